"""
The settings of `pellucid serve`: one table, from which flags, environment variables, file keys and documents are made.

A setting is taken from its flag, else from its `PELLUCID_*` variable, else from the TOML file, else it has its
default.  What nobody knows is an error in each of the three places, and the message names the nearest known one.
Upstreams are in the file alone: launch.upstreams.
"""
# long: one table, and people look for a setting in one place.

import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from gateway.config import POLICIES, Policy, UpstreamOptions
from launch.errors import UserError
from launch.parse import (
    nearest,
    one_of,
    parse_amount,
    parse_engines,
    parse_list,
    parse_redis,
    parse_share,
    parse_speculative,
    parse_switch,
    parse_text,
    parse_url,
    seconds,
    whole,
)
from launch.sizes import KvMemory, parse_bytes, parse_flight_memory, parse_kv_memory
from launch.upstreams import TABLE, parse_upstreams

PREFIX = "PELLUCID_"
OTHER_VARIABLES = frozenset(
    {
        "PELLUCID_API_KEY",  # that of `pellucid why` and `doctor`
        "PELLUCID_ADMIN_KEY",  # in place of --admin-key-file
        "PELLUCID_CONFIG",
        "PELLUCID_ENGINE_SECRET",  # in place of --engine-secret-file
        "PELLUCID_KERNELS",  # the engine's, to force an instruction set
        "PELLUCID_PEPPER",  # the secret of the API keys, in place of --pepper-file
        "PELLUCID_FUZZ_CASES", "PELLUCID_FUZZ_SEED", "PELLUCID_PAGE_SOAK_S",  # the test suite's, as these
        "PELLUCID_SCREENSHOTS", "PELLUCID_SHARED", "PELLUCID_TEST_GGUF", "PELLUCID_TEST_LIBRARIES",
        "PELLUCID_WRITE_GOLDEN",
    }
)  # fmt: skip
"""Those that are no options; tests/tidy looks for more of them."""

REPLICAS_MAX = 64
"""As many as telemetry has labels for."""
RANKS_MAX = 64
"""Of one replica, in both directions together; telemetry has labels for as many."""
WORKERS_MAX = 32
"""An engine talks to twice as many: those of two servers, and those that come in place of others."""
Value = str | int | float | bool | tuple[str, ...] | KvMemory | None
Given = Mapping[str, str | bool | tuple[str, ...] | None]
"""Flags as they came from the command line; None or (): not given."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting."""

    name: str
    """As in Python and TOML; the flag and the variable follow from it."""
    default: str
    """As a person would write it; empty: unset."""
    metavar: str
    help: str
    parse: Callable[[str], Value]
    """Raises ValueError, whose text goes behind the name of the place where the value came from."""
    repeats: bool = False
    """May be given several times; in a variable, separated by commas."""

    @property
    def flag(self) -> str:
        """`--max-queue`"""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`PELLUCID_MAX_QUEUE`"""
        return PREFIX + self.name.upper()

    @property
    def switch(self) -> bool:
        """Whether it is on or off, and takes no value as a flag."""
        return self.parse is parse_switch


OPTIONS = (
    Option(
        name="model",
        default="SmolLM2-135M-Instruct",
        metavar="NAME|DIR|FILE.gguf",
        help="A known model, a Hugging Face name (org/repo), a directory in that layout, or a GGUF file.",
        parse=parse_text,
    ),
    Option(
        name="model_name",
        default="",
        metavar="NAME",
        help="The name under which clients know the model. Unset: from --model.",
        parse=str,
    ),
    Option(
        name="host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="Where to listen. Anything but loopback needs an API key, or --insecure-open.",
        parse=parse_text,
    ),
    Option(
        name="port",
        default="8000",
        metavar="PORT",
        help="Where to listen; 0 takes a free one.",
        parse=whole(least=0, most=65535),
    ),
    Option(
        name="insecure_open",
        default="false",
        metavar="",
        help="Serve on a network without API keys.",
        parse=parse_switch,
    ),
    Option(
        name="data_dir",
        default="",
        metavar="DIR",
        help="Models, API keys, sockets. Unset: $XDG_DATA_HOME/pellucid, else ~/.local/share/pellucid.",
        parse=str,
    ),
    Option(
        name="redis_url",
        default="",
        metavar="URL",
        help="Redis or Valkey for API keys and limits. Unset: one of our own, in the data directory.",
        parse=parse_redis,
    ),
    Option(
        name="pepper_file",
        default="",
        metavar="FILE",
        help="The secret of the API keys. Unset: $PELLUCID_PEPPER, else a file in the data directory.",
        parse=str,
    ),
    Option(
        name="admin_port",
        default="0",
        metavar="PORT",
        help="Where API keys, tenants and limits can be changed over HTTP; 0: nowhere.",
        parse=whole(least=0, most=65535),
    ),
    Option(
        name="admin_host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="The address of that port. It speaks plain HTTP: on a network put a proxy with TLS before it.",
        parse=parse_text,
    ),
    Option(
        name="admin_key_file",
        default="",
        metavar="FILE",
        help="The key for that port. Unset: $PELLUCID_ADMIN_KEY, else a file in the data directory, made at the start.",
        parse=str,
    ),
    Option(
        name="price_prompt",
        default="0",
        metavar="AMOUNT",
        help="What a million prompt tokens cost, for the spend limits of keys: 0.15, in any currency.",
        parse=parse_amount,
    ),
    Option(
        name="price_output",
        default="0",
        metavar="AMOUNT",
        help="What a million output tokens cost.",
        parse=parse_amount,
    ),
    Option(
        name="dtype",
        default="auto",
        metavar="TYPE",
        help="auto, float32 or bfloat16; auto is bfloat16 where the processor multiplies it natively.",
        parse=one_of("auto", "float32", "bfloat16"),
    ),
    Option(
        name="quantization",
        default="auto",
        metavar="SCHEME",
        help="What float weights are rounded to at load: none, int8, fp8, nf4; auto: int8 where native kernels run.",
        parse=one_of("auto", "none", "int8", "fp8", "nf4"),
    ),
    Option(
        name="kv_dtype",
        default="auto",
        metavar="TYPE",
        help="Keys and values: int8 or fp8; auto: int8 beside quantized weights on native kernels, else as --dtype.",
        parse=one_of("auto", "int8", "fp8"),
    ),
    Option(
        name="replicas",
        default="1",
        metavar="COUNT",
        help="Engine processes on this machine; each gets its share of the processors and of --kv-memory.",
        parse=whole(least=0, most=REPLICAS_MAX),
    ),
    Option(
        name="tensor_parallel",
        default="1",
        metavar="COUNT",
        help="Ranks: processes that share the heads, channels and vocabulary of one replica's model.",
        parse=whole(least=1, most=RANKS_MAX),
    ),
    Option(
        name="pipeline_parallel",
        default="1",
        metavar="COUNT",
        help="Stages that share the layers; each is --tensor-parallel ranks.",
        parse=whole(least=1, most=RANKS_MAX),
    ),
    Option(
        name="rank_timeout_s",
        default="10",
        metavar="SECONDS",
        help="How long a rank may keep the others waiting before its replica is started anew.",
        parse=seconds(least=0.1),
    ),
    Option(
        name="interconnect",
        default="auto",
        metavar="WAY",
        help="How ranks exchange numbers: shared-memory or gloo; auto: shared memory, where it can be had.",
        parse=one_of("auto", "shared-memory", "gloo"),
    ),
    Option(
        name="engine",
        default="",
        metavar="tcp://HOST:PORT",
        help="An engine on another machine, see `pellucid engine`; may be repeated.",
        parse=parse_engines,
        repeats=True,
    ),
    Option(
        name="engine_secret_file",
        default="",
        metavar="FILE",
        help="What gateways and engines of different machines must know. Unset: $PELLUCID_ENGINE_SECRET.",
        parse=str,
    ),
    Option(
        name="workers",
        default="1",
        metavar="COUNT",
        help="Gateway processes, which share the port and the limits.",
        parse=whole(least=1, most=WORKERS_MAX),
    ),
    Option(
        name="routing",
        default="prefix",
        metavar="POLICY",
        help="Which replica gets a request: prefix (who has its beginning cached), least-tokens or round-robin.",
        parse=one_of(*POLICIES),
    ),
    Option(
        name="threads",
        default="0",
        metavar="COUNT",
        help="Threads of each engine, and of each of its ranks; 0 takes as many as its process may use.",
        parse=whole(least=0, most=256),
    ),
    Option(
        name="max_context",
        default="0",
        metavar="TOKENS",
        help="Prompt and output of one sequence; 0 takes what the model was trained for.",
        parse=whole(least=0),
    ),
    Option(
        name="kv_memory",
        default="1GiB",
        metavar="SIZE",
        help="Memory for keys and values of all replicas: 512MiB, 2GiB, or 25% of what is available.",
        parse=parse_kv_memory,
    ),
    Option(
        name="max_queue",
        default="256",
        metavar="COUNT",
        help="Sequences that may wait; one more is refused with 503.",
        parse=whole(least=1),
    ),
    Option(
        name="max_batch",
        default="64",
        metavar="COUNT",
        help="Sequences computed at the same time.",
        parse=whole(least=1, most=4096),
    ),
    Option(
        name="max_step_tokens",
        default="512",
        metavar="TOKENS",
        help="Tokens of one engine step: bounds how long a long prompt holds up the others.",
        parse=whole(least=1),
    ),
    Option(
        name="prefix_cache",
        default="true",
        metavar="",
        help="Keep finished blocks for prompts that start alike.",
        parse=parse_switch,
    ),
    Option(
        name="speculative",
        default="auto",
        metavar="auto|off|COUNT",
        help="Tokens guessed ahead from text that repeats, where that pays: at most COUNT of a sequence in a step.",
        parse=parse_speculative,
    ),
    Option(
        name="draft_model",
        default="",
        metavar="NAME|DIR|FILE.gguf",
        help="A smaller model with the same tokens, that guesses ahead where texts do not repeat, and where that pays.",
        parse=str,
    ),
    Option(
        name="max_body",
        default="8MiB",
        metavar="SIZE",
        help="Bytes of one request body.",
        parse=parse_bytes,
    ),
    Option(
        name="request_timeout",
        default="600",
        metavar="SECONDS",
        help="From acceptance to the last token of one request.",
        parse=seconds(least=0.001),
    ),
    Option(
        name="resume_deadline_s",
        default="30",
        metavar="SECONDS",
        help="How long a request whose engine has died waits for another to go on with it; 0: not at all.",
        parse=seconds(least=0),
    ),
    Option(
        name="drain",
        default="30",
        metavar="SECONDS",
        help="After SIGTERM or Ctrl-C, how long running requests may go on.",
        parse=seconds(least=0),
    ),
    Option(
        name="cors_origin",
        default="*",
        metavar="ORIGIN",
        help="A browser origin that may call; may be repeated.",
        parse=parse_list,
        repeats=True,
    ),
    Option(
        name="otlp_endpoint",
        default="",
        metavar="URL",
        help="Where spans go, OTLP over HTTP. Unset: $OTEL_EXPORTER_OTLP_ENDPOINT, else nowhere.",
        parse=parse_url,
    ),
    Option(
        name="otlp_metrics",
        default="false",
        metavar="",
        help="Metrics go there as well, every 10 s.",
        parse=parse_switch,
    ),
    Option(
        name="export_trace",
        default="",
        metavar="FILE",
        help="Append spans to a file, as OTLP JSON lines, which Jaeger's page takes.",
        parse=str,
    ),
    Option(
        name="trace_sample",
        default="1",
        metavar="RATIO",
        help="Of requests that neither failed, were slow nor are traced by their caller, the share that is traced.",
        parse=parse_share,
    ),
    Option(
        name="flight_memory",
        default="64MiB",
        metavar="SIZE",
        help="On disk, for each process: what it did in the last minutes, see `pellucid flight`; 0: nothing.",
        parse=parse_flight_memory,
    ),
    Option(
        name="log_level",
        default="info",
        metavar="LEVEL",
        help="debug, info, warning or error.",
        parse=one_of("debug", "info", "warning", "error"),
    ),
    Option(
        name="log_format",
        default="console",
        metavar="FORMAT",
        help="console or json.",
        parse=one_of("console", "json"),
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings, parsed.  One field per row of OPTIONS, and the upstreams."""

    model: str
    model_name: str
    host: str
    port: int
    insecure_open: bool
    data_dir: str
    redis_url: str
    pepper_file: str
    admin_port: int
    admin_host: str
    admin_key_file: str
    price_prompt: int
    price_output: int
    dtype: str
    quantization: str
    kv_dtype: str
    replicas: int
    tensor_parallel: int
    pipeline_parallel: int
    rank_timeout_s: float
    interconnect: str
    engine: tuple[str, ...]
    engine_secret_file: str
    workers: int
    routing: Policy
    threads: int
    max_context: int
    kv_memory: KvMemory
    max_queue: int
    max_batch: int
    max_step_tokens: int
    prefix_cache: bool
    speculative: int
    draft_model: str
    max_body: int
    request_timeout: float
    resume_deadline_s: float
    drain: float
    cors_origin: tuple[str, ...]
    otlp_endpoint: str
    otlp_metrics: bool
    export_trace: str
    trace_sample: float
    flight_memory: int
    log_level: str
    log_format: str
    upstreams: tuple[UpstreamOptions, ...]

    @property
    def ranks(self) -> int:
        """Processes of one replica."""
        return self.tensor_parallel * self.pipeline_parallel


def read_options(flags: Given, environ: Mapping[str, str], config: str | None = None) -> ServeOptions:
    """
    All settings from their four places.  Raises UserError.

    Args:
        flags: by option name, as click hands them over.
        environ: the environment; PELLUCID_CONFIG may name the file.
        config: the TOML file of `--config`.
    """
    file = config or environ.get(PREFIX + "CONFIG") or ""
    from_file, upstreams = read_file(Path(file)) if file else ({}, ())
    _refuse_unknown_variables(environ, {one.api_key_env for one in upstreams})
    values: dict[str, Value | tuple[UpstreamOptions, ...]] = {"upstreams": upstreams}
    for option in OPTIONS:
        place, text = _find(option, flags, environ, from_file, file)
        try:
            values[option.name] = option.parse(text)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error
    return msgspec.convert(values, ServeOptions)


def _find(
    option: Option, flags: Given, environ: Mapping[str, str], from_file: Mapping[str, str], file: str
) -> tuple[str, str]:
    """Where the value of `option` comes from, and the value as text."""
    flag = flags.get(option.name)
    if flag is not None and flag != ():
        return option.flag, _as_text(flag)
    if option.variable in environ:
        return option.variable, environ[option.variable]
    if option.name in from_file:
        return f"{file}: {option.name}", from_file[option.name]
    return f"default of {option.flag}", option.default


def read_file(path: Path) -> tuple[dict[str, str], tuple[UpstreamOptions, ...]]:
    """The settings in a TOML file, as text by option name, and the upstreams.  Raises UserError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a TOML file: {error}") from error
    upstreams = parse_upstreams(table.pop(TABLE, []), str(path))
    settings = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in BY_NAME:
            raise UserError(f"{path}: unknown key {key!r}{nearest(name, [*BY_NAME, TABLE])}")
        repeats = BY_NAME[name].repeats and isinstance(value, list) and all(isinstance(part, str) for part in value)
        if not repeats and not isinstance(value, str | int | float | bool):
            raise UserError(f"{path}: {key}: a plain value is expected, not a {type(value).__name__}")
        if name in settings:
            raise UserError(f"{path}: {key!r} stands there twice")
        settings[name] = _as_text(tuple(value) if isinstance(value, list) else value)
    return settings, upstreams


def _as_text(value: str | float | bool | tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _refuse_unknown_variables(environ: Mapping[str, str], keys: Collection[str]) -> None:
    known = {option.variable for option in OPTIONS} | OTHER_VARIABLES | {*keys}
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            raise UserError(f"unknown variable {variable} in the environment{nearest(variable, known)}")


def markdown_table() -> str:
    """The settings for README.md; tests/tidy keeps the two alike."""
    rows = ["| flag | default | |", "|---|---|---|"]
    for option in OPTIONS:
        flag = f"{option.flag} {option.metavar}".strip().replace("|", "\\|")
        default = f"`{option.default}`" if option.default else ""
        rows.append(f"| `{flag}` | {default} | {option.help} |")
    return "\n".join(rows)
