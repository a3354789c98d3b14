"""
Where the processes of one `pellucid serve` have their sockets.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.errors import UserError
from launch.fleet import engine_socket, worker_socket
from launch.options import REPLICAS_MAX, WORKERS_MAX
from launch.valkey import embedded_socket

SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un holds 108, with the zero at the end
RUN_DIR_PREFIX = "serve-"


@contextmanager
def run_dir(data: Path) -> Iterator[Path]:
    """
    A directory for sockets, for us alone; gone afterwards.  Raises UserError.

    It is held by a lock, so that what a killed supervisor left can be told from what another one uses.
    """
    try:
        base = data / "run"
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in base.glob(RUN_DIR_PREFIX + "*"):
            _remove_if_left(left)
        folder = Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX, dir=base))
        last = (engine_socket(folder, REPLICAS_MAX - 1), worker_socket(folder, WORKERS_MAX - 1))
        sockets = (*last, embedded_socket(folder))
        if any(len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX for path in sockets):
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="pellucid-", dir="/tmp"))  # TMPDIR may be as long as the other
        lock = (folder / "lock.new").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock.new").rename(folder / "lock")  # under that name it was never free
    except OSError as error:
        raise UserError(f"cannot use {data}: {error.strerror}; choose another place with --data-dir") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _remove_if_left(folder: Path) -> None:
    """Remove a run directory that no living supervisor holds."""
    try:
        with (folder / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # held, or another one is just being made
        return
