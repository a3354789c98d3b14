"""Server-sent events in any pieces."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream_events import EventReader, TooLarge

EVENTS = [b'{"a":"\xc3\xa9"}', b"[DONE]", b"", "\N{WINKING FACE}".encode() * 3, b"two\nlines", b" space"]


def plainly(text: bytes) -> list[bytes | None]:
    """The standard's words, one after the other, over the whole text."""
    found: list[bytes | None] = []
    data: list[bytes] = []
    for line in re.split(rb"\r\n|\n|\r", text.removeprefix(b"\xef\xbb\xbf"))[:-1]:
        if not line:
            if data:
                found.append(b"\n".join(data) or None)
            data = []
            continue
        name, colon, value = line.partition(b":")
        if not name and colon:
            found.append(None)
        elif name == b"data":
            data.append(value.removeprefix(b" "))
    return found


def fed(text: bytes, cuts: list[int]) -> list[bytes | None]:
    reader = EventReader(event_bytes_max=10_000)
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    return [event for piece in pieces for event in reader.feed(piece)]


lines = st.sampled_from(
    [
        *(
            b"data: x",
            b"data:y",
            b"data",
            b"data:",
            b"data:  z",
            b": comment",
            b":",
            b"event: e",
            b"id: 1",
            b"retry: 5",
        ),
        *(b"", b"", b"", b"garbage", b"data: " + EVENTS[0], b"data: " + EVENTS[3], b"dat", b"datax: 1", b" data: x"),
    ]
)


@given(
    parts=st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=30),
    bom=st.booleans(),
    tail=st.sampled_from([b"", b"data: half"]),
    cuts=st.lists(st.integers(0, 2000), max_size=20),
)
def test_wherever_it_is_cut_the_events_are_the_same(
    parts: list[tuple[bytes, bytes]], bom: bool, tail: bytes, cuts: list[int]
) -> None:
    text = (b"\xef\xbb\xbf" if bom else b"") + b"".join(line + end for line, end in parts) + tail
    assert fed(text, cuts) == fed(text, list(range(len(text)))) == plainly(text)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_cut_of_a_stream(end: bytes) -> None:
    text = b"".join(
        b"".join(b"data: " + line + end for line in event.split(b"\n")) + end + b": ping" + end for event in EVENTS
    )
    expected = [one for event in EVENTS for one in (event or None, None)]
    for cut in range(len(text) + 1):
        assert fed(text, [cut]) == expected


def test_half_an_event_is_none() -> None:
    assert fed(b"data: x\n\ndata: [DONE]\n", []) == [b"x"]


@pytest.mark.parametrize("filler", [b"x", b"data:\n", b"data: xx\n", b"\xc3"])
@pytest.mark.parametrize("size", [1, 64, 4096])
def test_what_does_not_end_is_refused_before_it_is_large(filler: bytes, size: int) -> None:
    reader = EventReader(event_bytes_max=2048)
    piece = filler * -(-size // len(filler))
    taken = 0
    with pytest.raises(TooLarge):
        while taken < 1_000_000:
            reader.feed(piece)
            taken += len(piece)
    assert taken <= 2048 * len(b"data:\n") + len(piece)


def test_a_long_stream_of_small_events_is_fine() -> None:
    reader = EventReader(event_bytes_max=64)
    assert sum(len(reader.feed(b"data: 0123456789\n\n: c\n")) for _ in range(10_000)) == 20_000
