"""What the comparison rests on: answers are read right however they arrive, and ratios point the right way."""

import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.machine import Machine, State
from tests.bench.peers.client import Exchange, ServerError, answer_of, body_of, events_of
from tests.bench.peers.compare import Load, Point, loads_of, prompts_of, ratios, table
from tests.bench.peers.servers import PELLUCID, family

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
TEXTS = st.lists(st.text(max_size=5), min_size=1, max_size=8)


def event(fields: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def stream_of(texts: list[str], tokens: int) -> list[bytes]:
    """The events of a whole answer."""
    return [
        *(event({"choices": [{"index": 0, "text": text}]}) for text in texts),
        event({"choices": [], "usage": {"completion_tokens": tokens}}),
        b"data: [DONE]\n\n",
    ]


def cut(data: bytes, dice: random.Random) -> list[bytes]:
    """`data` in pieces of any size."""
    pieces, start = [], 0
    while start < len(data):
        size = dice.choice((1, 2, 7, 40, 400))
        pieces.append(data[start : start + size])
        start += size
    return pieces


def wire(events: list[bytes], dice: random.Random, *, chunked: bool) -> tuple[bytes, list[int]]:
    """What is sent, and where in it each event ends."""
    if not chunked:
        head = HEAD + b"\r\n"
        sizes = [len(one) for one in events]
        return head + b"".join(events), [len(head) + sum(sizes[: i + 1]) for i in range(len(sizes))]
    ends: list[int] = []
    raw, position, body = HEAD + b"Transfer-Encoding: chunked\r\n\r\n", 0, b"".join(events)
    marks = [sum(len(one) for one in events[: i + 1]) for i in range(len(events))]
    for chunk in cut(body, dice):
        raw += f"{len(chunk):x}\r\n".encode() + chunk
        position += len(chunk)
        while marks[len(ends) :] and marks[len(ends)] <= position:
            ends.append(len(raw))
        raw += b"\r\n"
    return raw + b"0\r\n\r\n", ends


@given(texts=TEXTS, seed=st.integers(), chunked=st.booleans())
def test_events_and_their_times_do_not_depend_on_how_they_were_cut(texts: list[str], seed: int, chunked: bool) -> None:
    """Each event carries the number of the read that completed it."""
    dice = random.Random(seed)
    raw, ends = wire(stream_of(texts, 3), dice, chunked=chunked)
    pieces = cut(raw, dice)
    status, body, stretches = body_of(pieces, list(range(len(pieces))))
    assert status == 200
    found = events_of(body, stretches)
    assert [one["choices"][0]["text"] for _, one in found if one["choices"]] == texts  # type: ignore[index] # JSON
    arrived = [sum(len(piece) for piece in pieces[: i + 1]) for i in range(len(pieces))]
    assert [when for when, _ in found] == [
        next(i for i, end in enumerate(arrived) if end >= mark) for mark in ends[:-1]
    ]


async def exchange_of(raw: bytes) -> Exchange:
    exchange = Exchange(b"")
    exchange.data_received(raw)
    exchange.connection_lost(None)
    return exchange


async def test_tokens_are_those_of_the_usage_object() -> None:
    """Two events, five tokens."""
    raw, _ = wire(stream_of(["a", "b"], 5), random.Random(0), chunked=False)
    answer = answer_of(await exchange_of(raw), output_tokens=5)
    assert (answer.output_tokens, answer.events) == (5, 3)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no HTTP answer"),
        (b"HTTP/1.1 503 Busy\r\n\r\nlater", "status 503: later"),
        (HEAD + b"\r\n" + b"".join(stream_of(["a"], 5)[:-1]), "broke off"),
        (HEAD + b"\r\n" + b"".join(stream_of(["a"], 4)), "4 tokens instead of 5"),
    ],
)
async def test_what_is_no_whole_answer_is_an_error(raw: bytes, words: str) -> None:
    """A server that refuses, breaks off or stops early must not count as fast."""
    with pytest.raises(ServerError, match=words):
        answer_of(await exchange_of(raw), output_tokens=5)


def test_no_two_prompts_of_a_load_begin_alike() -> None:
    """No prefix cache can help."""
    for load in loads_of([1, 8, 32], 128, 128, 1500):
        prompts = prompts_of(range(3000), load, random.Random(0))
        assert {len(prompt) for prompt in prompts} == {load.prompt_tokens}
        assert len({prompt[0] for prompt in prompts}) == len(prompts) == load.requests


def point(number: int, load: Load, server: str, figure: float) -> Point:
    return Point(
        number,
        load.name,
        server,
        figure,
        "one L3 (30 ns)",
        "two L3s (150 ns)",
        2.0,
        0.0,
        0.0 if number == 1 else 1.0,
        {},
    )


def test_a_ratio_above_one_is_better_whichever_way_the_figure_goes() -> None:
    """More tokens, or fewer milliseconds; pairs of one round."""
    rate, delay = loads_of([1], 128, 128, 1500)
    points = [
        *(point(i, rate, PELLUCID, 100.0 * i) for i in (1, 2)),
        *(point(i, rate, "peer", 50.0 * i) for i in (1, 2)),
        *(point(i, delay, PELLUCID, 10.0) for i in (1, 2)),
        *(point(i, delay, "peer", 40.0) for i in (1, 2)),
    ]
    assert ratios(points, rate, PELLUCID, "peer") == [2, 2]
    assert ratios(points, delay, PELLUCID, "peer") == [4, 4]
    text = table(points, [rate, delay], [PELLUCID, "peer"])
    assert "| 150 (100-200) | 75 (50-100) | 2.00x | changed 4, of 4 disturbed 2 |" in text


def test_the_state_has_a_name() -> None:
    """Also where nothing can be measured."""
    assert [State(ns, 30.0).name for ns in (0.0, 30.0, 155.0)] == ["unknown", "one L3", "two L3s"]
    assert Machine().state().handover_ns >= 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc here")
def test_a_family_is_a_process_with_all_below_it() -> None:
    """Ours is in that of our parent."""
    assert os.getpid() in family(os.getppid())
