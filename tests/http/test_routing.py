"""Three engines and an index behind one gateway: who gets a request, and why."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from engine.api import GenerateRequest, Hello, Load, PrefixNews, Sampling
from gateway.balance import Candidate
from gateway.calls import Call, Flight
from gateway.config import GatewayOptions
from gateway.errors import ApiError
from gateway.replica import STALE_S, Replica
from gateway.routing import candidate
from telemetry.evidence import Facts
from telemetry.records import RequestRecord, StepRecord
from tests.http.asking import chat, post, prompt
from tests.http.conftest import options_for
from tests.http.guard import Guard, until
from tests.http.harness import LiveGateway, ShellEngine

ENGINES = 3
HELLO = Hello(
    epoch="e",
    replica=0,
    clock_id="c",
    model="m",
    fingerprint="f",
    reproducible=True,
    vocab_size=10,
    context_max=512,
    block_slots=16,
    blocks_max=64,
    sequences_max=8,
    waiting_max=8,
    eos_ids=(),
)


OPTIONS = GatewayOptions(model="", model_name="tiny", engines=())


class Fleet:
    """The gateway, its engines, and what a request of a test comes to."""

    def __init__(self, model_dir: Path, vocab_size: int, directory: str, **options: object) -> None:
        self._paths = [f"{directory}/{number}.sock" for number in range(ENGINES)]
        self._vocab_size = vocab_size
        self.engines = [self._engine(number) for number in range(ENGINES)]
        addresses = tuple(f"unix:{path}" for path in self._paths)
        self.gateway = LiveGateway(msgspec.structs.replace(options_for(model_dir, ""), engines=addresses, **options))
        self.gateway.start()
        self.until_whole()

    def until_whole(self) -> None:
        """Until all engines are connected."""
        until(lambda: self.gateway.client.get("/ready").json()["engines"] == {}, "not all are seen")

    def _engine(self, number: int) -> ShellEngine:
        engine = ShellEngine(self._paths[number], vocab_size=self._vocab_size)
        engine.start()
        return engine

    def restart(self, number: int) -> None:
        """Another life of an engine, with an empty cache."""
        self.engines[number].stop()
        self.engines[number] = self._engine(number)
        self.until_whole()

    def ask(self, text: str, *, key: str = "", **fields: object) -> RequestRecord:
        """One prompt, and its record."""
        body, headers = prompt(prompt=text, max_tokens=4, **fields), {"authorization": f"Bearer {key}"} if key else {}
        return self.gateway.record(post(self.gateway, body, "/v1/completions", **headers)["id"])

    def stop(self) -> None:
        self.gateway.stop()
        for engine in self.engines:
            engine.stop()


class Nobody:
    """Listens to nothing."""

    def step(self, record: StepRecord) -> None: ...
    def engine_up(self, replica: int, *, epoch: str, block_slots: int, facts: Facts) -> None: ...
    def engine_down(self, replica: int) -> None: ...
    def strand(self, calls: Sequence[Call], error: ApiError, *, died: bool) -> None: ...
    def heard(self, epoch: str, news: PrefixNews) -> None: ...
    def ended(self, epoch: str) -> None: ...


NewFleet = Callable[..., Fleet]


@pytest.fixture
def new_fleet(model_dir: Path, vocab_size: int) -> Iterator[NewFleet]:
    with TemporaryDirectory(prefix="pellucid") as directory:
        fleets: list[Fleet] = []

        def start(**options: object) -> Fleet:
            fleets.append(Fleet(model_dir, vocab_size, directory, **options))
            return fleets[-1]

        yield start
        for fleet in fleets:
            fleet.stop()


@pytest.fixture
def fleet(new_fleet: NewFleet, guard: Guard) -> Fleet:
    return new_fleet(**guard.options)


def indexed(guard: Guard) -> int:
    """Names in the index."""
    return guard.server.ask("KEYS", "pellucid:*:prefix:*").count(b":prefix:")


def text_of(name: str, words: int = 40) -> str:
    """More than 64 tokens that begin like no other."""
    return " ".join(f"{name}{number}" for number in range(words))


def test_what_goes_on_goes_where_it_began(fleet: Fleet, guard: Guard) -> None:
    first = fleet.ask(text_of("a"))
    assert (first.routing, first.promised_tokens, first.cached_tokens) == ("two_choices", 0, 0)
    names = (first.prompt_tokens + first.output_tokens - 1) // 64
    assert names > 0
    until(lambda: indexed(guard) == names, "the engine's news are not in the index")
    second = fleet.ask(text_of("a", 60))
    assert (second.replica, second.routing) == (first.replica, "cached")
    assert 64 <= (second.promised_tokens or 0) <= second.cached_tokens
    lines = fleet.gateway.client.get("/metrics").text.splitlines()
    assert f'pellucid_prefix_index_tokens_total{{promise="kept"}} {float(second.promised_tokens or 0)}' in lines
    assert 'pellucid_prefix_index_tokens_total{promise="broken"} 0.0' in lines
    assert 'pellucid_routed_requests_total{routing="cached"} 1.0' in lines
    shown = fleet.gateway.client.get(f"/debug/requests/{second.request_id}").json()
    assert shown["replica"] == second.replica and shown["routing"] == "cached"
    assert shown["promised_tokens"] == second.promised_tokens


def test_a_restarted_engine_has_nothing(fleet: Fleet, guard: Guard) -> None:
    first = fleet.ask(text_of("b"))
    until(lambda: indexed(guard) > 0, "the engine's news are not in the index")
    fleet.restart(first.replica)
    again = fleet.ask(text_of("b"))
    assert (again.routing, again.promised_tokens, again.cached_tokens) == ("two_choices", 0, 0)


def test_a_tenant_finds_nothing_of_anothers(fleet: Fleet, guard: Guard) -> None:
    keys = [guard.create(tenant=tenant).key for tenant in ("blue", "green")]
    first = fleet.ask(text_of("i"), key=keys[0])
    until(lambda: indexed(guard) > 0, "the engine's news are not in the index")
    other = fleet.ask(text_of("i"), key=keys[1])
    assert (other.routing, other.promised_tokens, other.cached_tokens) == ("two_choices", 0, 0)
    again = fleet.ask(text_of("i"), key=keys[0])
    assert again.replica == first.replica and (again.promised_tokens or 0) > 0


def test_what_has_been_sent_counts_before_the_engine_has_taken_it() -> None:
    replica = Replica(0, "unix:x", Nobody(), Nobody(), Nobody(), OPTIONS)
    assert candidate(replica, HELLO, 0, now_ns=0) == Candidate(name="unix:x", capacity_tokens=1024)
    replica.load = Load(running=1, waiting=2, owed_tokens=30, used_slots=400)
    flight = Flight()
    for number, promised in enumerate((0, 64)):
        message = GenerateRequest(request_id=str(number), prompt=(1,) * 100, sampling=Sampling(), tokens_max=1)
        call = Call(message, flight)
        call.promised_tokens = promised
        replica.calls[call.request_id] = call
    known = candidate(replica, HELLO, 64, now_ns=0)
    assert (known.sequences, known.ahead_tokens, known.tokens) == (5, 30 + 136, 430 + 136)
    assert known.matched_tokens == 64 and not known.saturated
    replica.calls["0"].accepted_ns = 1  # from now on the engine's own figures have it
    assert candidate(replica, HELLO, 0, now_ns=0).sequences == 4
    replica.load = Load(running=7)
    assert candidate(replica, HELLO, 0, now_ns=0).saturated, "no place is left in the batch"


def test_an_engine_that_does_not_answer_is_saturated() -> None:
    replica = Replica(0, "unix:x", Nobody(), Nobody(), Nobody(), OPTIONS)
    replica._owes_since_ns = 10**9
    late_ns = 10**9 + int(STALE_S * 1e9)
    assert not candidate(replica, HELLO, 0, now_ns=late_ns).saturated
    assert candidate(replica, HELLO, 0, now_ns=late_ns + 1).saturated


def test_without_the_index_what_begins_alike_meets(fleet: Fleet, guard: Guard) -> None:
    first = fleet.ask(text_of("c"))
    until(lambda: indexed(guard) > 0, "the engine's news are not in the index")
    guard.server.freeze()
    others = [fleet.ask(text_of("d", words)) for words in (30, 40, 50)]
    assert {one.routing for one in others} == {"first_block"}
    assert len({one.replica for one in others}) == 1
    assert {one.promised_tokens for one in others} == {None}
    guard.server.thaw()
    until(lambda: fleet.ask(text_of("c")).routing == "cached", "the index is not asked again")
    last = fleet.ask(text_of("c"))
    assert last.cached_tokens >= (last.promised_tokens or 0) > 0
    assert first.cached_tokens == 0


def test_requests_with_a_key_meet_and_without_anything_they_spread(fleet: Fleet) -> None:
    for fields in ({"prompt_cache_key": "one"}, {"user": "two"}):
        records = [fleet.ask("short", **fields) for _ in range(5)]
        assert {one.routing for one in records} == {"key"}
        assert len({one.replica for one in records}) == 1
    spread = [fleet.ask("short") for _ in range(20)]
    assert {one.routing for one in spread} == {"two_choices"}
    assert len({one.replica for one in spread}) > 1


def test_in_turns(new_fleet: NewFleet) -> None:
    fleet = new_fleet(routing="round-robin")
    records = [fleet.ask(text_of("e")) for _ in range(6)]
    assert [one.replica for one in records] == [0, 1, 2, 0, 1, 2]
    assert {(one.routing, one.promised_tokens) for one in records} == {("turn", None)}


def test_without_a_server_what_begins_alike_meets(new_fleet: NewFleet) -> None:
    fleet = new_fleet()
    records = [fleet.ask(text_of("f")) for _ in range(3)]
    assert {(one.replica, one.routing) for one in records} == {(records[0].replica, "first_block")}
    assert [one.cached_tokens > 0 for one in records] == [False, True, True]


def test_several_prompts_stay_together_and_are_promised_nothing(fleet: Fleet) -> None:
    body = prompt(prompt=[text_of("g"), text_of("h")], max_tokens=2)
    record = fleet.gateway.record(post(fleet.gateway, body, "/v1/completions")["id"])
    assert record.promised_tokens is None and record.routing == "two_choices"
    answer = post(fleet.gateway, chat(n=3, max_tokens=2))
    assert fleet.gateway.record(answer["id"]).promised_tokens == 0
