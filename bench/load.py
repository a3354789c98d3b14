"""
The load: streamed completions, greedy, from a seed.

It shares the processors with the server, so while the clock runs it only keeps what arrives and when; all parsing comes
afterwards.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import pairwise

import aiohttp
import msgspec

DEADLINE_S = 600.0  # of one request
WARM_TOKENS = 8
WARM_REQUEST = -1  # its prompt is nobody else's
WORDS = (
    "above", "across", "apple", "autumn", "bank", "bell", "bird", "blue", "boat", "bridge", "city", "cloud", "door",
    "early", "field", "fire", "flower", "forest", "friend", "garden", "green", "hill", "horse", "house", "island",
    "king", "lake", "leaf", "letter", "light", "market", "moon", "morning", "mountain", "music", "night", "river",
)  # fmt: skip


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients do."""

    streams: int
    requests: int
    """Of each stream, one behind the other."""
    prompt_words: int
    output_tokens: int
    seed: int
    output_spread: int = 0
    """Lengths differ from `output_tokens` by up to that: with equal ones all streams begin and end together."""


class ServerError(Exception):
    """The server has answered something else than the whole stream that was asked for."""


class Answer(msgspec.Struct, frozen=True):
    """One finished request."""

    first_ns: int
    """From sending it to the first text."""
    gaps_ns: tuple[int, ...]
    """Between one event with text and the next."""
    prompt_tokens: int
    output_tokens: int


class Answers(msgspec.Struct, frozen=True):
    """All of one run."""

    wall_ns: int
    """From the first request to the end of the last answer."""
    answers: tuple[Answer, ...]

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(answer.output_tokens for answer in self.answers)


async def warm(session: aiohttp.ClientSession, url: str, model: str, load: Load) -> None:
    """One short request of each stream.  Raises ServerError."""
    short = msgspec.structs.replace(load, output_tokens=WARM_TOKENS, output_spread=0)
    bodies = [_body(model, short, stream, WARM_REQUEST) for stream in range(load.streams)]
    await asyncio.gather(*(_ask(session, url, body) for body in bodies))


async def drive(session: aiohttp.ClientSession, url: str, model: str, load: Load) -> Answers:
    """The whole load on the server at `url`.  Raises ServerError."""
    bodies = [[_body(model, load, stream, number) for number in range(load.requests)] for stream in range(load.streams)]

    async def stream(own: Sequence[dict[str, object]]) -> list[tuple[int, list[tuple[int, bytes]]]]:
        return [await _ask(session, url, body) for body in own]

    started_ns = time.monotonic_ns()
    raw = await asyncio.gather(*(stream(own) for own in bodies))
    wall_ns = time.monotonic_ns() - started_ns
    return Answers(wall_ns, tuple(read_answer(sent_ns, lines) for own in raw for sent_ns, lines in own))


def _body(model: str, load: Load, stream: int, number: int) -> dict[str, object]:
    draw = random.Random(f"{load.seed} {stream} {number}")
    return {
        "model": model,
        "prompt": " ".join(draw.choice(WORDS) for _ in range(load.prompt_words)),
        "max_tokens": load.output_tokens + draw.randint(-load.output_spread, load.output_spread),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, object]
) -> tuple[int, list[tuple[int, bytes]]]:
    """When it was sent, and each line of the answer with the time when it came."""
    sent_ns = time.monotonic_ns()
    try:
        async with session.post(
            f"{url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=DEADLINE_S)
        ) as answer:
            if answer.status != 200:
                raise ServerError(f"status {answer.status}: {(await answer.text())[:200]}")
            return sent_ns, [(time.monotonic_ns(), line) async for line in answer.content]
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ServerError(f"{type(error).__name__}: {error}") from error


def read_answer(sent_ns: int, lines: Sequence[tuple[int, bytes]]) -> Answer:
    """An answer from its lines with their times.  Raises ServerError if it is not whole."""
    came_ns: list[int] = []
    usage: dict[str, int] = {}
    done = False
    for at_ns, line in lines:
        data = line.strip().removeprefix(b"data: ")
        if data == line.strip():  # an empty line, a comment
            continue
        if data == b"[DONE]":
            done = True
            continue
        event = msgspec.json.decode(data, type=dict[str, object])
        if "error" in event:
            raise ServerError(f"in the stream: {event['error']}")
        match event:
            case {"choices": [{"text": str(text)}]} if text:
                came_ns.append(at_ns)
        match event:
            case {"usage": {"prompt_tokens": int(prompt), "completion_tokens": int(output)}}:
                usage = {"prompt": prompt, "output": output}
    if not done or not usage or not came_ns:
        raise ServerError("the stream was cut off")
    gaps_ns = tuple(later - sooner for sooner, later in pairwise(came_ns))
    return Answer(came_ns[0] - sent_ns, gaps_ns, usage["prompt"], usage["output"])
