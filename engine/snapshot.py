"""
All that a scheduler knows, as a value: from it another one goes on exactly as the first one would have.

What speculation has learned is not in it: a replay is told what was guessed (engine.journal).  Names of blocks that a
sequence has asked for are made again.  A test goes through all attributes of the classes below: one that is neither in
a state here nor named as derived fails it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from engine.api import Delta, GenerateRequest
from engine.blocks import BlockPool
from engine.config import SchedulerConfig
from engine.fairness import Account, Book, FairQueue
from engine.interference import Interference
from engine.scheduler import Scheduler
from engine.sequence import Sequence, Status
from engine.speculate import Speculation
from telemetry.ledger import Ledger
from telemetry.records import KvBook, RequestRecord


class LedgerState(msgspec.Struct, frozen=True, array_like=True):
    """Of `telemetry.ledger.Ledger`."""

    opened_ns: int
    state: str
    since_ns: int
    spent_ns: dict[str, int]


class InterferenceState(msgspec.Struct, frozen=True, array_like=True):
    """Of `engine.interference.Interference`.  The named ones stay in their order: it decides who is given up."""

    named: dict[str, int]
    further_ns: int


class SequenceState(msgspec.Struct, frozen=True, kw_only=True):
    """Of `engine.sequence.Sequence`.  Fields are named as its attributes, but for the first ones."""

    request: GenerateRequest
    emitted: list[int]
    """Its tokens behind those of the request."""
    ledger: LedgerState
    interference: InterferenceState
    number: int
    computed: int
    computed_peak: int
    blocks: list[int]
    bypassed: int
    preemptions: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    steps: int
    drafted: int
    drafts_accepted: int
    interconnect_wait_ns: int
    interconnect_transfer_ns: int
    interconnect_wait_max_ns: int
    engine_ns: int
    stalled: tuple[int, dict[str, int]] | None
    kv_met: list[KvBook]
    repeats: int
    degenerate: str
    first_token_ns: int
    first_token_states: dict[str, int]
    last_token_ns: int
    last_token_states: dict[str, int]
    gap_max_ns: int
    gap_states: dict[str, int]
    gap_step: int
    block_ns: int
    charged_ns: int


class BookState(msgspec.Struct, frozen=True):
    """Of `engine.fairness.Book`.  Accounts stay in their order: it decides between debtors who owe as much."""

    accounts: dict[str, Account]
    last_share: str | None
    """Whose account `last` is; None: it is one that was forgotten."""
    last: Account


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """Of `engine.blocks.BlockPool`; queues in their order."""

    evictions: int
    refs: list[int]
    filled: list[int]
    names: list[bytes | None]
    free: list[int]
    idle: list[int]
    fenced: list[tuple[int, int]]
    committed: int
    held: int
    filled_slots: int
    started: int
    indexed: list[int]
    """Blocks whose names an index knows."""
    news: dict[bytes, bool]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Of `engine.scheduler.Scheduler` between two steps."""

    config: SchedulerConfig
    continues: bool = True
    """Whether all that happened since the snapshot before stands in the journal."""
    arrivals: int
    step_id: int
    running: list[SequenceState]
    waiting: list[SequenceState]
    books: dict[int, BookState]
    pool: PoolState
    deltas: list[Delta]
    finished: list[RequestRecord]
    cached: int
    preemptions: int
    evictions_before: int


def capture(scheduler: Scheduler, *, continues: bool = True) -> Snapshot:
    """What `scheduler` knows.  It shares lists with it: to be encoded before the next call."""
    assert not scheduler._in_flight, "a snapshot is taken between two steps"
    return Snapshot(
        config=scheduler.config,
        continues=continues,
        arrivals=scheduler._arrivals,
        step_id=scheduler._step_id,
        running=[_sequence_state(sequence) for sequence in scheduler.running],
        waiting=[_sequence_state(sequence) for sequence in scheduler.waiting],
        books={priority: _book_state(book) for priority, book in scheduler.waiting.books.items()},
        pool=_pool_state(scheduler.pool),
        deltas=scheduler._deltas,
        finished=scheduler._finished,
        cached=scheduler._cached,
        preemptions=scheduler._preemptions,
        evictions_before=scheduler._evictions_before,
    )


def restore(snapshot: Snapshot, speculation: Speculation | None = None) -> Scheduler:
    """Another scheduler that knows the same.  The snapshot is used up."""
    scheduler = Scheduler(snapshot.config, _pool(snapshot.pool, snapshot.config), speculation)
    scheduler._arrivals, scheduler._step_id = snapshot.arrivals, snapshot.step_id
    scheduler.running = [_sequence(state, Status.RUNNING) for state in snapshot.running]
    waiting = [_sequence(state, Status.WAITING) for state in snapshot.waiting]
    scheduler.waiting = _queue(waiting, snapshot.books)
    everybody = sorted([*scheduler.running, *waiting], key=lambda sequence: sequence.number)
    scheduler._by_id = {sequence.request.request_id: sequence for sequence in everybody}
    scheduler._deltas, scheduler._finished = snapshot.deltas, snapshot.finished
    scheduler._cached, scheduler._preemptions = snapshot.cached, snapshot.preemptions
    scheduler._evictions_before = snapshot.evictions_before
    return scheduler


_State = TypeVar("_State", bound=msgspec.Struct)


def _taken(kind: type[_State], thing: object, **others: object) -> _State:
    """A state whose fields, but for `others`, are the attributes of `thing` of the same names, private or not."""
    fields = [name for name in kind.__struct_fields__ if name not in others]
    return kind(**others, **{name: getattr(thing, _attribute(thing, name)) for name in fields})


def _given(state: msgspec.Struct, thing: object, *others: str) -> None:
    """The way back."""
    for name in state.__struct_fields__:
        if name not in others:
            setattr(thing, _attribute(thing, name), getattr(state, name))


def _attribute(thing: object, name: str) -> str:
    private = f"_{name}"
    return private if hasattr(thing, private) else name


def _sequence_state(sequence: Sequence) -> SequenceState:
    return _taken(
        SequenceState,
        sequence,
        emitted=sequence.tokens[len(sequence.request.prompt) :],
        ledger=_taken(LedgerState, sequence.ledger),
        interference=_taken(InterferenceState, sequence.interference),
    )


def _sequence(state: SequenceState, status: Status) -> Sequence:
    sequence = Sequence(state.request, number=state.number, now_ns=state.ledger.opened_ns)
    sequence.tokens += state.emitted
    sequence.status = status
    sequence.ledger = Ledger(state.ledger.state, state.ledger.opened_ns)
    _given(state.ledger, sequence.ledger)
    sequence.interference = Interference()
    _given(state.interference, sequence.interference)
    _given(state, sequence, "emitted", "ledger", "interference")
    return sequence


def _book_state(book: Book) -> BookState:
    share = next((share for share, account in book.accounts.items() if account is book.last), None)
    return BookState(book.accounts, share, book.last)


def _queue(waiting: Iterable[Sequence], books: dict[int, BookState]) -> FairQueue:
    queue = FairQueue()
    queue._line = list(waiting)
    for priority, state in books.items():
        last = state.last if state.last_share is None else state.accounts[state.last_share]
        queue.books[priority] = Book(state.accounts, last)
    return queue


def _pool_state(pool: BlockPool) -> PoolState:
    indexed = pool.prefixes._indexed
    return _taken(
        PoolState,
        pool,
        free=list(pool._free),
        idle=list(pool._idle),
        fenced=list(pool._fenced),
        indexed=[block for block, name in enumerate(pool._names) if name in indexed],
        news=pool.prefixes._news,
    )


def _pool(state: PoolState, config: SchedulerConfig) -> BlockPool:
    pool = BlockPool(blocks_max=config.blocks_max, block_slots=config.block_slots)
    _given(state, pool, "free", "idle", "fenced", "indexed", "news")
    pool._free, pool._fenced = deque(state.free), deque(state.fenced)
    pool._idle = OrderedDict.fromkeys(state.idle)
    pool._named = {name: block for block, name in enumerate(state.names) if name is not None}
    pool.prefixes._indexed = {name for block in state.indexed if (name := state.names[block]) is not None}
    pool.prefixes._news = state.news
    return pool
