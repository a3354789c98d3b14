"""
The secret that gateways and engines of different machines must know (engine.handshake).

It is in a file of mode 0600 or in the environment, and goes to the processes in theirs: never on a command line.
"""

from collections.abc import Mapping
from pathlib import Path

from cache.errors import Misconfigured
from cache.private_file import read_private
from engine.handshake import SECRET_VARIABLE, HandshakeError, secret_in
from launch.errors import UserError
from launch.options import ServeOptions

OPTION = "--engine-secret-file"


def engine_secret(options: ServeOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """For the environment of the processes.  Raises UserError: there is none, or it is none."""
    secret = environ.get(SECRET_VARIABLE, "")
    if options.engine_secret_file:
        secret = _read(Path(options.engine_secret_file).expanduser())
    try:
        found = secret_in({SECRET_VARIABLE: secret})
    except HandshakeError as error:
        raise UserError(str(error).replace(SECRET_VARIABLE, options.engine_secret_file or SECRET_VARIABLE)) from error
    if not found:
        raise UserError(
            f"engines on a network need a secret: {OPTION}, or {SECRET_VARIABLE}; "
            "`(umask 077; openssl rand -hex 32 > FILE)` makes one"
        )
    return {SECRET_VARIABLE: secret}


def _read(file: Path) -> str:
    try:
        secret = read_private(file, "the secret of the engines")
    except Misconfigured as error:
        raise UserError(f"{OPTION}: {error}") from error
    if secret is None:
        raise UserError(f"{OPTION}: {file}: no such file")
    if b"\0" in secret or b"\n" in secret:
        raise UserError(f"{OPTION}: {file}: one line of text is expected")
    return secret.decode(errors="surrogateescape")
