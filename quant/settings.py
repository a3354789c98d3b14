"""
The settings of `pellucid quantize`: one table, from which flags, checks and documents are made.

A setting that means nothing for a scheme is refused there, with the reason; nothing is ignored.  No torch here: this is
read before anything heavy is loaded.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from launch.errors import UserError
from launch.parse import one_of, parse_text, whole
from quant.formats.scheme import Granularity, Method, Scheme
from quant.options import Rotation

Value = str | int | float | None
Given = Mapping[str, str | bool | tuple[str, ...] | None]
"""Flags as they came from the command line; None or (): not given."""

SCHEMES: tuple[Method, ...] = ("int8", "fp8", "gptq", "nf4", "llm-int8")
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "channel", "group")
BITS: dict[Method, tuple[int, ...]] = {"int8": (8,), "fp8": (8,), "gptq": (4, 8), "nf4": (4,), "llm-int8": (8,)}
"""What each scheme can have; the first is its default."""
ROTATIONS: tuple[Rotation, ...] = ("full", "offline", "none")
ROTATION_DEFAULT: Rotation = "full"  # as `serve` by itself does
SOLVED: tuple[Method, ...] = ("gptq", "fp8")
"""Whose weights are fitted to the calibration text, layer by layer, and not only rounded."""
GROUP_SIZES = (32, 64, 128, -1)
GROUP_SIZE_DEFAULT = 64  # 128 divides no layer of the default model
CALIBRATION_TOKENS = 16384  # for a Hessian
ROUNDING_TOKENS = 4096  # for everything else; `quant.convert` looks at no more


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting."""

    name: str
    help: str
    default: str = ""
    """As a person would write it; empty: unset, or as `help` says."""
    metavar: str = ""
    """Empty: a switch."""
    parse: Callable[[str], Value] = parse_text
    """Raises ValueError, whose text goes behind the flag."""
    schemes: tuple[Method, ...] = SCHEMES
    """Where it means something."""
    reason: str = ""
    """Why it means nothing elsewhere."""
    opposite: str = ""
    """The flag that switches it off."""
    repeats: bool = False

    @property
    def flag(self) -> str:
        """`--group-size`"""
        return "--" + self.name.replace("_", "-")


def fraction(*, least: float, most: float, open_ends: bool = False) -> Callable[[str], float]:
    """A parser of numbers within bounds, which belong to the range unless `open_ends`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
        if not (least < value < most if open_ends else least <= value <= most):  # also true for NaN
            raise ValueError(f"{text} is not {'between' if open_ends else 'in'} {least:g} .. {most:g}")
        return value

    return parse


SETTINGS = (
    Setting(
        name="scheme",
        metavar="SCHEME",
        help=f"The number format: {', '.join(SCHEMES)}. Required.",
        parse=one_of(*SCHEMES),
    ),
    Setting(name="out", metavar="DIR", help="The directory to make; it must not exist. Required but for --dry-run."),
    Setting(
        name="bits",
        metavar="BITS",
        help="gptq: 4 or 8. Unset: 4; every other scheme has one size.",
        parse=one_of("4", "8"),
    ),
    Setting(
        name="group_size",
        metavar="COLUMNS",
        help="gptq, and int8 with --granularity group: how many columns share a scale, 32, 64, 128 or -1 for all."
        f" Unset: {GROUP_SIZE_DEFAULT}.",
        parse=one_of(*map(str, GROUP_SIZES)),
        schemes=("gptq", "int8"),
        reason="it has no groups of columns",
    ),
    Setting(
        name="granularity",
        metavar="KIND",
        help="int8: tensor, channel or group; fp8: tensor or channel. Unset: channel.",
        parse=one_of(*GRANULARITIES),
        schemes=("int8", "fp8"),
        reason="what shares a scale is given by --group-size for gptq and fixed for nf4 and llm-int8",
    ),
    Setting(
        name="desc_act",
        help="gptq: form groups by descending activation. vLLM does not read such checkpoints.",
        schemes=("gptq",),
        reason="only gptq orders columns",
    ),
    Setting(
        name="sym",
        opposite="--asym",
        help="gptq: no zero points, or zero points; vLLM reads only the first. Unset: --sym.",
        schemes=("gptq",),
        reason="only gptq can have zero points",
    ),
    Setting(
        name="damp",
        default="0.01",
        metavar="SHARE",
        help="gptq and fp8: what is added to the Hessian's diagonal, as a share of its mean.",
        parse=fraction(least=0, most=1, open_ends=True),
        schemes=SOLVED,
        reason="only gptq and fp8 fit weights by a Hessian",
    ),
    Setting(
        name="backend",
        default="native",
        metavar="NAME",
        help="gptq: native, or auto-gptq, which needs --device cuda and the extra of that name.",
        parse=one_of("native", "auto-gptq"),
        schemes=("gptq",),
        reason="only gptq has another implementation",
    ),
    Setting(
        name="smooth",
        metavar="ALPHA",
        help="int8 and fp8: SmoothQuant's exponent, 0 for none. Unset: searched, layer by layer.",
        parse=fraction(least=0, most=1),
        schemes=("int8", "fp8"),
        reason="its activations are not rounded",
    ),
    Setting(
        name="rotate",
        metavar="KIND",
        help="int8: full costs the least quality, and only Pellucid reads it; offline; or none."
        f" Unset: {ROTATION_DEFAULT}, but none with --smooth.",
        parse=one_of(*ROTATIONS),
        schemes=("int8",),
        reason="it gains nothing where activations are not rounded in even steps",
    ),
    Setting(
        name="calibration",
        metavar="FILE.txt|jsonl",
        help='Text to calibrate with; of a .jsonl, the "text" of each line. Unset: sampled from the model itself.',
    ),
    Setting(
        name="calibration_tokens",
        metavar="TOKENS",
        help=f"How much of it. Unset: {CALIBRATION_TOKENS} for gptq and fp8, {ROUNDING_TOKENS} for the rest, at most.",
        parse=whole(least=128, most=2**24),
    ),
    Setting(
        name="eval",
        metavar="FILE.txt|jsonl",
        help="Text on which the result is compared with its source. Unset: one that ships with Pellucid.",
    ),
    Setting(
        name="max_ppl_increase",
        default="0.05",
        metavar="SHARE",
        help="The gate: how much the perplexity may rise; 0.05 is 5 %.",
        parse=fraction(least=0, most=1e9),
    ),
    Setting(
        name="min_top1",
        default="0.90",
        metavar="SHARE",
        help="The gate: how often both must hold the same token for the likeliest.",
        parse=fraction(least=0, most=1),
    ),
    Setting(
        name="keep",
        metavar="LAYER",
        repeats=True,
        help="A linear layer that stays as it is: its name, a part of it, or a pattern. May be repeated.",
    ),
    Setting(name="dry_run", help="Say what would be quantized and how large the result would be; write nothing."),
    Setting(
        name="seed",
        default="0",
        metavar="NUMBER",
        help="Of the sampled calibration text, and of what is drawn from it.",
        parse=whole(least=0, most=2**31 - 1),
    ),
    Setting(name="json", help="Print the report as JSON, and nothing else."),
    Setting(
        name="device",
        default="cpu",
        metavar="DEVICE",
        help="Where layers are computed: cpu or cuda.",
        parse=one_of("cpu", "cuda"),
    ),
    Setting(
        name="data_dir",
        metavar="DIR",
        help="Models, as for `serve`.",
    ),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}


class QuantizeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the person at the terminal wants, parsed and consistent."""

    model: str
    out: Path | None
    """None: only with `dry_run`."""
    scheme: Scheme
    damp: float
    backend: str
    smooth: float | None
    rotate: Rotation
    calibration: Path | None
    calibration_tokens: int
    evaluation: Path | None
    max_ppl_increase: float
    min_top1: float
    keep: tuple[str, ...]
    dry_run: bool
    seed: int
    json: bool
    device: str
    data_dir: str


def read_settings(model: str, given: Given) -> QuantizeSettings:
    """All settings, parsed.  Raises UserError for a value, or a combination, that makes no sense."""
    if not model.strip():
        raise UserError("the model's name is empty")
    if given.get("scheme") is None:
        raise UserError(f"--scheme is missing: one of {', '.join(SCHEMES)}")
    values = {setting.name: _parsed(setting, given) for setting in SETTINGS if setting.metavar and not setting.repeats}
    scheme = _scheme(given, values)
    if given.get("out") is None and not given.get("dry_run"):
        raise UserError("--out is missing: the directory to make")
    return QuantizeSettings(
        model=model,
        out=_path(values["out"]),
        scheme=scheme,
        damp=_number(values["damp"]),
        backend=str(values["backend"]),
        smooth=None if values["smooth"] is None else _number(values["smooth"]),
        rotate=_rotation(scheme.method, values),
        calibration=_path(values["calibration"]),
        calibration_tokens=_calibration_tokens(scheme.method, values["calibration_tokens"]),
        evaluation=_path(values["eval"]),
        max_ppl_increase=_number(values["max_ppl_increase"]),
        min_top1=_number(values["min_top1"]),
        keep=_texts(given),
        dry_run=bool(given.get("dry_run")),
        seed=int(_number(values["seed"])),
        json=bool(given.get("json")),
        device=str(values["device"]),
        data_dir=str(values["data_dir"] or ""),
    )


def _parsed(setting: Setting, given: Given) -> Value:
    value = given.get(setting.name)
    text = value if isinstance(value, str) else setting.default
    if value is None and not text:
        return None
    try:
        return setting.parse(text)
    except ValueError as error:
        raise UserError(f"{setting.flag}: {error}") from error


def _calibration_tokens(method: Method, value: Value) -> int:
    if value is None:
        return CALIBRATION_TOKENS if method in SOLVED else ROUNDING_TOKENS
    tokens = int(_number(value))
    if method not in SOLVED and tokens > ROUNDING_TOKENS:
        raise UserError(f"--calibration-tokens: --scheme {method} looks at no more than {ROUNDING_TOKENS}")
    return tokens


def _rotation(method: Method, values: Mapping[str, Value]) -> Rotation:
    if method not in BY_NAME["rotate"].schemes:
        return "none"
    unset: Rotation = ROTATION_DEFAULT if values["smooth"] is None else "none"
    wanted = next((kind for kind in ROTATIONS if kind == values["rotate"]), unset)
    if wanted == "full" and values["smooth"]:
        raise UserError("--smooth does not go with --rotate full: what it would move is spread evenly already")
    return wanted


def _number(value: Value) -> float:
    assert isinstance(value, int | float), "the table's parser gives a number"
    return value


def _path(value: Value) -> Path | None:
    return None if value is None else Path(str(value)).expanduser().absolute()


def _texts(given: Given) -> tuple[str, ...]:
    keep = given.get("keep") or ()
    assert isinstance(keep, tuple)
    if not all(pattern.strip() for pattern in keep):
        raise UserError("--keep: is empty")
    return keep


def _scheme(given: Given, values: Mapping[str, Value]) -> Scheme:
    """The number format, after every flag that was given has been found to fit it."""
    method: Method = next(name for name in SCHEMES if name == values["scheme"])
    for setting in SETTINGS:
        if given.get(setting.name) not in (None, ()) and method not in setting.schemes:
            raise UserError(f"{_shown(setting, given)} does not go with --scheme {method}: {setting.reason}")
    bits = int(str(values["bits"] or BITS[method][0]))
    if bits not in BITS[method]:
        raise UserError(f"--bits {bits} does not go with --scheme {method}, which has {BITS[method][0]} bits")
    granularity, group_size = _granularity(method, values)
    return Scheme(
        method=method,
        bits=bits,
        granularity=granularity,
        group_size=group_size,
        symmetric=given.get("sym") is not False,
        desc_act=bool(given.get("desc_act")),
    )


def _shown(setting: Setting, given: Given) -> str:
    return setting.opposite if setting.opposite and given[setting.name] is False else setting.flag


def _granularity(method: Method, values: Mapping[str, Value]) -> tuple[Granularity, int]:
    """What shares a scale, and how many columns of a channel do."""
    size = None if values["group_size"] is None else int(str(values["group_size"]))
    if method == "gptq":
        size = GROUP_SIZE_DEFAULT if size is None else size
        return ("group" if size > 0 else "channel"), size
    wanted: Granularity = next((kind for kind in GRANULARITIES if kind == values["granularity"]), "channel")
    if wanted == "group":
        if method == "fp8":
            raise UserError("--granularity group does not go with --scheme fp8: it has one scale a channel or tensor")
        if size == -1:
            raise UserError("--group-size -1 means one scale a channel: that is --granularity channel")
        return "group", size or GROUP_SIZE_DEFAULT
    if size is not None:
        raise UserError(f"--group-size {size} needs --granularity group with --scheme {method}")
    return wanted, -1


def markdown_table() -> str:
    """The settings for docs/quantization.md; tests/tidy keeps the two alike."""
    rows = ["| flag | default | |", "|---|---|---|"]
    for setting in SETTINGS:
        flag = f"{setting.flag} {setting.metavar}".strip()
        flag = (f"{flag}/{setting.opposite}" if setting.opposite else flag).replace("|", "\\|")
        default = f"`{setting.default}`" if setting.default else ""
        rows.append(f"| `{flag}` | {default} | {setting.help} |")
    return "\n".join(rows)
