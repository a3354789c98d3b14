"""
Which replica gets a request: pure functions of what is known of each.

    round-robin    one after the other
    least-tokens   the one with the fewest tokens in flight
    prefix         the one that has the most of the prompt in its cache, unless it is busy

`prefix`, in order:

1. Who is saturated, or has many more sequences in flight than the others, is left out, unless all are.
2. Of the rest the best score: the share of the prompt that a replica has, less the share of its KV that is in flight.
   It loses to the one that would be first to begin with the answer, if that is expected to be clearly sooner.
3. If nobody has anything: the replica that requests with this key (`prompt_cache_key`, else `user`) always get, if
   there is a key and that replica is not left out; else of two chosen at random the one with fewer tokens in flight.
   Two random choices keep loads nearly as even as looking for the least, and gateways that know the same do not all
   choose the same (Mitzenmacher 2001).
4. If the index could not be asked, the first block is such a key: what begins alike meets again.

Rule 1 is consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018) with prefixes in place of hashes:
one that everybody uses spreads over as many replicas as its traffic fills, and each of them computes it once.
The numbers were chosen by simulation: tests/sim/routing.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from random import Random
from typing import Literal, NamedTuple

from gateway.config import Policy

Reason = Literal[
    "only",  # there is no other
    "turn",  # round-robin
    "least",  # least-tokens
    "cached",  # it has the most of the prompt
    "relief",  # another has more, and is busy
    "key",
    "first_block",
    "two_choices",
]

LOAD_BOUND = 1.25
LOAD_MARGIN_SEQUENCES = 2
"""So many times the mean and so many more: a replica with more sequences in flight gets no more for its prefixes."""
CLEARLY = 1.2
MARGIN_TOKENS = 64
"""So many times as much and so many more, to be computed before the first token: that is clearly longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica that could have the request, as it is known now."""

    name: str
    """The same for all gateways, and after a restart."""
    sequences: int = 0
    """In flight: running, waiting, and on the way to it."""
    tokens: int = 0
    """In flight: its KV slots in use, and what it has yet to compute."""
    ahead_tokens: int = 0
    """To be computed before what is sent now."""
    capacity_tokens: int = 0
    """Its KV slots."""
    saturated: bool = False
    matched_tokens: int = 0
    """Of the prompt, those in its cache as far as the index knows."""

    @property
    def load_share(self) -> float:
        """Of its KV, what is in flight: 0..1."""
        return min(1.0, self.tokens / self.capacity_tokens) if self.capacity_tokens else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to be placed."""

    prompt_tokens: int
    """Of its longest prompt, which the matched tokens are of."""
    key: bytes = b""
    """What requests that should meet again have in common; empty: nothing is known of that."""
    first_block: bytes = b""
    """The name of the prompt's beginning, if the index could not be asked."""


class Choice(NamedTuple):
    """Which of the candidates, and why."""

    chosen: int
    reason: Reason


def choose(policy: Policy, candidates: Sequence[Candidate], ask: Ask, *, turn: int, rng: Random) -> Choice:
    """
    The replica for one request.

    Args:
        policy: how to choose.
        candidates: at least one.
        ask: the request.
        turn: how many requests have been placed before.
        rng: for random choices, and among equals.
    """
    assert candidates
    if len(candidates) == 1:
        return Choice(0, "only")
    if policy == "round-robin":
        return Choice(turn % len(candidates), "turn")
    if policy == "least-tokens":
        return Choice(_fewest(candidates, range(len(candidates)), rng), "least")
    fit = _fit(candidates)
    if any(candidates[index].matched_tokens for index in fit):
        return _by_prefix(candidates, fit, ask, rng)
    reason: Reason = "key" if ask.key else "first_block"
    if key := ask.key or ask.first_block:
        index = _owner(key, candidates)
        if index in fit:
            return Choice(index, reason)
    known = any(one.matched_tokens for one in candidates)
    return Choice(_fewest(candidates, rng.sample(fit, min(2, len(fit))), rng), "relief" if known else "two_choices")


def _fit(candidates: Sequence[Candidate]) -> list[int]:
    """Those that may get more than the others."""
    ready = [index for index, one in enumerate(candidates) if not one.saturated]
    mean = (1 + sum(one.sequences for one in candidates)) / len(candidates)
    most = ceil(LOAD_BOUND * mean) + LOAD_MARGIN_SEQUENCES
    return [index for index in ready if candidates[index].sequences < most] or ready or list(range(len(candidates)))


def _by_prefix(candidates: Sequence[Candidate], fit: Sequence[int], ask: Ask, rng: Random) -> Choice:
    def ahead(index: int) -> int:
        """Tokens to be computed before the answer begins."""
        return candidates[index].ahead_tokens + ask.prompt_tokens - candidates[index].matched_tokens

    def score(index: int) -> float:
        return candidates[index].matched_tokens / ask.prompt_tokens - candidates[index].load_share

    best = max(fit, key=lambda index: (score(index), rng.random()))
    soonest = min(fit, key=lambda index: (ahead(index), rng.random()))
    if ahead(best) > CLEARLY * ahead(soonest) + MARGIN_TOKENS:
        return Choice(soonest, "relief")
    return Choice(best, "cached" if candidates[best].matched_tokens else "relief")


def _fewest(candidates: Sequence[Candidate], among: Iterable[int], rng: Random) -> int:
    return min(among, key=lambda index: (candidates[index].saturated, candidates[index].tokens, rng.random()))


def _owner(key: bytes, candidates: Sequence[Candidate]) -> int:
    """By rendezvous: who leaves takes with it what it owned, and nothing else moves."""

    def rank(index: int) -> bytes:
        return blake2b(key, key=blake2b(candidates[index].name.encode()).digest(), digest_size=8).digest()

    return max(range(len(candidates)), key=rank)
