"""What bench_routing asks for: chats of several tenants, and conversations of a recorded trace."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "measured"
TENANTS = 24
BLOCK_TOKENS = 512
"""Of the trace, what one of its hashes stands for."""
STAMP_S = 3
"""The trace's times are rounded to it."""
UNCOUNTED = 0.25
"""Of a run, the beginning in which caches fill."""
WORDS = ("time", "year", "people", "way", "day", "thing", "world", "school", "family", "group", "hand", "part")


@dataclass
class Turn:
    """One request; what it says of the chat so far comes from the answers before."""

    body: dict[str, Any]
    waits_s: float = 0.0
    """After the answer before, or after the beginning of the run."""


@dataclass
class Talk:
    """Requests that follow one another."""

    tenant: int
    turns: list[Turn]
    counted: bool
    """Whether it began after the caches had filled."""


def chats(seconds: float, per_s: float, rng: random.Random) -> list[Talk]:
    """Chats that begin within `seconds`."""

    def text(words: int) -> str:
        return " ".join(rng.choices(WORDS, k=words))

    systems = [text(rng.randint(250, 550)) for _ in range(TENANTS)]
    talks, begins_s = [], 0.0
    while (begins_s := begins_s + rng.expovariate(per_s)) < seconds:
        tenant = rng.randrange(TENANTS)
        turns = []
        for number in range(rng.randint(1, 4)):
            system = [{"role": "system", "content": systems[tenant]}] if not number else []
            messages = [*system, {"role": "user", "content": text(rng.randint(10, 40))}]
            body = {"model": NAME, "messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            turns.append(Turn(body, rng.expovariate(1 / 3.0) if number else begins_s))
        talks.append(Talk(tenant, turns, begins_s >= seconds * UNCOUNTED))
    return talks


def replay(
    file: Path, seconds: float, requests: int, divisor: int, tokens_max: int, rng: random.Random
) -> tuple[list[Talk], float]:
    """About so many requests of whole conversations, within `seconds`; and the share that one endless cache finds."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    conversations: dict[int, list[dict[str, Any]]] = {}
    for row in rows:  # Block 0 may be everybody's: the second is where conversations part.
        conversations.setdefault(row["hash_ids"][min(1, len(row["hash_ids"]) - 1)], []).append(row)
    block = BLOCK_TOKENS // divisor
    chosen: list[dict[str, Any]] = []
    for first in rng.sample(sorted(conversations), len(conversations)):
        if len(chosen) >= requests:
            break
        chosen += [row for row in conversations[first] if row["input_length"] // divisor <= tokens_max]
    chosen.sort(key=lambda row: row["timestamp"])
    pace = seconds / (rows[-1]["timestamp"] / 1000 + STAMP_S)
    talks, seen, found, asked = [], set[int](), 0, 0
    for row in chosen:
        known = next((at for at, one in enumerate(row["hash_ids"]) if one not in seen), len(row["hash_ids"]))
        begins_s = (row["timestamp"] / 1000 + rng.uniform(0, STAMP_S)) * pace
        counted = begins_s >= seconds * UNCOUNTED
        if counted:
            found, asked = found + known, asked + len(row["hash_ids"])
        seen.update(row["hash_ids"])
        tokens = [token for one in row["hash_ids"] for token in tokens_of(one, block)]
        body = {
            "model": NAME,
            "prompt": tokens[: max(1, row["input_length"] // divisor)],
            "max_tokens": max(1, row["output_length"] // divisor),
            "temperature": 0,
            "ignore_eos": True,
        }
        talks.append(Talk(0, [Turn(body, begins_s)], counted))
    return talks, found / asked


def tokens_of(block: int, count: int) -> list[int]:
    """The same for the same block; of the ordinary tokens."""
    rng = random.Random(block)
    return [rng.randrange(1000, 40_000) for _ in range(count)]
