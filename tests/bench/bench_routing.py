"""
Which replica gets a request: round robin, least tokens and prefix-aware, on three engines of one thread each.

    python -m tests.bench.bench_routing [--rounds 3] [--seconds 60] [--trace mooncake.jsonl] [--model FILE.gguf]

Everything is real: engines, gateways with keys and limits, an embedded Valkey.  There is a gateway for each policy, all
in front of the same engines; policies take turns, in another order each round.  Each run of each policy has tenants of
its own, so it asks the same as the others and finds nothing of what they left in the caches.

chats   Tenants with a system prompt each, which do not all fit into one replica's KV; users say a few things in turn,
        and think in between.  Chats begin at random (Poisson), whatever the server does.
trace   With --trace, a file of Mooncake's form (timestamp, input_length, output_length, hash_ids): whole conversations
        are drawn from it until there are enough requests, with what they share; lengths and times are divided.  Stamps
        that are rounded to 3 s are spread over them.  `possible` is what one endless cache would find.

What begins in the first quarter of a run fills the caches and is not counted.

Times are those of the gateway's records.  Queueing is from the gateway's sending a request until the engine begins
with it.  Percentiles are over all rounds; spreads are over replicas, of prompt tokens computed and output tokens.
"""

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from bench.host import commit, host
from cache.accounts import Limits
from cache.connection import Store as RedisStore
from cache.keys import Keys
from cache.pepper import make_pepper
from cache.redis_url import parse_redis_url
from engine.config import EngineOptions
from gateway.config import POLICIES, REDIS_URL_VARIABLE, GatewayOptions, Policy
from launch.known import DEFAULT_MODEL
from launch.store import Store, data_dir
from tests.bench.routing_loads import NAME, TENANTS, Talk, chats, replay
from tests.cache import servers

REPLICAS = 3
READY_S = 300.0
ANSWER_S = 300.0
PERCENT = 100


@dataclass
class Result:
    """What the gateway's records say of the runs of one policy."""

    records: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    """Hit share of each."""

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        self.records += records
        self.rounds.append(hit_share(records))

    def first_ms(self, percent: int) -> float:
        return percentile([one["first_token_ns"] / 1e6 for one in self.records], percent)

    def queue_ms(self, percent: int) -> float:
        return percentile([queued_ms(one["states"]) for one in self.records], percent)

    @property
    def spread(self) -> float:
        """The busiest replica's tokens over the mean."""
        tokens: Counter[int] = Counter()
        for one in self.records:
            tokens[one["replica"]] += one["computed_tokens"] + one["output_tokens"]
        return max(tokens.values()) * REPLICAS / tokens.total()

    def row(self, workload: str, policy: str) -> str:
        reasons = Counter(one["routing"] for one in self.records).most_common(3)
        promised = [one for one in self.records if one["promised_tokens"] is not None]
        kept = sum(min(one["promised_tokens"], one["cached_tokens"]) for one in promised)
        total = sum(one["promised_tokens"] for one in promised)
        cells = (
            workload,
            policy,
            f"{len(self.records)}",
            f"{hit_share(self.records):.1%} ({min(self.rounds):.1%}-{max(self.rounds):.1%})",
            f"{self.first_ms(50):,.0f}",
            f"{self.first_ms(99):,.0f}",
            f"{self.queue_ms(99):,.0f}",
            f"{self.spread:.2f}",
            f"{kept / total:.1%}" if total else "",
            ", ".join(f"{reason} {count}" for reason, count in reasons),
        )
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| workload | policy | requests | hit share | first token p50, ms | p99 | queueing p99, ms | busiest / mean "
    "| promises kept | why |\n|---|---|---|---|---|---|---|---|---|---|"
)


def hit_share(records: Sequence[dict[str, Any]]) -> float:
    cached, asked = (sum(int(one[name]) for one in records) for name in ("cached_tokens", "prompt_tokens"))
    return cached / asked


def queued_ms(states: dict[str, int]) -> float:
    return sum(spent for state, spent in states.items() if state == "dispatch" or state.startswith("queue_")) / 1e6


def percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // PERCENT)]


# ---- asking


class Asker:
    """One run of one policy: a client, and a key for each tenant."""

    def __init__(self, client: httpx.AsyncClient, keys: Sequence[str]) -> None:
        self._client = client
        self._keys = keys
        self._records: list[dict[str, Any]] = []

    async def run(self, talks: Sequence[Talk]) -> list[dict[str, Any]]:
        """All talks, and the records of those that count."""
        async with asyncio.TaskGroup() as group:
            for talk in talks:
                group.create_task(self._talk(talk))
        return self._records

    async def _talk(self, talk: Talk) -> None:
        headers = {"authorization": f"Bearer {self._keys[talk.tenant]}"}
        said: list[dict[str, str]] = []
        for turn in talk.turns:
            await asyncio.sleep(turn.waits_s)
            body = turn.body
            if "messages" in body:
                said += body["messages"]
                body = body | {"messages": said}
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            answer = await self._client.post(path, json=body, headers=headers)
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.text[:500]}")
            if "messages" in body:
                said.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
            record = await self._record(answer.json()["id"], headers)
            if talk.counted:
                self._records.append(record)

    async def _record(self, request_id: str, headers: dict[str, str]) -> dict[str, Any]:
        while True:
            answer = await self._client.get(f"/debug/requests/{request_id}", headers=headers)
            record: dict[str, Any] = answer.json()
            if record["outcome"] is not None:
                return record
            await asyncio.sleep(0.05)


# ---- what is asked of


@contextlib.contextmanager
def processes(options: argparse.Namespace, folder: Path, redis_url: str) -> Iterator[dict[Policy, str]]:
    """Engines and gateways; the URL of each policy's gateway."""
    store = Store(data_dir("", dict(os.environ)))
    model = options.model or store.pull(DEFAULT_MODEL).path
    environ = os.environ | {REDIS_URL_VARIABLE: redis_url, "GOMP_SPINCOUNT": "10000"}
    running: list[subprocess.Popen[bytes]] = []

    def start(package: str, settings: EngineOptions | GatewayOptions) -> None:
        command = [sys.executable, "-m", package, "--options", msgspec.json.encode(settings).decode()]
        running.append(subprocess.Popen(command, env=environ))

    addresses = tuple(f"unix:{folder}/engine-{replica}.sock" for replica in range(REPLICAS))
    urls: dict[Policy, str] = {}
    try:
        for replica, address in enumerate(addresses):
            engine = EngineOptions(
                model=str(model),
                model_name=NAME,
                listen=address,
                replica=replica,
                threads=1,
                packed_directory=str(data_dir("", dict(os.environ)) / "packed"),
                kv_memory_bytes=options.kv_mib << 20,
                log_level="warning",
            )
            start("engine", engine)
        for policy in POLICIES:
            port = servers.free_port()
            gateway = GatewayOptions(
                model=str(model),
                model_name=NAME,
                engines=addresses,
                routing=policy,
                port=port,
                pepper_file=str(folder / "pepper"),
                drain_s=1.0,
                log_level="warning",
            )
            start("gateway", gateway)
            urls[policy] = f"http://127.0.0.1:{port}"
        yield urls
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.get("/ready")
                if answer.status_code == 200 and not answer.json()["engines"]:
                    return
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def key_maker(redis_url: str, folder: Path) -> AsyncIterator[Callable[[str], Any]]:
    """Makes the keys of a run, each of a tenant that nobody has had before."""
    store = RedisStore(parse_redis_url(redis_url))
    keys = Keys(store, make_pepper(folder / "pepper", {}))
    limits = Limits(requests_per_minute=10**6, tokens_per_minute=10**9)

    async def make(run: str) -> list[str]:
        issued = [
            await keys.create(tenant=f"{run}-{tenant}", actor="bench", limits=limits) for tenant in range(TENANTS)
        ]
        return [one.key for one in issued]

    yield make
    await store.aclose()


async def measure(options: argparse.Namespace, urls: dict[Policy, str], redis_url: str, folder: Path) -> None:
    """All rounds, and the table."""
    results: dict[tuple[str, Policy], Result] = {}
    notes: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        make_keys = await stack.enter_async_context(key_maker(redis_url, folder))
        clients = {
            policy: await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=ANSWER_S))
            for policy, url in urls.items()
        }
        for client in clients.values():
            await until_ready(client)
        warm = chats(5.0, 2.0, random.Random(-1))
        await Asker(clients["round-robin"], await make_keys("warm")).run(warm)
        for number in range(options.rounds):
            seed = options.seed + number
            loads = {"chats": chats(options.seconds, options.chats_per_s, random.Random(seed))}
            if options.trace is not None:
                loads["trace"], possible = replay(
                    options.trace,
                    options.seconds,
                    int(options.seconds * options.trace_per_s),
                    options.divisor,
                    options.trace_tokens_max,
                    random.Random(seed),
                )
                notes.append(f"{possible:.1%}")
            order = [*POLICIES[number % len(POLICIES) :], *POLICIES[: number % len(POLICIES)]]
            for workload, talks in loads.items():
                for policy in order:
                    keys = await make_keys(f"{workload}-{number}-{policy}")
                    records = await Asker(clients[policy], keys).run(talks)
                    results.setdefault((workload, policy), Result()).add(records)
                    print(f"round {number + 1}: {results[workload, policy].row(workload, policy)}", file=sys.stderr)
    print(f"\n{commit()}, {host()}, seeds {options.seed} to {options.seed + options.rounds - 1}\n\n{HEAD}")
    for (workload, policy), result in sorted(results.items(), key=lambda item: item[0][0]):
        print(result.row(workload, policy))
    if notes:
        print(f"\npossible in the trace: {', '.join(notes)}")
    for workload in sorted({workload for workload, _ in results}):
        turns, prefix = results[workload, "round-robin"], results[workload, "prefix"]
        ratio = hit_share(prefix.records) / hit_share(turns.records)
        queue = f"{prefix.queue_ms(99):,.0f} ms against {turns.queue_ms(99):,.0f} ms"
        print(f"{workload}: prefix-aware finds {ratio:.2f} times as much as round robin; queueing p99 {queue}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-mib", type=int, default=36, help="of each replica")
    parser.add_argument("--chats-per-s", type=float, default=1.2)
    parser.add_argument("--trace", type=Path, help="a file of Mooncake's form")
    parser.add_argument("--trace-per-s", type=float, default=1.5, help="requests")
    parser.add_argument("--trace-tokens-max", type=int, default=1024, help="longer prompts are left out")
    parser.add_argument("--divisor", type=int, default=32, help="of the trace's lengths")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pellucid-") as name:
        folder = Path(name)
        with servers.embedded(folder / "valkey") as valkey, processes(options, folder, valkey.url) as urls:
            asyncio.run(measure(options, urls, valkey.url, folder))


if __name__ == "__main__":
    main()
