"""
Several unsigned integers in one int32 word, the first in the lowest bits: what GPTQ and compressed-tensors share.

Lowest first means that the words are the bytes in order on a little-endian machine, the only kind that safetensors
and torch run on; so packing is a view, and 4 bits are two values in a byte.
"""

import torch
from torch import Tensor


def pack_words(values: Tensor, bits: int) -> Tensor:
    """uint8 [rows, count] of 4 or 8 bits -> int32 [rows, ceil(count * bits / 32)]; what is missing of a word is 0."""
    assert bits in (4, 8) and values.dtype == torch.uint8
    assert bits == 8 or values.numel() == 0 or int(values.max()) < 2**bits, "a code runs over into its neighbour"
    count_per_word = 32 // bits
    missing = -values.shape[1] % count_per_word
    whole = torch.nn.functional.pad(values, (0, missing)) if missing else values
    octets = whole if bits == 8 else whole[:, 0::2] | (whole[:, 1::2] << 4)
    return octets.reshape(-1).view(torch.int32).reshape(values.shape[0], -1)  # flat: strides of 1-row tensors vary


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The reverse: int32 [rows, words] -> uint8 [rows, count]."""
    assert bits in (4, 8) and words.dtype == torch.int32
    octets = words.reshape(-1).view(torch.uint8).reshape(words.shape[0], -1)
    if bits == 8:
        return octets[:, :count].contiguous()
    values = torch.stack((octets & 15, octets >> 4), -1).reshape(words.shape[0], -1)
    return values[:, :count].contiguous()


def unsigned(codes: Tensor, bits: int) -> Tensor:
    """int8 codes around 0 -> uint8 around 2 ** (bits - 1); the sum wraps, as it must."""
    return codes.view(torch.uint8).add(2 ** (bits - 1))


def signed(values: Tensor, bits: int) -> Tensor:
    """The reverse."""
    return values.sub(2 ** (bits - 1)).view(torch.int8)
