"""
Which steps get a trace: few, and those that somebody may ask for.

    slow                it was busy for longer than 999 of 1000 steps of about its size lately
    preemption          it took KV memory away from somebody
    interconnect_wait   more than a fifth of it went into waiting for ranks that were late
    share               one of STEPS_PER_SHARE
    request             one of the slowest that served a request, which is kept for being bad

Here is also known which requests a step served, and which were the slowest steps of a request; a step that served none
of ours is another worker's to trace.
"""

from collections import OrderedDict
from heapq import heappush, heapreplace
from itertools import count

from telemetry.live import LiveRequest
from telemetry.records import StepRecord, request_of
from telemetry.rolling import Rolling
from telemetry.spans import NO_STEPS, Link, SlowestSteps, SpanData
from telemetry.step_spans import busy_ns, step_name, step_spans

LINKS_MAX = 32
SLOWEST_MAX = 3
"""Steps that a request remembers."""
REQUESTS_MAX = 4096
"""Requests in flight whose steps are followed, and sequences of a replica."""
SIZES_MAX = 1024
"""Steps of one size, of which the slowest are traced."""
SLOW_QUANTILE = 0.999
WAIT_SHARE = 0.2
STEPS_PER_SHARE = 1024
PERIOD_NS = 1_000_000_000
"""One step is traced in so long, on average, for its own sake: what happens all the time is no anomaly."""
BURST_MAX = 10


class _Step:
    """One that may get a trace, and has one if it has a `link`."""

    __slots__ = ("link", "record", "served")

    def __init__(self, record: StepRecord, members: "list[tuple[_Request, int]]") -> None:
        self.record = record
        # No `_Request` is held, which may hold this: most are never traced, and are to go when their requests do.
        self.served = [(rows, request.link) for request, rows in members]
        self.link: Link | None = None

    def links(self) -> tuple[Link, ...]:
        """To the requests, those with most rows first; of several sequences of one request, once."""
        ordered = sorted(self.served, key=lambda one: one[0], reverse=True)
        links = dict.fromkeys(link for _, link in ordered if link is not None)
        return tuple(links)[:LINKS_MAX]


class _Request:
    """One in flight."""

    __slots__ = ("link", "sequences", "slowest")

    def __init__(self, link: Link | None) -> None:
        self.link = link  # None: its caller does not want a trace of it
        self.sequences: list[tuple[int, int]] = []
        self.slowest: list[tuple[int, int, _Step]] = []  # a heap: of how long, when, and which


class StepTraces:
    """Follows the requests of this process through the steps of all replicas."""

    def __init__(self, *, share: bool) -> None:
        """`share`: whether some steps are traced without a reason."""
        self._share = share
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._sequences: OrderedDict[tuple[int, int], _Request] = OrderedDict()
        self._sizes: dict[tuple[int, int], Rolling] = {}
        self._seen = count()
        self._full_at_ns = 0  # when BURST_MAX may be traced again

    def opened(self, live: LiveRequest) -> None:
        """A request has begun."""
        link = Link(live.trace.trace_id, live.trace.span_id) if live.trace.sampled else None
        former = self._requests.pop(live.request_id, None)
        if former is not None:
            self._forget(former)
        self._requests[live.request_id] = _Request(link)
        if len(self._requests) > REQUESTS_MAX:
            self._forget(self._requests.popitem(last=False)[1])

    def step(self, record: StepRecord, *, offset_ns: int) -> list[SpanData]:
        """An engine has made a step.  Its trace, if it gets one now."""
        members = self._members(record)
        busy = busy_ns(record)
        because = self._because(record, busy)
        if not members:
            return []
        step: _Step | None = None
        for request, _ in members:
            slowest = request.slowest
            if len(slowest) < SLOWEST_MAX:
                step = step or _Step(record, members)
                heappush(slowest, (busy, next(self._seen), step))
            elif busy > slowest[0][0]:
                step = step or _Step(record, members)
                heapreplace(slowest, (busy, next(self._seen), step))
        if not because or not self._may(record.ended_ns):
            return []
        return self._trace(step or _Step(record, members), because, offset_ns)

    def ended(self, request_id: str, *, trace: bool, offset_ns: int) -> tuple[SlowestSteps, list[list[SpanData]]]:
        """A request has ended: its slowest steps and, with `trace`, the traces of those that had none yet."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return NO_STEPS, []
        self._forget(request)
        slowest = sorted(request.slowest, reverse=True)
        traces = [self._trace(step, "request", offset_ns) for _, _, step in slowest if trace and step.link is None]
        links = tuple(step.link for _, _, step in slowest if step.link is not None)
        names = tuple(step_name(step.record) for _, _, step in slowest)
        return SlowestSteps(names, slowest[0][0] if slowest else 0, links), traces

    def _members(self, record: StepRecord) -> list[tuple[_Request, int]]:
        """Our requests that it served, with the rows of each of their sequences."""
        for number, name in record.requests.items():
            request = self._requests.get(request_of(name))
            if request is not None:
                self._sequences[record.replica, number] = request
                request.sequences.append((record.replica, number))
                if len(self._sequences) > REQUESTS_MAX:
                    self._sequences.popitem(last=False)
        found = ((self._sequences.get((record.replica, number)), rows) for number, rows in record.slices)
        return [(request, rows) for request, rows in found if request is not None]

    def _because(self, record: StepRecord, busy: int) -> str:
        size = (record.replica, record.tokens.bit_length())
        sizes = self._sizes.get(size)
        if sizes is None:
            sizes = self._sizes[size] = Rolling(amounts_max=SIZES_MAX)
        slow = sizes.is_above(busy, SLOW_QUANTILE)
        sizes.add(busy)
        if record.preemptions:
            return "preemption"
        if record.interconnect.wait_ns > WAIT_SHARE * busy:
            return "interconnect_wait"
        if slow:
            return "slow"
        return "share" if self._share and record.step_id % STEPS_PER_SHARE == 0 else ""

    def _may(self, now_ns: int) -> bool:
        """A bucket of BURST_MAX that fills by one in PERIOD_NS."""
        full_at_ns = max(self._full_at_ns, now_ns) + PERIOD_NS
        if full_at_ns - now_ns > BURST_MAX * PERIOD_NS:
            return False
        self._full_at_ns = full_at_ns
        return True

    def _trace(self, step: _Step, because: str, offset_ns: int) -> list[SpanData]:
        spans = step_spans(step.record, step.links(), offset_ns=offset_ns, because=because)
        step.link = Link(spans[0].trace_id, spans[0].span_id)
        return spans

    def _forget(self, request: _Request) -> None:
        for sequence in request.sequences:
            if self._sequences.get(sequence) is request:  # An engine that is started anew counts from the beginning.
                del self._sequences[sequence]
