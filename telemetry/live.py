"""
A request in flight, as the gateway sees it: what is known before its record can be written.

The gateway makes one `LiveRequest` per HTTP request, hands it to the hub and goes on changing it; the hub only reads.
"""

import re
import secrets
from dataclasses import dataclass, field

import msgspec

from telemetry.ledger import Ledger
from telemetry.records import RequestRecord

Attribute = str | bool | int | float | tuple[str, ...]
"""What a span attribute may be here."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE_CHARS_MAX = 512  # What W3C Trace Context asks everybody to carry at least.
_SAMPLED = 1


class TraceContext(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request sits in a distributed trace: `span_id` is our request span, `parent_id` the caller's, if any."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = True
    state: str = ""

    def traceparent(self) -> str:
        """The W3C header that makes somebody a child of our request span."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def accept_trace(traceparent: str | None = None, tracestate: str | None = None) -> TraceContext:
    """Continue the caller's trace, or begin one where the header is absent or malformed.  Never raises."""
    span_id = secrets.token_hex(8)
    caller = _TRACEPARENT.fullmatch((traceparent or "").strip())
    if caller is None or not _acceptable(caller):
        return TraceContext(trace_id=secrets.token_hex(16), span_id=span_id)
    state = (tracestate or "").strip()
    return TraceContext(
        trace_id=caller[2],
        span_id=span_id,
        parent_id=caller[3],
        sampled=bool(int(caller[4], 16) & _SAMPLED),
        state=state if len(state) <= _TRACESTATE_CHARS_MAX else "",
    )


def _acceptable(caller: re.Match[str]) -> bool:
    """Version ff and ids of zeros are forbidden; only versions after 00 may have more fields."""
    version, trace_id, parent_id, _, rest = caller.groups()
    return version != "ff" and bool(int(trace_id, 16)) and bool(int(parent_id, 16)) and not (version == "00" and rest)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """One request that has no record yet."""

    request_id: str
    ledger: Ledger
    tenant: str = ""
    model: str = ""
    route: str = ""
    """The template of the path, such as /v1/models/{id}."""
    method: str = "POST"
    path: str = ""
    """The path as it was sent, without its query; empty: the same as the route."""
    stream: bool = False
    choices: int = 1
    trace: TraceContext = field(default_factory=accept_trace)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """Tokens that the client has been sent so far; the gateway adds to it."""
    first_token_ns: int = 0
    """From acceptance to the first output token; 0: none yet."""
    replica: int = -1
    """The one that it was given to at first; -1: none yet."""
    routing: str = ""
    """Why that one: of `telemetry.vocabulary.ROUTINGS`."""
    promised_tokens: int | None = None
    """Of its prompt, what the prefix index said that replica has in its cache; None: it was not asked, or away."""
    repeated_tokens: int = 0
    """Of its prompt, as many as a prompt before it began with."""
    parameters: dict[str, Attribute] = field(default_factory=dict)
    """What was asked for, by the names of `telemetry.names.REQUEST_PARAMETERS`: max_tokens, temperature, seed, ..."""
    error: str = ""
    """The code of the error that the request ended with, if any: becomes `error.type`, so it is one of a few words."""

    def so_far(self, now_ns: int) -> RequestRecord:
        """Its record as if it ended now; what its engine has counted is not known yet."""
        return RequestRecord(
            request_id=self.request_id,
            tenant=self.tenant,
            accepted_ns=self.ledger.opened_ns,
            finished_ns=now_ns,
            states=self.ledger.spent(max(now_ns, self.ledger.opened_ns)),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            first_token_ns=self.first_token_ns,
            repeated_tokens=self.repeated_tokens,
            model=self.model,
            route=self.route,
            stream=self.stream,
            choices=self.choices,
            trace_id=self.trace.trace_id,
            replica=self.replica,
            routing=self.routing,
            promised_tokens=self.promised_tokens,
        )

    def placed(self, replica: int, routing: str, promised_tokens: int | None) -> None:
        """A replica has been chosen."""
        self.replica, self.routing, self.promised_tokens = replica, routing, promised_tokens
