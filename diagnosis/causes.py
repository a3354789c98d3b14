"""
What there is to find: each cause with its words, and the one setting or step that helps.
"""

from collections.abc import Callable
from dataclasses import dataclass

from telemetry.evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason why a request takes time."""

    name: str
    title: str
    """In a few words, for a table."""
    words: str
    """What has happened, behind the time that it took: `2.1 s: ...`."""
    absent: str
    """What is said where it is not the cause."""
    change: Callable[[Evidence], str]
    """What would help."""
    estimated: bool = False
    """Whether its time is computed from shares of steps, and not stamped."""
    ordinary: bool = False
    """Whether it is the work that was asked for, and no fault."""


def _always(text: str) -> Callable[[Evidence], str]:
    return lambda _: text


def _concurrency(evidence: Evidence) -> str:
    waiting = evidence.totals.waiting / max(1, evidence.totals.steps)
    return (
        f"--replicas {evidence.facts.replicas + 1} or more processors; or a smaller --max-queue, so that what cannot"
        f" be served soon is refused at once ({waiting:.0f} sequences waited on average)"
    )


def _kv(evidence: Evidence) -> str:
    totals = evidence.totals
    reserved = totals.kv_wait_lookahead / max(1, totals.kv_waits)
    also = f"; {reserved:.0%} of the pool was reserved ahead for guesses: --speculative off" if reserved > 0.1 else ""
    now = f" (now {evidence.facts.kv_slots} tokens)" if evidence.facts.kv_slots else ""
    return f"--kv-memory, twice as much{now}; or a smaller --max-batch, or shorter max_tokens{also}"


def _fragmentation(evidence: Evidence) -> str:
    totals = evidence.totals
    tail = totals.kv_wait_fragmentation / max(1, totals.kv_waits)
    return (
        f"--kv-memory, {1 / max(0.1, 1 - tail):.1f} times as much: {tail:.0%} of the slots in use are the unfilled ends"
        " of blocks, because many sequences are short; or a smaller --max-batch"
    )


def _step_tokens(evidence: Evidence) -> str:
    now = evidence.facts.tokens_step_max or evidence.totals.tokens_max
    return f"--max-step-tokens {max(256, 4 * now)} (now {now}): a step costs much that does not depend on its tokens"


def _prefix_lost(evidence: Evidence) -> str:
    return f"--kv-memory, more of it: {evidence.totals.evictions} cached blocks had to make room for others"


def _dequantize(evidence: Evidence) -> str:
    return f"--quantization int8 on native kernels, which multiply it as it is; now: {evidence.facts.why_torch}"


def _late_rank(evidence: Evidence) -> str:
    late = evidence.totals.late_ranks
    replica, _, rank = max(late, key=late.__getitem__, default="?:?").partition(":")
    return f"give rank {rank} of replica {replica} processors of its own: the others waited for it"


def _memory(_: Evidence) -> str:
    return (
        "restart the process that grows, soon, and look for what it keeps; until then --kv-memory may have to be less"
    )


CAUSES = (
    Cause(
        name="prompt",
        title="its own prompt",
        words="its own prompt was computed",
        absent="its prompt was short, or found in the cache",
        change=_always("a shorter prompt, or one that begins like those before it"),
        ordinary=True,
    ),
    Cause(
        name="generation",
        title="its own output",
        words="its own output was computed, token by token",
        absent="there was hardly any output",
        change=_always("a smaller max_tokens; a smaller model, or a draft model"),
        ordinary=True,
    ),
    Cause(
        name="gateway",
        title="the gateway's own work",
        words="the gateway read, tokenized and wrote",
        absent="the gateway was quick",
        change=_always("--workers 2, or a shorter prompt"),
        ordinary=True,
    ),
    Cause(
        name="engine",
        title="in the engine",
        words="it is in the engine, which says what it has waited for and worked on once it ends",
        absent="",
        change=_always("look again when it has ended; the live page shows what it waits for now"),
        ordinary=True,
    ),
    Cause(
        name="concurrency",
        title="more requests than places",
        words="it waited for a place in the batch: more requests than could be served at a time",
        absent="it did not wait for a place in the batch",
        change=_concurrency,
    ),
    Cause(
        name="kv_starvation",
        title="too little KV memory",
        words="it waited for KV memory, or had to give its own away and compute it again",
        absent="it did not wait for KV memory",
        change=_kv,
    ),
    Cause(
        name="fragmentation",
        title="KV memory in unfilled ends of blocks",
        words="it waited for KV memory, much of which was held by the unfilled ends of blocks",
        absent="",
        change=_fragmentation,
    ),
    Cause(
        name="prefix_off",
        title="prefix cache off, though prompts repeat",
        words="a beginning was computed again that an earlier prompt had, too: the prefix cache is off",
        absent="",
        change=_always("--prefix-cache"),
        estimated=True,
    ),
    Cause(
        name="prefix_lost",
        title="prefix cache too small for what repeats",
        words="a beginning was computed again that had been in the prefix cache, and had to make room",
        absent="nothing that the cache should have had was computed again",
        change=_prefix_lost,
        estimated=True,
    ),
    Cause(
        name="speculation",
        title="wrong guesses",
        words="tokens were guessed ahead, and were wrong",
        absent="guessing ahead cost nothing worth a word",
        change=_always("--speculative off"),
        estimated=True,
    ),
    Cause(
        name="step_tokens",
        title="too few tokens a step",
        words="prompts were cut into many small steps, each with its fixed cost",
        absent="",
        change=_step_tokens,
        estimated=True,
    ),
    Cause(
        name="dequantize",
        title="weights that are multiplied as floats",
        words="weights were multiplied as floats, which they had to be made for",
        absent="",
        change=_dequantize,
        estimated=True,
    ),
    Cause(
        name="straggler",
        title="a rank that is late",
        words="ranks waited for one that was late",
        absent="no rank kept the others waiting",
        change=_late_rank,
        estimated=True,
    ),
    Cause(
        name="interconnect",
        title="a slow way between ranks",
        words="ranks exchanged numbers over a slow way, once all of them had come",
        absent="",
        change=_always("--interconnect shared-memory on one host, a faster network between hosts, or fewer ranks"),
        estimated=True,
    ),
    Cause(
        name="client",
        title="a client that does not read",
        words="the client did not read what was there for it",
        absent="the client read what it was sent",
        change=_always("look at the client and the network before it: nothing here would have made it faster"),
    ),
    Cause(
        name="garbage_collection",
        title="garbage collection",
        words="Python collected garbage, and everybody waited",
        absent="garbage collection took no time worth a word",
        change=_always("look for what makes so many objects that refer to each other; --workers shares them out"),
        estimated=True,
    ),
    Cause(
        name="event_loop",
        title="a gateway that was held up",
        words="the gateway's event loop was held up: it did not come round to this request",
        absent="the gateway's event loop was in time",
        change=_always("--workers 2; look for what blocks the loop: large bodies, slow disks, a stopped process"),
        estimated=True,
    ),
    Cause(
        name="memory_growth",
        title="memory that grows",
        words="a process takes more and more memory",
        absent="memory does not grow",
        change=_memory,
    ),
    Cause(
        name="cold_start",
        title="an engine that has just started",
        words="an engine had died or just begun: the request waited for it, or found nothing in its cache",
        absent="all engines were there and warm",
        change=_always("find out why the engine went (its log says); --replicas 2, so that another one takes over"),
    ),
    Cause(
        name="redis",
        title="slow server of keys and limits",
        words="the server of keys, limits and prefixes took long to answer",
        absent="the server of keys and limits answered at once",
        change=_always("put that server (--redis-url) nearer, or leave --redis-url out: an embedded one is used then"),
    ),
    Cause(
        name="cpu_starvation",
        title="processors that others have",
        words="threads could have run and had no processor: others had it",
        absent="there were processors enough",
        change=_always(
            "give Pellucid processors of its own, or a smaller --threads, so that fewer have to wait for one"
        ),
        estimated=True,
    ),
    Cause(
        name="upstream",
        title="a slow upstream",
        words="the upstream had it, and took its time",
        absent="no upstream was asked",
        change=_always("look at the upstream's own records, or add a second one for the model"),
    ),
    Cause(
        name="neighbours",
        title="long prompts of others",
        words="the steps were full of others' prompts",
        absent="others' prompts did not hold it up",
        change=_always("a smaller --max-step-tokens, so that a long prompt holds the others up for less at a time"),
        estimated=True,
    ),
    Cause(
        name="unaccounted",
        title="nobody knows",
        words="no state accounts for it: a bug of ours",
        absent="",
        change=_always("report it, with the flight recording"),
    ),
)
BY_NAME = {cause.name: cause for cause in CAUSES}
