"""
The background load: a few short chats a second, as people come, from a seed.  And how one request is sent and read.
"""

import asyncio
import random
from collections.abc import Sequence

import aiohttp
import msgspec

from bench.load import WORDS
from tests.faults.appliance import Patient, Row

DEADLINE_S = 60.0


class Background(msgspec.Struct, frozen=True):
    """What comes, whatever is wrong."""

    rate_s: float = 2.5
    words: tuple[int, int] = (10, 40)
    """Of a prompt, at least and at most."""
    tokens: tuple[int, int] = (20, 48)
    """Of an answer."""
    beginnings: int = 0
    """In turn, each prompt begins with one of so many texts; 0: each is new from its first word."""
    beginning_words: int = 0


def text(draw: random.Random, words: int) -> str:
    """Words that nobody else has in this order."""
    return " ".join(draw.choice(WORDS) for _ in range(words))


def chat(content: str, tokens: int) -> Row:
    """A body for /v1/chat/completions, whose answer has that length."""
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def beginnings_of(background: Background) -> list[str]:
    """Its texts, the same in each run."""
    draw = random.Random("beginnings")
    return [text(draw, background.beginning_words) for _ in range(background.beginnings)]


def bodies(background: Background, seed: str) -> Sequence[tuple[float, Row]]:
    """Endlessly many would be too many: of a minute, with the pause before each."""
    draw = random.Random(f"background {seed}")
    beginnings = beginnings_of(background)
    found = []
    for number in range(int(60 * background.rate_s)):
        beginning = beginnings[number % len(beginnings)] + " " if beginnings else ""
        content = f"{beginning}{number}: {text(draw, draw.randint(*background.words))}"
        found.append((draw.uniform(0.4, 1.6) / background.rate_s, chat(content, draw.randint(*background.tokens))))
    return found


async def send(patient: Patient, body: Row, route: str = "/v1/chat/completions") -> int:
    """Ask and read to the end; the status.  0: it was cut off, or never came; faults do that."""
    whole = {"model": patient.model} | body
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    try:
        async with patient.session.post(
            patient.url + route, json=whole, headers=patient.headers, timeout=timeout
        ) as answer:
            await answer.read()
            return answer.status
    except (aiohttp.ClientError, TimeoutError):
        return 0


async def introduce(patient: Patient, background: Background) -> None:
    """All beginnings have been there once."""
    for beginning in beginnings_of(background):
        await send(patient, chat(beginning, 1))


async def come(patient: Patient, background: Background, seed: str, window_s: float) -> list[int]:
    """All that come within the window, to their ends; their statuses."""
    async with asyncio.TaskGroup() as group:
        sent = []
        ends_s = asyncio.get_running_loop().time() + window_s
        for pause_s, body in bodies(background, seed):
            await asyncio.sleep(pause_s)
            if asyncio.get_running_loop().time() > ends_s:
                break
            sent.append(group.create_task(send(patient, body)))
    return [task.result() for task in sent]
