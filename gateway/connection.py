"""
The way to an engine: a socket, and on a network the proof that both sides know the secret, before anything else.
"""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator

from engine.handshake import GREETING_BYTES, HANDSHAKE_S, NONCE_BYTES, PROOF_BYTES, TCP_OPTIONS, Answer, HandshakeError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CONNECT_TIMEOUT_S = 5.0


class CannotConnect(Exception):
    """Why not, in words for the operator; none where an engine on this machine is simply not there yet."""


@contextlib.asynccontextmanager
async def connection(address: str, secret: bytes) -> AsyncIterator[Streams]:
    """A connection to `unix:PATH` or `tcp:HOST:PORT`, closed at the end.  Raises CannotConnect."""
    kind, _, where = address.partition(":")
    reader, writer = await (_open_local(where) if kind == "unix" else _open_remote(where))
    try:
        if kind != "unix":
            await _shake_hands(reader, writer, secret)
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _open_local(path: str) -> Streams:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await asyncio.open_unix_connection(path)
    except (FileNotFoundError, ConnectionRefusedError):
        raise CannotConnect from None
    except TimeoutError:
        raise CannotConnect(f"no answer within {CONNECT_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise CannotConnect(_in_words(error)) from None


def _in_words(error: OSError) -> str:
    """Without the address, which asyncio puts there: whoever may ask whether we are ready need not know it."""
    return os.strerror(error.errno) if error.errno else type(error).__name__


async def _open_remote(where: str) -> Streams:
    host, _, port = where.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
    except TimeoutError:
        raise CannotConnect(f"no answer within {CONNECT_TIMEOUT_S:g} s") from None
    except socket.gaierror:
        raise CannotConnect("no such host") from None
    except OSError as error:
        raise CannotConnect(_in_words(error)) from None
    line = writer.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_OPTIONS:
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return reader, writer


async def _shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Nothing is said to whom does not know the secret, but that we do.  Raises CannotConnect."""
    greeted = False
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            greeting = await reader.readexactly(GREETING_BYTES)
            greeted = True
            answer = Answer(secret, greeting, secrets.token_bytes(NONCE_BYTES))
            writer.write(answer.text)
            answer.check(await reader.readexactly(PROOF_BYTES))
    except HandshakeError as error:
        raise CannotConnect(str(error)) from None
    except TimeoutError:
        raise CannotConnect(f"the handshake took longer than {HANDSHAKE_S:g} s") from None
    except (OSError, EOFError):
        reason = "the engine refuses our secret" if greeted else "it hung up: no engine, or one with too many gateways"
        raise CannotConnect(reason) from None
