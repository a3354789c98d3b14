"""
The supervisor: starts the processes, brings the dead ones back, and takes all of them down in the right order.

    the first engine loads --it listens--> a gateway worker starts, and the other engines
                           --/ready says yes--> serving; the other workers start
    serving --a signal--> the workers drain --> the engines stop --> 0
    at any time:
           a child's first life ends with 2 (a user's mistake, it has said which on stderr): all down --> 2
           a child dies TRIES_MAX times before anything was ever ready: all down --> 1

All wait for the first engine, and workers for the first worker, because what cannot be served should cost one line and
not a page of logs, and because it is there soonest when nobody else loads at the same time.  Nobody waits for the
others, which serve as they come, nor for a companion, which is what it can do without: the embedded Valkey, that starts
first, stops last, and whose deaths end nothing.  Any other death is answered by a restart after a pause that doubles
with each death, is bounded, and is short again once the child has lived for a while: who has served before may be short
of memory for a moment, and is no reason to stop those who still serve.  A second signal kills at once.  The children
are on a leash (launch.leash): they do not outlive this process, whatever ends it.  They run in groups of their own, so
that Ctrl-C reaches us alone.

No child is niced: the kernel already favours the gateway, which mostly sleeps, over the engine's busy threads.
"""

import asyncio
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from launch.leash import leashed

USER_MISTAKE = 2  # exit code of a child that has told the person, in one line, what to mend
KILLED = 130
TRIES_MAX = 3
STDERR = 2
Say = Callable[[str], None]


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """The pause before a restart."""

    first_s: float = 0.5
    most_s: float = 30.0
    healthy_s: float = 60.0
    """A child that lived so long starts with `first_s` again."""

    def pause_s(self, deaths: int) -> float:
        """After `deaths` deaths in a row, at least one."""
        assert deaths > 0
        return min(self.most_s, self.first_s * 2.0 ** min(deaths - 1, 32))


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A program to keep alive."""

    name: str
    command: tuple[str, ...]
    """The program's full path and its arguments."""
    grace_s: float
    """From SIGTERM to SIGKILL."""
    vital: bool = True
    """Whether nothing can be served without it."""
    log: Path | None = None
    """What it says, if not on stderr."""
    descriptors: tuple[int, ...] = ()
    """Open files of ours that it gets under the same numbers, in each of its lives."""


class Child:
    """One program, kept alive until it is asked to stop."""

    def __init__(self, spec: ChildSpec, backoff: Backoff, environ: dict[str, str], say: Say) -> None:
        self.spec = spec
        self.lives = 0
        self.deaths = 0
        """In a row."""
        self._backoff = backoff
        self._environ = environ
        self._say = say
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    def stop(self) -> None:
        """Ask for SIGTERM, and SIGKILL after the grace time; `keep` returns when it is gone."""
        self._stop.set()

    def kill(self) -> None:
        """Ask for SIGKILL."""
        self._stop.set()
        self._kill.set()

    async def keep(self, died: Callable[["Child", int], None], *, after: asyncio.Event | None = None) -> None:
        """Run the program again and again until `stop`; tell `died(self, exit code)` of each end nobody asked for."""
        if after is not None:
            await _either(after, self._stop)
        while not self._stop.is_set():
            started_s = time.monotonic()
            self.lives += 1
            code = await self._live()
            if self._stop.is_set():
                return
            lived_s = time.monotonic() - started_s
            self.deaths = 1 if lived_s >= self._backoff.healthy_s else self.deaths + 1
            died(self, code)
            if self._stop.is_set():
                return
            pause_s = self._backoff.pause_s(self.deaths)
            why = where_to_look(self.spec.log) if self.spec.log is not None else ""
            self._say(f"{self.spec.name} {describe_exit(code)} after {lived_s:.1f} s; again in {pause_s:g} s{why}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)

    async def _live(self) -> int:
        """One life of the program; its exit code, negative for a signal."""
        try:
            process = await asyncio.create_subprocess_exec(
                *leashed(self.spec.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=STDERR,  # logs; stdout belongs to what the person asked for
                pass_fds=self.spec.descriptors,
                env=self._environ,
                start_new_session=True,
            )
        except OSError as error:  # no memory, no processes: as if it had died at once
            self._say(f"{self.spec.name} cannot be started: {error.strerror}")
            return 1
        exited = asyncio.ensure_future(process.wait())
        if not await _first(exited, self._stop, None):
            _signal(process, signal.SIGTERM)
            if not await _first(exited, self._kill, self.spec.grace_s):
                _signal(process, signal.SIGKILL)
        return await exited


async def _until_any(verdict: asyncio.Future[int], *tasks: asyncio.Task[None]) -> None:
    """Wait until the verdict stands or a task ends; a task that failed raises here."""
    watched: list[asyncio.Future[int] | asyncio.Task[None]] = [verdict, *tasks]
    await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    """Wait until one of the two is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


async def _first(exited: "asyncio.Future[int]", event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for the exit, the event or the time; whether it was the exit."""
    asked = asyncio.ensure_future(event.wait())
    watched: list[asyncio.Future[int] | asyncio.Task[Literal[True]]] = [exited, asked]
    await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    return exited.done()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it went by itself in this instant
        process.send_signal(number)


def describe_exit(code: int) -> str:
    """`was killed by SIGSEGV` or `ended with code 1`."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def where_to_look(log: Path) -> str:
    """For the reason of a death; a full disk is one itself, and leaves the log empty."""
    with contextlib.suppress(OSError):
        if not shutil.disk_usage(log.parent).free:
            return f"; the disk is full at {log.parent}"
    return f"; see {log}"


class Supervisor:
    """All the programs of one `pellucid serve`."""

    def __init__(
        self,
        *,
        gateways: Sequence[ChildSpec],
        engines: Sequence[ChildSpec],
        companions: Sequence[ChildSpec] = (),
        environ: dict[str, str],
        say: Say,
        backoff: Backoff = Backoff(),  # noqa: B008 - frozen
        on_drained: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_drained`: called when the last gateway is gone, and nobody answers any more."""
        self.gateways = [Child(gateway, backoff, environ, say) for gateway in gateways]
        self.engines = [Child(engine, backoff, environ, say) for engine in engines]
        self.companions = [Child(companion, backoff, environ, say) for companion in companions]
        self._say = say
        self._on_drained = on_drained
        self._ready = asyncio.Event()
        self._killed = False
        self._verdict: asyncio.Future[int] | None = None

    @property
    def _children(self) -> list[Child]:
        return [*self.companions, *self.engines, *self.gateways]

    async def run(
        self, until_listening: Callable[[], Awaitable[None]], until_ready: Callable[[], Awaitable[None]]
    ) -> int:
        """
        Serve until a signal or until it makes no sense any more; the exit code.

        Args:
            until_listening: returns when an engine listens.
            until_ready: returns when a gateway says that it is ready, and has then told the person.
        """
        loop = asyncio.get_running_loop()
        self._verdict = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        listening = asyncio.Event()
        readiness = asyncio.create_task(self._await_ready(until_listening, listening, until_ready))
        after = dict.fromkeys([*self.engines[1:], *self.gateways[:1]], listening)
        after |= dict.fromkeys(self.gateways[1:], self._ready)
        keeping = {
            child: asyncio.create_task(child.keep(self._on_death, after=after.get(child))) for child in self._children
        }
        try:
            await _until_any(self._verdict, readiness, *keeping.values())
            await _until_any(self._verdict, *keeping.values())
        finally:
            readiness.cancel()
            for children in (self.gateways, self.engines, self.companions):
                for child in children:
                    child.stop()
                await asyncio.gather(*(keeping[child] for child in children), return_exceptions=True)
                if children is self.gateways:
                    self._on_drained()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
        return KILLED if self._killed else self._verdict.result()

    async def _await_ready(
        self,
        until_listening: Callable[[], Awaitable[None]],
        listening: asyncio.Event,
        until_ready: Callable[[], Awaitable[None]],
    ) -> None:
        await until_listening()
        listening.set()
        await until_ready()
        self._ready.set()

    def _on_signal(self) -> None:
        assert self._verdict is not None
        if self._verdict.done():
            self._say("killed")
            for child in self._children:
                child.kill()
            self._killed = True
            return
        grace_s = max((gateway.spec.grace_s for gateway in self.gateways), default=0.0)
        limit = f": at most {grace_s:g} s for running requests" if self.gateways else ""
        self._say(f"stopping{limit}; once more to kill")
        self._verdict.set_result(0)

    def _on_death(self, child: Child, code: int) -> None:
        assert self._verdict is not None
        if self._verdict.done() or not child.spec.vital:
            return
        if code == USER_MISTAKE and child.lives == 1:
            self._verdict.set_result(USER_MISTAKE)
        elif not self._ready.is_set() and child.deaths >= TRIES_MAX:
            self._say(f"{child.spec.name} {describe_exit(code)}, {child.deaths} times before it was ready: giving up")
            self._verdict.set_result(1)
        if self._verdict.done():
            child.stop()


def python_command(package: str, options: msgspec.Struct) -> tuple[str, ...]:
    """Our package as a program.  `-P`: a directory of that name where the person stands must not be taken for it."""
    return (sys.executable, "-P", "-m", package, "--options", msgspec.json.encode(options).decode())
