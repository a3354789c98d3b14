"""
Where the appliance listens: whether that is allowed, and the socket.

The socket is bound here, once, and the gateway's workers inherit it: none of them is needed for the port to stay ours.
They begin to listen on it themselves, so until the first one is there a client is refused at once.
"""

import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from launch.errors import UserError


def check_host(host: str, *, allowed: Callable[[], bool]) -> None:
    """Loopback, or it is `allowed` that others reach us, which is asked only then.  Raises UserError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"--host {host}: no such address") from error
    loopback = all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
    if not loopback and not allowed():
        raise UserError(
            f"--host {host} would serve everybody who can reach this machine, because there are no API keys yet; "
            "make one with `pellucid keys create`, keep to 127.0.0.1, or serve without keys with --insecure-open"
        )


@contextmanager
def bound(host: str, port: int, option: str) -> Iterator[socket.socket]:
    """A socket that nobody listens on yet, with a real port where `port` is 0.  Raises UserError, naming `option`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"cannot listen on {host}: no such address") from error
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is no obstacle
        try:
            listener.bind(address)
        except PermissionError as error:
            raise UserError(f"port {port} needs more rights than this user has; choose one above 1023") from error
        except OSError as error:
            if not (port and _in_use(family, host)):
                raise UserError(f"cannot listen on {host}: {error.strerror}") from error
            raise UserError(f"port {port} on {host} is in use; choose another with {option}") from error
        yield listener


def _in_use(family: int, host: str) -> bool:
    """Whether it is the port that is the trouble, and not the address."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True


def reachable(host: str) -> str:
    """An address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
