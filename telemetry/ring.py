"""
A ring of frames in two memory-mapped files, which outlives the process that writes it.

    file       MAGIC, how many frames were lost so far (8 bytes), then frames: the first is the header of the segment
    frame      length (4 bytes), crc32 of the body with the segment's number as its seed (4), body; length 0: no more

The mapping is shared, so what was written is in the page cache whatever ends the process; only the machine's own end
can take it.  A frame is there once its length is, which is written last, over a zero: whenever the writer dies, what
can be read is whole.  A segment that is old or full makes room for the next one, which takes the other file; so the
last SEGMENT_NS can always be read, as far as they fit.

The files are reserved on the disk before they are mapped: writing to a hole of a full disk would be a SIGBUS.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

MAGIC = b"PLFLIGHT"
VERSION = 2
FILES = ("0.ring", "1.ring")
SEGMENT_NS = 600_000_000_000
RING_BYTES_MIN = 256 * 1024
"""With less, a segment would hold next to nothing."""
READ_TRIES_MAX = 5
HEAD_BYTES_MAX = 4096
"""More than a header takes."""
_FRAME = struct.Struct("<II")
_LOST = struct.Struct("<Q")
_START = len(MAGIC) + _LOST.size
_END = bytes(4)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment is a part of."""

    version: int = VERSION
    kind: str
    """What its frames are: `records` or `journal`."""
    name: str
    """Of the process: `gateway-0`."""
    epoch: str = ""
    """How an engine calls this life of itself."""
    start: str = ""
    """What the workers of one gateway have in common, each of which records a part; empty: it is the whole."""
    clock_id: str
    wall_offset_ns: int
    """What turns a stamp of `clock_id` into time of day."""
    began_ns: int
    number: int
    """Of the segment, from 0."""
    bytes: int
    """Of its file."""


class RingError(Exception):
    """There is nothing that can be read; the message says why."""


class Ring:
    """Writes.  One process, one thread.  What does not fit, or comes too late, is counted in `lost`."""

    def __init__(self, directory: Path, header: Header, *, ring_bytes: int) -> None:
        """Make both files in `directory`, which is there, and begin the first segment.  Raises OSError."""
        assert ring_bytes >= RING_BYTES_MIN
        self.lost = 0
        self._size = ring_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        self._header = msgspec.structs.replace(header, number=-1, bytes=self._size)
        self._files: list[int] = []
        self._maps: list[mmap.mmap] = []
        try:
            for name in FILES:
                self._files.append(_reserved(directory / name, self._size))
                self._maps.append(_mapped(self._files[-1], self._size))
        except OSError:
            self.close()
            raise
        self.turn(header.began_ns)

    def old(self, now_ns: int) -> bool:
        """Whether the present segment reaches back far enough."""
        return now_ns - self._header.began_ns >= SEGMENT_NS

    @property
    def full(self) -> bool:
        """Whether the present segment has less than an eighth left."""
        return self._end > self._size - self._size // 8

    def turn(self, now_ns: int) -> None:
        """Begin the next segment, in place of the one before the present one."""
        if not self._maps:
            return
        number = self._header.number + 1
        self._header = msgspec.structs.replace(self._header, number=number, began_ns=now_ns)
        self._map = self._maps[number % len(FILES)]
        self._end = _START
        self._map[self._end : self._end + len(_END)] = _END  # from here on nothing of the old one counts
        self._map[:_START] = MAGIC + _LOST.pack(self.lost)
        self.put(msgspec.msgpack.encode(self._header))

    def put(self, body: bytes) -> bool:
        """Write one frame.  False, and one more in `lost`: the present segment is too full for it."""
        start = self._end + _FRAME.size
        end = start + len(body)
        if not self._maps or not body or end + len(_END) > self._size:
            self.lose()
            return False
        self._map[end : end + len(_END)] = _END
        self._map[start - 4 : end] = crc32(body, self._header.number).to_bytes(4, "little") + body
        self._map[start - 8 : start - 4] = len(body).to_bytes(4, "little")
        self._end = end
        return True

    def lose(self) -> None:
        """One frame more that is not written, which the file says from now on."""
        self.lost += 1
        if self._maps:
            self._map[len(MAGIC) : _START] = _LOST.pack(self.lost)

    def close(self) -> None:
        """Write no more.  What is put afterwards is lost."""
        for mapping in self._maps:
            mapping.close()
        for file in self._files:
            os.close(file)
        self._maps, self._files = [], []


class Segment(NamedTuple):
    """What one file holds."""

    header: Header
    frames: list[bytes]
    lost: int
    """Frames that were not written in this life, until the next segment was begun."""
    torn: bool
    """Its end is missing: there are bytes that are no frame, and not the mark of an end, or it was read too late."""
    end: int
    """Bytes up to there."""


def read_ring(directory: Path) -> list[Segment]:
    """The segments in their order, also while they are written.  Raises RingError."""
    paths = [directory / name for name in FILES]
    for _ in range(READ_TRIES_MAX):
        before = [_number(_bytes_of(path, HEAD_BYTES_MAX)) for path in paths]
        data = [_bytes_of(path) for path in paths]
        # If one was begun while the other one was read, the end of that other one may be missing.
        still = before == [_number(one) for one in data]
        if still:
            break
    segments = [segment for one in data if (segment := _segment(one)) is not None]
    if not segments:
        raise RingError(f"{directory} holds no recording, or none that can be read")
    segments.sort(key=lambda segment: segment.header.number)
    return segments if still else [segments[0]._replace(torn=True), *segments[1:]]


def head_of(directory: Path) -> Header | None:
    """Of the oldest segment; None: there is none that can be read."""
    headers = [header for name in FILES if (header := _header(_bytes_of(directory / name, HEAD_BYTES_MAX))) is not None]
    return min(headers, key=lambda header: header.number, default=None)


def shrink(directory: Path) -> bool:
    """Cut off what was never written.  False, and nothing is done: a living process writes there."""
    with _held(directory) as free:
        for path in map(directory.joinpath, FILES) if free else ():
            header = _header(_bytes_of(path, HEAD_BYTES_MAX))
            if header is None and _bytes_of(path, len(MAGIC)) == MAGIC:
                continue  # Of another version, whose reader may be wanted yet.
            if header is None or path.stat().st_size >= header.bytes:
                segment = _segment(_bytes_of(path))
                with suppress(FileNotFoundError):
                    os.truncate(path, segment.end + len(_END) if segment is not None else 0)
        return free


@contextmanager
def _held(directory: Path) -> Iterator[bool]:
    """Whether nobody writes a ring there; as long as this lasts, nobody begins to."""
    try:
        file = os.open(directory / FILES[0], os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(file)


def is_free(directory: Path) -> bool:
    """Whether nobody writes there any more."""
    with _held(directory) as free:
        return free


def _reserved(path: Path, size: int) -> int:
    """A new file that has its place on the disk, for us alone."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until we end, however that is
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:  # macOS
            for _ in range(0, size, mmap.PAGESIZE):
                os.write(file, bytes(mmap.PAGESIZE))
    except OSError:
        os.close(file)
        path.unlink()
        raise
    return file


def _mapped(file: int, size: int) -> mmap.mmap:
    """All of it at once, so that the memory of this process does not seem to grow for minutes."""
    return mmap.mmap(file, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _bytes_of(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""


def _frames(data: bytes, number: int) -> Iterator[tuple[bytes, int]]:
    """Each whole frame, and where it ends."""
    position = _START
    while position + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, position)
        position += _FRAME.size
        body = data[position : position + length]
        position += length
        if not length or len(body) < length or crc32(body, number) != checksum:
            return
        yield body, position


def _header(data: bytes) -> Header | None:
    """Of the segment that begins so.  None: it is no segment, is just being begun, or is of another version."""
    if not data.startswith(MAGIC) or len(data) < _START + _FRAME.size:
        return None
    length, checksum = _FRAME.unpack_from(data, _START)
    start = _START + _FRAME.size
    try:
        header = msgspec.msgpack.decode(data[start : start + length], type=Header)
    except msgspec.MsgspecError:
        return None
    whole = crc32(data[start : start + length], header.number) == checksum
    return header if whole and header.version == VERSION else None


def _number(data: bytes) -> int:
    header = _header(data)
    return header.number if header is not None else -1


def _segment(data: bytes) -> Segment | None:
    header = _header(data)
    if header is None:
        return None
    frames = list(_frames(data, header.number))
    end = frames[-1][1]
    bodies = [body for body, _ in frames[1:]]  # the first one is the header
    (lost,) = _LOST.unpack_from(data, len(MAGIC))
    return Segment(header, bodies, lost, torn=data[end : end + len(_END)] != _END, end=end)
