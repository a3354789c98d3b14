"""
Bytes that two readers may take for different requests: they are refused, or read in the one way that the standard says.

Each has a second request inside of what one of the readers takes for a body; it must not be served.
"""

import json
import re

import pytest

from tests.http.conftest import Custom
from tests.http.harness import MODEL, LiveGateway

INNER = b"GET /debug/steps HTTP/1.1\r\nHost: x\r\nX-Request-ID: smuggled\r\n\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "a b", "max_tokens": 2}).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SECURITY = ("x-content-type-options", "content-security-policy", "referrer-policy", "cache-control", "x-request-id")


def post(*fields: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    lines = (b"POST /v1/completions HTTP/" + version, b"Host: x", b"Content-Type: application/json", *fields)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def length(number: int) -> bytes:
    return b"Content-Length: %d" % number


TE = b"Transfer-Encoding: chunked"
REFUSED = {
    "two lengths": post(length(4), length(len(INNER)), body=INNER),
    "two equal lengths": post(length(4), length(4), body=b"1234" + INNER),
    "a list of lengths": post(b"Content-Length: 4, 4", body=b"1234" + INNER),
    "a length and chunks": post(length(len(INNER) + 5), TE, body=b"0\r\n\r\n" + INNER),
    "chunks and a length": post(TE, length(len(INNER) + 5), body=b"0\r\n\r\n" + INNER),
    "a signed length": post(b"Content-Length: +4", body=b"1234" + INNER),
    "a negative length": post(b"Content-Length: -4", body=INNER),
    "a hexadecimal length": post(b"Content-Length: 0x4", body=b"1234" + INNER),
    "a length with a gap": post(b"Content-Length: 4 4", body=INNER),
    "an empty length": post(b"Content-Length: ", body=INNER),
    "a length beyond all": post(b"Content-Length: " + b"9" * 30, body=INNER),
    "another coding": post(b"Transfer-Encoding: xchunked", body=CHUNKED + INNER),
    "identity": post(b"Transfer-Encoding: identity", body=CHUNKED + INNER),
    "chunked, but not at last": post(b"Transfer-Encoding: chunked, identity", body=CHUNKED + INNER),
    "a coding with a vertical tab": post(b"Transfer-Encoding: \x0bchunked", body=CHUNKED + INNER),
    "a name with a gap": post(b"Transfer-Encoding : chunked", body=CHUNKED + INNER),
    "a name that begins with a gap": post(b" Transfer-Encoding: chunked", body=CHUNKED + INNER),
    "a name with a zero": post(b"Transfer-Encoding\x00: chunked", body=CHUNKED + INNER),
    "a value with a zero": post(b"X-A: b\x00c", length(0)) + INNER,
    "a value with a line": post(b"X-A: b\rX-B: c", length(0)) + INNER,
    "a folded field": post(b"X-A: b\r\n c", length(0)) + INNER,
    "a chunk's size with a sign": post(TE, body=b"+5\r\n12345\r\n0\r\n\r\n" + INNER),
    "a chunk's size in C": post(TE, body=b"0x5\r\n12345\r\n0\r\n\r\n" + INNER),
    "a chunk's size beyond all": post(TE, body=b"f" * 20 + b"\r\n12345\r\n0\r\n\r\n" + INNER),
    "a chunk longer than it says": post(TE, body=b"5\r\n1234567\r\n0\r\n\r\n" + INNER),
    "a version of the future": b"GET /health HTTP/3.7\r\nHost: x\r\n\r\n" + INNER,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + INNER,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + INNER,
    "a URL that is no ASCII": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n" + INNER,
    "a gap in the URL": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n" + INNER,
    "a method of our own": b"FETCH /health HTTP/1.1\r\nHost: x\r\n\r\n" + INNER,
    "two hosts": b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "two keys": b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n",
    "two other keys": b"GET /health HTTP/1.1\r\nHost: x\r\nx-api-key: a\r\nX-API-Key: b\r\n\r\n",
    "two kinds of content": post(b"content-type: text/plain", length(len(BODY)), body=BODY),
}


def ask(gateway: LiveGateway, data: bytes) -> list[tuple[int, dict[str, str]]]:
    """The status and the headers of all answers until the server hangs up."""
    said = b""
    with gateway.connect() as raw:
        try:
            raw.sendall(data)
            while more := raw.recv(65536):
                said += more
        except (BrokenPipeError, ConnectionResetError):
            pass
    found = []
    for head in re.findall(rb"HTTP/1\.1 \d{3}[^\r]*\r\n.*?\r\n\r\n", said, re.DOTALL):
        first, *fields = head.decode("latin-1").strip().split("\r\n")
        found.append((int(first.split()[1]), {k.lower(): v for k, _, v in (field.partition(": ") for field in fields)}))
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_our_words_and_the_connection_ends(shell: LiveGateway, name: str) -> None:
    before = len(shell.hub.records)
    answers = ask(shell, REFUSED[name])
    assert [status for status, _ in answers] == [400], answers
    headers = answers[0][1]
    assert headers["content-type"] == "application/json" and headers["connection"] == "close"
    assert all(header in headers for header in SECURITY)
    assert "server" not in headers
    assert not any(record.request_id == "smuggled" for record in shell.hub.records[before:])


LAST = b"DELETE /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
"""So that the server hangs up: it is answered with 405."""
READ = {
    "chunks": (post(TE, body=CHUNKED), [200, 405]),
    "chunks with an extension": (post(TE, body=CHUNKED.replace(b"\r\n", b";a=b\r\n", 1)), [200, 405]),
    "trailers": (
        post(TE, body=CHUNKED[:-2] + b"Authorization: Bearer x\r\nX-Request-ID: smuggled\r\n\r\n"),
        [200, 405],
    ),
    "one after the other": (post(length(len(BODY)), body=BODY) * 3, [200, 200, 200, 405]),
    "a body where none is read": (
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + length(len(INNER)) + b"\r\n\r\n" + INNER,
        [200, 405],
    ),
    "an absolute URL": (b"GET http://other/health HTTP/1.1\r\nHost: x\r\n\r\n", [200, 405]),
    "no version": (b"GET /health\r\n\r\n" + INNER, [200]),
    "HTTP/1.0": (post(length(len(BODY)), body=BODY + INNER, version=b"1.0"), [200]),
    "an empty line first": (b"\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n", [200, 405]),
    "another path to it": (b"GET /%2e%2e/health HTTP/1.1\r\nHost: x\r\n\r\n", [404, 405]),
    "all of it": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", [404, 405]),
}


@pytest.mark.parametrize("name", READ)
def test_it_is_read_in_one_way(shell: LiveGateway, name: str) -> None:
    data, expected = READ[name]
    assert [status for status, _ in ask(shell, data + LAST)] == expected
    assert not any(record.request_id == "smuggled" for record in shell.hub.records)


def test_what_follows_a_stream_does_not_get_into_it(shell: LiveGateway) -> None:
    """Garbage behind a request, while that is being answered: the answer ends early, with nothing foreign inside."""
    body = json.dumps({"model": MODEL, "prompt": "a b", "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
    with shell.connect() as raw:
        raw.sendall(post(length(len(body)), body=body))
        said = b""
        while b"data: " not in said:
            said += raw.recv(65536)
        raw.sendall(b"garbage\r\n\r\n")
        try:
            while more := raw.recv(65536):
                said += more
        except ConnectionResetError:
            pass
    answer, _, _ = said.partition(b"data: [DONE]\n\n")  # behind a whole answer the garbage is a request of its own
    assert answer.count(b"HTTP/1.1") == 1 and b"not valid HTTP" not in answer


def test_trailers_are_not_kept(custom: Custom) -> None:
    gateway, _ = custom()
    with gateway.connect() as raw:
        raw.sendall(post(TE, body=CHUNKED[:-2]))
        for _ in range(200):
            raw.sendall(b"X-Trailer: %s\r\n" % (b"y" * 10_000))
        raw.sendall(b"\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        (connection,) = gateway.connections
        assert [name for name, _ in connection.headers] == [b"host", b"content-type", b"transfer-encoding"]


def test_more_connections_than_there_may_be(custom: Custom) -> None:
    gateway, _ = custom(connections_max=2)
    with gateway.connect() as first, gateway.connect() as second, gateway.connect() as third:
        refused = third.makefile("rb").read()  # to the end
        assert refused.startswith(b"HTTP/1.1 503 ") and b'"overloaded"' in refused and b"retry-after: 1" in refused
        for raw in (first, second):
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert raw.makefile("rb").read().startswith(b"HTTP/1.1 200 ")
    assert gateway.client.get("/health").status_code == 200


@pytest.mark.parametrize("count", [100, 200])
def test_more_headers_than_anybody_needs(shell: LiveGateway, count: int) -> None:
    headers = {f"x-{number}": "y" for number in range(count)}
    answer = shell.client.get("/health", headers=headers)
    assert answer.status_code == (200 if count < 128 else 431)


def test_every_answer_is_told_not_to_be_a_page(shell: LiveGateway) -> None:
    ask_first = {"origin": "http://app", "access-control-request-method": "POST"}
    answers = [
        shell.client.get("/health"),
        shell.client.get("/metrics"),
        shell.client.get("/nothing"),
        shell.client.get("/v1/models"),
        shell.client.options("/v1/models", headers=ask_first),
        shell.client.post("/v1/completions", json={}),
        shell.client.post("/v1/completions", json=json.loads(BODY)),
        shell.client.post("/v1/completions", json={**json.loads(BODY), "stream": True}),
        shell.client.get("/health", headers={"x-long": "y" * 60_000}),
    ]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] in ("no-store", "no-cache, no-transform")
        assert "server" not in answer.headers
