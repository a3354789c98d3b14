"""
Models on disk: what a configuration means, where its tensors are, and how quantized weights are laid out.

    architecture  config.json -> sizes and switches       rope      positions -> cosines and sines
    checkpoint    a directory or file -> named tensors    gguf_weights  the same for GGUF
    scheme        how a checkpoint is quantized           weights   quantized weights in memory
    numbers       rounding to each number format          bnb       the same by bitsandbytes
    rotation      the same function in a basis without outliers        mixing   what of it is left for run time
    layouts       quantized weights and their configuration in files, and back: gptq_, compressed_, bnb_layout, kept
"""
