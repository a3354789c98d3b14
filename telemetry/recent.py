"""
What happened lately, for the people who ask now: the last requests and steps, and the KV book of each replica.

Everything here is bounded: rings forget the oldest, and the requests in flight are as many as the gateway admits.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec

from telemetry.evidence import Evidence
from telemetry.live import LiveRequest
from telemetry.records import MemoryReading, RequestRecord, StepRecord
from telemetry.totals import GRAIN_NS, StepTotals
from telemetry.vocabulary import OBSERVING_ROUTES

REQUESTS_MAX = 4_000
"""Of a hub: what can be asked for afterwards, and judged by."""
REPLICAS_MAX = 64
TOTALS_MAX = 720
"""Stretches of steps of which sums are kept: of an hour."""
SAMPLES_MAX = 3600
"""Of the memory of a process: of an hour, a second apart, which is as far back as anybody may ask."""
PRESSURES_MAX = TOTALS_MAX
"""Readings of what the machine waited for, GRAIN_NS apart: of the same hour."""
NAMES_MAX = 8192
"""Sequences whose names are kept, those that were served last: more than requests are remembered."""
STARTS_MAX = 256
BLOCK_SLOTS = 16
"""Tokens per KV block, of an engine that has not said otherwise."""


class Samples:
    """A number at times, of which the newest SAMPLES_MAX are kept."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES_MAX)

    def add(self, at_ns: int, amount: int) -> None:
        """One more."""
        self._samples.append((at_ns, amount))

    def since(self, since_ns: int) -> list[tuple[int, int]]:
        """Those from then on."""
        return [one for one in self._samples if one[0] >= since_ns]


class Replica:
    """What is known of one engine replica."""

    __slots__ = ("block_slots", "connected", "epoch", "heard_ns", "last_step", "memory", "restarts")

    def __init__(self) -> None:
        self.connected: bool | None = None  # None: nobody has told us, so only its steps speak for it.
        self.epoch = ""
        self.block_slots = BLOCK_SLOTS
        self.restarts = 0
        self.heard_ns = 0
        self.last_step: StepRecord | None = None
        self.memory: MemoryReading | None = None

    def is_up(self, now_ns: int, stale_ns: int) -> bool:
        """Connected, as the gateway says; where it says nothing, heard of within `stale_ns`."""
        if self.connected is not None:
            return self.connected
        return now_ns - self.heard_ns <= stale_ns

    def current_step(self, now_ns: int, stale_ns: int) -> StepRecord | None:
        """
        The newest step, while it still describes the replica; None when nobody can know.

        An engine without work makes no steps, so the last book of an idle, connected replica stays true for ever.
        """
        step = self.last_step
        if step is None or not self.is_up(now_ns, stale_ns):
            return None
        idle = self.connected is True and step.running == 0 and step.waiting == 0
        return step if idle or now_ns - self.heard_ns <= stale_ns else None


class Recent:
    """The last `requests_max` finished requests and `steps_max` steps, and everything in flight."""

    def __init__(self, *, requests_max: int, steps_max: int, live_max: int) -> None:
        assert requests_max > 0 and steps_max > 0 and live_max > 0
        self._requests_max = requests_max
        self._live_max = live_max
        self._requests: OrderedDict[tuple[str, str], RequestRecord] = OrderedDict()
        self._steps: deque[StepRecord] = deque(maxlen=steps_max)
        self._totals: deque[StepTotals] = deque(maxlen=TOTALS_MAX)
        self._starts_ns: deque[int] = deque(maxlen=STARTS_MAX)
        self._names: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._pressures_ns: deque[tuple[int, dict[str, int]]] = deque(maxlen=PRESSURES_MAX)
        self.memory: dict[str, Samples] = {}
        self.live: dict[str, LiveRequest] = {}
        self.steps_seen = 0
        """Steps, ever."""
        self.replicas: dict[int, Replica] = {}

    def opened(self, live: LiveRequest) -> bool:
        """Follow a request in flight.  False when there are too many already, which is a leak of somebody's."""
        if len(self.live) >= self._live_max:
            return False
        self.live[live.request_id] = live
        return True

    def closed(self, request_id: str) -> LiveRequest | None:
        """The request is no longer in flight; what was known of it."""
        return self.live.pop(request_id, None)

    def request(self, record: RequestRecord) -> None:
        """Remember a finished request, unless it only looked."""
        if record.route in OBSERVING_ROUTES:
            return
        name = record.tenant, record.request_id  # Clients choose ids: none of them may write over another's.
        self._requests.pop(name, None)
        self._requests[name] = record
        if len(self._requests) > self._requests_max:
            self._requests.popitem(last=False)

    def step(self, record: StepRecord, heard_ns: int) -> None:
        """Remember a step; its finished requests have a life of their own."""
        record = msgspec.structs.replace(record, finished=())
        self._steps.append(record)
        self.steps_seen += 1
        self._name(record)
        if not self._totals or record.ended_ns - self._totals[-1].first_ns > GRAIN_NS:
            self._totals.append(StepTotals())
        self._totals[-1].add(record)
        replica = self._replica(record.replica)
        if record.memory is not None:
            replica.memory = record.memory
            self.sampled(f"engine {record.replica}", heard_ns, record.memory.resident_bytes)
        replica.last_step = record
        replica.heard_ns = heard_ns

    def _name(self, record: StepRecord) -> None:
        """Who it served: a sequence is named in its first step alone, which is forgotten before its last one."""
        names = self._names
        for number, name in record.requests.items():
            names[record.replica, number] = name
        for number, _ in record.slices:
            if (record.replica, number) in names:
                names.move_to_end((record.replica, number))
        while len(names) > NAMES_MAX:
            names.popitem(last=False)

    def connected(self, number: int, *, epoch: str, block_slots: int, now_ns: int) -> None:
        """The replica is there.  Another epoch than before is another process: its pool is new and empty."""
        replica = self._replica(number)
        if replica.epoch != epoch:
            self._starts_ns.append(now_ns)
            # Steps and sequences of a new life are counted from the beginning: they must not be taken for those before.
            self._steps = deque((one for one in self._steps if one.replica != number), maxlen=self._steps.maxlen)
            self._names = OrderedDict(one for one in self._names.items() if one[0][0] != number)
        if replica.epoch not in ("", epoch):
            replica.restarts += 1
            replica.last_step = None
            # What the life before has held would hide what this one takes more and more of.
            self.memory.pop(f"engine {number}", None)
        replica.epoch = epoch
        replica.block_slots = block_slots
        replica.heard_ns = now_ns
        replica.connected = True

    def disconnected(self, number: int) -> None:
        """The replica is gone, until `connected` says otherwise."""
        self._replica(number).connected = False

    def _replica(self, number: int) -> Replica:
        if number not in self.replicas:
            if len(self.replicas) >= REPLICAS_MAX:
                raise ValueError(f"replica {number} is one more than the {REPLICAS_MAX} that can be followed")
            self.replicas[number] = Replica()
        return self.replicas[number]

    def sampled(self, process: str, at_ns: int, size_bytes: int) -> None:
        """The resident memory of a process."""
        if size_bytes:
            self.memory.setdefault(process, Samples()).add(at_ns, size_bytes)

    def pressed(self, at_ns: int, waited_ns: dict[str, int]) -> None:
        """For how long, ever, something on this machine has waited for each resource."""
        if waited_ns and (not self._pressures_ns or at_ns - self._pressures_ns[-1][0] >= GRAIN_NS):
            self._pressures_ns.append((at_ns, waited_ns))

    def _pressure(self, since_ns: int) -> dict[str, float]:
        """By resource, the share of the time since then; empty while there are no two readings."""
        before = [one for one in self._pressures_ns if one[0] <= since_ns][-1:]
        readings = before + [one for one in self._pressures_ns if one[0] > since_ns]
        if len(readings) < 2:
            return {}
        (first_ns, first), (last_ns, last) = readings[0], readings[-1]
        return {name: (last[name] - first[name]) / (last_ns - first_ns) for name in first.keys() & last.keys()}

    def evidence(self, since_ns: int, now_ns: int) -> Evidence:
        """All that has happened since then, as far as it is remembered."""
        found = Evidence(
            window_ns=now_ns - since_ns,
            requests=[one for one in reversed(self._requests.values()) if one.finished_ns >= since_ns],
            steps={(one.replica, one.step_id): one for one in self._steps if one.ended_ns >= since_ns},
            names=dict(self._names),
            memory={process: samples.since(since_ns) for process, samples in self.memory.items()},
            pressure=self._pressure(since_ns),
            starts=sum(start_ns >= since_ns for start_ns in self._starts_ns),
        )
        whole = [one for one in self._totals if one.first_ns >= since_ns]
        for totals in whole:
            found.totals.join(totals)
        # Of the stretch in which the window begins only single steps can tell, while they are remembered.
        first_ns = whole[0].first_ns if whole else now_ns
        for step in found.steps.values():
            if step.ended_ns < first_ns:
                found.totals.add(step)
        return found

    def find(self, request_id: str) -> list[RequestRecord | LiveRequest]:
        """All requests of that name: the one in flight, and of each tenant the one that finished last."""
        live = self.live.get(request_id)
        finished = (one for one in self._requests.values() if one.request_id == request_id)
        return [*finished] if live is None else [live, *finished]

    def requests(self, limit: int, tenant: str | None = None) -> list[RequestRecord | LiveRequest]:
        """At most `limit` requests of this tenant, or of all, newest first by their beginning."""
        live = (one for one in self.live.values() if one.route not in OBSERVING_ROUTES)
        everything: list[RequestRecord | LiveRequest] = [*self._requests.values(), *live]
        found = [one for one in everything if tenant is None or one.tenant == tenant]
        found.sort(key=_began_ns, reverse=True)
        return found[: max(0, limit)]

    def ended(self) -> Iterable[RequestRecord]:
        """Those that have ended."""
        return self._requests.values()

    def steps(self, limit: int) -> list[StepRecord]:
        """At most `limit` steps, newest first."""
        count = min(max(0, limit), len(self._steps))
        return [self._steps[-1 - index] for index in range(count)]


def _began_ns(request: RequestRecord | LiveRequest) -> int:
    return request.ledger.opened_ns if isinstance(request, LiveRequest) else request.accepted_ns
