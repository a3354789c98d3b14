"""
The paged cache in 8 bits: what comes back, and that a token is rounded by itself.
"""

import msgspec
import pytest
import torch

from engine.device.kv import BLOCK_SLOTS, KV_DTYPES, KvCache, block_bytes, e4m3_values
from quant.formats.architecture import Architecture, Rope

ARCHITECTURE = Architecture(
    family="llama", layers=2, hidden=64, intermediate=64, heads=4, kv_heads=2, head_dim=16, vocab_size=10,
    context_max=64, norm_epsilon=1e-5, rope=Rope(), windows=(0, 0),
)  # fmt: skip
WIDTH = 2 * ARCHITECTURE.kv_size


def _cache(kv_dtype: str, dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache(ARCHITECTURE, layers=2, blocks_max=6, dtype=dtype, kv_dtype=kv_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_what_was_written_comes_back(kv_dtype: str, dtype: torch.dtype) -> None:
    layer = _cache(kv_dtype, dtype).layers[1]
    pairs = (torch.randn(20, WIDTH) * torch.logspace(-3, 3, 20)[:, None]).to(dtype)
    slots = torch.randperm(6 * BLOCK_SLOTS)[:20]
    with torch.inference_mode():
        layer.write(slots, pairs)
        read = layer.read(torch.arange(6))
    assert read.dtype == dtype and read.shape == (6, BLOCK_SLOTS, 2, 2, 16)
    found, wanted = read.reshape(-1, 16).view(6 * BLOCK_SLOTS, -1, 16)[slots].float(), pairs.view(20, -1, 16).float()
    largest = wanted.abs().amax(-1, keepdim=True)
    half_step = {"auto": 0.0, "int8": 0.5 / 127, "fp8": 1 / 16}[kv_dtype]  # fp8: half of 2 ** -3 of the value at most
    slack = 0.0 if kv_dtype == "auto" else {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    assert ((found - wanted).abs() <= largest * (half_step + slack)).all()
    rest = torch.ones(6 * BLOCK_SLOTS, dtype=torch.bool)
    rest[slots] = False
    assert not read.reshape(6 * BLOCK_SLOTS, -1)[rest].any(), "nothing else has changed"


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_token_is_rounded_by_itself(kv_dtype: str) -> None:
    pairs = torch.randn(37, WIDTH).bfloat16()
    together, alone = _cache(kv_dtype, torch.bfloat16).layers[0], _cache(kv_dtype, torch.bfloat16).layers[0]
    with torch.inference_mode():
        together.write(torch.arange(37), pairs)
        for row in range(37):
            alone.write(torch.tensor([row]), pairs[row : row + 1])
        assert torch.equal(together.read(torch.arange(3)), alone.read(torch.arange(3)))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_scrubbed_blocks_are_numbers_again(kv_dtype: str) -> None:
    cache = _cache(kv_dtype)
    pairs = torch.randn(40, WIDTH)
    pairs[3, 5], pairs[18, 0] = float("nan"), float("inf")
    with torch.inference_mode():
        for layer in cache.layers:
            layer.write(torch.arange(40), pairs)
        assert not torch.isfinite(cache.layers[1].read(torch.arange(6))).all()
        cache.scrub((0, 1))
        for layer in cache.layers:
            read = layer.read(torch.arange(6))
            assert torch.isfinite(read).all()
            assert read[2].any(), "other blocks are not touched"
        cache.reset()
        assert not cache.layers[0].read(torch.arange(6)).any()


def test_every_e4m3_number() -> None:
    bits = torch.arange(256).to(torch.uint8)
    values = bits.view(torch.float8_e4m3fn).float()
    real = torch.isfinite(values)
    assert real.sum() == 254
    assert torch.equal(e4m3_values(bits.view(torch.int8)).float()[real], values[real])


def test_memory_of_a_block() -> None:
    """As allocated, and about half in 8 bits for heads of usual size."""
    for kv_dtype in KV_DTYPES:
        cache = _cache(kv_dtype, torch.bfloat16)
        allocated = sum(tensor.numel() * tensor.element_size() for tensor in cache._all)
        assert allocated == 6 * block_bytes(ARCHITECTURE, torch.bfloat16, kv_dtype)
    usual = msgspec.structs.replace(ARCHITECTURE, head_dim=64)
    ratio = block_bytes(usual, torch.bfloat16, "int8") / block_bytes(usual, torch.bfloat16, "auto")
    assert ratio == pytest.approx(68 / 128)
