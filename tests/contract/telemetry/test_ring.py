"""
The ring: whatever ends the writer, and wherever, what can be read is whole and in order.
"""

import mmap
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.ring import (
    FILES,
    RING_BYTES_MIN,
    SEGMENT_NS,
    VERSION,
    Header,
    Ring,
    RingError,
    Segment,
    head_of,
    read_ring,
    shrink,
)
from tests.tidy.imports import ROOT

HEADER = Header(kind="records", name="t-0", clock_id="c", wall_offset_ns=5, began_ns=0, number=0, bytes=0)


def open_ring(directory: Path, ring_bytes: int = RING_BYTES_MIN) -> Ring:
    return Ring(directory, HEADER, ring_bytes=ring_bytes)


def bodies(directory: Path) -> list[bytes]:
    return [frame for segment in read_ring(directory) for frame in segment.frames]


def turning(ring: Ring, body: bytes, now_ns: int) -> None:
    """Put as a producer of records does."""
    if ring.full or ring.old(now_ns):
        ring.turn(now_ns)
    assert ring.put(body)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 16_000), max_size=120), seed=st.integers(0, 9))
def test_the_newest_frames_are_there_in_order_whatever_their_sizes(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    directory = tmp_path_factory.mktemp("ring")
    ring, dice = open_ring(directory), random.Random(seed)
    put = [dice.randbytes(size) for size in sizes]
    for body in put:
        turning(ring, body, 0)
    ring.close()
    found = bodies(directory)
    assert found == put[len(put) - len(found) :]
    kept_bytes = sum(map(len, found))
    assert found == put or kept_bytes >= RING_BYTES_MIN // 2 * 7 // 8 - 16_000 - 8 * len(found) - 1000


def test_a_minute_can_always_be_read(tmp_path: Path) -> None:
    ring, second_ns = open_ring(tmp_path), 1_000_000_000
    for now_s in range(500):
        turning(ring, now_s.to_bytes(2, "big"), now_s * second_ns)
        read = [int.from_bytes(body, "big") for body in bodies(tmp_path)]
        assert read[-1] == now_s and read[0] <= max(0, now_s - SEGMENT_NS // second_ns)
        assert read == list(range(read[0], now_s + 1)) and len(read) <= 2 * SEGMENT_NS // second_ns
    ring.close()


class Spied:
    """A mapping that remembers each byte that is written, in order."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.writes: list[tuple[int, int]] = []

    def __setitem__(self, place: slice, value: bytes) -> None:
        start = place.start or 0
        self.writes += [(start + index, byte) for index, byte in enumerate(value)]
        self.data[place] = value


@pytest.mark.parametrize("turns", [False, True])
def test_killed_at_any_byte_of_a_frame_or_of_a_new_segment_the_rest_is_there(tmp_path: Path, turns: bool) -> None:
    """As if the process had died between two bytes, in the order in which they are written."""
    ring = open_ring(tmp_path)
    for number in range(40):  # In the way of what comes there later: as frames would be of an earlier turn.
        ring.put(b"old %d" % number)
    ring.turn(1)
    ring.put(b"last")
    if not turns:
        ring.turn(2)
        ring.put(b"new")
    before = bodies(tmp_path)
    name = FILES[0]
    content = (tmp_path / name).read_bytes()
    spied = Spied(len(content))
    spied.data[:] = content
    ring._maps[0].close()
    ring._maps[0] = spied  # type: ignore[call-overload]
    if turns:
        ring.turn(3)
    else:
        ring._map = spied  # type: ignore[assignment]
        ring.put(b"the newest")
    assert len(spied.writes) > 15
    read = []
    for cut in range(len(spied.writes) + 1):
        torn = bytearray(content)
        for place, byte in spied.writes[:cut]:
            torn[place] = byte
        (tmp_path / name).write_bytes(torn)
        read.append(bodies(tmp_path))
    if turns:  # The older segment goes at one blow; the other one stays.
        assert read[0] == before and read[-1] == [b"last"]
        assert all(one in (before, [b"last"]) for one in read)
    else:
        assert read == [before] * (len(read) - 1) + [[*before, b"the newest"]] or read[-1] == [*before, b"the newest"]
        assert all(one in (before, [*before, b"the newest"]) for one in read)


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 2_500), junk=st.binary(min_size=1, max_size=40), cut=st.booleans())
def test_a_damaged_file_yields_no_frame_that_was_not_put(
    tmp_path_factory: pytest.TempPathFactory, place: int, junk: bytes, cut: bool
) -> None:
    """Cut off anywhere, or overwritten anywhere with anything."""
    directory = tmp_path_factory.mktemp("ring")
    ring = open_ring(directory)
    put = [b"%d" % number * (number % 30 + 1) for number in range(60)]
    for body in put:
        ring.put(body)
    ring.close()
    path = directory / FILES[0]
    data = path.read_bytes()
    junk = junk.replace(b"\0", b"\1")  # a length of zero is an end as good as any
    path.write_bytes(data[:place] if cut else data[:place] + junk + data[place + len(junk) :])
    try:
        segments = read_ring(directory)
    except RingError:
        assert place < 300  # the header
        return
    assert segments[0].frames == put[: len(segments[0].frames)]
    assert segments[0].torn or segments[0].frames == put


def check_numbers(segments: list[Segment], newest: int) -> int:
    """That the frames follow each other, and come no earlier than the one that has been seen; the newest one."""
    found = [frame for segment in segments for frame in segment.frames]
    numbers = [int.from_bytes(frame[:8], "big") for frame in found]
    for frame, number in zip(found, numbers, strict=True):
        assert frame == number.to_bytes(8, "big") * (1 + number % 50)
    follows = len(segments) < 2 or segments[0].header.number + 1 == segments[1].header.number
    if not numbers or not follows or segments[0].torn:  # The writer has turned as often as a reader tries.
        return newest
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert numbers[-1] >= newest
    return numbers[-1]


def test_it_is_read_while_it_is_written(tmp_path: Path) -> None:
    """Another process writes and turns as fast as it can; whenever it is read, the frames follow each other."""
    program = (
        "import sys; from pathlib import Path; from tests.contract.telemetry.test_ring import open_ring, turning\n"
        "ring = open_ring(Path(sys.argv[1])); print('there', flush=True)\n"
        "number = 0\n"
        "while True:\n"
        "    turning(ring, number.to_bytes(8, 'big') * (1 + number % 50), 0); number += 1\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == b"there\n"
            newest, whole, turned = -1, 0, set[int]()
            while len(turned) < 40:
                segments = read_ring(tmp_path)
                turned.add(segments[-1].header.number)
                seen, newest = newest, check_numbers(segments, newest)
                whole += newest > seen
            assert whole > 10
            assert not shrink(tmp_path), "somebody writes there"
        finally:
            writer.send_signal(signal.SIGKILL)
    size = sum((tmp_path / name).stat().st_size for name in FILES)
    before = bodies(tmp_path)
    assert int.from_bytes(before[-1][:8], "big") >= newest
    assert shrink(tmp_path) and bodies(tmp_path) == before
    assert sum((tmp_path / name).stat().st_size for name in FILES) < size
    assert shrink(tmp_path) and bodies(tmp_path) == before


def test_what_does_not_fit_is_counted_and_the_next_one_is_not_hindered(tmp_path: Path) -> None:
    ring = open_ring(tmp_path)
    assert not ring.put(bytes(RING_BYTES_MIN))
    assert ring.put(b"small")
    assert ring.lost == 1
    assert [segment.lost for segment in read_ring(tmp_path)] == [1], "within the newest segment"
    ring.turn(1)
    assert not ring.put(bytes(RING_BYTES_MIN))
    assert [segment.lost for segment in read_ring(tmp_path)] == [1, 2]
    ring.close()
    assert not ring.put(b"late")
    assert ring.lost == 3
    assert shrink(tmp_path) and [segment.lost for segment in read_ring(tmp_path)] == [1, 2]


def test_it_is_for_us_alone_and_has_its_place_on_the_disk(tmp_path: Path) -> None:
    ring = open_ring(tmp_path)
    for name in FILES:
        facts = (tmp_path / name).stat()
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert facts.st_blocks * 512 >= facts.st_size >= RING_BYTES_MIN // 2 - mmap.PAGESIZE
    ring.close()


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("calls", [0, 1])
def test_a_full_disk_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Whichever of the two files is the one that does not fit; nothing is left open, or mapped to a hole."""
    real: Callable[[int, int, int], None] = os.posix_fallocate
    left = [calls]

    def reserve(file: int, offset: int, size: int) -> None:
        left[0] -= 1
        (_full if left[0] < 0 else real)(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    before = descriptors()
    with pytest.raises(OSError, match="No space left"):
        open_ring(tmp_path)
    assert descriptors() == before


def test_nothing_there_and_another_version_are_said(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="holds no recording"):
        read_ring(tmp_path)
    open_ring(tmp_path).close()
    assert head_of(tmp_path) is not None
    newer = msgspec.structs.replace(HEADER, version=VERSION + 1, bytes=1)
    (tmp_path / "later").mkdir()
    Ring(tmp_path / "later", newer, ring_bytes=RING_BYTES_MIN).close()
    with pytest.raises(RingError, match="holds no recording, or none that can be read"):
        read_ring(tmp_path / "later")
