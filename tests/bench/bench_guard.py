"""
What keys and limits cost a request: one look at a key that is known, one reservation, one settlement, in turn.

    python -m tests.bench.bench_guard [--rounds 5] [--calls 1000] [--levels 3] [--against PATH]

On an embedded Valkey as production starts it, with an event loop as in production.  All three limits are set on each of
`--levels` levels.  Each round is a process of its own; `--against` names another checkout, whose rounds take turns with
ours.  Medians of the rounds' medians, in microseconds, and the CPU time of our process for each call.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import asyncio, json, statistics, sys, tempfile, time
from pathlib import Path
import uvloop
from cache.accounts import Account, Level, Limits
from cache.connection import Store
from cache.keys import Keys
from cache.limits import Limiter
from cache.redis_url import parse_redis_url
from tests.cache import servers
calls, levels = map(int, sys.argv[1:])
limits = Limits(requests_per_minute=10**9, tokens_per_minute=10**12, concurrent=1000)

async def measure(url):
    store = Store(parse_redis_url(url))
    assert await store.start()
    limiter, keys = Limiter(store), Keys(store, b"a pepper for a bench")
    issued = await keys.create(tenant="t", actor="bench")
    names = ("organisation", "tenant", "key")[3 - levels:]
    account = Account(organisation="o", levels=tuple(Level(name, "x", limits) for name in names))
    found = {}
    for what in ("verify", "reserve", "settle"):
        found[what] = []
    for number in range(calls + 50):
        if number == 50:
            cpu_s = time.process_time()
        first = time.perf_counter()
        assert await keys.verify(issued.key)
        second = time.perf_counter()
        reservation = await limiter.reserve(account, tokens=100)
        third = time.perf_counter()
        assert reservation.source == "server" and await limiter.settle(reservation, tokens=50)
        fourth = time.perf_counter()
        for what, spent in (("verify", second - first), ("reserve", third - second), ("settle", fourth - third)):
            found[what].append(spent * 1e6)
    cpu_s = time.process_time() - cpu_s
    medians = {what: statistics.median(times[50:]) for what, times in found.items()}
    print(json.dumps(medians | {"cpu": cpu_s / calls * 1e6}))
    await limiter.aclose()
    await store.aclose()

with tempfile.TemporaryDirectory() as home, servers.embedded(Path(home) / "v") as server:
    uvloop.run(measure(server.url))
"""


def measure(root: Path, calls: int, levels: int) -> dict[str, float]:
    """One round of the checkout at `root`."""
    command = [sys.executable, "-c", CHILD, str(calls), str(levels)]
    environ = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--levels", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--against", type=Path)
    arguments = parser.parse_args()
    roots = [ROOT, *([arguments.against.resolve()] if arguments.against else [])]
    rounds: dict[Path, list[dict[str, float]]] = {root: [] for root in roots}
    for _ in range(arguments.rounds):
        for root in roots:
            rounds[root].append(measure(root, arguments.calls, arguments.levels))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {arguments.levels} levels")
    for root, found in rounds.items():
        command = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        figures = "  ".join(f"{name} {statistics.median(one[name] for one in found):6.0f} us" for name in found[0])
        print(f"{commit.stdout.strip():16}  {figures}")


if __name__ == "__main__":
    main()
