"""
The admin interface of `pellucid serve`: where it listens, and the key that it asks for.

The key is read here, once, and goes to the gateways in their environment, so one that comes back needs no file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from socket import socket

from cache.errors import Misconfigured
from cache.private_file import make_private
from gateway.config import ADMIN_KEY, ADMIN_KEY_RULE, ADMIN_KEY_VARIABLE
from launch.address import bound, reachable
from launch.errors import UserError
from launch.options import ServeOptions
from launch.secret import HOW_TO_MAKE, read_secret

OPTION = "--admin-key-file"
FILE = "admin-key"
"""In the data directory, unless --admin-key-file names another."""
_WHAT = "the admin key"


@contextmanager
def admin_listener(options: ServeOptions, port: int) -> Iterator[socket | None]:
    """Its socket, beside that on `port` for the applications; None: it is off.  Raises UserError."""
    if not options.admin_port:
        yield None
        return
    if options.admin_port == port:
        raise UserError(f"--admin-port {port} is the port of the applications; choose another")
    with bound(options.admin_host, options.admin_port, "--admin-port") as listener:
        yield listener


def admin_key(options: ServeOptions, data: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """
    For the environment of the gateways; nothing where nobody needs it.  Raises UserError, without a word of it.

    Where none is named it is in the data directory, and made there if need be.
    """
    if not options.admin_port:
        return {}
    place, key = _find(options, data, environ)
    if not ADMIN_KEY.fullmatch(key.encode(errors="surrogateescape")):
        raise UserError(f"{place}: {ADMIN_KEY_RULE}; {HOW_TO_MAKE}")
    return {ADMIN_KEY_VARIABLE: key}


def admin_file(options: ServeOptions, data: Path, environ: Mapping[str, str]) -> Path | None:
    """The file that has the key; None: the environment has it."""
    if options.admin_key_file:
        return Path(options.admin_key_file).expanduser()
    return None if environ.get(ADMIN_KEY_VARIABLE) else data / FILE


def _find(options: ServeOptions, data: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """Where the key is, and the key."""
    file = admin_file(options, data, environ)
    if file is None:
        return ADMIN_KEY_VARIABLE, environ[ADMIN_KEY_VARIABLE]
    if not options.admin_key_file and not file.exists():
        try:
            make_private(file, _WHAT)
        except Misconfigured as error:
            raise UserError(str(error)) from error
    return str(file), read_secret(file, _WHAT, OPTION)


def admin_banner(options: ServeOptions, place: Path | None) -> str:
    """Where to find it, and its key."""
    host = reachable(options.admin_host)
    base = f"http://[{host}]:{options.admin_port}" if ":" in host else f"http://{host}:{options.admin_port}"
    return f"API keys, tenants and limits: {base}/admin/v1/keys, with the key in {place or ADMIN_KEY_VARIABLE}\n"
