"""
A float checkpoint in, a quantized checkpoint and a report of what it cost out.

    convert     layer by layer: calibrate, quantize, measure        options, report   what is asked for, what it cost
    gptq        the solver              smooth    foldings that make inputs easier to round
    forward     one decoder layer       texts     token ids to look at        quality   two models against each other
    formats     what lies on disk, read and written, and the number formats themselves: the only part the engine knows
"""
