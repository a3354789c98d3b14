"""
Models on disk: what a configuration means, where its tensors are, and how quantized weights are laid out.

    architecture  config.json -> sizes and switches       rope      positions -> cosines and sines
    checkpoint    a directory or file -> named tensors    gguf_weights  the same for GGUF
"""
