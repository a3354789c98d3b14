"""
Heads of requests, byte by byte.
"""

import contextlib
import http.client
import json
import socket
import time

import pytest

from tests.http.conftest import Custom
from tests.http.harness import MODEL, LiveGateway

BODY = json.dumps({"model": MODEL, "prompt": "a b", "max_tokens": 2}).encode()
OFFERS = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    b"upgrade: websocket\r\nconnection: upgrade\r\n",
    b"",
)


def head(offer: bytes) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + offer + b"Content-Type: application/json\r\n"
        b"Content-Length: " + str(len(BODY)).encode() + b"\r\n\r\n"
    )


def read_answer(raw: socket.socket) -> bytes:
    answer = b""
    while b'"usage"' not in answer and b'"error"' not in answer:
        data = raw.recv(65536)
        if not data:
            break
        answer += data
    return answer


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("cut", [0, 1])
def test_an_offered_upgrade_is_ignored(shell: LiveGateway, offer: bytes, cut: int) -> None:
    with shell.connect() as raw:
        for _ in range(2):  # The connection stays good.
            pieces = (head(offer) + BODY,) if cut == 0 else (head(offer), BODY)
            for piece in pieces:
                raw.sendall(piece)
            assert read_answer(raw).startswith(b"HTTP/1.1 200")


def test_a_head_without_end_is_refused(shell: LiveGateway) -> None:
    with shell.connect() as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nX: ")
        answer = b""
        try:
            for _ in range(64):
                raw.sendall(b"y" * 65536)
            answer = read_answer(raw)
        except (BrokenPipeError, ConnectionResetError):
            return  # It has hung up on us before we read.
        assert answer.startswith(b"HTTP/1.1 431") or answer == b""


def test_a_head_that_comes_too_slowly_is_hung_up_on(custom: Custom) -> None:
    gateway, _ = custom(body_timeout_s=0.3)
    for beginning in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
        with gateway.connect() as raw:
            raw.sendall(beginning)
            assert raw.recv(100) == b""


def test_a_connection_that_has_been_answered_may_rest(custom: Custom) -> None:
    gateway, _ = custom(body_timeout_s=0.3)
    with gateway.connect() as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += raw.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        raw.settimeout(0.6)
        with pytest.raises(TimeoutError):
            raw.recv(1)


@pytest.mark.parametrize("path", ["/openapi.json", "/health", "/v1/models", "/debug/kv", "/", "/nothing"])
def test_a_body_that_nobody_asked_for_costs_neither_the_answer_nor_the_connection(
    shell: LiveGateway, path: str
) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", shell.port)) as client:
        for pause_s in (0.0, 0.0, 0.005, 0.02):
            client.putrequest("GET", path)
            client.putheader("Content-Length", str(len(BODY)))
            client.endheaders()
            time.sleep(pause_s)
            client.send(BODY)
            answer = client.getresponse()
            assert answer.status in (200, 404) and len(answer.read()) == int(answer.headers["content-length"])
            assert not answer.will_close


def test_a_body_that_nobody_asked_for_and_that_does_not_come_is_not_waited_for_long(shell: LiveGateway) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", shell.port)) as client:
        client.putrequest("GET", "/health")
        client.putheader("Content-Length", "5")
        client.endheaders()
        answer = client.getresponse()
        assert answer.status == 200 and answer.will_close and answer.read()
