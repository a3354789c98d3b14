"""
What the gateway adds: the same requests straight to an engine, and through the gateway, in turn.

    python -m tests.bench.bench_overhead [--rounds 7] [--requests 60] [--clients 1,8,32] [--tokens 64] [--gap-ms 4]

The engine is a fake in a process of its own: it accepts at once, and emits a token every `--gap-ms`.  Straight means
its frames over its socket, from here.  The gateway is `python -m gateway` as production starts it, with keys, limits at
all three levels, routing over two replicas with the prefix index, and tracing to a collector that takes everything;
Valkey is the embedded one.  The client reads bytes from a socket, so that little of what is measured is its own.

    added       to the first byte of the answer, and to the first text: through the gateway less straight, of the
                medians of a round; the median over the rounds, and the least and the most
    CPU         of the gateway process (user and system) for each streamed token, whole requests included
    floor       the same of a bare server that writes the same bytes at the same pace (tests.bench.floor_server): what
                this machine takes for it.  Its first byte waits for nothing

Every round makes new requests with prompts that nobody has sent.  Exit code 1: beyond the targets (--first-byte-ms-max,
--token-us-max).
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import uvloop

from bench.host import commit, host
from cache.accounts import Limits
from engine.api import FrameReader, GenerateRequest, Hello, Sampling, StepFrame, decode_frame, encode
from gateway.config import GatewayOptions
from gateway.tokens import load
from tests.cache import servers
from tests.http.guard import Guard
from tests.http.model_files import write_model

MODEL = "tiny"
PROMPT_WORDS = 200
LIMITS = Limits(requests_per_minute=10**9, tokens_per_minute=10**12, concurrent=10_000)


@dataclass
class Seen:
    """What the clients of a round saw, in seconds."""

    first_bytes: list[float] = field(default_factory=list)
    first_texts: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    tokens: int = 0


class Collector(BaseHTTPRequestHandler):
    """Takes spans and forgets them."""

    def do_POST(self) -> None:
        """Answer with nothing."""
        self.rfile.read(int(self.headers.get("content-length", "0")))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Straight:
    """Requests over an engine's own socket."""

    def __init__(self, path: str, vocab_size: int, tokens: int) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._tokens = tokens
        self._number = 0

    async def client(self, requests: int, pick: random.Random, seen: Seen) -> None:
        """One after the other, over one connection."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        frames = FrameReader()
        await self._frame(reader, frames)
        for number in range(requests):
            prompt = tuple(pick.randrange(40, self._vocab_size) for _ in range(PROMPT_WORDS))
            name = f"{id(writer)}-{number}"
            message = GenerateRequest(request_id=name, prompt=prompt, sampling=Sampling(), tokens_max=self._tokens)
            began_s = time.perf_counter()
            writer.write(encode(message))
            first_byte_s = first_text_s = 0.0
            ended = False
            while not ended:
                for frame in await self._frame(reader, frames):
                    now_s = time.perf_counter()
                    first_byte_s = first_byte_s or now_s
                    for delta in frame.deltas:
                        if delta.tokens:
                            first_text_s = first_text_s or now_s
                            seen.tokens += len(delta.tokens)
                        ended = ended or delta.finish is not None
            seen.first_bytes.append(first_byte_s - began_s)
            seen.first_texts.append(first_text_s - began_s)
        writer.close()

    async def _frame(self, reader: asyncio.StreamReader, frames: FrameReader) -> list[StepFrame]:
        found: list[StepFrame] = []
        hello = False
        while not found and not hello:
            data = await reader.read(1 << 18)
            assert data, "the engine has gone"
            for body in frames.feed(data):
                frame = decode_frame(body)
                hello = hello or isinstance(frame, Hello)
                if isinstance(frame, StepFrame):
                    found.append(frame)
        return found


class Through:
    """The same over HTTP, streamed."""

    def __init__(self, port: int, key: str, tokens: int) -> None:
        self._port = port
        self._key = key
        self._tokens = tokens

    async def client(self, requests: int, pick: random.Random, seen: Seen) -> None:
        """One after the other, over one connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        for _ in range(requests):
            words = [pick.randrange(40, 300) for _ in range(PROMPT_WORDS)]
            body = json.dumps(
                {"model": MODEL, "prompt": words, "max_tokens": self._tokens, "stream": True, "ignore_eos": True}
            )
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            began_s = time.perf_counter()
            writer.write((head + body).encode())
            await self._answer(reader, began_s, seen)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, began_s: float, seen: Seen) -> None:
        first_byte_s = first_text_s = 0.0
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 18)
            now_s = time.perf_counter()
            assert data, answer
            first_byte_s = first_byte_s or now_s
            answer += data
            if not first_text_s and b'"text":"' in answer:
                first_text_s = now_s
        assert answer.startswith(b"HTTP/1.1 200") and b"[DONE]" in answer, answer[:2000]
        seen.wholes.append(now_s - began_s)
        seen.first_bytes.append(first_byte_s - began_s)
        seen.first_texts.append(first_text_s - began_s)
        seen.tokens += self._tokens


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


Client = Callable[[int, random.Random, Seen], Awaitable[None]]


def play(client: Client, clients: int, requests: int, seed: int) -> Seen:
    """`requests` in all, by so many clients at the same time."""
    seen = Seen()

    async def all_of_them() -> None:
        each = max(1, requests // clients)
        await asyncio.gather(*(client(each, random.Random(seed * 1000 + number), seen) for number in range(clients)))

    uvloop.run(all_of_them())
    return seen


@contextmanager
def process(*command: str, environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program that is ended at the end."""
    running = subprocess.Popen([sys.executable, *command], env=environ, stdout=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(20)


class Ways(NamedTuple):
    """All that is compared."""

    straight: Straight
    through: Through
    floor: Through
    gateway_pid: int
    floor_pid: int


@contextmanager
def everything(home: Path, tokens: int, gap_s: float) -> Iterator[Ways]:
    """Engines, gateway and floor, started."""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with ExitStack() as stack:
        model = home / "model"
        model.mkdir()
        write_model(model)
        vocab_size = load(model).vocab_size
        server = stack.enter_context(servers.embedded(home / "v"))
        guard = Guard(server, home)
        guard.change_tenant("blue", organisation="blue", limits=LIMITS)
        key = guard.create(tenant="blue", limits=LIMITS).key
        collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        stack.callback(collector.shutdown)
        paths = [str(home / f"engine-{number}.sock") for number in range(2)]
        for path in paths:
            engine = (path, Path(path).stem, str(vocab_size), str(gap_s))
            stack.enter_context(process("-m", "tests.bench.pacing_engine", *engine, environ=environ))
        options = GatewayOptions(
            model=str(model),
            model_name=MODEL,
            engines=tuple(f"unix:{path}" for path in paths),
            port=free_port(),
            otlp_endpoint=f"http://127.0.0.1:{collector.server_address[1]}",
            log_level="warning",
            **guard.options,  # type: ignore[arg-type]
        )
        encoded = msgspec.json.encode(options).decode()
        running = stack.enter_context(process("-m", "gateway", "--options", encoded, environ=environ))
        until_ready(options.port)
        floor_port = free_port()
        arguments = (str(floor_port), str(tokens), str(gap_s))
        floor = stack.enter_context(process("-m", "tests.bench.floor_server", *arguments, environ=environ))
        yield Ways(
            Straight(paths[0], vocab_size, tokens),
            Through(options.port, key, tokens),
            Through(floor_port, key, tokens),
            running.pid,
            floor.pid,
        )


def free_port() -> int:
    """Nobody listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until_ready(port: int) -> None:
    """Until the gateway on that port has engines."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/ready")
            if answer.status_code == 200 and answer.json()["engines"] == {}:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SystemExit("the gateway does not start")


class Round(NamedTuple):
    """What one round has measured."""

    first_byte_ms: float
    first_text_ms: float
    token_us: float
    floor_first_byte_ms: float
    floor_token_us: float


def measure(ways: Ways, clients: int, requests: int, seed: int) -> Round:
    """Straight, through the gateway, and the floor."""
    direct = play(ways.straight.client, clients, requests, seed)
    ours, token_us = _with_cpu(ways.through, ways.gateway_pid, clients, requests, seed)
    bare, floor_token_us = _with_cpu(ways.floor, ways.floor_pid, clients, requests, seed)
    return Round(
        first_byte_ms=(statistics.median(ours.first_bytes) - statistics.median(direct.first_bytes)) * 1e3,
        first_text_ms=(statistics.median(ours.first_texts) - statistics.median(direct.first_texts)) * 1e3,
        token_us=token_us,
        floor_first_byte_ms=statistics.median(bare.first_bytes) * 1e3,
        floor_token_us=floor_token_us,
    )


def _with_cpu(way: Through, pid: int, clients: int, requests: int, seed: int) -> tuple[Seen, float]:
    """With the CPU time of that process for each token, in us."""
    before_s = cpu_s(pid)
    seen = play(way.client, clients, requests, seed)
    return seen, (cpu_s(pid) - before_s) / seen.tokens * 1e6


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gap-ms", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-byte-ms-max", type=float, default=1.0)
    parser.add_argument("--token-us-max", type=float, default=50.0)
    arguments = parser.parse_args()
    print(f"commit {commit()}, {host()}, seed {arguments.seed}")
    failed = False
    with (
        tempfile.TemporaryDirectory(prefix="pellucid-overhead-") as home,
        everything(Path(home), arguments.tokens, arguments.gap_ms / 1000) as ways,
    ):
        play(ways.through.client, 4, 40, 999_999)  # Imports, caches, connections.
        titles = ("+ first byte, ms", "+ first text, ms", "CPU per token, us", "floor: first byte", "floor: CPU")
        print("clients  " + "".join(f"{title:25s}" for title in titles))
        for clients in map(int, arguments.clients.split(",")):
            rounds = [
                measure(ways, clients, max(arguments.requests, clients), arguments.seed + clients * 100 + number)
                for number in range(arguments.rounds)
            ]
            print(
                f"{clients:7d}  " + "".join(f"{_spread(column):25s}" for column in zip(*rounds, strict=True)),
                flush=True,
            )
            first_byte_ms = statistics.median(one.first_byte_ms for one in rounds)
            token_us = statistics.median(one.token_us for one in rounds)
            failed |= (
                clients == 1 and first_byte_ms > arguments.first_byte_ms_max
            ) or token_us > arguments.token_us_max
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
