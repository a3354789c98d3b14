"""Who does not know the secret is told nothing, whatever it says, and whatever it has overheard."""

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import strangers
from engine.api import FrameReader, GenerateRequest, Hello, Sampling, decode_frame, encode
from engine.handshake import (
    ANSWER_BYTES,
    GREETING_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Answer,
    Challenge,
    HandshakeError,
    secret_in,
)
from engine.server import ListenError, Server
from tests.core.test_server import HELLO

SECRET = b"x" * 32
OTHER = b"x" * 31 + b"y"
nonces = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    yield from (data[start:end] for start, end in itertools.pairwise(places))


@given(nonces, nonces, st.lists(st.integers(0, 1000), max_size=5))
def test_both_who_know_it_are_sure_of_each_other(engine: bytes, gateway: bytes, cuts: list[int]) -> None:
    challenge = Challenge(SECRET, engine)
    answer = Answer(SECRET, challenge.greeting, gateway)
    assert len(challenge.greeting) == GREETING_BYTES and len(answer.text) == ANSWER_BYTES
    proofs = [challenge.take(piece) for piece in pieces(answer.text, cuts)]
    assert proofs[:-1] == [None] * (len(proofs) - 1)
    proof = proofs[-1]
    assert proof is not None and len(proof) == PROOF_BYTES
    answer.check(proof)


@given(nonces, nonces)
def test_another_secret_proves_nothing(engine: bytes, gateway: bytes) -> None:
    challenge = Challenge(SECRET, engine)
    with pytest.raises(HandshakeError, match="does not know the secret"):
        challenge.take(Answer(OTHER, challenge.greeting, gateway).text)
    answer = Answer(SECRET, challenge.greeting, gateway)
    proof = Challenge(SECRET, engine).take(answer.text)
    assert proof is not None
    with pytest.raises(HandshakeError, match="the engine does not know"):
        Answer(OTHER, challenge.greeting, gateway).check(proof)


@given(nonces, nonces, st.integers(0, ANSWER_BYTES - 1), st.integers(1, 255))
def test_no_bit_may_be_another(engine: bytes, gateway: bytes, place: int, flip: int) -> None:
    challenge = Challenge(SECRET, engine)
    text = bytearray(Answer(SECRET, challenge.greeting, gateway).text)
    text[place] ^= flip
    with pytest.raises(HandshakeError):
        challenge.take(bytes(text))


@given(nonces, nonces)
def test_what_was_overheard_is_of_no_use(engine: bytes, gateway: bytes) -> None:
    """Neither on another connection, nor sent back to its maker."""
    answer = Answer(SECRET, MAGIC + engine, gateway)
    another = bytes(NONCE_BYTES) if engine != bytes(NONCE_BYTES) else b"\1" * NONCE_BYTES
    with pytest.raises(HandshakeError):
        Challenge(SECRET, another).take(answer.text)
    with pytest.raises(HandshakeError):
        answer.check(answer.text[NONCE_BYTES:])


@given(st.binary(min_size=GREETING_BYTES, max_size=GREETING_BYTES).filter(lambda data: not data.startswith(MAGIC)))
def test_what_is_no_engine_is_not_answered(greeting: bytes) -> None:
    with pytest.raises(HandshakeError, match="no engine of this version"):
        Answer(SECRET, greeting, bytes(NONCE_BYTES))


def test_the_secret_comes_from_the_environment_and_is_long() -> None:
    assert secret_in({}) == b"" == secret_in({"PELLUCID_ENGINE_SECRET": ""})
    assert secret_in({"PELLUCID_ENGINE_SECRET": "ü" * 16}) == ("ü" * 16).encode()
    with pytest.raises(HandshakeError, match="at least 32 bytes") as caught:
        secret_in({"PELLUCID_ENGINE_SECRET": "short"})
    assert "short" not in str(caught.value)


# ---- over real sockets


class Peer:
    """The gateway's end of a connection."""

    def __init__(self, port: int) -> None:
        self.line = socket.create_connection(("127.0.0.1", port), timeout=5)
        self.said = b""

    def prove(self, secret: bytes) -> None:
        """The handshake, up to the engine's proof."""
        answer = Answer(secret, self.exactly(GREETING_BYTES), b"n" * NONCE_BYTES)
        self.line.sendall(answer.text)
        answer.check(self.exactly(PROOF_BYTES))

    def exactly(self, count: int) -> bytes:
        while len(self.said) < count:
            data = self.line.recv(65536)
            assert data, "it hung up"
            self.said += data
        data, self.said = self.said[:count], self.said[count:]
        return data

    def hello(self) -> object:
        reader = FrameReader()
        for body in reader.feed(self.said):
            return decode_frame(body)
        while True:
            for body in reader.feed(self.line.recv(65536)):
                return decode_frame(body)

    def until_end(self) -> bytes:
        """All that comes until the other side hangs up."""
        try:
            while data := self.line.recv(65536):
                self.said += data
        except ConnectionResetError:
            pass
        return self.said


Knock = Callable[[], Peer]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("tcp:127.0.0.1:0", HELLO, SECRET)
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            messages.extend(server.poll(None))

    messages: list[object] = []
    setattr(server, "messages", messages)  # noqa: B010 - a test's own
    thread = threading.Thread(target=run)
    thread.start()
    yield server
    stop.set()
    server.wake()
    thread.join(5)
    server.close()


@pytest.fixture
def knock(server: Server) -> Iterator[Knock]:
    peers: list[Peer] = []

    def knock() -> Peer:
        peers.append(Peer(server._listener.getsockname()[1]))
        return peers[-1]

    yield knock
    for peer in peers:
        peer.line.close()


def test_who_knows_it_is_served(server: Server, knock: Knock) -> None:
    peer = knock()
    peer.prove(SECRET)
    hello = peer.hello()
    assert isinstance(hello, Hello) and hello.model == HELLO.model
    peer.line.sendall(encode(GenerateRequest(request_id="r", prompt=(1,), sampling=Sampling(), tokens_max=1)))
    peer.line.sendall(b"\xff\xff\xff\xff")  # after which it is hung up on, so that the other has arrived
    peer.until_end()
    assert [getattr(message, "request_id") for message in getattr(server, "messages")][:1] == ["r"]  # noqa: B009


@pytest.mark.parametrize(
    "say",
    [
        b"\0" * ANSWER_BYTES,
        encode(GenerateRequest(request_id="r", prompt=tuple(range(40)), sampling=Sampling(), tokens_max=1)),
        b"GET / HTTP/1.1\r\nhost: x\r\nuser-agent: a browser that is lost here\r\n\r\n",
    ],
    ids=["guess", "message", "http"],
)
def test_who_does_not_is_told_nothing(knock: Knock, say: bytes, server: Server) -> None:
    peer = knock()
    peer.exactly(GREETING_BYTES)
    peer.line.sendall(say)
    assert peer.until_end() == b""
    knock().prove(SECRET)  # and others are served as before
    assert getattr(server, "messages") == []  # noqa: B009


def test_who_says_nothing_has_little_time(knock: Knock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "HANDSHAKE_S", 0.2)
    slow, quick = knock(), knock()
    quick.prove(SECRET)
    slow.line.sendall(b"x")
    assert len(slow.until_end()) == GREETING_BYTES
    assert isinstance(quick.hello(), Hello)


def test_a_crowd_of_strangers_keeps_nobody_out(knock: Knock) -> None:
    crowd = [knock() for _ in range(3 * strangers.STRANGERS_MAX)]
    knock().prove(SECRET)
    assert len(crowd[0].until_end()) == GREETING_BYTES, "the oldest is not let go"
    for peer in crowd[-strangers.STRANGERS_MAX // 2 :]:
        peer.prove(SECRET)


def test_a_look_at_the_port_is_not_worth_a_word(knock: Knock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        knock().line.close()
        peer = knock()
        peer.exactly(GREETING_BYTES)
        peer.line.sendall(bytes(ANSWER_BYTES))
        peer.until_end()
    assert [record.getMessage() for record in caplog.records if "refused" in record.getMessage()] == [
        "a connection was refused: it does not know the secret (0 more held back)"
    ]


def test_without_a_secret_it_does_not_listen_on_a_network() -> None:
    with pytest.raises(ListenError, match="needs a secret in PELLUCID_ENGINE_SECRET"):
        Server("tcp:127.0.0.1:0", HELLO)
