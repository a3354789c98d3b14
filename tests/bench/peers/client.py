"""
The one load for every server: streamed completions over HTTP/1.1, greedy, end-of-text ignored.

    python -m tests.bench.peers.client --url http://127.0.0.1:8000 --model NAME --prompts FILE --streams 8

It shares the cores with the server that it measures, so while the clock runs it only keeps what arrives and when; all
parsing comes afterwards.  Tokens are those of the usage object: a server may put several into one event, or none.
FILE holds a JSON list of prompts, each a list of token ids.  A stream that has finished one takes the next.
"""

import argparse
import asyncio
import bisect
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import uvloop

DEADLINE_S = 900.0


class ServerError(Exception):
    """A server answered with something else than the whole stream that was asked for."""


@dataclass(frozen=True)
class Answer:
    """One finished request; times in seconds from its start."""

    first_s: float  # first event with text
    last_s: float  # last event with text
    end_s: float  # the connection is closed
    output_tokens: int
    events: int


@dataclass(frozen=True)
class Sample:
    """One load on one server."""

    streams: int
    requests: int
    wall_s: float
    output_tokens: int
    output_tokens_per_s: float  # all streams together, from the first request to the last byte
    first_token_ms: float  # median
    first_token_ms_max: float
    stream_tokens_per_s: float  # median over requests, from the first token to the last: decode alone
    events: int
    client_cpu: float  # share of one core


class Exchange(asyncio.Protocol):
    """One request and all that comes back until the server closes, each piece with its time."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started_ns = 0
        self.times_ns: list[int] = []
        self.pieces: list[bytes] = []
        self.ended_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.started_ns = time.monotonic_ns()
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's is one, but does not inherit

    def data_received(self, data: bytes) -> None:
        self.times_ns.append(time.monotonic_ns())
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended_ns = time.monotonic_ns()
        if not self.done.done():
            self.done.set_result(None)


def body_of(pieces: Sequence[bytes], times_ns: Sequence[int]) -> tuple[int, bytes, list[tuple[int, int]]]:
    """Status, body, and (end in the body, time) of each stretch of it that came in one piece.  Raises ServerError."""
    raw = b"".join(pieces)
    head, found, _ = raw.partition(b"\r\n\r\n")
    if not found:
        raise ServerError(f"no HTTP answer: {raw[:200]!r}")
    status = int(head.split(b" ", 2)[1])
    arrivals: list[int] = []  # ends of the pieces in `raw`
    total = 0
    for piece in pieces:
        total += len(piece)
        arrivals.append(total)

    def time_of(end: int) -> int:
        return times_ns[bisect.bisect_left(arrivals, end)]

    start = len(head) + 4
    if b"transfer-encoding: chunked" not in head.lower():
        stretches = [(end - start, when) for end, when in zip(arrivals, times_ns, strict=True) if end > start]
        return status, raw[start:], stretches
    body, stretches = bytearray(), []
    while True:
        line_end = raw.find(b"\r\n", start)
        size = int(raw[start:line_end].split(b";")[0], 16) if line_end >= 0 else 0
        if not size:
            return status, bytes(body), stretches
        start = line_end + 2
        body += raw[start : start + size]
        stretches.append((len(body), time_of(min(start + size, total))))
        start += size + 2


def events_of(body: bytes, stretches: Sequence[tuple[int, int]]) -> list[tuple[int, dict[str, object]]]:
    """(time, JSON) of each server-sent event but the last, [DONE].  Raises ServerError where that is missing."""
    ends = [end for end, _ in stretches]
    events: list[tuple[int, dict[str, object]]] = []
    start = 0
    while (end := body.find(b"\n\n", start)) >= 0:
        event, start = body[start:end], end + 2
        if not event.startswith(b"data:"):
            continue  # a comment
        data = event[5:].strip()
        if data == b"[DONE]":
            return events
        events.append((stretches[bisect.bisect_left(ends, start)][1], json.loads(data)))
    raise ServerError(f"the stream broke off: {body[-200:]!r}")


def answer_of(exchange: Exchange, *, output_tokens: int) -> Answer:
    """What became of one request.  Raises ServerError if it is not `output_tokens` long."""
    status, body, stretches = body_of(exchange.pieces, exchange.times_ns)
    if status != 200:
        raise ServerError(f"status {status}: {body[:500].decode(errors='replace')}")
    events = events_of(body, stretches)
    tokens, with_text = 0, []
    for when_ns, event in events:
        usage, choices = event.get("usage"), event.get("choices")
        if isinstance(usage, dict):
            tokens = int(usage["completion_tokens"])
        if isinstance(choices, list) and choices and choices[0].get("text"):
            with_text.append(when_ns)
    if tokens != output_tokens:
        raise ServerError(f"{tokens} tokens instead of {output_tokens}; the last event: {events[-1:]}")
    began = exchange.started_ns
    end_s = (exchange.ended_ns - began) / 1e9
    # Without any text (half characters only) the end is the first thing that a reader sees.
    first_s, last_s = ((when - began) / 1e9 for when in (with_text[0], with_text[-1])) if with_text else (end_s, end_s)
    return Answer(first_s=first_s, last_s=last_s, end_s=end_s, output_tokens=tokens, events=len(events))


def request_bytes(url: str, model: str, prompt: Sequence[int], output_tokens: int) -> bytes:
    """The whole request, ready to write."""
    place = urlsplit(url)
    fields = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields).encode()
    head = (
        f"POST {place.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def load(url: str, requests: Sequence[bytes], *, streams: int) -> tuple[list[Exchange], float, float]:
    """Send all, `streams` at a time; returns the exchanges, the wall and the CPU seconds that it took."""
    place = urlsplit(url)
    host, port = place.hostname or "", place.port or 80
    loop = asyncio.get_running_loop()
    waiting = iter(requests)
    exchanges: list[Exchange] = []

    async def stream() -> None:
        for request in waiting:
            exchange = Exchange(request)
            exchanges.append(exchange)
            await loop.create_connection(lambda it=exchange: it, host, port)  # type: ignore[misc] # a default in a lambda
            await exchange.done

    began, cpu = time.perf_counter(), time.process_time()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(stream() for _ in range(streams)))
    return exchanges, time.perf_counter() - began, time.process_time() - cpu


def measure(url: str, model: str, prompts: Sequence[Sequence[int]], *, streams: int, output_tokens: int) -> Sample:
    """Run one load and read it.  Raises ServerError."""
    requests = [request_bytes(url, model, prompt, output_tokens) for prompt in prompts]
    gc.disable()  # a short life with few objects: no pause of ours may count as the server's
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        exchanges, wall_s, cpu_s = runner.run(load(url, requests, streams=streams))
    gc.enable()
    answers = [answer_of(exchange, output_tokens=output_tokens) for exchange in exchanges]
    total = sum(answer.output_tokens for answer in answers)
    rates = [(one.output_tokens - 1) / (one.last_s - one.first_s) for one in answers if one.last_s > one.first_s]
    return Sample(
        streams=streams,
        requests=len(answers),
        wall_s=wall_s,
        output_tokens=total,
        output_tokens_per_s=total / wall_s,
        first_token_ms=1e3 * statistics.median(one.first_s for one in answers),
        first_token_ms_max=1e3 * max(one.first_s for one in answers),
        stream_tokens_per_s=statistics.median(rates) if rates else 0.0,
        events=sum(one.events for one in answers),
        client_cpu=cpu_s / wall_s,
    )


def main() -> None:
    """Measure, and print one line of JSON; one line on stderr and exit code 1 where the server failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--output-tokens", type=int, default=128)
    arguments = parser.parse_args()
    prompts = json.loads(arguments.prompts.read_text())
    try:
        sample = measure(
            arguments.url, arguments.model, prompts, streams=arguments.streams, output_tokens=arguments.output_tokens
        )
    except (ServerError, OSError) as error:
        sys.exit(f"{arguments.url}: {type(error).__name__} {error}")
    print(json.dumps(asdict(sample)))


if __name__ == "__main__":
    main()
