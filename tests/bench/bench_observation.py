"""
What it costs to be seen: the same load with everything on, and with everything off that can be.

    python -m tests.bench.bench_observation [--rounds 10] [--streams 16] [--requests 2] [--output-tokens 64]

Two appliances with the default model, which take turns:

    on    every trace to a collector over OTLP, metrics pushed over OTLP and scraped each second, the flight recorder,
          and a live page open
    off   no collector, no scrape, no flight recorder, nobody looks; records are made all the same: they are the product

Collector, scraper and viewer are in a process of their own, which reads and throws away; while the other is measured
they are gone.  In each round both serve the
same load, in an order that changes.  Printed is the throughput of each, and the ratio of both in the same round, of
which the median decides.  Exit code 1: it is lower by more than --percent-max.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
from contextlib import AsyncExitStack
from http.server import ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.request import urlopen

from bench.appliance import Appliance, serving
from bench.host import commit, host
from bench.load import Load, drive, warm
from tests.bench.bench_overhead import Collector

MODEL = "SmolLM2-135M-Instruct"
SCRAPE_S = 1.0
OFF = ("--flight-memory", "0")


def watch(line: Connection) -> None:
    """The collector; and, told a URL, who scrapes and looks at it, until told that nobody does: an empty one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        line.send(server.server_address[1])
        watching: list[threading.Thread] = []
        over = threading.Event()
        while (url := line.recv()) is not None:
            over.set()
            for thread in watching:
                thread.join()
            over = threading.Event()
            works = (_scrape, _look) if url else ()
            watching = [threading.Thread(target=work, args=(url, over), daemon=True) for work in works]
            for thread in watching:
                thread.start()
            line.send(True)


def _scrape(url: str, over: threading.Event) -> None:
    while not over.wait(SCRAPE_S):
        with urlopen(f"{url}/metrics", timeout=10) as answer:
            answer.read()


def _look(url: str, over: threading.Event) -> None:
    with urlopen(f"{url}/debug/live", timeout=60) as events:
        while not over.is_set() and events.readline():
            pass


async def compare(load: Load, rounds: int, seed: int) -> dict[str, list[float]]:
    """Output tokens a second, of each round."""
    here, there = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("fork").Process(target=watch, args=(there,), daemon=True)
    watcher.start()
    collector = f"http://127.0.0.1:{here.recv()}"
    order = random.Random(seed)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        on = await _start(stack, folder / "on", "--otlp-endpoint", collector, "--otlp-metrics")
        off = await _start(stack, folder / "off", *OFF)
        found: dict[str, list[float]] = {"on": [], "off": []}
        ways = [("on", on), ("off", off)]
        for _, appliance in ways:
            await warm(appliance.session, appliance.url, MODEL, load)
        for number in range(rounds):
            order.shuffle(ways)
            for name, appliance in ways:
                here.send(appliance.url if name == "on" else "")
                here.recv()
                answers = await drive(appliance.session, appliance.url, MODEL, load)
                found[name].append(answers.output_tokens / (answers.wall_ns / 1e9))
            print(f"round {number + 1}: on {found['on'][-1]:.1f}, off {found['off'][-1]:.1f} tokens/s", flush=True)
        here.send(None)
    watcher.kill()
    return found


async def _start(stack: AsyncExitStack, data: Path, *options: str) -> Appliance:
    return await stack.enter_async_context(serving(("--speculative", "off", *options), data, os.environ, replicas=1))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--prompt-words", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--percent-max", type=float, default=2.0)
    given = parser.parse_args()
    load = Load(
        streams=given.streams,
        requests=given.requests,
        prompt_words=given.prompt_words,
        output_tokens=given.output_tokens,
        seed=given.seed,
    )
    print(f"commit {commit()}\nhost {host()}\nseed {given.seed}, {load}")
    found = asyncio.run(compare(load, given.rounds, given.seed))
    ratios = [on / off for on, off in zip(found["on"], found["off"], strict=True)]
    for name, rates in found.items():
        print(f"{name:4} median {statistics.median(rates):.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f})")
    cost = (1 - statistics.median(ratios)) * 100
    print(f"everything on costs {cost:.2f} % of throughput ({min(ratios):.3f} to {max(ratios):.3f} of it is left)")
    return int(cost > given.percent_max)


if __name__ == "__main__":
    sys.exit(main())
