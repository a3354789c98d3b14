"""
What `--redis-url` may say.

    unix:///path/to/socket                            ?db=0
    redis://user:password@host:6379/0                 one server; rediss:// with TLS
    redis+cluster://user:password@host:7000,host:7001 some nodes of a cluster; rediss+cluster:// with TLS
    redis+sentinel://user:password@host:26379,host:26379/service/0     ?sentinel_password=...; rediss+sentinel://

TLS takes `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` (paths) and `ssl_cert_reqs` (required or none).

An error says what is expected and where, and repeats nothing of what was given: a slash in a password moves the rest of
it into the host, the path or the name of a parameter.
"""

import re
from typing import Literal
from urllib.parse import parse_qsl, unquote

import msgspec

from cache.errors import Misconfigured

OPTION = "--redis-url"
HOSTS_MAX = 64
Kind = Literal["unix", "single", "cluster", "sentinel"]
_SCHEMES: dict[str, tuple[Kind, bool]] = {
    "unix": ("unix", False),
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
}
_TLS_PARAMETERS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
_SERVICE = re.compile(r"[\w.-]+", re.ASCII)
_PORTS: dict[Kind, int] = {"unix": 0, "single": 6379, "cluster": 6379, "sentinel": 26379}


class RedisUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A URL, parsed.  Its text form hides the passwords."""

    kind: Kind
    tls: bool = False
    path: str = ""
    """Of the socket."""
    hosts: tuple[tuple[str, int], ...] = ()
    """Of the server, of some nodes of the cluster, or of the sentinels."""
    service: str = ""
    """The name under which the sentinels know the master."""
    db: int = 0
    username: str = ""
    password: str = ""
    sentinel_password: str = ""
    ssl: tuple[tuple[str, str], ...] = ()
    """The parameters of TLS, by redis-py's names."""

    def __repr__(self) -> str:
        """Where it leads, and nothing that lets anybody in."""
        places = self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"<{self.kind}{' with TLS' if self.tls else ''} {places}{'/' if self.service else ''}{self.service}>"


def parse_redis_url(text: str) -> RedisUrl:
    """The parts of a URL.  Raises Misconfigured, without a word of it."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise _wrong(f"it begins with one of {', '.join(name + '://' for name in _SCHEMES)}")
    kind, tls = _SCHEMES[scheme]
    rest, _, query = rest.partition("?")
    parameters = _parameters(query, kind, tls=tls)
    db = _db(parameters.pop("db", ""))
    authority, _, path = rest.partition("/")
    user, _, authority = authority.rpartition("@")
    username, _, password = user.partition(":")
    unix_password, sentinel_password = parameters.pop("password", ""), parameters.pop("sentinel_password", "")
    common = RedisUrl(
        kind=kind,
        tls=tls,
        db=db,
        username=unquote(username),
        password=unquote(password) or unix_password,
        sentinel_password=sentinel_password,
        ssl=tuple(parameters.items()),
    )
    if kind == "unix":
        if authority or not path:
            raise _wrong("unix:// is followed by the absolute path of a socket: unix:///run/valkey.sock")
        if "@" in path:  # more likely the rest of a password
            raise _wrong("in the path of a socket, write @ as %40; " + _ENCODE)
        return msgspec.structs.replace(common, path="/" + unquote(path))
    hosts = _hosts(authority, kind)
    parts = [unquote(part) for part in path.split("/") if part]
    service = ""
    if kind == "sentinel":
        if not parts:
            raise _wrong("after the sentinels comes the name of the service: redis+sentinel://host:26379/mymaster")
        service = parts.pop(0)
        if not _SERVICE.fullmatch(service):
            raise _wrong("the name of the service is of letters, digits, dots and dashes; " + _ENCODE)
    if len(parts) > 1:
        raise _wrong("after the hosts comes the number of a database and nothing else; " + _ENCODE)
    if parts:
        db = _db(parts[0])
    if kind == "cluster" and db:
        raise _wrong("a cluster has database 0 only")
    return msgspec.structs.replace(common, hosts=hosts, service=service, db=db)


_ENCODE = "in a password, write @ as %40, / as %2F, : as %3A, ? as %3F, # as %23 and % as %25"


def _wrong(what: str) -> Misconfigured:
    return Misconfigured(f"{OPTION}: {what}")


def _parameters(query: str, kind: Kind, *, tls: bool) -> dict[str, str]:
    known = ["db", *(["password"] if kind == "unix" else []), *(["sentinel_password"] if kind == "sentinel" else [])]
    known += _TLS_PARAMETERS if tls else ()
    parameters = dict(parse_qsl(query, keep_blank_values=True))
    if parameters.keys() - set(known):
        raise _wrong(f"behind the ? only {', '.join(known)} may stand here; {_ENCODE}")
    if parameters.get("ssl_cert_reqs", "required") not in ("required", "none"):
        raise _wrong("ssl_cert_reqs is required or none")
    return parameters


def _db(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        raise _wrong("the number of the database is a whole number; " + _ENCODE)
    return int(text)


def _hosts(authority: str, kind: Kind) -> tuple[tuple[str, int], ...]:
    several = kind != "single"
    named = authority.split(",") if several else [authority]
    if len(named) > HOSTS_MAX:
        raise _wrong(f"at most {HOSTS_MAX} hosts")
    return tuple(_host(one, _PORTS[kind]) for one in named)


def _host(text: str, default_port: int) -> tuple[str, int]:
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        good = bool(bracket) and port[:1] in ("", ":")
        port = port[1:]
    else:
        host, _, port = text.partition(":")
        good = ":" not in port
    if not host:
        raise _wrong("a host is missing: redis://host:6379/0; " + _ENCODE)
    if not good or (port and not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536)):
        raise _wrong("a port is a whole number from 1 to 65535; " + _ENCODE)
    return host, int(port) if port else default_port
