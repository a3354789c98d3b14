"""
The API keys as the command line reaches them: through the server that runs, or one that is started for as long.
"""

import asyncio
import contextlib
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from cache import embedded
from cache.connection import Store
from cache.errors import CacheError, Unavailable
from cache.keys import Keys
from cache.pepper import UNSET, pepper_for_digest, read_pepper
from cache.redis_url import parse_redis_url
from launch.errors import UserError
from launch.leash import leashed
from launch.options import ServeOptions
from launch.run_dir import run_dir
from launch.store import data_dir
from launch.valkey import DIRECTORY, GRACE_S, embedded_valkey, log_file, pepper_file

START_S = 30.0
POLL_S = 0.02
COMMAND_TIMEOUT_MS = 5000
"""A person waits longer than a request."""
_Result = TypeVar("_Result")


def with_keys(
    options: ServeOptions,
    environ: Mapping[str, str],
    do: Callable[[Keys], Awaitable[_Result]],
    *,
    create: bool = False,
) -> _Result:
    """
    What `do` answers, given the keys.  Raises UserError.

    Args:
        options: where they are.
        environ: where the pepper may be.
        do: what is to be done.
        create: whether this makes a digest, for which there must be a pepper: with the first key it is made.
    """
    data = data_dir(options.data_dir, dict(environ))
    file = pepper_file(options, data)
    try:
        read_pepper(file, environ)  # one that cannot be used is said before anything is started
        with _server(options, data) as url:
            return asyncio.run(_ask(url, file, environ, do, create=create))
    except Unavailable as error:
        raise UserError(f"the server that keeps the API keys does not answer: {error}") from error
    except CacheError as error:
        raise UserError(str(error)) from error


def anything(options: ServeOptions, environ: Mapping[str, str]) -> bool:
    """Whether a server was ever there to keep something.  Raises UserError."""
    return bool(options.redis_url) or (data_dir(options.data_dir, dict(environ)) / DIRECTORY).exists()


def any_keys(options: ServeOptions, environ: Mapping[str, str]) -> bool:
    """Whether at least one key was ever made.  Raises UserError."""
    return anything(options, environ) and with_keys(options, environ, lambda keys: keys.count()) > 0


async def _ask(
    url: str, file: Path, environ: Mapping[str, str], do: Callable[[Keys], Awaitable[_Result]], *, create: bool
) -> _Result:
    store = Store(parse_redis_url(url), connect_timeout_ms=COMMAND_TIMEOUT_MS, command_timeout_ms=COMMAND_TIMEOUT_MS)
    try:
        keys = Keys(store, read_pepper(file, environ) or UNSET)
        if create:
            keys = Keys(store, await pepper_for_digest(file, environ, keys.count))
        return await do(keys)
    finally:
        await store.aclose()


@contextlib.contextmanager
def _server(options: ServeOptions, data: Path) -> Iterator[str]:
    """The URL of a server that answers, for as long as it is needed.  Raises UserError."""
    if options.redis_url:
        yield options.redis_url
        return
    with run_dir(data) as folder:
        url, spec = embedded_valkey(data, folder)
        process = subprocess.Popen(leashed(spec.command), stdin=subprocess.DEVNULL)
        try:
            asyncio.run(_until_answers(process, folder / DIRECTORY, log_file(data)))
            yield url
        finally:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _until_answers(process: "subprocess.Popen[bytes]", directory: Path, log: Path) -> None:
    """Until a server in `directory` answers: ours, or the one that we would take over from."""
    try:
        async with asyncio.timeout(START_S):
            while not await embedded.answers(directory):
                if process.poll() is not None:
                    raise UserError(f"the embedded Valkey does not start: {_last_line(log)}")
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise UserError(f"the embedded Valkey does not answer within {START_S:g} s") from None


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"{log}: {error.strerror}"
    return next((line for line in reversed(lines) if line.strip()), "it says nothing")
