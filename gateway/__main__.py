"""
`python -m gateway --options JSON`: the gateway process.

    0   stopped by a signal, after draining
    2   cannot start: one line on stderr says why
"""

import argparse
import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import structlog
import uvicorn
import uvloop

from cache.errors import Misconfigured
from engine.handshake import SECRET_VARIABLE, HandshakeError, secret_in
from gateway.app import Application
from gateway.config import ADMIN_KEY, ADMIN_KEY_RULE, ADMIN_KEY_VARIABLE, REDIS_URL_VARIABLE, GatewayOptions
from gateway.front import Front
from gateway.protocol import BACKLOG, http_config
from gateway.tokens import load
from gateway.vocabulary import VocabularyError
from telemetry import logs, withhold
from telemetry.export import ExportConfigError

EXIT_CANNOT_START = 2

_ADDRESS = re.compile(r"unix:.+|tcp:.+:[0-9]{1,5}")


class CannotStart(Exception):
    """One line for the operator."""


class Server(uvicorn.Server):
    """uvicorn without its signal handling: ours drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by `serve`."""
        yield


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m gateway", description="The Pellucid gateway process.")
    parser.add_argument("--options", required=True, metavar="JSON", help="GatewayOptions as JSON")
    raw = parser.parse_args(arguments).options
    with contextlib.ExitStack() as stack:
        try:
            options = _options(raw)
            logs.configure(options.log_level, options.log_format, withheld=True)
            withhold.install()
            if options.workers > 1:  # in each line of this process: the loop's context is a copy of this one
                stack.enter_context(structlog.contextvars.bound_contextvars(worker=options.worker))
            listeners = [stack.enter_context(open_listener(options.host, options.port, options.listener))]
            if options.admin_port:
                opened = open_listener(options.admin_host, options.admin_port, options.admin_listener)
                listeners.append(stack.enter_context(opened))
            runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
            text = load(Path(options.model)) if options.engines else None
            if text is not None:
                stack.callback(text.close)
                runner.run(text.check())
            application = Application(options, text)
        except (CannotStart, VocabularyError, ExportConfigError, Misconfigured, ValueError) as error:
            print(f"gateway: {error}", file=sys.stderr)
            return EXIT_CANNOT_START
        gc.collect()
        gc.freeze()  # What is loaded stays: no collection need walk through it while tokens wait.
        runner.run(serve(application, list(zip(application.fronts, listeners, strict=True))))
    return 0


def _options(raw: str) -> GatewayOptions:
    try:
        options = msgspec.json.decode(raw, type=GatewayOptions)
    except msgspec.DecodeError as error:
        raise CannotStart(f"bad options: {error}") from None
    if not options.engines and not options.upstreams:
        raise CannotStart("bad options: at least one engine or upstream is needed")
    if not 0 <= options.worker < options.workers:
        raise CannotStart(f"bad options: there is no worker {options.worker} of {options.workers}")
    for address in options.engines:
        if not _ADDRESS.fullmatch(address):
            raise CannotStart(f"bad options: engine {address!r} is neither unix:PATH nor tcp:HOST:PORT")
    try:
        secret = secret_in(os.environ)
    except HandshakeError as error:
        raise CannotStart(str(error)) from None
    if not secret and any(address.startswith("tcp:") for address in options.engines):
        raise CannotStart(f"engines on a network need a secret: --engine-secret-file, or {SECRET_VARIABLE}")
    redis_url = os.environ.get(REDIS_URL_VARIABLE, options.redis_url)
    admin_key = os.environ.get(ADMIN_KEY_VARIABLE, "").encode(errors="surrogateescape")
    if options.admin_port and not redis_url:
        raise CannotStart("bad options: the admin interface needs a server that keeps keys")
    if options.admin_port and not ADMIN_KEY.fullmatch(admin_key):
        raise CannotStart(f"the admin interface needs a key in {ADMIN_KEY_VARIABLE}: {ADMIN_KEY_RULE}")
    return msgspec.structs.replace(options, redis_url=redis_url, engine_secret=secret, admin_key=admin_key)


def open_listener(host: str, port: int, inherited: int) -> socket.socket:
    """
    A listening socket, of our own or shared with other workers.  Raises CannotStart.

    Workers share one socket that the supervisor holds, and not a port (SO_REUSEPORT): the connections that wait are
    the kernel's, any worker takes them, and none is lost with a worker that dies, or waits for one that is stuck.
    """
    if inherited < 0:
        return listen(host, port)
    where = f"{host}:{port}"
    try:
        listener = socket.socket(fileno=inherited)
    except OSError as error:
        raise CannotStart(f"bad options: no socket for {where} was inherited: {error.strerror}") from None
    return _begin(listener, where)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.  Raises CannotStart."""
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotStart(f"cannot listen on {where}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise CannotStart(f"cannot listen on {where}: {error.strerror}") from None
    return _begin(listener, where)


def _begin(listener: socket.socket, where: str) -> socket.socket:
    try:
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise CannotStart(f"cannot listen on {where}: {error.strerror}") from None
    return listener


async def serve(application: Application, doors: Sequence[tuple[Front, socket.socket]]) -> None:
    """Serve all `doors`, the first of them the application's, until SIGTERM or SIGINT, then drain."""
    servers = [(Server(http_config(front, front.options)), listener) for front, listener in doors]
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            application.gateway.cut_off()  # The second one: somebody is in a hurry.
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    serving = [asyncio.create_task(server.serve(sockets=[listener]), name="http") for server, listener in servers]
    stopping = asyncio.create_task(stop.wait(), name="signals")
    await asyncio.wait({*serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        structlog.get_logger("pellucid.gateway").info("draining", running=len(application.gateway.running))
        await application.gateway.drain()
    stopping.cancel()
    for (server, _), task in reversed(list(zip(servers, serving, strict=True))):
        server.should_exit = True
        await task  # the application is the last: what others have counted is told by it


if __name__ == "__main__":
    sys.exit(main())
