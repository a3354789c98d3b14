"""
Secrets that a person gives: that which gateways and engines of different machines must know (engine.handshake), and how
others are read.

One is in a file of mode 0600 or in the environment, and goes to the processes in theirs: never on a command line.
"""

from collections.abc import Mapping
from pathlib import Path

from cache.errors import Misconfigured
from cache.private_file import read_private
from engine.handshake import SECRET_VARIABLE, HandshakeError, secret_in
from launch.errors import UserError
from launch.options import ServeOptions

OPTION = "--engine-secret-file"
HOW_TO_MAKE = "`(umask 077; openssl rand -hex 32 > FILE)` makes one"


def engine_secret(options: ServeOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """For the environment of the processes.  Raises UserError: there is none, or it is none."""
    secret = environ.get(SECRET_VARIABLE, "")
    if options.engine_secret_file:
        secret = read_secret(Path(options.engine_secret_file).expanduser(), "the secret of the engines", OPTION)
    try:
        found = secret_in({SECRET_VARIABLE: secret})
    except HandshakeError as error:
        raise UserError(str(error).replace(SECRET_VARIABLE, options.engine_secret_file or SECRET_VARIABLE)) from error
    if not found:
        raise UserError(f"engines on a network need a secret: {OPTION}, or {SECRET_VARIABLE}; {HOW_TO_MAKE}")
    return {SECRET_VARIABLE: secret}


def read_secret(file: Path, what: str, option: str) -> str:
    """One line of text that nobody else may read.  Raises UserError, without a word of it."""
    try:
        secret = read_private(file, what)
    except Misconfigured as error:
        raise UserError(f"{option}: {error}") from error
    if secret is None:
        raise UserError(f"{option}: {file}: no such file; {HOW_TO_MAKE}")
    if b"\0" in secret or b"\n" in secret:
        raise UserError(f"{option}: {file}: one line of text is expected")
    return secret.decode(errors="surrogateescape")
