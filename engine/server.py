"""
The engine's socket: messages in, frames out, without a thread.

One thread does everything: between two steps the loop asks for what has arrived.  A gateway that reads slowly costs
bounded memory: what it has not taken is merged, one delta per request.

A connection to the Unix socket, which only this user can reach, is a gateway.  One over TCP is a stranger until it has
proven that it knows the secret (engine.handshake).

All gateways hear of all steps.  News of the prefix cache go to one of them, which writes the index for all: the one
that has been connected for longest among those that have read all that they were sent.
"""

import selectors
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from engine.api import (
    Abort,
    Delta,
    Fault,
    Finish,
    FrameError,
    FrameReader,
    GenerateRequest,
    Hello,
    Load,
    Look,
    Message,
    Ping,
    Pong,
    PrefixNews,
    Question,
    Sight,
    StepFrame,
    Usage,
    decode_message,
    encode,
)
from engine.handshake import SECRET_VARIABLE
from engine.outcome import merged
from engine.strangers import Strangers
from telemetry.clock import now_ns
from telemetry.records import RequestRecord, StepRecord

RECEIVE_BYTES = 1 << 18
STEPS_BACKLOG_MAX = 256
FRAME_WEIGHT_MAX = 500_000  # numbers of at most 9 bytes in one frame; one delta more than that still fits
CONNECTIONS_MAX = 64
PONG = encode(Pong())


log = structlog.get_logger("engine")


class ListenError(Exception):
    """The address cannot be listened on; the message is for the person who chose it."""


class Connection:
    """One gateway: its socket, the requests that it owns, and what it has not read yet."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.reader = FrameReader()
        self.requests: set[str] = set()  # only ever asked for membership
        self._out = bytearray()
        self._steps: deque[StepRecord] = deque()
        self._records: list[RequestRecord] = []
        self._deltas: list[Delta] = []
        self._load: Load | None = None  # these two go with the next step
        self._prefixes: PrefixNews | None = None

    @property
    def unsent(self) -> bool:
        """Whether the gateway has something left to read."""
        return bool(self._out or self._steps or self._deltas)

    def post(self, frame: StepFrame) -> None:
        """
        Queue one frame behind what is still unsent.

        What a slow reader missed is merged: the newest steps are kept, and the records of its own requests, which are
        as many as it has unread ends.
        """
        self._deltas = list(merged([*self._deltas, *frame.deltas]))
        self._load = frame.load or self._load
        self._prefixes = frame.prefixes or self._prefixes
        if frame.step is None:
            return
        ended = {delta.request_id for delta in frame.deltas if delta.finish is not None}
        self._records += [record for record in frame.step.finished if record.request_id in ended]
        self._steps.append(msgspec.structs.replace(frame.step, finished=()) if frame.step.finished else frame.step)
        if len(self._steps) > STEPS_BACKLOG_MAX:
            self._steps.popleft()

    def say(self, frame: bytes) -> None:
        """A frame that is no news of requests: it may overtake those that wait to be packed."""
        self._out += frame

    def flush(self) -> None:
        """Write as much as the socket takes.  Raises OSError if the gateway is gone."""
        while self.unsent:
            if not self._out:
                self._pack()
            try:
                sent = self.peer.send(self._out)
            except BlockingIOError:
                return
            del self._out[:sent]

    def _pack(self) -> None:
        # A request's record goes out no later than the delta that ends it: the oldest step carries all records, deltas
        # follow with the newest one, in as many frames as their size asks for.
        records, self._records = tuple(self._records), []
        while self._steps:
            step = msgspec.structs.replace(self._steps.popleft(), finished=records)
            records = ()
            frame = StepFrame(step=step)
            if not self._steps:
                frame = StepFrame(deltas=self._some_deltas(), step=step, load=self._load, prefixes=self._prefixes)
                self._load = self._prefixes = None
            self._out += encode(frame)
        while self._deltas:
            self._out += encode(StepFrame(deltas=self._some_deltas()))

    def _some_deltas(self) -> tuple[Delta, ...]:
        """As many unread deltas as fit well into one frame."""
        weight, count = 0, 0
        while count < len(self._deltas) and weight < FRAME_WEIGHT_MAX:
            weight += weight_of(self._deltas[count])
            count += 1
        some, self._deltas = tuple(self._deltas[:count]), self._deltas[count:]
        return some


def weight_of(delta: Delta) -> int:
    """About how many numbers a delta holds."""
    return 1 + len(delta.tokens) + sum(2 + 2 * len(one.top) for one in delta.logprobs)


class Server:
    """Listens, knows who asked for what, and tells each gateway about its own requests and about every step."""

    def __init__(self, listen: str, hello: Hello, secret: bytes = b"") -> None:
        """`secret`: what gateways must know that come over TCP.  Raises ListenError."""
        self._guarded = listen.startswith("tcp:")
        if self._guarded and not secret:
            raise ListenError(f"whoever reaches {listen} could use this engine: it needs a secret in {SECRET_VARIABLE}")
        self._hello = encode(hello)  # Now, so that a hello that cannot be said stops the start.
        self._selector = selectors.DefaultSelector()
        self._listener = listen_on(listen)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._strangers = Strangers(secret, self._selector)
        self._connections: dict[int, Connection] = {}
        self._owner: dict[str, Connection] = {}
        self._prefixes_lost = 0  # news of the prefix cache while nobody could have them
        self._look: Callable[[], Sight] | None = None

    def poll(self, timeout_s: float | None) -> list[Message]:
        """What has arrived.  Waits up to `timeout_s` (None: for ever) for the first message or wake-up."""
        messages: list[Message] = []
        for key, events in self._selector.select(self._strangers.patience_s(timeout_s)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._drain_wake()
            elif key.fd in self._connections:
                messages += self._serve(self._connections[key.fd], events)
            elif key.fd in self._strangers:  # else it has just had to make room for another one
                self._hear(key.fd)
        self._strangers.expire()
        return messages

    def publish(self, frame: StepFrame) -> list[Message]:
        """Tell everybody.  Returns aborts for the requests of gateways that turned out to be gone."""
        messages: list[Message] = []
        mine: dict[int, list[Delta]] = {}
        for delta in frame.deltas:
            owner = self._owner.get(delta.request_id)
            if owner is None:
                continue  # Its gateway has left.
            mine.setdefault(owner.peer.fileno(), []).append(delta)
            if delta.finish is not None:
                del self._owner[delta.request_id]
                owner.requests.discard(delta.request_id)
        writer, prefixes = self._writer(frame.prefixes)
        for number, connection in list(self._connections.items()):
            deltas = tuple(mine.get(number, ()))
            if deltas or frame.step is not None:
                its = prefixes if connection is writer else None
                connection.post(StepFrame(deltas=deltas, step=frame.step, load=frame.load, prefixes=its))
            messages += self._flush(connection)
        return messages

    def _writer(self, prefixes: PrefixNews | None) -> tuple[Connection | None, PrefixNews | None]:
        """Who is to have news of the prefix cache, and these, with the number of those that nobody has had."""
        if prefixes is None:
            return None, None
        writer = next((connection for connection in self._connections.values() if not connection.unsent), None)
        if writer is None:
            self._prefixes_lost += len(prefixes.here) + len(prefixes.gone) + prefixes.lost
            return None, None
        lost, self._prefixes_lost = self._prefixes_lost, 0
        return writer, msgspec.structs.replace(prefixes, lost=prefixes.lost + lost) if lost else prefixes

    def shows(self, look: Callable[[], Sight]) -> None:
        """What there is to see, for those who send `Look`."""
        self._look = look

    def wake(self) -> None:
        """End a `poll` that waits; safe in a signal handler."""
        with suppress(OSError):  # It is full, and the poll will wake anyhow; or it is closed, and there is no poll.
            self._wake.send(b"!")

    @property
    def open(self) -> bool:
        """Whether it still listens."""
        return self._listener.fileno() >= 0

    def close(self) -> None:
        """Give every gateway a last chance to read, and hang up."""
        for connection in list(self._connections.values()):
            connection.peer.settimeout(1.0)
            self._flush(connection)
            connection.peer.close()
        self._connections = {}
        self._strangers.close()
        self._selector.close()
        self._listener.close()
        self._wake.close()
        self._woken.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:  # No descriptors left, or it has hung up already: those who are here matter more.
            log.warning("accept_failed", error=str(error))
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            peer.close()
            return
        peer.setblocking(False)
        if self._guarded:
            self._strangers.add(peer)
        else:
            self._welcome(peer, b"")

    def _hear(self, descriptor: int) -> None:
        proven = self._strangers.hear(descriptor)
        if proven is not None and len(self._connections) < CONNECTIONS_MAX:
            self._welcome(*proven)
        elif proven is not None:
            proven[0].close()

    def _welcome(self, peer: socket.socket, proof: bytes) -> None:
        """A gateway.  It is told who we are, after the proof where it has asked for one."""
        connection = self._connections[peer.fileno()] = Connection(peer)
        self._selector.register(peer, selectors.EVENT_READ)
        connection.say(proof + self._hello)
        self._flush(connection)

    def _serve(self, connection: Connection, events: int) -> list[Message]:
        messages: list[Message] = []
        if events & selectors.EVENT_READ:
            try:
                data = connection.peer.recv(RECEIVE_BYTES)
                if not data:
                    return self._drop(connection)
                for body in connection.reader.feed(data):
                    messages += self._own(connection, decode_message(body))
            except BlockingIOError:
                pass
            except (OSError, FrameError):
                return messages + self._drop(connection)
        return messages + self._flush(connection)

    def _own(self, connection: Connection, message: Message | Question) -> list[Message]:
        match message:
            case Ping():
                if not connection.unsent:  # Else something is on its way, and says the same.
                    connection.say(PONG)
                return []
            case Look():
                if not connection.unsent and self._look is not None:  # Who does not read has seen enough.
                    began_ns = now_ns()
                    sight = self._look()
                    connection.say(encode(msgspec.structs.replace(sight, spent_ns=now_ns() - began_ns)))
                return []
            case GenerateRequest(request_id=request_id):
                if request_id in self._owner:
                    self._turn_away(connection, request_id)
                    return []
                self._owner[request_id] = connection
                connection.requests.add(request_id)
            case Abort(request_id):
                if request_id not in connection.requests:
                    return []  # Not its own, or finished already.
        return [message]

    def _turn_away(self, connection: Connection, request_id: str) -> None:
        """An id that is in flight already: the first one goes on undisturbed."""
        if request_id in connection.requests:
            log.warning(
                "request_id_twice", request_id=request_id
            )  # Its gateway mixes them up; a refusal would hit both.
            return
        fault = Fault("invalid_value", f"A request with the id {request_id} is in flight already.", "request_id")
        connection.post(StepFrame(deltas=(Delta(request_id, finish=Finish("refused", Usage(), fault=fault)),)))

    def _flush(self, connection: Connection) -> list[Message]:
        try:
            connection.flush()
        except (OSError, FrameError):
            return self._drop(connection)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.peer).events != wanted:
            self._selector.modify(connection.peer, wanted)
        return []

    def _drop(self, connection: Connection) -> list[Message]:
        """A gateway is gone: nobody waits for its requests any more."""
        self._selector.unregister(connection.peer)
        del self._connections[connection.peer.fileno()]
        connection.peer.close()
        orphans = sorted(connection.requests)
        for request_id in orphans:
            del self._owner[request_id]
        return [Abort(request_id) for request_id in orphans]

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(4096):
                continue


def listen_on(address: str) -> socket.socket:
    """A listening socket for `unix:PATH` or `tcp:HOST:PORT`.  Raises ListenError."""
    scheme, _, rest = address.partition(":")
    host, colon, port = rest.rpartition(":")
    try:
        if scheme == "unix" and rest:
            listener = _listen_on_path(Path(rest))
        elif scheme == "tcp" and colon and port.isdigit() and int(port) < 1 << 16:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, int(port)), family=family)
        else:
            raise ListenError(f"cannot listen on {address!r}: use unix:PATH or tcp:HOST:PORT")
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: {error}") from error
    listener.listen()
    listener.setblocking(False)
    return listener


def _listen_on_path(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # Of a predecessor that was killed; the supervisor starts one engine a path.
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    path.chmod(0o600)
    return listener
