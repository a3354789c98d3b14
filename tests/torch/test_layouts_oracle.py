"""
Layouts against the tools themselves: files that they wrote, and one of them beside us, byte by byte.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from quant.formats.bits import pack_words, signed, unpack_words, unsigned
from quant.formats.bnb import round_llm_int8, round_nf4
from quant.formats.layouts import pack, quantization_config, read_scheme, suffixes, unpack
from quant.formats.numbers import round_fp8, round_int8, round_rows_int8
from quant.formats.scheme import Scheme
from quant.formats.weights import Affine, Nf4, Quantized

GPTQ = [
    f"b{bits}-g{group}-{sign}-{order}"
    for bits in (4, 8)
    for group in ("32", "64", "ch")
    for sign in ("sym", "asym")
    for order in ("noact", "act")
    if group != "ch" or order == "noact"
]
COMPRESSED = [
    "int8-channel-w8a8",
    "fp8-channel-w8a8",
    "int8-g64-packed",
    "int4-g64-sym-packed",
    "int4-g64-asym-packed",
    "int4-channel-sym-packed",
]
BITSANDBYTES = {
    "nf4": Scheme(method="nf4", bits=4),
    "nf4-dq": Scheme(method="nf4", bits=4, double_quant=True),
    "llm_int8": Scheme(method="llm-int8", bits=8),
}
V2_MORE = {4: 0x11111111, 8: 0x01010101}  # of each word of zero points, than v1


class Case(NamedTuple):
    """One linear layer in a file of the tool."""

    scheme: Scheme
    tensors: dict[str, Tensor]
    shape: tuple[int, int]
    extra: dict[str, Tensor]  # what else the tool computed

    @property
    def weight(self) -> Quantized:
        return unpack(self.scheme, self.tensors, self.shape, name="layer")


@pytest.fixture(scope="session")
def fixtures(shared: Path) -> Path:
    place = shared / "fixtures"
    if not (place / "gptq" / "index.json").is_file():
        pytest.skip(f"no fixtures of quantized layers at {place}")
    return place


def config_of(directory: Path, name: str) -> dict[str, object]:
    """The tool's configuration of that case."""
    cases = json.loads((directory / "index.json").read_bytes())["cases"]
    case = next(case for case in cases if case["name"] == name)
    config: dict[str, object] = case.get("quantize_config") or case["quantization_config"]
    return config


def gptq(fixtures: Path, name: str) -> Case:
    extra = load_file(fixtures / "gptq" / f"{name}.safetensors")
    scheme = read_scheme(config_of(fixtures / "gptq", name))
    tensors = {suffix: extra[suffix] for suffix in suffixes(scheme)}
    return Case(scheme, tensors, (tensors["qweight"].shape[1], len(tensors["g_idx"])), extra)


def checkpoint(fixtures: Path, tool: str, name: str, scheme: Scheme) -> Case:
    extra = load_file(fixtures / tool / f"{name}.safetensors")
    found = {key.removeprefix("ckpt."): tensor for key, tensor in extra.items() if key.startswith("ckpt.")}
    found.pop("bias", None)
    assert set(found) <= set(suffixes(scheme))
    return Case(scheme, found, (32, 192) if tool == "compressed_tensors" else (96, 192), extra)


def assert_same_bytes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for key, tensor in found.items():
        wanted = expected[key]
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), key
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize("name", GPTQ)
def test_gptq_is_read_and_written_exactly(fixtures: Path, name: str) -> None:
    case = gptq(fixtures, name)
    weight = case.weight
    assert isinstance(weight, Affine)
    assert torch.equal(weight.dense(torch.float16), case.extra["dequant.f16"])
    assert (weight.zero is None) == name.endswith(("-sym-noact", "-sym-act"))
    assert (weight.columns is not None) == name.endswith("-act")
    assert_same_bytes(pack(case.scheme, weight), case.tensors)


@pytest.mark.parametrize("name", GPTQ)
def test_gptq_v2_is_read_and_written_exactly(fixtures: Path, name: str) -> None:
    case = gptq(fixtures, name)
    config = config_of(fixtures / "gptq", name) | {"checkpoint_format": "gptq_v2"}
    scheme = read_scheme(config)
    assert scheme.zeros_v2
    more = case.tensors["qzeros"].long() + V2_MORE[scheme.bits]
    tensors = case.tensors | {"qzeros": more.to(torch.int32)}  # no zero point is 16: no carry between them
    weight = unpack(scheme, tensors, case.shape)
    assert torch.equal(weight.dense(torch.float16), case.extra["dequant.f16"])
    assert_same_bytes(pack(scheme, weight), tensors)
    assert_same_bytes(pack(case.scheme, weight), case.tensors)


def test_symmetric_gptq_is_read_whichever_zero_points_it_has(fixtures: Path) -> None:
    """Some files of the second layout say nothing of it; of symmetric weights the zero point is known anyway."""
    case = gptq(fixtures, "b4-g64-sym-noact")
    tensors = case.tensors | {"qzeros": case.tensors["qzeros"] + 0x11111111}
    assert torch.equal(unpack(case.scheme, tensors, case.shape).dense(torch.float16), case.extra["dequant.f16"])


@pytest.mark.parametrize("name", [name for name in GPTQ if "noact" in name])
def test_gptq_needs_no_g_idx_in_order(fixtures: Path, name: str) -> None:
    case = gptq(fixtures, name)
    tensors = {suffix: tensor for suffix, tensor in case.tensors.items() if suffix != "g_idx"}
    assert torch.equal(unpack(case.scheme, tensors, case.shape).dense(torch.float16), case.extra["dequant.f16"])


@pytest.mark.parametrize("name", GPTQ)
def test_gptq_computes_what_auto_gptq_computes(fixtures: Path, name: str) -> None:
    case = gptq(fixtures, name)
    x = load_file(fixtures / "gptq" / "inputs.safetensors")["x"].float()
    product = x @ case.weight.dense(torch.float32).T + case.extra["bias"].float()
    assert float((product - case.extra["y.f32"]).abs().max()) < 1e-5


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_is_read_and_written_exactly(fixtures: Path, name: str) -> None:
    config = config_of(fixtures / "compressed_tensors", name)
    case = checkpoint(fixtures, "compressed_tensors", name, read_scheme(config))
    weight = case.weight
    assert torch.equal(weight.dense(torch.float32), case.extra["decompressed"])
    assert_same_bytes(pack(case.scheme, weight), case.tensors)


def test_unpacked_int8_is_the_packed_int8(fixtures: Path) -> None:
    """`naive-quantized` stores the same integers one a byte; they are read, and written packed."""
    config = config_of(fixtures / "compressed_tensors", "int8-g64-naive")
    naive = checkpoint(fixtures, "compressed_tensors", "int8-g64-naive", read_scheme(config))
    packed = checkpoint(fixtures, "compressed_tensors", "int8-g64-packed", naive.scheme)
    assert_same_bytes(pack(naive.scheme, naive.weight), packed.tensors)
    x = load_file(fixtures / "compressed_tensors" / "inputs.safetensors")
    product = x["x"] @ naive.weight.dense(torch.float32).T + x["bias"]
    assert float((product - naive.extra["y.weight_only"]).abs().max()) < 1e-5


def test_fp8_rounds_like_compressed_tensors(fixtures: Path) -> None:
    config = config_of(fixtures / "compressed_tensors", "fp8-channel-w8a8")
    case = checkpoint(fixtures, "compressed_tensors", "fp8-channel-w8a8", read_scheme(config))
    weight = load_file(fixtures / "compressed_tensors" / "inputs.safetensors")["weight"]
    assert_same_bytes(pack(case.scheme, round_fp8(weight, "channel")), case.tensors)


def test_int8_is_as_near_as_that_of_compressed_tensors(fixtures: Path) -> None:
    """It divides by 127.5 and uses -128; we do not, so codes are one apart at most, and the error hardly larger."""
    config = config_of(fixtures / "compressed_tensors", "int8-channel-w8a8")
    case = checkpoint(fixtures, "compressed_tensors", "int8-channel-w8a8", read_scheme(config))
    weight = load_file(fixtures / "compressed_tensors" / "inputs.safetensors")["weight"]
    ours, theirs = round_int8(weight, "channel"), case.weight
    assert isinstance(theirs, Affine)
    assert int((ours.codes.int() - theirs.codes.int()).abs().max()) == 1
    errors = [float((weight - rounded.dense(torch.float32)).norm()) for rounded in (ours, theirs)]
    assert errors[0] < errors[1] * 1.05


def test_rows_round_like_vllm(fixtures: Path) -> None:
    x = load_file(fixtures / "compressed_tensors" / "inputs.safetensors")["x"][0]
    expected = load_file(fixtures / "compressed_tensors" / "int8-channel-w8a8.vllm.safetensors")
    codes, scale = round_rows_int8(x)
    assert torch.equal(codes, expected["x.q"]) and torch.equal(scale, expected["x.scale"])


@pytest.mark.parametrize("name", BITSANDBYTES)
def test_bitsandbytes_is_read_and_written_exactly(fixtures: Path, name: str) -> None:
    case = checkpoint(fixtures, "bitsandbytes", name, BITSANDBYTES[name])
    weight = case.weight
    if isinstance(weight, Nf4):
        assert torch.equal(weight.dense(torch.float16), case.extra["dequant"]) and weight.dtype == torch.float16
    else:
        source = load_file(fixtures / "bitsandbytes" / "inputs.safetensors")["weight"].float()
        assert (
            float((weight.dense(torch.float32) - source).abs().max()) <= float(case.tensors["SCB"].max()) / 254 * 1.001
        )
    assert_same_bytes(pack(case.scheme, weight), case.tensors)


def test_double_quantized_scales_are_read_exactly(fixtures: Path) -> None:
    weight = checkpoint(fixtures, "bitsandbytes", "nf4-dq", BITSANDBYTES["nf4-dq"])
    assert isinstance(weight.weight, Nf4)
    assert torch.equal(weight.weight.absmax, weight.extra["absmax.dequant"])


@pytest.mark.parametrize("name", ["nf4", "llm_int8"])
def test_rounding_gives_the_bytes_of_bitsandbytes(fixtures: Path, name: str) -> None:
    case = checkpoint(fixtures, "bitsandbytes", name, BITSANDBYTES[name])
    source = load_file(fixtures / "bitsandbytes" / "inputs.safetensors")["weight"]
    weight = round_nf4(source) if name == "nf4" else round_llm_int8(source)
    assert_same_bytes(pack(case.scheme, weight), case.tensors)


@pytest.mark.parametrize("when", ["rounding", "packing"])
def test_rounding_gives_the_bytes_of_double_quantization(fixtures: Path, when: str) -> None:
    case = checkpoint(fixtures, "bitsandbytes", "nf4-dq", BITSANDBYTES["nf4-dq"])
    source = load_file(fixtures / "bitsandbytes" / "inputs.safetensors")["weight"]
    found = pack(case.scheme, round_nf4(source, double_quant=when == "rounding"))
    # bitsandbytes computes this table and the mean of the scales with sums whose order is the machine's choice.
    state, table = "weight.quant_state.bitsandbytes__nf4", "weight.nested_quant_map"
    assert torch.allclose(found.pop(table), case.tensors[table], rtol=0, atol=2**-23)
    said, wanted = (json.loads(bytes(tensors[state].tolist())) for tensors in (found, case.tensors))
    assert said.pop("nested_offset") == pytest.approx(wanted.pop("nested_offset"), rel=1e-6)
    assert said == wanted
    found.pop(state)
    assert_same_bytes(found, {key: tensor for key, tensor in case.tensors.items() if key not in (state, table)})


def test_schemes_of_the_tools_come_back(fixtures: Path) -> None:
    for tool in ("gptq", "compressed_tensors"):
        for case in json.loads((fixtures / tool / "index.json").read_bytes())["cases"]:
            scheme = read_scheme(case.get("quantize_config") or case["quantization_config"])
            assert read_scheme(quantization_config(scheme)) == scheme, case["name"]


@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from((4, 8)), st.integers(0, 2**31 - 1))
@settings(max_examples=60, deadline=None)
def test_words_are_those_of_compressed_tensors(rows: int, columns: int, bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    middle = 2 ** (bits - 1)
    codes = torch.randint(-middle, middle, (rows, columns), generator=generator, dtype=torch.int8)
    for packed_dim, whole in ((1, codes), (0, codes.T)):
        words = pack_words(unsigned(whole, bits), bits)
        theirs = pack_to_int32(codes, bits, packed_dim)
        assert torch.equal(words if packed_dim else words.T, theirs)
        there = theirs if packed_dim else theirs.T
        assert torch.equal(signed(unpack_words(there, bits, whole.shape[1]), bits), whole)
