"""
What it costs to be seen: the same load with everything on, and with everything off that can be.

    python -m tests.bench.bench_observation [--rounds 10] [--streams 16] [--requests 8] [--output-tokens 64]

Two appliances with the default model:

    on    every trace to a collector over OTLP, metrics pushed over OTLP and scraped as often as our own Prometheus
          does, the flight recorder, and a live page open
    off   no collector, no scrape, no flight recorder, nobody looks; records are made all the same: they are the product

Collector, scraper and viewer are in a process of their own, which reads and throws away; while the other is measured
they are gone.  In each round both are started anew, because two processes of the same program differ by some percent
for as long as they live, and serve the same load, in an order that changes.  Printed is the throughput of each,
and the ratio of both in the same round, of which the median decides.  Exit code 1: it is lower by more than
--percent-max.

Answers differ in length, by --output-spread at most.  With equal lengths the streams of one appliance keep step for a
whole run, and those of the other do not, as chance has it; in step they need fewer steps, and that is then measured.

`--without traces,page,flight` leaves some of it out of `on`, to find what costs.
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
from collections.abc import Sequence
from contextlib import AsyncExitStack
from http.server import ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from bench.appliance import Appliance, serving
from bench.host import commit, host, tree_s
from bench.load import Load, drive, warm
from dashboards.files import SCRAPE_S
from tests.bench.bench_overhead import Collector

MODEL = "SmolLM2-135M-Instruct"
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


class Drive(NamedTuple):
    """One load on one appliance."""

    rate: float
    """Output tokens a second."""
    cpu_us: float
    """Processor time of all its processes, for a token."""


async def compare(load: Load, rounds: int, seed: int, without: Sequence[str]) -> dict[str, list[Drive]]:
    """Of each round, by way."""
    here, there = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("fork").Process(target=watch, args=(there,), daemon=True)
    watcher.start()
    collector = f"http://127.0.0.1:{here.recv()}"
    order = random.Random(seed)
    found: dict[str, list[Drive]] = {"on": [], "off": []}
    traces = () if "traces" in without else ("--otlp-endpoint", collector, "--otlp-metrics")
    options = {"on": (*traces, *(OFF if "flight" in without else ())), "off": OFF}
    for number in range(rounds):
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ways = ["on", "off"]
            order.shuffle(ways)
            started = {way: await _start(stack, folder / way, *options[way]) for way in ways}
            for appliance in started.values():
                await warm(appliance.session, appliance.url, MODEL, load)
            order.shuffle(ways)
            for way in ways:
                here.send(started[way].url if way == "on" and "page" not in without else "")
                here.recv()
                found[way].append(await _drive(started[way], load))
            here.send("")
            here.recv()
        on, off = found["on"][-1].rate, found["off"][-1].rate
        print(f"round {number + 1}: on {on:.1f}, off {off:.1f} tokens/s", flush=True)
    here.send(None)
    watcher.kill()
    return found


async def _drive(appliance: Appliance, load: Load) -> Drive:
    before_s = tree_s(appliance.pid)
    answers = await drive(appliance.session, appliance.url, MODEL, load)
    cpu_us = (tree_s(appliance.pid) - before_s) / answers.output_tokens * 1e6
    return Drive(answers.output_tokens / (answers.wall_ns / 1e9), cpu_us)


async def _start(stack: AsyncExitStack, data: Path, *options: str) -> Appliance:
    return await stack.enter_async_context(serving(("--speculative", "off", *options), data, os.environ, replicas=1))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-words", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--output-spread", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--percent-max", type=float, default=2.0)
    parser.add_argument("--without", default="", help="with commas, of: traces, page (and scrapes), flight")
    given = parser.parse_args()
    load = Load(
        streams=given.streams,
        requests=given.requests,
        prompt_words=given.prompt_words,
        output_tokens=given.output_tokens,
        output_spread=given.output_spread,
        seed=given.seed,
    )
    print(f"commit {commit()}\nhost {host()}\nseed {given.seed}, {load}")
    found = asyncio.run(compare(load, given.rounds, given.seed, given.without.split(",")))
    ratios = [on.rate / off.rate for on, off in zip(found["on"], found["off"], strict=True)]
    for name, drives in found.items():
        rates = [one.rate for one in drives]
        cpu_us = statistics.median(one.cpu_us for one in drives)
        spread = f"{min(rates):.1f} to {max(rates):.1f}"
        print(
            f"{name:4} median {statistics.median(rates):.1f} tokens/s ({spread}), {cpu_us:.0f} us of processors a token"
        )
    cost = (1 - statistics.median(ratios)) * 100
    print(f"everything on costs {cost:.2f} % of throughput ({min(ratios):.3f} to {max(ratios):.3f} of it is left)")
    return int(cost > given.percent_max)


if __name__ == "__main__":
    sys.exit(main())
