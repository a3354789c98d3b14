"""
Parsers of single settings.  Each takes what a person wrote, and raises ValueError with the words that go behind the
name of the place where it stood.
"""

import difflib
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from urllib.parse import urlsplit

from cache.errors import Misconfigured
from cache.redis_url import OPTION, parse_redis_url

DRAFTS_AUTO_MAX = 15  # a step of 16 rows
DRAFTS_MAX = 63
MICROS = 1_000_000
MICROS_MAX = 10**15
"""The largest amount of money that the limits count with."""


def whole(*, least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A parser of whole numbers within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            raise ValueError(f"{value} is not in {least} .. {most}")
        return value

    return parse


def seconds(*, least: float, most: float = 86400.0) -> Callable[[str], float]:
    """A parser of seconds within bounds."""

    def parse(text: str) -> float:
        try:
            value = float(text.removesuffix("s"))
        except ValueError:
            raise ValueError(f"{text!r} is not a number of seconds") from None
        if not least <= value <= most:  # also false for NaN
            raise ValueError(f"{text} is not in {least:g} .. {most:g} seconds")
        return value

    return parse


def parse_share(text: str) -> float:
    """A share of a whole."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:  # also false for NaN
        raise ValueError(f"{text} is not in 0 .. 1")
    return value


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser of a closed vocabulary."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}{nearest(text.lower(), choices)}")
        return text.lower()

    return parse


def parse_amount(text: str) -> int:
    """An amount of money, in millionths: 0.15 is 150000."""
    try:
        micros = Decimal(text) * MICROS
    except InvalidOperation:
        micros = Decimal("nan")
    if not micros.is_finite():
        raise ValueError(f"{text!r} is no amount of money")
    if not 0 <= micros <= MICROS_MAX:
        raise ValueError(f"{text} is not in 0 .. {MICROS_MAX // MICROS}")
    if micros != int(micros):
        raise ValueError(f"{text} has more than six decimals")
    return int(micros)


def parse_speculative(text: str) -> int:
    """How many tokens may be guessed ahead; 0: none."""
    words = {"auto": DRAFTS_AUTO_MAX, "off": 0}
    if text.lower() in words:
        return words[text.lower()]
    try:
        count = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither auto nor off nor a number") from None
    if not 0 <= count <= DRAFTS_MAX:
        raise ValueError(f"{count} is not in 0 .. {DRAFTS_MAX}")
    return count


def parse_switch(text: str) -> bool:
    """On or off."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def parse_text(text: str) -> str:
    """Any text but none."""
    if not text.strip():
        raise ValueError("is empty")
    return text


def parse_url(text: str) -> str:
    """A base URL, or nothing."""
    if text and not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is not an http:// or https:// URL")
    return text


def parse_redis(text: str) -> str:
    """The URL of a server, or nothing.  The error repeats nothing of it."""
    if text:
        try:
            parse_redis_url(text)
        except Misconfigured as error:
            raise ValueError(str(error).removeprefix(f"{OPTION}: ")) from None
    return text


def parse_engines(text: str) -> tuple[str, ...]:
    """`tcp://HOST:PORT`, separated by commas -> `tcp:HOST:PORT`, as the processes call them."""
    return tuple(parse_engine(part) for part in parse_list(text))


def parse_engine(text: str) -> str:
    """`tcp://HOST:PORT`, an IPv6 address in brackets."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        port = None
    if port is None or parts.scheme != "tcp" or not parts.hostname or parts.netloc != text.removeprefix("tcp://"):
        raise ValueError(f"{text!r} is no address such as tcp://10.0.0.7:9000")
    if "@" in parts.netloc:
        raise ValueError("an address has no user and no password: the secret is in --engine-secret-file")
    return f"tcp:{parts.hostname}:{port}"


def parse_list(text: str) -> tuple[str, ...]:
    """Texts separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word that is most alike, or nothing."""
    found = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""
