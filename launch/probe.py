"""
Waiting for the children: for the engine's socket to appear, and for the gateway to say that it is ready.

The gateway is asked over plain sockets: proxies in the environment have no say here.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from launch.supervise import Say

POLL_S = 0.05
ANSWER_S = 5.0
NEWS_S = 30.0
BODY_BYTES_MAX = 65536


async def until_any_exists(sockets: Sequence[Path], say: Say) -> None:
    """Return when an engine listens: it does when the model is loaded, in a directory that was empty before."""
    started_s = news_s = time.monotonic()
    while not any(socket.exists() for socket in sockets):
        if time.monotonic() - news_s >= NEWS_S:
            news_s = time.monotonic()
            say(f"the engine has been loading for {news_s - started_s:.0f} s")
        await asyncio.sleep(POLL_S)


async def until_connects(host: str, port: int, say: Say) -> None:
    """Return when an engine listens there."""
    started_s = news_s = time.monotonic()
    while True:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), ANSWER_S)
        except OSError:  # TimeoutError is one
            await asyncio.sleep(POLL_S)
        else:
            writer.close()
            return
        if time.monotonic() - news_s >= NEWS_S:
            news_s = time.monotonic()
            say(f"the engine has been loading for {news_s - started_s:.0f} s")


async def until_ready(host: str, port: int, say: Say) -> None:
    """Return when `/ready` answers 200; tell the person now and then that we still wait, and for what."""
    started_s = news_s = time.monotonic()
    while True:
        status, answer = await ask(host, port, "/ready")
        if status == 200:
            return
        if time.monotonic() - news_s >= NEWS_S:
            news_s = time.monotonic()
            said = f"{status} {answer[:200]}" if status else answer
            say(f"not ready after {news_s - started_s:.0f} s; /ready says: {said}")
        await asyncio.sleep(POLL_S)


async def first_look(host: str, port: int) -> tuple[int, str, bool]:
    """
    How many engines serve, how long one took to its first token, and whether a key is needed.

    The second in words; nothing if it does not say.
    """
    _, answer = await ask(host, port, "/health")
    serving = 1  # or it would not be ready
    try:
        engines = json.loads(answer)["engines"]
        serving = max(serving, len(engines))
        details = engines[0]["details"]
        cold = f"{details['first_token_s']} s from the engine's cold start to its first token, on {details['kernels']}"
    except (ValueError, LookupError, TypeError):
        cold = ""
    status, _ = await ask(host, port, "/v1/models")
    return serving, cold, status == HTTPStatus.UNAUTHORIZED


async def ask(host: str, port: int, path: str) -> tuple[int, str]:
    """`GET path`: status code and body; 0 and what is in the way."""
    try:
        return await asyncio.wait_for(_exchange(host, port, path), ANSWER_S)
    except TimeoutError:
        return 0, f"no answer within {ANSWER_S:g} s"
    except (OSError, ValueError) as error:
        return 0, f"no answer: {error}"


async def _exchange(host: str, port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        # HTTP/1.0: the server closes at the end, and neither chunks nor keep-alive are in play.
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        await writer.drain()
        answer = b""
        while len(answer) < BODY_BYTES_MAX and (data := await reader.read(BODY_BYTES_MAX)):
            answer += data
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    version, _, status = head[:13].partition(b" ")
    if not version.startswith(b"HTTP/"):
        raise ValueError("the answer is no HTTP")
    return int(status[:3]), body.decode(errors="replace")
