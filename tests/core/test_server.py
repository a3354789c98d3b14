"""
The engine's socket, with real sockets: who is told what, and what a gateway costs that vanishes or does not read.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from engine.api import (
    Abort,
    Delta,
    EngineFrame,
    Finish,
    FrameReader,
    GenerateRequest,
    Hello,
    Load,
    Look,
    Message,
    PrefixNews,
    Question,
    Sampling,
    Sight,
    StepFrame,
    TokenLogprobs,
    Usage,
    decode_frame,
    encode,
)
from engine.server import STEPS_BACKLOG_MAX, ListenError, Server, listen_on
from telemetry.records import KvBook, RequestRecord, StepRecord

HELLO = Hello(
    epoch="e",
    replica=0,
    clock_id="c",
    model="m",
    fingerprint="f",
    reproducible=True,
    vocab_size=10,
    context_max=10,
    block_slots=1,
    blocks_max=1,
    sequences_max=1,
    waiting_max=1,
    eos_ids=(),
)


Connect = Callable[[], "Gateway"]


class Gateway:
    """The other end."""

    def __init__(self, path: Path) -> None:
        self.peer = socket.socket(socket.AF_UNIX)
        self.peer.settimeout(5)
        self.peer.connect(str(path))
        self._frames = self._read()

    def send(self, *messages: Message | Question) -> None:
        self.peer.sendall(b"".join(encode(message) for message in messages))

    def next(self) -> EngineFrame:
        return next(self._frames)

    def _read(self) -> Iterator[EngineFrame]:
        reader = FrameReader()
        while data := self.peer.recv(65536):
            for body in reader.feed(data):
                yield decode_frame(body)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    server = Server(f"unix:{path}", HELLO)
    yield server
    if server.open:
        server.close()


@pytest.fixture
def connect(server: Server, path: Path) -> Iterator[Callable[[], Gateway]]:
    gateways: list[Gateway] = []

    def made() -> Gateway:
        gateway = Gateway(path)
        gateways.append(gateway)
        assert server.poll(5) == []
        assert gateway.next() == HELLO
        return gateway

    yield made
    for gateway in gateways:
        gateway.peer.close()


def request(request_id: str) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt=(1,), sampling=Sampling(), tokens_max=1)


def step(number: int, *finished: str) -> StepRecord:
    records = tuple(RequestRecord(request_id=name, accepted_ns=0, finished_ns=0, states={}) for name in finished)
    return StepRecord(step_id=number, ended_ns=number, step_ns=1, parts={"idle": 1}, finished=records)


def test_each_gateway_hears_of_its_own_requests_and_all_of_every_step(server: Server, connect: Connect) -> None:
    one, two = connect(), connect()
    one.send(request("a"))
    two.send(request("b"))
    heard = [*server.poll(5), *server.poll(0.1)]
    assert sorted(message.request_id for message in heard) == ["a", "b"]
    server.publish(StepFrame(deltas=(Delta("a", (1,)), Delta("b", (2,)), Delta("nobody", (3,))), step=step(1)))
    for gateway, delta in ((one, Delta("a", (1,))), (two, Delta("b", (2,)))):
        assert gateway.next() == StepFrame(deltas=(delta,), step=step(1))


def test_a_gateway_that_vanishes_aborts_its_requests_only(server: Server, connect: Connect) -> None:
    one, two = connect(), connect()
    one.send(request("b"), request("a"))
    two.send(request("c"))
    while len(server._owner) < 3:
        server.poll(5)
    one.peer.close()
    assert server.poll(5) == [Abort("a"), Abort("b")]
    server.publish(StepFrame(deltas=(Delta("a", (1,)), Delta("c", (2,)))))
    assert two.next() == StepFrame(deltas=(Delta("c", (2,)),))


def test_an_id_in_flight_is_not_let_in_twice_and_nobody_aborts_for_another(server: Server, connect: Connect) -> None:
    one, two = connect(), connect()
    one.send(request("a"))
    server.poll(5)
    two.send(request("a"), Abort("a"))
    assert server.poll(5) == []
    frame = two.next()
    assert isinstance(frame, StepFrame)
    assert frame.deltas[0].finish is not None and frame.deltas[0].finish.reason == "refused"
    server.publish(StepFrame(deltas=(Delta("a", (1,), finish=Finish("length", Usage())),)))
    assert isinstance(one.next(), StepFrame)
    two.send(request("a"))
    assert server.poll(5) == [request("a")]


@pytest.mark.parametrize(
    "junk", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", encode(HELLO), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_junk_costs_its_sender_the_connection_and_nobody_else(server: Server, connect: Connect, junk: bytes) -> None:
    good, bad = connect(), connect()
    bad.send(request("mine"))
    server.poll(5)
    bad.peer.sendall(junk)
    assert server.poll(5) == [Abort("mine")]
    assert bad.peer.recv(1) == b""
    good.send(request("a"))
    assert server.poll(5) == [request("a")]


def test_a_gateway_that_does_not_read_costs_bounded_memory_and_loses_nothing(server: Server, connect: Connect) -> None:
    slow = connect()
    slow.send(request("a"), request("b"))
    server.poll(5)
    rounds = 30 * STEPS_BACKLOG_MAX
    server.publish(StepFrame(deltas=(Delta("b", finish=Finish("abort", Usage())),), step=step(0, "b")))
    for number in range(1, rounds):
        server.publish(StepFrame(deltas=(Delta("a", (number,)),), step=step(number)))
    connection = next(iter(server._connections.values()))
    assert len(connection._steps) <= STEPS_BACKLOG_MAX
    assert len(connection._deltas) <= 2
    server.publish(StepFrame(deltas=(Delta("a", (rounds,), finish=Finish("length", Usage())),), step=step(rounds, "a")))
    stop = threading.Event()
    writer = threading.Thread(target=lambda: [server.poll(0.01) for _ in iter(stop.is_set, True)])
    writer.start()
    tokens: list[int] = []
    recorded: list[str] = []
    ended: list[str] = []
    while "a" not in ended:
        frame = slow.next()
        assert isinstance(frame, StepFrame)
        if frame.step:
            recorded += [record.request_id for record in frame.step.finished]
        for delta in frame.deltas:
            tokens += delta.tokens
            if delta.finish:
                ended.append(delta.request_id)
                assert delta.request_id in recorded, "the record comes no later than the end"
    stop.set()
    writer.join()
    assert tokens == list(range(1, rounds + 1))
    assert sorted(recorded) == ["a", "b"] == sorted(ended)


def test_an_id_that_its_own_gateway_sends_twice_leaves_the_first_one_alone(server: Server, connect: Connect) -> None:
    gateway = connect()
    gateway.send(request("a"), request("a"), request("b"))
    assert server.poll(5) == [request("a"), request("b")]
    server.publish(StepFrame(deltas=(Delta("a", (1,), finish=Finish("length", Usage())),)))
    assert gateway.next() == StepFrame(deltas=(Delta("a", (1,), finish=Finish("length", Usage())),))


def test_a_gateway_gets_the_records_of_its_own_requests_only(server: Server, connect: Connect) -> None:
    one, two = connect(), connect()
    one.send(request("a"))
    two.send(request("b"))
    while len(server._owner) < 2:
        server.poll(5)
    ends = tuple(Delta(name, finish=Finish("length", Usage())) for name in ("a", "b"))
    server.publish(StepFrame(deltas=ends, step=step(1, "a", "b")))
    for gateway, name in ((one, "a"), (two, "b")):
        assert gateway.next() == StepFrame(deltas=ends[name == "b" :][:1], step=step(1, name))


def test_what_does_not_fit_into_one_frame_comes_in_several(server: Server, connect: Connect) -> None:
    slow = connect()
    names = [f"r{index}" for index in range(40)]
    slow.send(*(request(name) for name in names))
    while len(server._owner) < len(names):
        server.poll(5)
    logprobs = (TokenLogprobs(-1.5, tuple((1 << 20, -1.5) for _ in range(20))),)
    news = tuple(Delta(name, (1 << 20,) * 4000, logprobs * 4000, Finish("length", Usage())) for name in names)
    stop = threading.Event()
    server.publish(StepFrame(deltas=news, step=step(1, *names)))
    writer = threading.Thread(target=lambda: [server.poll(0.01) for _ in iter(stop.is_set, True)])
    writer.start()
    ended: list[str] = []
    frames = 0
    while len(ended) < len(names):
        frame = slow.next()
        assert isinstance(frame, StepFrame)
        frames += 1
        ended += [delta.request_id for delta in frame.deltas if delta.finish]
    stop.set()
    writer.join()
    assert ended == names
    assert frames > 1


def test_one_gateway_hears_of_the_prefix_cache_and_all_hear_of_the_load(server: Server, connect: Connect) -> None:
    one, two = connect(), connect()
    news, load = PrefixNews(here=(b"a", b"b"), gone=(b"c",), lost=1), Load(running=1, owed_tokens=5)
    server.publish(StepFrame(step=step(1), load=load, prefixes=news))
    assert one.next() == StepFrame(step=step(1), load=load, prefixes=news)
    assert two.next() == StepFrame(step=step(1), load=load)
    one.peer.close()
    server.poll(5)
    server.publish(StepFrame(step=step(2), load=load, prefixes=news))
    assert two.next() == StepFrame(step=step(2), load=load, prefixes=news)
    two.peer.close()
    server.poll(5)
    for number in (3, 4):
        server.publish(StepFrame(step=step(number), prefixes=news))
    three = connect()
    server.publish(StepFrame(step=step(5), prefixes=news))
    assert three.next() == StepFrame(step=step(5), prefixes=PrefixNews(news.here, news.gone, lost=1 + 2 * 4))
    server.publish(StepFrame(step=step(6), prefixes=news))
    assert three.next() == StepFrame(step=step(6), prefixes=news)


def test_a_gateway_that_does_not_read_is_not_told_of_the_prefix_cache(server: Server, connect: Connect) -> None:
    slow, quick = connect(), connect()
    connection = next(iter(server._connections.values()))
    number = 0

    def behind() -> bool:
        return connection.unsent

    while not behind():
        number += 1
        server.publish(StepFrame(step=step(number)))
        assert quick.next() == StepFrame(step=step(number))
    news = PrefixNews(here=(b"a",))
    server.publish(StepFrame(step=step(number + 1), load=Load(running=7), prefixes=news))
    assert quick.next() == StepFrame(step=step(number + 1), load=Load(running=7), prefixes=news)
    heard: list[EngineFrame] = []
    while behind():
        server.poll(0)
        heard.append(slow.next())
    while len(heard) < number + 1:
        heard.append(slow.next())
    assert heard[-1] == StepFrame(step=step(number + 1), load=Load(running=7))


def test_a_wake_up_ends_a_wait(server: Server) -> None:
    for _ in range(100_000):
        server.wake()  # More than its socket holds.
    assert server.poll(None) == []


def test_closing_delivers_what_was_published(server: Server, connect: Connect) -> None:
    gateway = connect()
    gateway.send(request("a"))
    server.poll(5)
    last = StepFrame(deltas=(Delta("a", finish=Finish("shutdown", Usage())),))
    server.publish(last)
    server.close()
    assert gateway.next() == last
    with pytest.raises(StopIteration):
        gateway.next()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:",
        "unix:/nowhere/at/all",
        "tcp:1234",
        "tcp:host:port",
        "tcp:127.0.0.1:99999",
        "udp:127.0.0.1:1",
        "/tmp/x",
    ],
)
def test_an_address_that_means_nothing_is_refused(address: str) -> None:
    with pytest.raises(ListenError, match="cannot listen on"):
        listen_on(address)


def test_a_stale_socket_file_is_replaced_and_tcp_works(path: Path) -> None:
    listen_on(f"unix:{path}").close()
    again = listen_on(f"unix:{path}")
    assert path.stat().st_mode & 0o777 == 0o600
    again.close()
    listener = listen_on("tcp:127.0.0.1:0")
    assert listener.getsockname()[1] > 0
    listener.close()


SIGHT = Sight(step_id=4, block_slots=1, book=KvBook(total=1, free=1), runs=((1, 0, 0, -1, 0),), sequences=())


def test_who_looks_is_shown_what_there_is_once_for_all_that_it_has_asked(server: Server, connect: Connect) -> None:
    looks = 0

    def look() -> Sight:
        nonlocal looks
        looks += 1
        return SIGHT

    server.shows(look)
    one, two = connect(), connect()
    one.send(Look(), Look(), Look(), request("a"))
    assert server.poll(5) == [request("a")]
    shown = one.next()
    assert isinstance(shown, Sight) and shown.spent_ns > 0 and msgspec.structs.replace(shown, spent_ns=0) == SIGHT
    assert looks == 1, "it is shown no more while it has not read"
    server.publish(StepFrame(step=step(1)))
    assert one.next() == two.next() == StepFrame(step=step(1)), "others are shown nothing"
    one.send(Look())
    server.poll(5)
    assert isinstance(one.next(), Sight) and looks == 2
