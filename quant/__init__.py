"""
A float checkpoint in, a quantized checkpoint and a report of what it cost out.

    formats     what lies on disk, read and written, and the number formats themselves: the only part the engine knows
"""
