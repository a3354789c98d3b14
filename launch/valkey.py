"""
Where API keys and limits are kept: a server that the person names, or the embedded one in the data directory.

    DATA/valkey/          its log, its socket and a lock: one Valkey at a time, whoever started it (launch.hold)
    DATA/pepper           the secret of the API keys

Servers that share a data directory share its keys and limits: a key that was made, or revoked, is so for all of them.
"""

from pathlib import Path

from cache import embedded
from cache.errors import Misconfigured
from cache.pepper import FILE
from launch.errors import UserError
from launch.hold import holding
from launch.options import ServeOptions
from launch.supervise import ChildSpec

DIRECTORY = "valkey"
GRACE_S = 5.0  # it writes its log to disk


def pepper_file(options: ServeOptions, data: Path) -> Path:
    """Where the secret of the API keys is, or will be."""
    return Path(options.pepper_file).expanduser().absolute() if options.pepper_file else data / FILE


def embedded_socket(folder: Path) -> Path:
    """What a program with the run directory `folder` calls the embedded server's socket."""
    return folder / DIRECTORY / embedded.SOCKET


def log_file(data: Path) -> Path:
    """What the embedded server says: nothing, unless something is wrong."""
    return data / DIRECTORY / "log"


def embedded_valkey(data: Path, folder: Path) -> tuple[str, ChildSpec]:
    """
    The embedded server's URL, and the program to keep alive.  Raises UserError.

    It is named through a link in the run directory `folder`: a path to a socket must be short, and that one is.
    """
    directory = data / DIRECTORY
    link = folder / DIRECTORY
    try:
        embedded.prepare(directory)
        link.symlink_to(directory)
        command = holding(directory / "lock", log_file(data), embedded.server_command(link))
        url = embedded.socket_url(link)
    except OSError as error:
        raise UserError(f"cannot use {data}: {error.strerror}; choose another place with --data-dir") from error
    except Misconfigured as error:
        raise UserError(str(error)) from error
    return url, ChildSpec(name="valkey", command=command, grace_s=GRACE_S, vital=False, log=log_file(data))
