"""
A live gateway: uvicorn on a free port in a thread, in front of the real engine shell with a fake device, or of an
engine that misbehaves on purpose.
"""

import asyncio
import secrets
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.api import Hello, Sight, WeightFacts
from engine.config import SchedulerConfig
from engine.device.fake import FakeRunner
from engine.loop import Loop
from engine.scheduler import Scheduler
from engine.server import Server
from engine.sight import sight_of
from engine.speculate import Speculation
from gateway.__main__ import listen
from gateway.app import Application
from gateway.config import GatewayOptions
from gateway.protocol import http_config
from gateway.tokens import ModelText, load
from telemetry.clock import CLOCK_ID, now_ns
from telemetry.hub import Hub
from telemetry.records import RequestRecord
from telemetry.spans import SpanData
from tests.contract.telemetry.trees import check_tree, sent
from tests.http.model_files import EOS_ID

MODEL = "tiny"
WEIGHTS = WeightFacts("gptq", 4, 64, "gptq-4bit-g64", "0123456789abcdef")
WAIT_S = 15.0


class Trees:
    """Takes spans, and looks whether each tree is whole, whatever the request and its end."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.spans = 0

    def submit(self, spans: Sequence[SpanData]) -> bool:
        """Nobody keeps it."""
        self.spans += len(spans)
        try:
            check_tree([sent(span) for span in spans])
        except (AssertionError, ValueError) as error:
            self.faults.append(f"{spans[0].name}: {error}")
        return False

    def drops(self) -> dict[str, int]:
        """None."""
        return {}

    def pending_spans(self) -> int:
        """None."""
        return 0

    async def stop(self, flush_s: float) -> None:
        """Nothing is left."""


class RecordingHub(Hub):
    """The real hub, which also keeps what it was given."""

    def __init__(self, options: GatewayOptions) -> None:
        self.trees = Trees()
        super().__init__(
            model=MODEL,
            otlp_endpoint=options.otlp_endpoint,
            otlp_metrics=options.otlp_metrics,
            trace_file=options.export_trace,
            trace_sample=options.trace_sample,
            also_to=(self.trees,),
        )
        self.records: list[RequestRecord] = []
        self.change = threading.Condition()

    def request(self, record: RequestRecord) -> None:
        """A request has ended."""
        super().request(record)
        with self.change:
            self.records.append(record)
            self.change.notify_all()


class LiveGateway:
    """A running gateway."""

    def __init__(self, options: GatewayOptions) -> None:
        self.options = options
        self.hub = RecordingHub(options)
        self._text = load(Path(options.model)) if options.engines else None
        self.application = Application(options, self._text, self.hub)
        self._listener = listen(options.host, 0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._server = uvicorn.Server(http_config(self.application.front, options))
        self.loop = asyncio.new_event_loop()

    def start(self, *, ready: bool = True) -> None:
        """Serve; with `ready`, until an engine is connected, or an upstream has answered."""
        # No certificates: to load them stops all threads, for longer than a gateway waits for Redis.
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S, verify=False)
        self._thread.start()
        if ready:
            self.until_ready()

    def until_ready(self) -> None:
        """Until an engine is connected."""
        asyncio.run_coroutine_threadsafe(self._until_ready(), self.loop).result(WAIT_S)

    async def _until_ready(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.application.gateway.ready()[0]:
                await asyncio.sleep(0.005)  # Start-up only: there is no event for it.

    def stop(self) -> None:
        """Stop serving."""
        self.client.close()
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the gateway does not stop"
        assert not self.hub.trees.faults

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._server.serve(sockets=[self._listener]))
        finally:
            self.loop.close()
            self._listener.close()

    def record(self, request_id: str) -> RequestRecord:
        """The record of a request, once it is written.  There is exactly one, and its book closes."""
        with self.hub.change:
            assert self.hub.change.wait_for(lambda: self._found(request_id), WAIT_S), f"no record of {request_id}"
            found = self._found(request_id)
        assert len(found) == 1
        assert found[0].imbalance() == 0
        assert all(spent_ns >= 0 for spent_ns in found[0].states.values())
        return found[0]

    def _found(self, request_id: str) -> list[RequestRecord]:
        return [record for record in self.hub.records if record.request_id == request_id]

    @property
    def connections(self) -> list[HttpToolsProtocol]:
        """Those that are open."""
        return [one for one in self._server.server_state.connections if isinstance(one, HttpToolsProtocol)]

    @property
    def text(self) -> ModelText:
        """Of the model that it serves itself."""
        assert self._text is not None
        return self._text

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return asyncio.run(self.text.encode(text, add_special_tokens=False))


class ShellEngine:
    """The real engine shell and core with a fake device, in a thread."""

    def __init__(
        self,
        path: str,
        *,
        vocab_size: int,
        context_max: int = 512,
        step_delay_s: float = 0.0,
        speculation: Speculation | None = None,
        secret: bytes = b"",
        clock_off_ns: int = 0,
    ) -> None:
        """With a `secret`, `path` is `tcp:HOST:PORT`; by `clock_off_ns` the clock of its machine is ahead of ours."""
        self.device = FakeRunner(
            vocab_size=vocab_size, context_max=context_max, blocks_max=256, eos_ids=(EOS_ID,), step_delay_s=step_delay_s
        )
        facts = self.device.facts
        config = SchedulerConfig(
            blocks_max=facts.blocks_max,
            context_max=context_max,
            sequences_max=16,
            waiting_max=64,
            vocab_size=vocab_size,
        )
        hello = Hello(
            epoch=secrets.token_hex(8),
            replica=0,
            clock_id="elsewhere" if clock_off_ns else CLOCK_ID,
            model=MODEL,
            fingerprint=facts.fingerprint,
            reproducible=True,
            vocab_size=vocab_size,
            context_max=context_max,
            block_slots=config.block_slots,
            blocks_max=facts.blocks_max,
            sequences_max=config.sequences_max,
            waiting_max=config.waiting_max,
            eos_ids=facts.eos_ids,
            weights=WEIGHTS,
        )
        self.looks = 0
        """How often somebody has looked into it."""
        self.scheduler = Scheduler(config, speculation=speculation)
        self._server = Server(path if secret else f"unix:{path}", hello, secret)
        self._server.shows(self._look)
        self._loop = Loop(self.scheduler, self.device, self._server, clock=lambda: now_ns() + clock_off_ns)
        self._thread = threading.Thread(target=self._loop.run, name="engine", daemon=True)

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def _look(self) -> Sight:
        self.looks += 1
        return sight_of(self.scheduler.pool, [*self.scheduler.running, *self.scheduler.waiting], now_ns())

    def kill(self) -> None:
        """Vanish, as far as gateways can tell: no last word, and nobody listens."""
        self._server._listener.close()
        for connection in list(self._server._connections.values()):
            connection.peer.shutdown(socket.SHUT_RDWR)
        self.stop()

    def stop(self) -> None:
        """End everything."""
        self._loop.stop()
        self._server.wake()
        self._thread.join(WAIT_S)
        self._server.close()
