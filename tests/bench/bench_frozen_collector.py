"""
What a collector that hangs costs the requests: the same load with no tracing, with a good collector, and with bad ones.

    python -m tests.bench.bench_frozen_collector [--rounds 10] [--requests 400] [--clients 8] [--tokens 32] [--gap-ms 4]

Four gateways, each `python -m gateway` as production starts it, in front of an engine that emits a token every
`--gap-ms` (tests.bench.pacing_engine):

    none        no endpoint: no spans at all
    healthy     a collector in a process of its own, which takes everything
    frozen      one that accepts connections and never reads or answers
    gone        an address where nobody listens

In each round all four serve the same number of requests, in an order that changes, so that what the machine does
otherwise meets all alike.  For each way: the median over the rounds of their p50 and p99, to the first text and to the
end; and by how much the p99 of whole requests differs from that of `none` and of `healthy` in the same round, of which
again the median.  What the bad ones lost is read from /metrics.  Exit code 1: `frozen` or `gone` is slower than
`healthy` by more than --percent-max.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.host import commit, host
from gateway.config import GatewayOptions
from gateway.tokens import load
from tests.bench.bench_overhead import MODEL, Collector, Seen, Through, free_port, play, process, until_ready
from tests.http.model_files import write_model

BAD = ("frozen", "gone")


@dataclass
class Way:
    """One gateway, and what its clients saw in each round."""

    name: str
    port: int
    through: Through
    rounds: list[Seen] = field(default_factory=list)

    def p99s(self) -> list[float]:
        """Of whole requests, by round, in seconds."""
        return [percentile(seen.wholes, 99) for seen in self.rounds]


def percentile(values: Sequence[float], percent: int) -> float:
    """By interpolation between the two nearest."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _serve(told: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    told.send(server.server_address[1])
    server.serve_forever()


@contextmanager
def healthy() -> Iterator[int]:
    """The port of a collector that takes everything."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    running = spawn.Process(target=_serve, args=(theirs,), daemon=True)
    running.start()
    try:
        yield ours.recv()
    finally:
        running.terminate()
        running.join(10)


@contextmanager
def frozen() -> Iterator[int]:
    """The port of one that accepts, and that is all."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):  # It is closed.
                while True:
                    held.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
    for connection in held:
        connection.close()


@contextmanager
def ways(home: Path, tokens: int, gap_s: float) -> Iterator[list[Way]]:
    """Collectors, engines and gateways, started."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environ |= {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with ExitStack() as stack:
        model = home / "model"
        model.mkdir()
        write_model(model)
        vocab_size = load(model).vocab_size
        ports = {
            "healthy": stack.enter_context(healthy()),
            "frozen": stack.enter_context(frozen()),
            "gone": free_port(),
        }
        found = []
        for name in ("none", "healthy", *BAD):
            path = str(home / f"{name}.sock")
            engine = (path, name, str(vocab_size), str(gap_s))
            stack.enter_context(process("-m", "tests.bench.pacing_engine", *engine, environ=environ))
            options = GatewayOptions(
                model=str(model),
                model_name=MODEL,
                engines=(f"unix:{path}",),
                port=free_port(),
                otlp_endpoint=f"http://127.0.0.1:{ports[name]}" if name in ports else "",
                log_level="error",
            )
            encoded = msgspec.json.encode(options).decode()
            stack.enter_context(process("-m", "gateway", "--options", encoded, environ=environ))
            until_ready(options.port)
            found.append(Way(name, options.port, Through(options.port, "none", tokens)))
        yield found


def spans(port: int) -> str:
    """What has become of the spans, from /metrics."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    lost = {
        sample.labels["reason"]: int(sample.value)
        for sample in samples
        if sample.name == "pellucid_telemetry_drops_total"
        and sample.labels["reason"].startswith("spans")
        and sample.value
    }
    pending = next(int(sample.value) for sample in samples if sample.name == "pellucid_telemetry_pending_spans")
    return f"spans lost: {lost or 'none'}, pending: {pending}"


def more_percent(way: Way, base: Way) -> float:
    """By how much its p99 is above that of `base`: the median over the rounds."""
    ratios = (ours / theirs for ours, theirs in zip(way.p99s(), base.p99s(), strict=True))
    return (statistics.median(ratios) - 1) * 100


def tell(measured: list[Way]) -> dict[str, float]:
    """The table; by how many percent each way is slower than `healthy`."""
    none, good = measured[:2]
    print(f"{'':8s}{'first text, ms':>20s}{'whole request, ms':>20s}{'p99 against none':>18s}{'against healthy':>17s}")
    print(f"{'':8s}" + f"{'p50':>10s}{'p99':>10s}" * 2)
    for way in measured:
        columns = [
            statistics.median(percentile(getattr(seen, kind), percent) for seen in way.rounds) * 1e3
            for kind in ("first_texts", "wholes")
            for percent in (50, 99)
        ]
        figures = "".join(f"{column:10.2f}" for column in columns)
        against = f"{more_percent(way, none):+17.2f}%{more_percent(way, good):+16.2f}%"
        print(f"{way.name:8s}{figures}{against}  {spans(way.port)}")
    return {way.name: more_percent(way, good) for way in measured}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--gap-ms", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--percent-max", type=float, default=2.0)
    arguments = parser.parse_args()
    print(f"commit {commit()}, {host()}, seed {arguments.seed}, {arguments.clients} clients, ", end="")
    print(f"{arguments.rounds} rounds of {arguments.requests} requests of {arguments.tokens} tokens")
    order = random.Random(arguments.seed)
    with (
        tempfile.TemporaryDirectory(prefix="pellucid-frozen-") as home,
        ways(Path(home), arguments.tokens, arguments.gap_ms / 1000) as measured,
    ):
        for way in measured:
            play(way.through.client, arguments.clients, 80, 999_999)  # Imports, caches, connections.
        for number in range(arguments.rounds):
            for way in order.sample(measured, len(measured)):
                way.rounds.append(play(way.through.client, arguments.clients, arguments.requests, number))
        more = tell(measured)
    return int(any(more[name] > arguments.percent_max for name in BAD))


if __name__ == "__main__":
    sys.exit(main())
