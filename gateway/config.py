"""
The gateway's configuration: parsed once into a frozen value.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

Policy = Literal["round-robin", "least-tokens", "prefix"]
POLICIES: tuple[Policy, ...] = ("round-robin", "least-tokens", "prefix")
"""How a replica is chosen: gateway.balance."""
REDIS_URL_VARIABLE = "PELLUCID_REDIS_URL"
"""It may hold a password, so it is not among the arguments, which everybody on the machine can read."""
ADMIN_KEY_VARIABLE = "PELLUCID_ADMIN_KEY"
ADMIN_KEY = re.compile(rb"[!-~]{16,256}")
"""What can be guessed is none, and what no header can hold is of no use."""
ADMIN_KEY_RULE = "an admin key is 16 to 256 characters of ASCII, without spaces"

UPSTREAMS_MAX = 64
_UPSTREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Seconds = Annotated[float, msgspec.Meta(ge=0.001, le=86_400)]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class UpstreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server with the OpenAI API that answers for a model.  Making a bad one raises ValueError."""

    name: str
    """For operators: in metrics, spans, logs and `/health`."""
    url: str
    """Its base, as an OpenAI client takes it: `http://10.0.0.7:8000/v1`.  Without a path, `/v1` is meant."""
    model: Name
    """The name under which clients know the model; several upstreams may serve one."""
    upstream_model: Name = ""
    """What the upstream calls it; empty: the same."""
    api_key_env: str = ""
    """The environment variable that holds its key."""
    api_key_file: str = ""
    """The file that holds its key, which nobody else may read."""
    connect_timeout_s: Seconds = 5.0
    """To look up its address, connect and, with https, shake hands."""
    first_byte_timeout_s: Seconds = 120.0
    """From the request to the first byte of a stream; of a whole answer that is almost the end: `Upstream.lost`."""
    idle_timeout_s: Seconds = 60.0
    """Between two pieces of an answer that has begun."""
    probe_interval_s: Seconds = 10.0
    """How often it is asked for its models, to see whether it is there."""
    requests_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256
    """In flight, from one gateway process."""

    def __post_init__(self) -> None:
        if not _UPSTREAM_NAME.fullmatch(self.name):
            raise ValueError("name: 1 to 64 letters, digits, dots, dashes and underscores, beginning with no sign")
        if not self.model.strip() or not (self.model + self.upstream_model).isprintable():
            raise ValueError("model: a name is needed, in printable characters")
        if trouble := _url_trouble(self.url):
            raise ValueError(f"url: {trouble}")
        if self.api_key_env and self.api_key_file:
            raise ValueError("api_key_env and api_key_file: one of them, not both")
        if self.api_key_env and not _VARIABLE.fullmatch(self.api_key_env):
            raise ValueError("api_key_env: the name of an environment variable is needed, not the key itself")

    @property
    def base_url(self) -> str:
        """What `/chat/completions` is put behind."""
        return self.url.rstrip("/") if urlsplit(self.url).path.strip("/") else self.url.rstrip("/") + "/v1"


def _url_trouble(url: str) -> str:
    """What is wrong with the base of an upstream; empty: nothing.  Repeats nothing of it, it may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "not a URL"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "http://HOST:PORT/v1 or https://... is expected"
    if parts.username is not None or parts.password is not None:
        return "a user or password does not belong into it: use api_key_env or api_key_file"
    if "?" in url or "#" in url or not url.isascii() or not url.isprintable() or " " in url:
        return "only scheme, host, port and path are expected, in ASCII and without spaces"
    return ""


def check_upstreams(upstreams: Iterable[UpstreamOptions]) -> None:
    """Raises ValueError: they do not go together."""
    names = Counter(upstream.name for upstream in upstreams)
    for name, count in names.items():
        if count > 1:
            raise ValueError(f"{count} upstreams are named {name!r}: each needs a name of its own")
    if names.total() > UPSTREAMS_MAX:
        raise ValueError(f"{names.total()} upstreams, and {UPSTREAMS_MAX} are the most")


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `python -m gateway` is started with, as JSON."""

    model: str
    """A Hugging Face directory or a GGUF file: for tokenizer and chat template.  Unused without engines."""
    model_name: str
    """The name under which clients know it."""
    engines: tuple[str, ...]
    """
    Where the engine replicas listen: `unix:PATH` or `tcp:HOST:PORT`.  Their place here is their number.

    None: upstreams answer for everything.
    """
    upstreams: tuple[UpstreamOptions, ...] = ()
    """Servers that answer for other models."""
    engine_secret: bytes = b""
    """What engines on a network must know, and we; the process takes it from its environment."""
    routing: Policy = "prefix"
    """Which replica gets a request."""
    redis_url: str = ""
    """Where keys and limits are; the process takes it from its environment.  Empty: there are none."""
    redis_named: bool = False
    """A person has named that server, so it may have keys that nobody here knows of."""
    pepper_file: str = ""
    """The secret of the API keys, unless the environment has it; there is none before the first key."""
    worker: int = 0
    """Which of the workers this is."""
    worker_sockets: tuple[str, ...] = ()
    """Where the workers, this one among them, ask each other what each has seen; empty: it is the only one."""
    listener: int = -1
    """File descriptor of a bound socket that was inherited and that the workers share; -1: listen on host and port."""
    price_prompt_micros: int = 0
    """Of a million prompt tokens, in millionths of the currency that spend limits are in."""
    price_output_micros: int = 0
    """Of a million output tokens."""
    host: str = "127.0.0.1"
    port: int = 8000
    admin_port: int = 0
    """Where keys, tenants and organisations can be changed; 0: nowhere."""
    admin_host: str = "127.0.0.1"
    admin_listener: int = -1
    """As `listener`, of that port."""
    admin_key: bytes = b""
    """Who knows it may change them; the process takes it from its environment."""
    otlp_endpoint: str = ""
    """Base URL for OTLP over HTTP, e.g. http://127.0.0.1:4318; empty: OTEL_EXPORTER_OTLP_ENDPOINT, or no traces."""
    otlp_metrics: bool = False
    """Metrics go there as well."""
    export_trace: str = ""
    """The file that spans are appended to; empty: none."""
    trace_sample: float = 1.0
    """The share of requests whose trace is kept without a reason."""
    cors_origins: tuple[str, ...] = ("*",)
    body_bytes_max: int = 8 * 1024 * 1024
    body_timeout_s: float = 20.0
    """For the head of a request, and again for its body."""
    depth_max: int = 64
    """Nesting of a JSON body."""
    messages_max: int = 4096
    request_timeout_s: float = 600.0
    """The engine's deadline for one request."""
    output_tokens_estimated: int = 512
    """What is reserved of a key's limits for an output at most; a longer one is charged at its end."""
    first_frame_timeout_s: float = 60.0
    """An engine that owes an answer for so long is gone, however long its steps may take."""
    silence_s: float = 5.0
    """The same for one whose steps are known to be short."""
    resume_deadline_s: float = 30.0
    """How long a request whose engine is gone waits for another one; 0: not at all."""
    send_timeout_s: float = 120.0
    """A client that reads nothing for so long is taken for gone."""
    record_timeout_s: float = 2.0
    """After an abort, how long to wait for the engine's last word."""
    requests_max: int = 1024
    """Requests in flight, of all workers; one more is refused as overloaded."""
    connections_max: int = 4096
    """One more is refused as overloaded."""
    header_bytes_max: int = 64 * 1024
    headers_max: int = 128
    drain_s: float = 30.0
    """After SIGTERM, how long streams may run on before they end with an error event."""
    flight_directory: str = ""
    """Where the records of the last minute are kept; empty: nowhere."""
    flight_memory_bytes: int = 64 << 20
    """Of them."""
    log_level: str = "info"
    log_format: str = "console"
    """console or json."""

    @property
    def workers(self) -> int:
        """Processes that share the port, and the limits of the whole."""
        return max(1, len(self.worker_sockets))

    @property
    def start(self) -> str:
        """What the workers of one start have in common: the name of the directory in which they meet; one has none."""
        return Path(self.worker_sockets[0]).parent.name if self.worker_sockets else ""

    @property
    def requests_here_max(self) -> int:
        """This worker's share of `requests_max`."""
        return -(-self.requests_max // self.workers)


def elsewhere(options: GatewayOptions) -> tuple[str, ...]:
    """The models that upstreams answer for, in their order: what is served here is served here."""
    own = options.model_name if options.engines else None
    return tuple(dict.fromkeys(one.model for one in options.upstreams if one.model != own))
