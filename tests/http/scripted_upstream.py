"""
A server with the OpenAI API that misbehaves on purpose, over real sockets, byte by byte.

A test gives it a behaviour, a coroutine that is run for each request but the probes:

    async def behave(visit: Visit) -> None:
        await visit.begin()
        await visit.say(content="Hel")
        await visit.end()
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

WAIT_S = 10.0
UPSTREAM_MODEL = "their/model"
USAGE = {
    "prompt_tokens": 21,
    "completion_tokens": 3,
    "total_tokens": 24,
    "prompt_tokens_details": {"cached_tokens": 16},
}


class Visit:
    """One request, and the means to answer it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
        self.reader = reader
        self.writer = writer
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.path, _ = first.split(" ")
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.raw_body = body
        self.gone_ns = 0
        """When the client hung up, as far as it was waited for."""

    @property
    def body(self) -> dict[str, Any]:
        """Its JSON."""
        value: dict[str, Any] = json.loads(self.raw_body)
        return value

    async def raw(self, data: bytes) -> None:
        """These bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, value: object, status: int = 200, **headers: str) -> None:
        """A whole JSON answer."""
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        sent = {"content_type": "application/json", "content_length": str(len(data))} | headers
        await self.head(status, **sent)
        await self.raw(data)

    async def head(self, status: int = 200, /, **headers: str) -> None:
        """The head of an answer."""
        lines = [f"HTTP/1.1 {status} Whatever", *(f"{name.replace('_', '-')}: {headers[name]}" for name in headers)]
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def begin(self, content_type: str = "text/event-stream; charset=utf-8", **headers: str) -> None:
        """The head of a stream."""
        await self.head(content_type=content_type, transfer_encoding="chunked", **headers)

    async def chunk(self, data: bytes) -> None:
        """A piece of a stream."""
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def say(self, content: str = "", *, finish: str | None = None, **fields: object) -> None:
        """An event of a stream."""
        await self.chunk(event(content, chat="chat" in self.path, finish=finish, **fields))

    async def end(self, *, done: bool = True) -> None:
        """The end of a stream."""
        if done:
            await self.chunk(b"data: [DONE]\n\n")
        await self.raw(b"0\r\n\r\n")

    async def until_gone(self) -> None:
        """Until the client hangs up."""
        with contextlib.suppress(OSError):  # it left something unread
            while await self.reader.read(65536):
                pass
        self.gone_ns = time.monotonic_ns()


def event(content: str, *, chat: bool = True, finish: str | None = None, **fields: object) -> bytes:
    """The bytes of an event."""
    said: dict[str, object] = {"delta": {"content": content} if content else {}} if chat else {"text": content}
    value = {
        "id": "theirs-1",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1_700_000_000,
        "model": UPSTREAM_MODEL,
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": finish}],
        **fields,
    }
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def whole(content: str = "Hello there", *, chat: bool = True, **fields: object) -> dict[str, object]:
    """An answer that is no stream."""
    said: dict[str, object] = {"message": {"role": "assistant", "content": content}} if chat else {"text": content}
    return {
        "id": "theirs-1",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1_700_000_000,
        "model": UPSTREAM_MODEL,
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
        **fields,
    }


Behaviour = Callable[[Visit], Awaitable[None]]


async def well(visit: Visit) -> None:
    """As a good server does."""
    if not visit.body.get("stream"):
        await visit.answer(whole(chat="chat" in visit.path))
        return
    await visit.begin()
    if "chat" in visit.path:
        await visit.chunk(event("", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]))
    for content in ("Hel", "lo ", "there"):
        await visit.say(content)
    await visit.say(finish="stop")
    if (visit.body.get("stream_options") or {}).get("include_usage"):
        await visit.chunk(event("", choices=[], usage=USAGE))
    await visit.end()


async def models(visit: Visit) -> None:
    """The answer to a probe."""
    await visit.answer({"object": "list", "data": [{"id": UPSTREAM_MODEL, "object": "model"}]})


class ScriptedUpstream:
    """Listens on a free port, in a thread with a loop of its own."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = well
        self.probed: Behaviour = models
        self.visits: list[Visit] = []
        """All but probes."""
        self.probes: list[Visit] = []
        self.connections = 0
        self.port = 0
        self._change = threading.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="upstream", daemon=True)

    @property
    def url(self) -> str:
        """Its base."""
        return f"http://127.0.0.1:{self.port}/v1"

    def fresh(self) -> "ScriptedUpstream":
        """As at the beginning, for another test."""
        self.behaviour, self.probed = well, models
        self.visits, self.probes, self.connections = [], [], 0
        return self

    def start(self) -> None:
        """Listen; on the same port as before, if there was one."""
        if not self._thread.is_alive():
            self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(WAIT_S)

    def pause(self) -> None:
        """Hang up on everybody, and refuse connections."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(WAIT_S)

    def stop(self) -> None:
        """Go."""
        self.pause()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Until something is so that visits change."""
        with self._change:
            assert self._change.wait_for(true, WAIT_S), "the gateway did not do what the test waits for"

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._tasks.add(serving)
        self.connections += 1
        try:
            while not writer.is_closing():
                visit = await _visit(reader, writer)
                probe = visit.method == "GET"
                self._note(lambda: (self.probes if probe else self.visits).append(visit))  # noqa: B023 - at once
                await (self.probed if probe else self.behaviour)(visit)
                self._note(lambda: None)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # The gateway has left, or the test has ended.
        finally:
            self._tasks.discard(serving)
            writer.transport.abort()
            self._note(lambda: None)

    def _note(self, change: Callable[[], None]) -> None:
        with self._change:
            change()
            self._change.notify_all()


async def _visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Visit:
    head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
    return Visit(reader, writer, head, body)
