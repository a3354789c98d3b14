"""
What relaying costs: CPU for each event of a stream, and time to the first one, through the gateway and without it.

    PYTHONPATH=. python tests/bench/bench_upstream.py [--streams 1 8] [--events 500] [--rounds 3]

A server in a process of its own sends an event each millisecond.  It is read by the two HTTP clients that could be the
gateway's (httpx in its raw form, aiohttp), which is why it has aiohttp, and by the gateway, which also parses, names
and counts what it passes on.  CPU is that of the reading process, by its own account.  First events are asked for one
after the other, directly and through the gateway in turn; medians of rounds are printed.
"""

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.queues import Queue
from pathlib import Path

import aiohttp
import httpx
import msgspec
import uvloop

from gateway.config import GatewayOptions, UpstreamOptions
from tests.conftest import ROOT
from tests.http.scripted_upstream import event

PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
EVENT = event(" token")
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FIRSTS = 100  # requests of a round
READY_S = 20.0


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def body(events: int) -> bytes:
    """A request for so many events."""
    messages = [{"role": "user", "content": "Hello"}]
    return msgspec.json.encode({"model": "m", "max_tokens": events, "messages": messages, "stream": True})


def serve(ports: "Queue[int]") -> None:
    """The server's process."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                if not length:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    continue
                events = msgspec.json.decode(await reader.readexactly(int(length)))["max_tokens"]
                writer.write(HEAD)
                for _ in range(events - 1):
                    writer.write(chunk(EVENT))
                    await asyncio.sleep(0.001)
                writer.write(chunk(EVENT) + chunk(DONE) + chunk(b""))
        except (EOFError, OSError):
            writer.close()

    async def listen() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(listen())


async def with_httpx(url: str, streams: int, events: int) -> float:
    """Seconds of this process' CPU."""
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:

        async def read(count: int) -> None:
            async with client.stream("POST", url + PATH, content=body(count), headers=JSON) as answer:
                async for _ in answer.aiter_raw():
                    pass

        return await _cpu_of(read, streams, events)


async def with_aiohttp(url: str, streams: int, events: int) -> float:
    """Seconds of this process' CPU."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def read(count: int) -> None:
            async with session.post(url + PATH, data=body(count), headers=JSON) as answer:
                assert answer.status == 200, await answer.text()
                while await answer.content.readany():
                    pass

        return await _cpu_of(read, streams, events)


async def _cpu_of(read: Callable[[int], Awaitable[None]], streams: int, events: int) -> float:
    await read(1)
    began_s = time.process_time()
    await asyncio.gather(*(read(events) for _ in range(streams)))
    return time.process_time() - began_s


async def with_gateway(gateway: subprocess.Popen[bytes], url: str, streams: int, events: int) -> float:
    """Seconds of its CPU."""
    await with_aiohttp(url, 1, 1)
    began_s = _cpu_s(gateway.pid)
    await with_aiohttp(url, streams, events)
    return _cpu_s(gateway.pid) - began_s


def _cpu_s(pid: int) -> float:
    """Of a process, in user and kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def first_ms(url: str) -> float:
    """Median time to the first bytes of a body, of requests one after the other."""
    times_s = []
    async with aiohttp.ClientSession() as session:
        for _ in range(FIRSTS):
            began_s = time.perf_counter()
            async with session.post(url + PATH, data=body(1), headers=JSON) as answer:
                await answer.content.readany()
                times_s.append(time.perf_counter() - began_s)
                await answer.read()
    return statistics.median(times_s) * 1000


def start_gateway(upstream: str) -> tuple[subprocess.Popen[bytes], str]:
    """A gateway in front of it, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    behind = UpstreamOptions(name="bench", url=upstream, model="m")
    options = GatewayOptions(model="", model_name="", engines=(), upstreams=(behind,), port=port, log_level="warning")
    command = [sys.executable, "-m", "gateway", "--options", msgspec.json.encode(options).decode()]
    process = subprocess.Popen(command, cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(f"{url}/ready", timeout=1).status_code == 200:
                return process, url
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    process.terminate()
    raise SystemExit("the gateway does not get ready")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ports: Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(ports,), daemon=True)
    server.start()
    direct = f"http://127.0.0.1:{ports.get(timeout=READY_S)}"
    gateway, url = start_gateway(direct)
    try:
        for streams in arguments.streams:
            sizes = streams, arguments.events
            costs = {
                "httpx": [uvloop.run(with_httpx(direct, *sizes)) for _ in range(arguments.rounds)],
                "aiohttp": [uvloop.run(with_aiohttp(direct, *sizes)) for _ in range(arguments.rounds)],
                "gateway": [uvloop.run(with_gateway(gateway, url, *sizes)) for _ in range(arguments.rounds)],
            }
            all_events = streams * arguments.events
            shown = (f"{name} {statistics.median(cost) / all_events * 1e6:.0f}" for name, cost in costs.items())
            print(f"{streams:3} streams: us of CPU for each event: {', '.join(shown)}")
        pairs = [(uvloop.run(first_ms(direct)), uvloop.run(first_ms(url))) for _ in range(arguments.rounds)]
        alone_ms = statistics.median(alone for alone, _ in pairs)
        added_ms = statistics.median(through - alone for alone, through in pairs)
        print(f"first event: {alone_ms:.2f} ms, the gateway adds {added_ms:.2f} ms")
    finally:
        gateway.terminate()
        gateway.wait()
        server.terminate()


if __name__ == "__main__":
    main()
