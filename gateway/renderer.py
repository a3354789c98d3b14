"""
Chat templates, rendered by processes whose time and memory have bounds (gateway.rendering).

    render     a process that is free, or a new one -> the conversation goes in, the prompt comes out
               it takes too long, or too much memory, or the client leaves: that process ends, and the next is a new one
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec

from gateway.rendering import EXIT_MEMORY, FRAME_BYTES_MAX, LENGTH_BYTES, Done, Job, Setup, framed
from gateway.template import TemplateError
from gateway.wire import ChatMessage

PROCESSES_MAX = 2
CPU_S = 2.0
"""Of the processor's time, for one conversation."""
RENDER_S = 20.0
"""To wait for a free process, and for its answer: for what the process's own clock does not see."""
EXIT_S = 5.0
READ_BYTES_MAX = 256 * 1024
ROOT = Path(__file__).resolve().parent.parent
INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""Of the environment: nothing that is secret."""


class RendererBusy(Exception):
    """All processes have work, and had for long."""


class Renderer:
    """One chat template."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, cpu_s: float = CPU_S, render_s: float = RENDER_S
    ) -> None:
        self.source = source
        self._cpu_s = cpu_s
        self._render_s = render_s
        self._setup = Setup(source=source, special_tokens=dict(special_tokens))
        self._idle: list[_Process] = []
        self._places = asyncio.Semaphore(PROCESSES_MAX)
        self._closed = False

    async def check(self) -> None:
        """Begin a process, so that the first request finds it.  Raises TemplateError: it is no template."""
        async with self._process():
            pass

    async def render(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool, extra: Mapping[str, object] | None
    ) -> str:
        """The prompt.  Raises TemplateError, RendererBusy."""
        job = Job(messages=list(messages), add_generation_prompt=add_generation_prompt, extra=dict(extra or {}))
        try:
            question = msgspec.msgpack.encode(job)
        except OverflowError:  # JSON has no bound for an integer, and what is between us and the template has
            raise TemplateError("The chat template takes no integer beyond 64 bits.") from None
        try:
            async with asyncio.timeout(self._render_s), self._process() as process:
                done = await process.ask(question)
        except TimeoutError:
            raise RendererBusy from None
        if done.error:
            raise TemplateError(done.error)
        return done.prompt

    def close(self) -> None:
        """Let the processes go."""
        self._closed = True
        while self._idle:
            self._idle.pop().end()

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator["_Process"]:
        """A process for one question.  One that was left in the middle is not asked again: its answer is another's."""
        async with self._places:
            process = self._idle.pop() if self._idle else _Process(self._cpu_s)
            whole = False
            try:
                if not process.ready:
                    await process.begin(self._setup)
                yield process
                whole = True
            finally:
                if whole and not self._closed:
                    self._idle.append(process)
                else:
                    process.end()


class _Process:
    """One `python -m gateway.rendering`."""

    def __init__(self, cpu_s: float) -> None:
        self.ready = False
        self._cpu_s = cpu_s
        self._link, theirs = socket.socketpair()
        self._link.setblocking(False)
        with theirs:
            environ = {name: os.environ[name] for name in INHERITED if name in os.environ}
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "gateway.rendering", str(theirs.fileno()), str(cpu_s)],
                env=environ | {"PYTHONPATH": str(ROOT)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # its last words may be somebody's prompt
                start_new_session=True,
            )

    async def begin(self, setup: Setup) -> None:
        """Give it the template.  Raises TemplateError."""
        done = await self.ask(msgspec.msgpack.encode(setup))
        if done.error:
            raise TemplateError(done.error)
        self.ready = True

    async def ask(self, message: bytes) -> Done:
        """The answer to one message, a Setup or a Job.  Raises TemplateError where there is none."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._link, framed(message))
            length = int.from_bytes(await self._read(LENGTH_BYTES), "big")
            if length > FRAME_BYTES_MAX:
                raise TemplateError("The chat template makes too long a prompt of these messages.")
            return msgspec.msgpack.decode(await self._read(length), type=Done)
        except (OSError, EOFError):
            raise TemplateError(await self._last_words()) from None

    async def _read(self, size_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        while len(data) < size_bytes:
            more = await loop.sock_recv(self._link, min(READ_BYTES_MAX, size_bytes - len(data)))
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    async def _last_words(self) -> str:
        """What its end means."""
        try:
            code = await asyncio.to_thread(self._popen.wait, EXIT_S)
        except subprocess.TimeoutExpired:
            code = 0
        if code == -signal.SIGPROF:
            return f"The chat template needs more than {self._cpu_s:g} s for these messages."
        if code == EXIT_MEMORY:
            return "The chat template needs too much memory for these messages."
        return "The chat template of this model cannot render these messages."

    def end(self) -> None:
        """It is not needed any more, whatever it is doing."""
        self._popen.kill()
        self._popen.wait()
        self._link.close()
