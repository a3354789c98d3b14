"""
The gateway's configuration: parsed once into a frozen value.
"""

from typing import Literal

import msgspec

Policy = Literal["round-robin", "least-tokens", "prefix"]
POLICIES: tuple[Policy, ...] = ("round-robin", "least-tokens", "prefix")
"""How a replica is chosen: gateway.balance."""
REDIS_URL_VARIABLE = "PELLUCID_REDIS_URL"
"""It may hold a password, so it is not among the arguments, which everybody on the machine can read."""


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `python -m gateway` is started with, as JSON."""

    model: str
    """A Hugging Face directory or a GGUF file: the tokenizer and the chat template are read from it."""
    model_name: str
    """The name under which clients know it."""
    engines: tuple[str, ...]
    """Where the engine replicas listen: `unix:PATH` or `tcp:HOST:PORT`.  Their place here is their number."""
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
    otlp_endpoint: str = ""
    """Base URL for OTLP over HTTP, e.g. http://127.0.0.1:4318; empty: OTEL_EXPORTER_OTLP_ENDPOINT, or no traces."""
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
    log_level: str = "info"
    log_format: str = "console"
    """console or json."""

    @property
    def workers(self) -> int:
        """Processes that share the port, and the limits of the whole."""
        return max(1, len(self.worker_sockets))

    @property
    def requests_here_max(self) -> int:
        """This worker's share of `requests_max`."""
        return -(-self.requests_max // self.workers)
