"""
A fleet on paper: the real policies in front of real schedulers, with a made-up clock and a made-up cost of a step.

What an engine tells of its prefix cache reaches the index some time later, as in production.  `python -m
tests.sim.routing` prints what each policy comes to on each workload: the numbers of gateway.balance were chosen by it.
"""

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from engine.api import GenerateRequest, Load, PrefixNews, Sampling, indexed_names, indexed_tokens
from engine.config import SchedulerConfig
from engine.device.fake import FakeRunner
from engine.plan import StepPlan
from engine.scheduler import Scheduler
from gateway.balance import Ask, Candidate, choose
from gateway.config import POLICIES, Policy
from telemetry.records import RequestRecord

STEP_NS, ROW_NS = 8_000_000, 1_000_000
INDEX_DELAY_NS = 50_000_000
BLOCK_SLOTS = 16
VOCAB = 1000


@dataclass(frozen=True)
class Workload:
    """Chats of several tenants, each with a system prompt of its own."""

    tenants: int = 6
    skew: float = 1.0
    """Zipf's exponent of the tenants' shares of the chats."""
    chats: int = 120
    per_s: float = 2.0
    """New chats."""
    system_tokens: tuple[int, int] = (200, 600)
    turns: tuple[int, int] = (1, 5)
    user_tokens: tuple[int, int] = (20, 80)
    output_tokens: int = 24
    think_s: float = 3.0
    slots: int = 8192
    """KV of each replica."""

    def chats_of(self, seed: int) -> list["Chat"]:
        """The same for the same seed."""
        pick = Random(seed)
        systems = [self._some(pick, self.system_tokens) for _ in range(self.tenants)]
        weights = [1 / (number + 1) ** self.skew for number in range(self.tenants)]
        chats, begins_s = [], 0.0
        for number in range(self.chats):
            begins_s += pick.expovariate(self.per_s)
            tenant = pick.choices(range(self.tenants), weights)[0]
            turns = [self._some(pick, self.user_tokens) for _ in range(pick.randint(*self.turns))]
            thinks_ns = [int(pick.expovariate(1 / self.think_s) * 1e9) for _ in turns]
            known = list(systems[tenant])
            chats.append(Chat(number, f"t{tenant}", int(begins_s * 1e9), known, turns, thinks_ns, self.output_tokens))
        return chats

    def _some(self, pick: Random, count: tuple[int, int]) -> list[int]:
        return [pick.randrange(VOCAB) for _ in range(pick.randint(*count))]


@dataclass
class Chat:
    """One conversation; `known` grows by what the user and the model say."""

    number: int
    tenant: str
    begins_ns: int
    known: list[int]
    turns: list[list[int]]
    thinks_ns: list[int]
    output_tokens: int
    turn: int = 0


class Arrival(NamedTuple):
    """A request on its way to a replica, which takes it between two steps."""

    request: GenerateRequest
    at_ns: int
    promised_tokens: int


@dataclass
class Replica:
    """A scheduler, and what the gateway knows of it."""

    name: str
    scheduler: Scheduler
    device: FakeRunner
    load: Load = field(default_factory=Load)
    on_the_way: list[Arrival] = field(default_factory=list)
    taken: int = 0
    """Of those on the way, how many the step that runs has taken."""
    index: set[bytes] = field(default_factory=set)
    stepping: bool = False
    requests: int = 0
    rows: int = 0

    def candidate(self, matched_tokens: int) -> Candidate:
        sent = sum(len(arrival.request.prompt) - arrival.promised_tokens for arrival in self.on_the_way)
        sequences = self.load.running + self.load.waiting + len(self.on_the_way)
        return Candidate(
            name=self.name,
            sequences=sequences,
            tokens=self.load.used_slots + self.load.owed_tokens + sent,
            ahead_tokens=self.load.owed_tokens + sent,
            capacity_tokens=self.scheduler.config.slots_max,
            saturated=sequences >= self.scheduler.config.sequences_max,
            matched_tokens=matched_tokens,
        )


def replica(number: int, slots: int) -> Replica:
    blocks = slots // BLOCK_SLOTS
    config = SchedulerConfig(
        blocks_max=blocks, block_slots=BLOCK_SLOTS, context_max=slots, vocab_size=VOCAB, tokens_step_max=256
    )
    device = FakeRunner(vocab_size=VOCAB, context_max=slots, blocks_max=blocks, block_slots=BLOCK_SLOTS)
    return Replica(f"r{number}", Scheduler(config), device)


@dataclass(frozen=True)
class Figures:
    """What a fleet has done with a workload; times in ms."""

    policy: str
    requests: int
    hit_share: float
    first_token_p50: float
    first_token_p99: float
    queue_p99: float
    most_rows: float
    """Rows of the busiest replica, over the mean."""
    reasons: dict[str, int]


class Fleet:
    """Three replicas and one gateway."""

    def __init__(self, policy: Policy, workload: Workload, seed: int) -> None:
        self.policy = policy
        self.replicas = [replica(number, workload.slots) for number in range(3)]
        self.records: list[RequestRecord] = []
        self.reasons: Counter[str] = Counter()
        self._rng = Random(seed)
        self._events: list[tuple[int, int, object]] = []
        self._order = itertools.count()
        self._chats: dict[str, Chat] = {}
        for chat in workload.chats_of(seed):
            self._at(chat.begins_ns, chat)

    def run(self) -> Figures:
        """Until all chats have ended."""
        while self._events:
            now_ns, _, event = heapq.heappop(self._events)
            match event:
                case Chat():
                    self._place(event, now_ns)
                case (Replica() as one, StepPlan() as plan):
                    self._commit(one, plan, now_ns)
                case (Replica() as one, PrefixNews() as news):
                    one.index = (one.index - set(news.gone)) | set(news.here)
                case other:
                    raise AssertionError(other)
        return self._figures()

    def _at(self, when_ns: int, event: object) -> None:
        heapq.heappush(self._events, (when_ns, next(self._order), event))

    def _place(self, chat: Chat, now_ns: int) -> None:
        chat.known += chat.turns[chat.turn]
        names = indexed_names(chat.tenant, chat.known, BLOCK_SLOTS)
        counts = [[*(name in one.index for name in names), False].index(False) for one in self.replicas]
        matched = [count * indexed_tokens(BLOCK_SLOTS) if self.policy == "prefix" else 0 for count in counts]
        candidates = [one.candidate(tokens) for one, tokens in zip(self.replicas, matched, strict=True)]
        ask = Ask(prompt_tokens=len(chat.known))
        chosen, reason = choose(self.policy, candidates, ask, turn=self.reasons.total(), rng=self._rng)
        self.reasons[reason] += 1
        request = GenerateRequest(
            request_id=f"{chat.number}-{chat.turn}",
            prompt=tuple(chat.known),
            sampling=Sampling(temperature=0),
            tokens_max=chat.output_tokens,
            tenant=chat.tenant,
        )
        self._chats[request.request_id] = chat
        one = self.replicas[chosen]
        one.requests += 1
        one.on_the_way.append(Arrival(request, now_ns, matched[chosen]))
        if not one.stepping:
            self._step(one, now_ns)

    def _step(self, one: Replica, now_ns: int) -> None:
        one.taken = len(one.on_the_way)
        for arrival in one.on_the_way:
            one.scheduler.apply(arrival.request, arrival.at_ns)
        one.stepping = one.scheduler.has_work or one.scheduler.has_news
        if one.stepping:
            plan = one.scheduler.plan(now_ns)
            one.rows += plan.tokens
            self._at(now_ns + STEP_NS + ROW_NS * plan.tokens, (one, plan))

    def _commit(self, one: Replica, plan: StepPlan, now_ns: int) -> None:
        outcome = one.scheduler.commit(plan, one.device.run(plan), now_ns)
        one.load = outcome.load
        del one.on_the_way[: one.taken]  # only now does the gateway hear that these were taken
        if outcome.prefixes is not None:
            self._at(now_ns + INDEX_DELAY_NS, (one, outcome.prefixes))
        tokens = {delta.request_id: delta.tokens for delta in outcome.deltas}
        for request_id, more in tokens.items():
            self._chats[request_id].known += more
        for record in outcome.finished:
            assert record.outcome == "length", record
            self.records.append(record)
            chat = self._chats[record.request_id]
            chat.turn += 1
            if chat.turn < len(chat.turns):
                self._at(now_ns + chat.thinks_ns[chat.turn], chat)
        self._step(one, now_ns)

    def _figures(self) -> Figures:
        first_ms = sorted(record.first_token_ns / 1e6 for record in self.records)
        queues = ((ns for state, ns in one.states.items() if state.startswith("queue")) for one in self.records)
        queue_ms = sorted(sum(spent) / 1e6 for spent in queues)
        rows = [one.rows for one in self.replicas]
        return Figures(
            policy=self.policy,
            requests=len(self.records),
            hit_share=sum(one.cached_tokens for one in self.records) / sum(one.prompt_tokens for one in self.records),
            first_token_p50=first_ms[len(first_ms) // 2],
            first_token_p99=first_ms[len(first_ms) * 99 // 100],
            queue_p99=queue_ms[len(queue_ms) * 99 // 100],
            most_rows=max(rows) * len(rows) / sum(rows),
            reasons=dict(self.reasons),
        )


WORKLOADS = {
    "six tenants": Workload(),
    "six busy tenants": Workload(per_s=4.0),
    "one tenant": Workload(tenants=1),
    "one busy tenant": Workload(tenants=1, per_s=5.0, output_tokens=40),
    "many tenants": Workload(tenants=30, skew=0.5, per_s=2.5),
    "many tenants, little memory": Workload(tenants=30, skew=0.5, turns=(2, 5), slots=6144),
    "nothing in common": Workload(tenants=120, skew=0.0, turns=(1, 1)),
}


def main() -> None:
    """All policies on all workloads."""
    for name, workload in WORKLOADS.items():
        print(name)
        for policy in POLICIES:
            figures = Fleet(policy, workload, seed=1).run()
            print(
                f"  {policy:12} hits {figures.hit_share:5.1%}  first token p50 {figures.first_token_p50:5.0f} ms"
                f"  p99 {figures.first_token_p99:5.0f} ms  queue p99 {figures.queue_p99:5.0f} ms"
                f"  busiest/mean {figures.most_rows:4.2f}  {figures.reasons}"
            )


if __name__ == "__main__":
    main()
