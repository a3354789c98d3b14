"""
The gateway's workers: processes that share one port, so that who asks one of them hears of all.

    a question --> own answer, and over a Unix socket those of the others, each within ANSWER_S and ANSWER_BYTES_MAX
                   whoever says nothing is left out, and named

What was counted outlives its worker: numbers are written to a file before anybody is shown them, and the next life of
the worker counts on from there.  So no counter falls when a worker dies, which a scraper would take for a new beginning
of all of them, and the numbers of one that does not answer are those that it has written last.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar  # Any: msgspec resolves no JSON type that names itself

import msgspec
import structlog

from gateway.config import GatewayOptions
from telemetry.evidence import GATEWAY, Evidence
from telemetry.hub import Hub, Json, JsonObject
from telemetry.numbers import Numbers, exposition, join
from telemetry.records import RequestRecord
from telemetry.served import Served

ANSWER_S = 1.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
QUESTION_BYTES_MAX = 4096
QUESTION_S = 5.0
REQUESTS_MAX = 100
"""Shown of the newest."""
RECORDS_MAX = 4_000
"""Of a worker, as many are looked through: what fits into an answer."""
ID_CHARS_MAX = 100
"""No request has a longer name."""

_log = structlog.get_logger("pellucid.gateway")
_Answer = TypeVar("_Answer")


class _Count(msgspec.Struct, frozen=True, tag="count"):
    """What have you counted?  -> Numbers"""


class _Newest(msgspec.Struct, frozen=True, tag="newest"):
    """Which requests have you had lately?  -> list[JsonObject]"""

    tenant: str | None
    """Of this one; None: of all."""


class _Find(msgspec.Struct, frozen=True, tag="find"):
    """Do you know this one?  -> list[JsonObject]: each tenant may have one"""

    request_id: str


class _Serve(msgspec.Struct, frozen=True, tag="serve"):
    """How were those served who have asked lately?  -> list[Served]"""


class _Records(msgspec.Struct, frozen=True, tag="records"):
    """What has happened since then?  -> _Remembered"""

    since_ns: int


class _Record(msgspec.Struct, frozen=True, tag="record"):
    """Do you know this one, all of it?  -> list[RequestRecord]: each tenant may have one"""

    request_id: str


class _Remembered(msgspec.Struct, frozen=True):
    """What one worker alone can know."""

    worker: int
    requests: list[RequestRecord]
    resident: list[tuple[int, int]]
    """Its memory: when, in ns, and how many bytes."""
    in_flight_ns: list[int]


_Question = _Count | _Newest | _Find | _Records | _Record | _Serve
_questions = msgspec.msgpack.Decoder(_Question)


class Siblings:
    """This worker's way to the others, and theirs to it."""

    def __init__(self, options: GatewayOptions, hub: Hub) -> None:
        self._worker = options.worker
        self._sockets = [Path(socket) for socket in options.worker_sockets]
        self._hub = hub
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Count on from a former life, and answer.  Before the hub starts."""
        if not self._sockets:
            return
        former = self._read(self._worker)
        if former is not None:
            self._hub.resume(former)
        own = self._sockets[self._worker]
        own.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, own)

    async def stop(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()

    # ---- what people ask

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """`/metrics`, and its content type."""
        return exposition(await self.numbers(), accept)

    async def numbers(self) -> Numbers:
        """Those of all workers, as one."""
        answers, silent = await self._ask(_Count(), Numbers)
        written = [numbers for number in silent if (numbers := self._read(number)) is not None]
        own = self._hub.numbers(workers=max(1, len(self._sockets)), workers_silent=len(silent))
        self._write(own)
        return join([own, *answers, *written])

    async def requests(self, tenant: str | None) -> tuple[list[JsonObject], list[int]]:
        """The newest requests of this tenant, or of all, newest first; and who has said nothing."""
        found, silent = await self._collect(_Newest(tenant))
        return found[:REQUESTS_MAX], silent

    async def find(self, request_id: str) -> tuple[list[JsonObject], list[int]]:
        """
        The requests of that name, newest first: each worker may know one of each tenant.  And who has said nothing.
        """
        if len(request_id) > ID_CHARS_MAX:
            return [], []
        return await self._collect(_Find(request_id))

    async def served(self) -> list[Served]:
        """How those were served who have asked any of the workers lately."""
        answers, _ = await self._ask(_Serve(), list[Served])
        return [*self._hub.served(), *(one for answer in answers for one in answer)]

    async def evidence(self, since_ns: int) -> Evidence:
        """What has happened since then: the requests of all, and the steps, of which each worker hears."""
        answers, silent = await self._ask(_Records(since_ns), _Remembered)
        found = self._hub.evidence(since_ns)
        found.workers_silent = silent
        if self._sockets:
            found.memory[f"{GATEWAY} {self._worker}"] = found.memory.pop(GATEWAY, [])
        for answer in answers:
            found.requests += answer.requests
            found.memory[f"{GATEWAY} {answer.worker}"] = answer.resident
            found.in_flight_ns += answer.in_flight_ns
        found.requests.sort(key=lambda record: record.finished_ns, reverse=True)
        return found

    async def records(self, request_id: str) -> tuple[list[RequestRecord], list[int]]:
        """
        The requests of that name: each worker may know one of each tenant.  One in flight is as if it ended now.  And
        who has said nothing.
        """
        if len(request_id) > ID_CHARS_MAX:
            return [], []
        answers, silent = await self._ask(_Record(request_id), list[RequestRecord])
        return [*self._hub.record(request_id), *(one for answer in answers for one in answer)], silent

    async def _collect(self, question: _Newest | _Find) -> tuple[list[JsonObject], list[int]]:
        answers, silent = await self._ask(question, list[dict[str, Any]])
        found = [*self._known(question), *(one for answer in answers for one in answer)]
        found.sort(key=_began_ns, reverse=True)
        return found, silent

    # ---- answering

    def _known(self, question: _Newest | _Find) -> list[JsonObject]:
        if isinstance(question, _Find):
            return self._hub.debug_request(question.request_id)
        newest = self._hub.debug_requests(REQUESTS_MAX, question.tenant)["requests"]
        assert isinstance(newest, list)
        return [one for one in newest if isinstance(one, dict)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One question.  A sibling that breaks off or talks nonsense gets none of our time."""
        with contextlib.suppress(OSError, EOFError, TimeoutError, msgspec.MsgspecError, ValueError):
            async with asyncio.timeout(QUESTION_S):
                question = _questions.decode(await _receive(reader, QUESTION_BYTES_MAX))
                writer.write(_framed(self._answer(question)))
                await writer.drain()
        writer.close()

    def _answer(self, question: _Question) -> bytes:
        if isinstance(question, _Count):
            return self._write(self._hub.numbers())
        if isinstance(question, _Serve):
            return msgspec.msgpack.encode(self._hub.served())
        if isinstance(question, _Records):
            known = self._hub.evidence(question.since_ns)
            resident = known.memory.get(GATEWAY, [])
            return msgspec.msgpack.encode(
                _Remembered(self._worker, known.requests[:RECORDS_MAX], resident, known.in_flight_ns)
            )
        if isinstance(question, _Record):
            return msgspec.msgpack.encode(self._hub.record(question.request_id))
        return msgspec.msgpack.encode(self._known(question))

    # ---- asking

    async def _ask(self, question: _Question, kind: type[_Answer]) -> tuple[list[_Answer], list[int]]:
        """The others' answers, and the numbers of those that gave none."""
        others = [number for number in range(len(self._sockets)) if number != self._worker]
        answers = await asyncio.gather(*(self._ask_one(number, question, kind) for number in others))
        silent = [number for number, answer in zip(others, answers, strict=True) if answer is None]
        return [answer for answer in answers if answer is not None], silent

    async def _ask_one(self, number: int, question: _Question, kind: type[_Answer]) -> _Answer | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._sockets[number])
                try:
                    writer.write(_framed(msgspec.msgpack.encode(question)))
                    return msgspec.msgpack.decode(await _receive(reader, ANSWER_BYTES_MAX), type=kind)
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError, msgspec.MsgspecError, ValueError) as error:
            _log.debug("a worker does not answer", silent=number, error=str(error) or type(error).__name__)
            return None

    # ---- the file

    def _file(self, number: int) -> Path:
        return self._sockets[number].with_suffix(".numbers")

    def _read(self, number: int) -> Numbers | None:
        """What that worker has written last, as far as it still means something."""
        try:
            return msgspec.msgpack.decode(self._file(number).read_bytes(), type=Numbers).counted()
        except (OSError, msgspec.MsgspecError):
            return None

    def _write(self, numbers: Numbers) -> bytes:
        """Keep them for the next life, whole or not at all; as they go over the wire."""
        data = msgspec.msgpack.encode(numbers)
        if self._sockets:
            file = self._file(self._worker)
            new = file.with_suffix(".new")
            try:
                new.write_bytes(data)
                new.replace(file)
            except OSError as error:  # a full disk, say: they are shown all the same
                _log.warning("what was counted cannot be kept", error=error.strerror)
        return data


def silent_json(workers: Sequence[int]) -> JsonObject:
    """What an answer says of those that gave none; nothing if there were none."""
    names: list[Json] = list(workers)
    return {"workers_silent": names} if names else {}


def _began_ns(request: JsonObject) -> int:
    began_ns = request.get("accepted_ns")
    return began_ns if isinstance(began_ns, int) else 0


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


async def _receive(reader: asyncio.StreamReader, bytes_max: int) -> bytes:
    """One message.  Raises ValueError for one that is too long, EOFError for one that ends early."""
    length = int.from_bytes(await reader.readexactly(4), "little")
    if length > bytes_max:
        raise ValueError(f"{length} bytes are more than {bytes_max}")
    return await reader.readexactly(length)
