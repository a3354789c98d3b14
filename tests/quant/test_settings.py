"""Settings of the conversion: what makes no sense is one line, before anything is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.errors import UserError
from quant.convert import ROUNDING_TOKENS_MAX, _is_solved
from quant.formats.scheme import Scheme
from quant.settings import BITS, ROTATIONS, ROUNDING_TOKENS, SCHEMES, SETTINGS, SOLVED, QuantizeSettings, read_settings
from tests.quant.small import complaint, run_command
from tests.tidy.imports import ROOT

GOLDEN = Path(__file__).with_name("golden") / "help_quantize.txt"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "Missing argument 'MODEL'"),
        ("m", "--scheme is missing: one of int8, fp8, gptq, nf4, llm-int8"),
        ("m --scheme gptq", "--out is missing"),
        ("m n --scheme gptq", "unexpected extra argument"),
        ("m --scheme int9 --out x", "--scheme: 'int9' is not one of int8, fp8, gptq, nf4, llm-int8; did you mean"),
        ("m --scheme int8 --grop-size 64", "unknown option --grop-size; did you mean '--group-size'?"),
        ("m --scheme gptq --bits 3 --out x", "--bits: '3' is not one of 4, 8"),
        ("m --scheme gptq --group-size 48 --out x", "--group-size: '48' is not one of 32, 64, 128, -1"),
        ("m --scheme int8 --bits 4 --out x", "--bits 4 does not go with --scheme int8, which has 8 bits"),
        ("m --scheme fp8 --bits 4 --out x", "--bits 4 does not go with --scheme fp8"),
        ("m --scheme nf4 --bits 8 --out x", "--bits 8 does not go with --scheme nf4, which has 4 bits"),
        ("m --scheme llm-int8 --bits 4 --out x", "--bits 4 does not go with --scheme llm-int8"),
        ("m --scheme fp8 --group-size 64 --out x", "--group-size does not go with --scheme fp8: it has no groups"),
        ("m --scheme nf4 --group-size 64 --out x", "--group-size does not go with --scheme nf4"),
        ("m --scheme int8 --group-size 64 --out x", "--group-size 64 needs --granularity group with --scheme int8"),
        ("m --scheme int8 --granularity group --group-size -1 --out x", "that is --granularity channel"),
        ("m --scheme fp8 --granularity group --out x", "--granularity group does not go with --scheme fp8"),
        ("m --scheme gptq --granularity channel --out x", "--granularity does not go with --scheme gptq"),
        ("m --scheme nf4 --granularity channel --out x", "--granularity does not go with --scheme nf4"),
        ("m --scheme int8 --granularity row --out x", "--granularity: 'row' is not one of tensor, channel, group"),
        ("m --scheme int8 --desc-act --out x", "--desc-act does not go with --scheme int8: only gptq"),
        ("m --scheme int8 --asym --out x", "--asym does not go with --scheme int8: only gptq"),
        ("m --scheme nf4 --sym --out x", "--sym does not go with --scheme nf4: only gptq"),
        ("m --scheme int8 --damp 0.1 --out x", "--damp does not go with --scheme int8: only gptq and fp8"),
        ("m --scheme gptq --smooth 0.5 --out x", "--smooth does not go with --scheme gptq: its activations"),
        ("m --scheme nf4 --smooth 0.5 --out x", "--smooth does not go with --scheme nf4"),
        ("m --scheme int8 --rotate full --smooth 0.5 --out x", "--smooth does not go with --rotate full"),
        ("m --scheme int8 --rotate half --out x", "--rotate: 'half'"),
        ("m --scheme gptq --rotate offline --out x", "--rotate does not go with --scheme gptq: it gains nothing"),
        ("m --scheme int8 --smooth 1.5 --out x", "--smooth: 1.5 is not in 0 .. 1"),
        ("m --scheme int8 --smooth nan --out x", "--smooth: nan is not in 0 .. 1"),
        ("m --scheme gptq --damp 0 --out x", "--damp: 0 is not between 0 .. 1"),
        ("m --scheme gptq --damp much --out x", "--damp: 'much' is not a number"),
        ("m --scheme int8 --min-top1 90 --out x", "--min-top1: 90 is not in 0 .. 1"),
        ("m --scheme int8 --max-ppl-increase -1 --out x", "--max-ppl-increase: -1 is not in 0 .."),
        ("m --scheme int8 --calibration-tokens 7 --out x", "--calibration-tokens: 7 is not in 128 .."),
        ("m --scheme int8 --calibration-tokens 9999 --out x", "--scheme int8 looks at no more than 4096"),
        ("m --scheme int8 --seed -1 --out x", "--seed: -1 is not in 0 .."),
        ("m --scheme int8 --device tpu --out x", "--device: 'tpu' is not one of cpu, cuda"),
        ("m --scheme int8 --calibration= --out x", "--calibration: is empty"),
        ("m --scheme int8 --keep= --out x", "--keep: is empty"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in complaint(run_command(["quantize", *arguments.split()], capsys))


def test_an_empty_name_is_no_model() -> None:
    with pytest.raises(UserError, match="name is empty"):
        read_settings(" ", {"scheme": "int8"})


def settings(**given: str | bool) -> QuantizeSettings:
    return read_settings("m", {"out": "x", **given})


@pytest.mark.parametrize(
    ("given", "scheme"),
    [
        ({"scheme": "int8"}, Scheme(method="int8", bits=8)),
        ({"scheme": "INT8", "bits": "8"}, Scheme(method="int8", bits=8)),
        ({"scheme": "int8", "granularity": "tensor"}, Scheme(method="int8", bits=8, granularity="tensor")),
        (
            {"scheme": "int8", "granularity": "group"},
            Scheme(method="int8", bits=8, granularity="group", group_size=64),
        ),
        (
            {"scheme": "int8", "granularity": "group", "group_size": "32"},
            Scheme(method="int8", bits=8, granularity="group", group_size=32),
        ),
        ({"scheme": "fp8"}, Scheme(method="fp8", bits=8)),
        ({"scheme": "gptq"}, Scheme(method="gptq", bits=4, granularity="group", group_size=64)),
        (
            {"scheme": "gptq", "bits": "8", "group_size": "-1", "sym": False, "desc_act": True},
            Scheme(method="gptq", bits=8, symmetric=False, desc_act=True),
        ),
        ({"scheme": "gptq", "sym": True}, Scheme(method="gptq", bits=4, granularity="group", group_size=64)),
        ({"scheme": "nf4"}, Scheme(method="nf4", bits=4)),
        ({"scheme": "llm-int8"}, Scheme(method="llm-int8", bits=8)),
    ],
)
def test_the_scheme_that_is_meant(given: dict[str, str | bool], scheme: Scheme) -> None:
    assert settings(**given).scheme == scheme


def test_defaults() -> None:
    found = settings(scheme="gptq")
    assert (found.damp, found.smooth, found.calibration, found.calibration_tokens) == (0.01, None, None, 16384)
    assert (found.max_ppl_increase, found.min_top1, found.seed, found.device) == (0.05, 0.90, 0, "cpu")
    assert found.out == Path("x").absolute() and not (found.json or found.dry_run)


def test_only_int8_is_rotated() -> None:
    """In full unless something else is asked for; smoothing is something else."""
    unset = {method: settings(scheme=method).rotate for method in SCHEMES}
    assert unset == dict.fromkeys(SCHEMES, "none") | {"int8": "full"}
    assert [settings(scheme="int8", rotate=kind).rotate for kind in ROTATIONS] == ["full", "offline", "none"]
    assert [settings(scheme="int8", smooth=value).rotate for value in ("0", "0.5")] == ["none", "none"]
    assert settings(scheme="int8", rotate="full", smooth="0").smooth == 0


def test_no_more_calibration_is_sampled_than_is_looked_at() -> None:
    assert settings(scheme="int8").calibration_tokens == ROUNDING_TOKENS == ROUNDING_TOKENS_MAX
    assert [method for method in SCHEMES if _is_solved(settings(scheme=method).scheme)] == sorted(SOLVED)


def test_every_flag_that_is_not_of_a_scheme_is_refused_there() -> None:
    """No row of the table is forgotten: what is not listed for a scheme is an error with it."""
    for setting in SETTINGS:
        for method in SCHEMES:
            if method not in setting.schemes:
                value = "1" if setting.metavar else True
                with pytest.raises(UserError, match=f"{setting.flag} does not go|{setting.flag}: "):
                    settings(scheme=method, **{setting.name: value})
                assert setting.reason
    assert set(BITS) == set(SCHEMES)


def test_the_parsed_settings_have_a_field_for_each_row() -> None:
    of_the_scheme = {"scheme", "bits", "group_size", "granularity", "desc_act", "sym"}
    rows = {setting.name for setting in SETTINGS} - of_the_scheme
    fields = set(QuantizeSettings.__struct_fields__) - {"model", "scheme"}
    assert rows - {"eval"} == fields - {"evaluation"}


@pytest.mark.parametrize("arguments", [["--help"], ["quantize", "--help"]], ids=" ".join)
def test_help_loads_no_torch(arguments: list[str]) -> None:
    script = (
        "import sys, pellucid\n"
        f"try: pellucid.cli({arguments!r})\n"
        "except SystemExit: pass\n"
        "print(*[name for name in ('torch', 'rich', 'tokenizers', 'asyncio', 'quant.run') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "" and "quantize" in done.stdout


def test_the_package_is_the_same_command() -> None:
    command = [sys.executable, "-m", "quant", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("Usage: pellucid quantize [OPTIONS] MODEL")


def test_help_is_as_it_was(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = run_command(["quantize", "--help"], capsys)
    assert done.out == GOLDEN.read_text(), f"COLUMNS=100 pellucid quantize --help > {GOLDEN.relative_to(ROOT)}"
