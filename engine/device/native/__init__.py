"""
The decoder in C++: one call computes a whole step.

    src/      C++17 behind a plain C interface (src/pellucid.h): no headers of Python or torch
    build     compile it, once for each instruction set; run when the package is installed
    library   open the best one that this processor can run; the structures of the interface for ctypes
    pack      a checkpoint's weights in the order in which the kernels read them, kept in a file between starts
    model     plans in, logits out

Which weights it takes: 8-bit integers with 8-bit activations (W8A8), 4-bit groups (W4A8), and bfloat16 for the rest.
Everything else, and a machine without a compiler, is served by the decoder in torch.
"""
