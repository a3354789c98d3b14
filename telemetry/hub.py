"""
The one place where the gateway hands its records over, and where people and scrapers read what came of them.

    producers --put--> sink --pump--> books checked, metrics, recent store, spans, logs

A put is one append.  The pump runs on a timer, a few milliseconds at a time, and each consumer's failure is counted
and stays its own.  Whoever reads pumps first, so a reader sees everything that was put before.
"""

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from telemetry import clock
from telemetry.books import request_mismatches, step_mismatches
from telemetry.complaints import Complaints
from telemetry.deliver import SpanExport
from telemetry.disturbance import host_pressure_ns
from telemetry.evidence import GATEWAY, UNKNOWN, Evidence, Facts, facts_together
from telemetry.export import exports
from telemetry.flight import Records
from telemetry.live import LiveRequest, TraceContext, accept_trace
from telemetry.logs import dropped_lines, log_request
from telemetry.metrics import Metrics
from telemetry.numbers import Numbers, exposition
from telemetry.outgoing import Outgoing
from telemetry.recent import BLOCK_SLOTS, REQUESTS_MAX, Recent
from telemetry.records import RequestRecord, StepRecord
from telemetry.runtime import Overlaps, RuntimeSampler, loop_tasks, resident_bytes
from telemetry.served import Served, served
from telemetry.sink import Sink
from telemetry.spans import SpanData
from telemetry.views import Json, JsonObject, kv_json, request_json, step_json
from telemetry.vocabulary import GENERATING_ROUTES, LimitsView, ReplicaView, UpstreamView, View

__all__ = ["Hub", "Json", "JsonObject", "LiveRequest", "TraceContext", "accept_trace"]

_logger = logging.getLogger("pellucid.telemetry")

PUMP_PERIOD_S = 0.1
PUMP_BUDGET_NS = 2_000_000
"""How long one turn of the pump may keep the event loop."""
SAMPLE_PERIOD_NS = 1_000_000_000
"""How often memory is looked at, and what the machine waits for."""
FLUSH_S = 3.0
"""How long `stop` waits for a collector."""
RECORDS_MAX = 16_384
STEPS_MAX = 2_000
LIVE_MAX = 100_000
STALE_NS = 5_000_000_000
"""A replica that has work and has been silent for so long says nothing about the present."""


_Value = TypeVar("_Value")


class _Observation(NamedTuple):
    """An amount for a metric that no record holds."""

    metric: str
    labels: tuple[str, ...]
    amount: int


class _Ended(NamedTuple):
    """A request's record, with what was known of it in flight."""

    live: LiveRequest | None
    record: RequestRecord


_Item = _Ended | StepRecord | _Observation


class Hub:
    """Takes records, never slows their producer, and answers questions about them."""

    def __init__(
        self,
        *,
        model: str = "",
        version: str = "",
        otlp_endpoint: str = "",
        otlp_metrics: bool = False,
        trace_file: str = "",
        trace_sample: float = 1.0,
        first: bool = True,
        also_to: tuple[SpanExport, ...] = (),
        flight: Records | None = None,
    ) -> None:
        """
        Raises ExportConfigError.

        Args:
            model: what is served.
            version: ours.
            otlp_endpoint: what the command line says; empty: what the OTEL_* variables say.
            otlp_metrics: whether metrics go there as well.
            trace_file: where spans are written; empty: nowhere.
            trace_sample: the share of traces that are kept without a reason.
            first: of several that hear of the same steps, the one that checks their books, records them and
                pushes metrics.
            also_to: further takers of spans.
            flight: the flight recorder; None: there is none.
        """
        self._models = (model,) if model else ()
        self._version = version
        self._first = first
        self._flight = flight
        self._facts: dict[int, Facts] = {}  # by replica
        self._sink: Sink[_Item] = Sink(items_max=RECORDS_MAX)
        self._recent = Recent(requests_max=REQUESTS_MAX, steps_max=STEPS_MAX, live_max=LIVE_MAX)
        self._metrics = Metrics(models=self._models)
        self._upstreams: Callable[[], tuple[UpstreamView, ...]] = tuple
        self._drops: dict[str, int] = {"live_full": 0, "consumer_failed": 0}
        settings = exports(
            endpoint=otlp_endpoint,
            metrics=otlp_metrics,
            trace_file=trace_file,
            trace_sample=trace_sample,
            environ=os.environ,
        )
        self._outgoing = Outgoing(
            settings if first else replace(settings, metrics=None),
            version=version,
            also_to=also_to,
            kept=self._exemplify,
            look=self._own_numbers,
        )
        self._runtime = RuntimeSampler(self)
        self._complaints = Complaints(_logger)
        self._pumping: asyncio.Task[None] | None = None
        self._limits: Callable[[], LimitsView | None] = lambda: None

    # What the gateway says.

    def request_opened(self, live: LiveRequest) -> None:
        """A request has begun; `request` with the same id closes it."""
        if not self._recent.opened(live):
            self._drops["live_full"] += 1
        self._outgoing.opened(live)

    def request(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._sink.put(_Ended(self._recent.closed(record.request_id), record))

    def step(self, record: StepRecord) -> None:
        """An engine has made a step."""
        self._sink.put(record)

    def observe(self, metric: str, amount: int, labels: tuple[str, ...] = ()) -> None:
        """Add to a metric of the catalogue that is in no record, such as the event loop's lag.  From any thread."""
        if len(self._sink) < RECORDS_MAX // 2:  # Under pressure records go first: measurements repeat themselves.
            self._sink.put(_Observation(metric, labels, amount))

    def engine_up(self, replica: int, *, epoch: str, block_slots: int = BLOCK_SLOTS, facts: Facts = UNKNOWN) -> None:
        """The gateway is connected to this replica, which calls this life of itself `epoch`, and is set up so."""
        self._facts[replica] = facts
        if self._flight is not None:
            self._guard("flight", self._flight.facts, facts_together(self._facts.values()))
        self._recent.connected(replica, epoch=epoch, block_slots=block_slots, now_ns=clock.now_ns())

    def engine_down(self, replica: int) -> None:
        """The connection to this replica is gone."""
        self._recent.disconnected(replica)

    def watch_limits(self, look: Callable[[], LimitsView | None]) -> None:
        """Where to look for what is true of keys and limits now."""
        self._limits = look

    def watch_upstreams(self, models: Sequence[str], look: Callable[[], tuple[UpstreamView, ...]]) -> None:
        """There are upstreams: for which models, and where to look how they are.  Before the first request."""
        self._models = (*self._models, *models)
        self._upstreams = look
        self._metrics.learn(models=models, upstreams=[view.name for view in look()])

    def push_numbers(self, look: Callable[[], Awaitable[Numbers]]) -> None:
        """Where to look for the numbers of all workers, which are pushed for all."""
        self._outgoing.look = look

    def disturbed(self) -> Overlaps:
        """What has disturbed this process so far, all times together."""
        return self._runtime.overlaps(clock.now_ns())

    # What people and scrapers ask.

    def metrics_text(self, accept: str = "") -> tuple[bytes, str]:
        """Everything in the metric catalogue, in the format that the Accept header asks for, and its content type."""
        return exposition(self.numbers(), accept)

    def numbers(self, *, workers: int = 1, workers_silent: int = 0) -> Numbers:
        """The same, to be joined with those of other workers before they are shown."""
        self._pump_all()
        view = replace(self._view(clock.now_ns()), workers=workers, workers_silent=workers_silent)
        return self._metrics.numbers(view)

    def resume(self, numbers: Numbers) -> None:
        """Count on from where a former life of this worker was.  Before `start`."""
        assert self._pumping is None, "something may have been counted"
        self._metrics.resume(numbers)

    def debug_requests(self, limit: int = 100, tenant: str | None = None) -> JsonObject:
        """The newest requests of this tenant, or of all, those in flight included."""
        self._pump_all()
        now_ns = clock.now_ns()
        return {"requests": [request_json(request, now_ns) for request in self._recent.requests(limit, tenant)]}

    def debug_request(self, request_id: str) -> list[JsonObject]:
        """The requests of that name, as far as they are remembered: each tenant may have one."""
        self._pump_all()
        now_ns = clock.now_ns()
        return [request_json(request, now_ns) for request in self._recent.find(request_id)]

    def debug_steps(self, limit: int = 100) -> JsonObject:
        """The newest engine steps."""
        self._pump_all()
        return {"steps": [step_json(step) for step in self._recent.steps(limit)]}

    def steps(self, limit: int) -> tuple[list[StepRecord], int]:
        """The newest steps, newest first, and how many there were, ever."""
        self._pump_all()
        return self._recent.steps(limit), self._recent.steps_seen

    def served(self) -> list[Served]:
        """How those were served who have asked within the last minute."""
        self._pump_all()
        return served(self._recent.ended(), clock.now_ns())

    def evidence(self, since_ns: int) -> Evidence:
        """All that has happened since then, as far as it is remembered."""
        self._pump_all()
        found = self._recent.evidence(since_ns, clock.now_ns())
        found.facts = facts_together(self._facts.values())
        now_ns = clock.now_ns()
        here = [one for one in self._recent.live.values() if one.route in GENERATING_ROUTES]
        found.in_flight_ns = [now_ns - one.ledger.opened_ns for one in here]
        return found

    def record(self, request_id: str) -> list[RequestRecord]:
        """The requests of that name, as far as they are remembered; one in flight as if it ended now."""
        self._pump_all()
        now_ns = clock.now_ns()
        return [one.so_far(now_ns) if isinstance(one, LiveRequest) else one for one in self._recent.find(request_id)]

    def debug_kv(self) -> JsonObject:
        """Where the KV slots are."""
        self._pump_all()
        return kv_json(self._recent.replicas, now_ns=clock.now_ns(), stale_ns=STALE_NS)

    # Its own life.

    async def start(self) -> None:
        """Begin to pump, to measure the runtime and, where an endpoint is set, to export spans."""
        assert self._pumping is None, "started twice"
        self._outgoing.start()
        self._runtime.start()
        self._pumping = asyncio.create_task(self._pump_for_ever(), name="telemetry pump")

    async def stop(self) -> None:
        """Hand on what is left, and give the exporter FLUSH_S to deliver it.  Afterwards the hub only answers."""
        if self._pumping is None:
            return
        self._pumping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._pumping
        self._pumping = None
        await self._runtime.stop()
        self._pump_all()
        await self._outgoing.stop(FLUSH_S)
        if self._flight is not None:
            self._flight.close()

    async def _pump_for_ever(self) -> None:
        sampled_ns = 0
        while True:
            pending = self._pump(budget_ns=PUMP_BUDGET_NS)
            now_ns = clock.now_ns()
            if now_ns - sampled_ns >= SAMPLE_PERIOD_NS:
                sampled_ns = now_ns
                self._recent.sampled(GATEWAY, now_ns, resident_bytes())
                self._recent.pressed(now_ns, host_pressure_ns())
            await asyncio.sleep(0 if pending else PUMP_PERIOD_S)

    def _pump_all(self) -> None:
        self._pump(budget_ns=None)

    def _pump(self, *, budget_ns: int | None) -> bool:
        """Feed the consumers, for no longer than the budget and one record more.  Whether something is left."""
        started_ns = clock.now_ns()
        for item in self._sink.drain():
            self._consume(item)
            if budget_ns is not None and clock.now_ns() - started_ns >= budget_ns:
                break
        return len(self._sink) > 0

    def _consume(self, item: _Item) -> None:
        if isinstance(item, _Ended):
            self._guard("metrics", self._metrics.request, item.record)
            self._guard("recent", self._recent.request, item.record)
            self._guard("books", self._check_request, item.record)
            self._guard("spans", self._trace, item)
            self._guard("logs", log_request, item.record)
            if self._flight is not None:
                self._guard("flight", self._flight.request, item.record)
        elif isinstance(item, StepRecord):
            self._guard("metrics", self._metrics.step, item)
            self._guard("recent", self._remember_step, item)
            self._guard("books", self._check_step, item)
            self._guard("spans", self._outgoing.step, item)
            if self._flight is not None and self._first:
                self._guard("flight", self._flight.step, item)
        else:
            self._guard("metrics", self._observe, item)

    def _remember_step(self, step: StepRecord) -> None:
        self._recent.step(step, clock.now_ns())

    def _trace(self, ended: _Ended) -> None:
        self._outgoing.request(ended.record, ended.live)

    def _exemplify(self, record: RequestRecord, root: SpanData) -> None:
        self._metrics.exemplify(record, trace_id=root.trace_id, span_id=root.span_id, at_ns=root.ended_ns)

    async def _own_numbers(self) -> Numbers:
        return self.numbers()

    def _observe(self, item: _Observation) -> None:
        self._metrics.feed(item.metric, item.labels, item.amount)

    def _check_request(self, record: RequestRecord) -> None:
        for book, amount in request_mismatches(record):
            self._mismatch(book, amount, f"request {record.request_id}")

    def _check_step(self, record: StepRecord) -> None:
        if self._first:
            for book, amount in step_mismatches(record):
                self._mismatch(book, amount, f"step {record.step_id} of replica {record.replica}")
        for finished in record.finished:
            self._check_request(finished)

    def _mismatch(self, book: str, amount: int, whose: str) -> None:
        self._metrics.feed("pellucid_book_mismatches_total", (book,), 1)
        self._complaints.log(book, "the %s book of %s does not close: %d too few", book, whose, amount)

    def _guard(self, consumer: str, consume: Callable[[_Value], None], value: _Value) -> None:
        """Whatever goes wrong with one consumer is counted and logged: it must not reach the others, or a request."""
        try:
            consume(value)
        except Exception:  # noqa: BLE001  the consumer's bug must not become the request's.
            self._drops["consumer_failed"] += 1
            self._complaints.log(consumer, "a consumer of telemetry failed: %s", consumer, exc_info=True)

    def _view(self, now_ns: int) -> View:
        replicas = (
            ReplicaView(
                replica=number,
                up=replica.is_up(now_ns, STALE_NS),
                restarts=replica.restarts,
                silent_ns=max(0, now_ns - replica.heard_ns),
                step=replica.current_step(now_ns, STALE_NS),
                memory=replica.memory,
            )
            for number, replica in sorted(self._recent.replicas.items())
        )
        flight = {"flight": self._flight.lost} if self._flight is not None else {}
        return View(
            replicas=tuple(replicas),
            upstreams=self._upstreams(),
            live=dict(Counter(live.route for live in self._recent.live.values())),
            drops=self._drops
            | {"sink_full": self._sink.dropped, "log_lines": dropped_lines()}
            | self._outgoing.drops()
            | flight,
            pending_records=len(self._sink),
            pending_spans=self._outgoing.pending_spans(),
            resident_bytes=resident_bytes(),
            starved_ns=self._runtime.starved_ns,
            pressure_ns=host_pressure_ns(),
            loop_tasks=loop_tasks(),
            build=tuple((self._version, model) for model in self._models),
            limits=self._limits(),
        )
