"""
The faults: what is done to an appliance, how strongly, and where it hurts.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from tests.faults.appliance import POLL_S, Patient, Row, Setup
from tests.faults.dials import Dial
from tests.faults.load import Background, chat, send, text
from tests.http.scripted_upstream import UPSTREAM_MODEL, Visit, well

BUSY = "while True: pass"
Hurts = Literal["first_token_ns", "gap_max_ns", "e2e_ns"]
Affliction = Callable[[Patient, random.Random], Awaitable[None]]
"""Does it until it is cancelled, and takes it back then."""


async def nothing(_patient: Patient, _draw: random.Random) -> None:
    """The fault is in the setup, or in the background itself."""
    await asyncio.Event().wait()


class Strength(msgspec.Struct, frozen=True):
    """One fault, as strong as it says."""

    label: str
    afflict: Affliction = nothing
    setup: Setup = Setup()
    background: Background = Background()
    longer_s: float = 0.0
    """By how much more than others."""


class Fault(msgspec.Struct, frozen=True):
    """A cause that the doctor knows."""

    cause: str
    strengths: tuple[Strength, Strength, Strength]
    hurts: Hurts | None
    """By what the request is chosen that `why` is asked about: it has the most of it.  None: it slows nobody yet."""


def turned(dial: Dial, value: float) -> Affliction:
    """A dial is at this value."""

    async def afflict(patient: Patient, _draw: random.Random) -> None:
        patient.dials[dial] = value
        try:
            await asyncio.Event().wait()
        finally:
            patient.dials[dial] = 0

    return afflict


def clients(count: int, body: Callable[[random.Random], Row], route: str = "/v1/chat/completions") -> Affliction:
    """So many, each of which asks anew as soon as it has its answer."""

    async def one(patient: Patient, draw: random.Random) -> None:
        while True:
            if await send(patient, body(draw), route) != 200:
                await asyncio.sleep(POLL_S)

    async def afflict(patient: Patient, draw: random.Random) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one(patient, random.Random(draw.random())))

    return afflict


def asking(words: int, tokens: int) -> Callable[[random.Random], Row]:
    """Chats of that size."""
    return lambda draw: chat(text(draw, words), tokens)


def token_ids(prompt: int, tokens: int) -> Callable[[random.Random], Row]:
    """Completions of exactly so many tokens."""

    def body(draw: random.Random) -> Row:
        ids = [draw.randrange(1000, 40_000) for _ in range(prompt)]
        return {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}

    return body


def visits(period_s: float, words: int) -> Affliction:
    """A tenant with a very long prompt comes now and then."""

    async def afflict(patient: Patient, draw: random.Random) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(period_s)
                group.create_task(send(patient, chat(text(draw, words), 4)))

    return afflict


def slow_readers(count: int, pause_s: float) -> Affliction:
    """Clients that ask for much and read nothing for a while, and then on to the end."""

    async def one(patient: Patient, draw: random.Random) -> None:
        address = urlsplit(patient.url)
        body = chat(text(draw, 20), 128) | {"model": patient.model, "logprobs": True, "top_logprobs": 20}
        data = msgspec.json.encode(body)
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            f"host: {address.netloc}",
            "content-type: application/json",
            f"content-length: {len(data)}",
            "connection: close",
        ]
        head = "\r\n".join(lines) + "\r\n\r\n"
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # on loopback it is 64 KB, and 2.5 MB are on the way
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        with raw:
            await loop.sock_connect(raw, (address.hostname, address.port))
            await loop.sock_sendall(raw, head.encode() + data)
            await asyncio.sleep(pause_s)
            first = await loop.sock_recv(raw, 1 << 16)
            assert first.startswith(b"HTTP/1.1 200"), first
            while await loop.sock_recv(raw, 1 << 16):
                pass

    async def afflict(patient: Patient, draw: random.Random) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one(patient, draw))

    return afflict


def killed(times: int, after_s: float) -> Affliction:
    """The engine, whenever it has served for a while and has something to do."""

    async def afflict(patient: Patient, _draw: random.Random) -> None:
        for _ in range(times):
            while not await patient.appliance.serving():
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(after_s)
            while not await patient.works():
                await asyncio.sleep(POLL_S)
            pid = patient.engine()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while await patient.appliance.serving():
                await asyncio.sleep(POLL_S)
        await asyncio.Event().wait()

    return afflict


def late_store(delay_s: float) -> Affliction:
    """The server for keys and limits answers that much later."""

    async def afflict(patient: Patient, _draw: random.Random) -> None:
        assert patient.proxy is not None
        patient.proxy.delay_s = delay_s
        try:
            await asyncio.Event().wait()
        finally:
            patient.proxy.delay_s = 0

    return afflict


def slow_upstream(delay_s: float) -> Affliction:
    """Some ask it, and it thinks for that long before it says anything."""
    asking_it = clients(2, lambda draw: chat(text(draw, 20), 8) | {"model": UPSTREAM_MODEL})

    async def behave(visit: Visit) -> None:
        await asyncio.sleep(delay_s)
        await well(visit)

    async def afflict(patient: Patient, draw: random.Random) -> None:
        assert patient.upstream is not None
        patient.upstream.behaviour = behave
        await asking_it(patient, draw)

    return afflict


def hogs(count: int) -> Affliction:
    """Programs that are always busy."""

    async def afflict(_patient: Patient, _draw: random.Random) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                # Of a session of its own, as somebody else's is: the kernel may share processors out by sessions.
                hog = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True))
                stack.callback(hog.kill)
            await asyncio.Event().wait()

    return afflict


@contextlib.asynccontextmanager
async def afflicted(patient: Patient, strength: Strength, seed: str) -> AsyncIterator[None]:
    """It suffers from it until the block ends."""
    suffering = asyncio.create_task(asyncio.wait_for(strength.afflict(patient, random.Random(seed)), None))
    try:
        yield
        if suffering.done():
            suffering.result()
    finally:
        suffering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await suffering


def three(make: Callable[[float], Strength], *values: float) -> tuple[Strength, Strength, Strength]:
    """The same with three numbers."""
    weak, middle, strong = (make(value) for value in values)
    return weak, middle, strong


def by_dial(cause: str, dial: Dial, hurts: Hurts | None, values: tuple[float, float, float], setup: Setup) -> Fault:
    """A fault whose strength is the value of a dial."""
    return Fault(cause, three(lambda value: Strength(f"{value:g}", turned(dial, value), setup), *values), hurts)


DEFAULT = Setup()
TWO_RANKS = Setup(("--tensor-parallel", "2"))
TWO_REPLICAS = Setup(("--replicas", "2"))
SMALL_BATCH = Setup(("--max-batch", "4"))
SMALL_KV = Setup(("--kv-memory", "16MiB"))
TINY_KV = Setup(("--kv-memory", "8MiB"))
NO_PREFIXES = Setup(("--no-prefix-cache",))
LONG_STEPS = Setup(("--max-step-tokens", "4096"))
IN_TORCH = (("PELLUCID_KERNELS", "torch"),)
WITH_KEYS = Setup(keys=True)
NO_LOAD = Background(rate_s=1.0)
STORIES = Background(rate_s=2.0, tokens=(100, 200))
SAGAS = Background(rate_s=1.5, tokens=(250, 350))  # who comes while the loop is held up is not known to have waited
MANY_STORIES = Background(rate_s=5.0, tokens=(60, 100))
LONG_PROMPTS = Background(rate_s=1.0, words=(1000, 1300), tokens=(8, 16))


def common(words: float) -> Background:
    """So many words of 400 are the same for all."""
    rest = 400 - int(words)
    return Background(rate_s=1.5, words=(rest, rest + 10), tokens=(4, 8), beginnings=1, beginning_words=int(words))


def _rotation(beginnings: float) -> Background:
    """So many long beginnings in turn."""
    return Background(1.5, (8, 16), (4, 8), beginnings=int(beginnings), beginning_words=350)


def _step_tokens(tokens: float) -> Strength:
    setup = Setup(("--max-step-tokens", f"{tokens:g}"))
    return Strength(f"{tokens:g} tokens", setup=setup, background=LONG_PROMPTS)


FAULTS = (
    Fault(
        "concurrency",
        three(lambda n: Strength(f"{n:g} clients", clients(int(n), asking(20, 32)), SMALL_BATCH), 8, 16, 32),
        "first_token_ns",
    ),
    Fault(
        "kv_starvation",
        three(lambda n: Strength(f"{n:g} clients", clients(int(n), asking(300, 150)), SMALL_KV, NO_LOAD), 6, 9, 12),
        "e2e_ns",
    ),
    Fault(
        "fragmentation",
        three(
            lambda n: Strength(
                f"{n:g} clients", clients(int(n), token_ids(17, 8), "/v1/completions"), TINY_KV, NO_LOAD
            ),
            40, 48, 60,
        ),
        "first_token_ns",
    ),
    Fault(
        "prefix_off",
        three(lambda n: Strength(f"{n / 4:g} %", setup=NO_PREFIXES, background=common(n)), 240, 320, 380),
        "first_token_ns",
    ),
    Fault(
        "prefix_lost",
        three(lambda n: Strength(f"{n:g} texts", setup=SMALL_KV, background=_rotation(n)), 5, 6, 7),
        "first_token_ns",
    ),
    Fault(
        "speculation",
        three(
            lambda n: Strength(f"{n:g} tokens", turned("wrong_guesses", n), background=MANY_STORIES), 6, 10, 15
        ),
        "e2e_ns",
    ),
    Fault("step_tokens", three(_step_tokens, 32, 24, 16), "first_token_ns"),
    Fault(
        "dequantize",
        (
            Strength("fp8", setup=Setup(("--quantization", "fp8"))),
            Strength("torch, fp8", setup=Setup(("--quantization", "fp8"), IN_TORCH)),
            Strength("torch, nf4", setup=Setup(("--quantization", "nf4"), IN_TORCH)),
        ),
        "e2e_ns",
    ),
    by_dial("straggler", "late_rank_s", "e2e_ns", (0.005, 0.010, 0.020), TWO_RANKS),
    by_dial("interconnect", "slow_wire_s", "e2e_ns", (0.0002, 0.0004, 0.0008), TWO_RANKS),
    Fault("client", three(lambda s: Strength(f"{s:g} s", slow_readers(2, s)), 3, 4.5, 6), "e2e_ns"),
    by_dial("garbage_collection", "collection_steps", "gap_max_ns", (24, 12, 6), DEFAULT),
    Fault(
        "event_loop",
        three(
            lambda s: Strength(f"{s * 1e3:g} ms", turned("loop_block_s", s), background=SAGAS), 0.2, 0.4, 0.6
        ),
        "gap_max_ns",
    ),
    by_dial("memory_growth", "leak_bytes_s", None, (2e6, 5e6, 10e6), DEFAULT),
    Fault(
        "redis",
        three(lambda s: Strength(f"{s * 1e3:g} ms", late_store(s), WITH_KEYS), 0.02, 0.05, 0.1),
        "first_token_ns",
    ),
    Fault(
        "upstream",
        three(lambda s: Strength(f"{s * 1e3:g} ms", slow_upstream(s), Setup(upstream=True)), 0.3, 0.7, 1.5),
        "e2e_ns",
    ),
    Fault("cpu_starvation", three(lambda n: Strength(f"{n:g} hogs", hogs(int(n))), 2, 4, 8), "e2e_ns"),
    Fault(
        "neighbours",
        three(lambda n: Strength(f"{n:g} words", visits(1.0, int(n)), LONG_STEPS, SAGAS), 1000, 1400, 1800),
        "gap_max_ns",
    ),
    Fault(
        "cold_start",
        three(
            lambda n: Strength(f"{n:g} times", killed(int(n), 2.0), background=STORIES, longer_s=9 * (n - 1)), 1, 2, 3
        ),
        "e2e_ns",
    ),
)  # fmt: skip
