"""
The prefix index against plain Python models on real servers: its script with a clock that the test sets, and what a
gateway makes of an engine's news on the server's own.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cache import prefix_index
from cache.connection import Script, Store
from cache.errors import Unavailable
from cache.prefix_index import BATCH_NAMES_MAX, FAMILY_BYTES, NAMES_MAX, PENDING_MAX, SCRIPT, PrefixIndex
from cache.redis_url import parse_redis_url
from engine import prefix
from tests.cache.conftest import OpenStore
from tests.cache.servers import Server

TIME, EPOCHS = "redis.call('TIME')", "local EPOCHS_MAX = 32"
assert SCRIPT.source.count(TIME) == SCRIPT.source.count(EPOCHS) == 1
EPOCHS_MAX = 3
CLOCK = "pellucid:test:prefix-clock"
CLOCKED = Script(
    SCRIPT.source.replace(TIME, f"redis.call('HMGET', '{CLOCK}', 's', 'us')").replace(
        EPOCHS, f"local EPOCHS_MAX = {EPOCHS_MAX}"
    )
)
SET_CLOCK = Script(f"redis.call('HSET', '{CLOCK}', 's', ARGV[1], 'us', ARGV[2]) return {{}}")
HELD = Script(
    "local all = {} for i, key in ipairs(KEYS) do all[i] = redis.call('HGET', key, ARGV[1]) or '' end return all"
)
TTL_MS = 1000
SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes; what fails is printed step by step
)

places = st.integers(0, 5)
epochs = st.sampled_from("abcde")


def new_chain(length: int) -> list[bytes]:
    """Names that no other test has."""
    family = secrets.token_bytes(FAMILY_BYTES)
    return [family + secrets.token_bytes(prefix.HASH_BYTES) for _ in range(length)]


def key_of(name: bytes) -> str:
    return prefix_index._key(name)


class Matching(RuleBasedStateMachine):
    """The script: a name is where it was last seen less than a TTL ago, and matches count up to the first gap."""

    runner: asyncio.Runner  # these two are set by the test
    store: Store

    @initialize()
    def begin(self) -> None:
        self.names = new_chain(6)
        self.now_ms = 1_800_000_000_000
        self.seen: dict[int, dict[str, int]] = {}
        self._set_clock()

    def _set_clock(self) -> None:
        words = [str(self.now_ms // 1000), str(self.now_ms % 1000 * 1000 + 999)]
        self.runner.run(self.store.run(SET_CLOCK, ["{x}"], words))

    def _run(self, operation: str, at: list[int], words: list[str]) -> list[bytes]:
        keys = [key_of(self.names[place]) for place in at]
        return self.runner.run(self.store.run(CLOCKED, keys, [operation, str(TTL_MS), *words]))

    @rule(ms=st.sampled_from((1, 400, TTL_MS - 1, TTL_MS, -300)))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        self._set_clock()

    @rule(news=st.lists(st.tuples(places, epochs, st.booleans()), min_size=1, max_size=8))
    def note(self, news: list[tuple[int, str, bool]]) -> None:
        words = [word for _, epoch, there in news for word in (epoch, "1" if there else "0")]
        assert self._run("note", [place for place, _, _ in news], words) == []
        for place, epoch, there in news:
            sightings = self.seen.setdefault(place, {})
            if not there:
                sightings.pop(epoch, None)
                continue
            sightings[epoch] = self.now_ms
            if len(sightings) > EPOCHS_MAX:
                del sightings[min(sightings, key=lambda one: (sightings[one], one))]

    @rule(epoch=epochs, length=st.integers(1, 6))
    def an_engine_tells_a_whole_chain(self, epoch: str, length: int) -> None:
        self.note([(place, epoch, True) for place in range(length)])

    @rule(asked=st.lists(epochs, max_size=5), length=st.integers(1, 6))
    def match(self, asked: list[str], length: int) -> None:
        expected = []
        for epoch in asked:
            there = [self.seen.get(place, {}).get(epoch, -TTL_MS) > self.now_ms - TTL_MS for place in range(length)]
            expected.append([*there, False].index(False))
        if asked:
            assert [int(count) for count in self._run("match", list(range(length)), asked)] == expected

    @invariant()
    def everybody_matches_what_the_model_says(self) -> None:
        if hasattr(self, "names"):
            self.match(list("abcde"), 6)


class Writing(RuleBasedStateMachine):
    """Two gateways write for two engines each: the server has what each engine has now, the latest names_max of it."""

    runner: asyncio.Runner
    store: Store
    NAMES_MAX = 7

    @initialize()
    def begin(self) -> None:
        self.chains = [new_chain(6) for _ in range(3)]
        self.gateways = [PrefixIndex(self.store, names_max=self.NAMES_MAX) for _ in range(2)]
        self.epochs = [secrets.token_hex(8) for _ in range(4)]
        self.there: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(4)]

    def _tell(self, tell: Callable[[], None]) -> None:
        async def inside() -> None:
            tell()

        self.runner.run(inside())

    @rule(engine=st.integers(0, 3), chain=st.integers(0, 2), length=st.integers(1, 6))
    def seen(self, engine: int, chain: int, length: int) -> None:
        names = self.chains[chain][:length]
        self._tell(lambda: self.gateways[engine % 2].seen(self.epochs[engine], names))
        there = self.there[engine]
        for name in names:
            there[name] = None
            there.move_to_end(name)
            if len(there) > self.NAMES_MAX:
                there.popitem(last=False)

    @rule(engine=st.integers(0, 3), chain=st.integers(0, 2), first=st.integers(0, 5))
    def gone(self, engine: int, chain: int, first: int) -> None:
        names = self.chains[chain][first:]
        self._tell(lambda: self.gateways[engine % 2].gone(self.epochs[engine], names))
        for name in names:
            self.there[engine].pop(name, None)

    @rule(engine=st.integers(0, 3), chain=st.integers(0, 2), length=st.integers(1, 6))
    def evicted_and_computed_again(self, engine: int, chain: int, length: int) -> None:
        self.gone(engine, chain, 0)
        self.seen(engine, chain, length)

    @rule(engine=st.integers(0, 3), roll=st.integers(0, 4))
    def restart(self, engine: int, roll: int) -> None:
        if roll:  # seldom
            return
        self._tell(lambda: self.gateways[engine % 2].forget(self.epochs[engine]))
        self.epochs[engine] = secrets.token_hex(8)
        self.there[engine].clear()

    @rule()
    def everything_is_written(self) -> None:
        self.runner.run(written(*self.gateways))
        for chain in self.chains:
            found = self.runner.run(self.gateways[0].matched(chain, self.epochs))
            expected = [[*(name in there for name in chain), False].index(False) for there in self.there]
            assert found == expected
        keys = {name: key_of(name) for chain in self.chains for name in chain}
        for epoch, there in zip(self.epochs, self.there, strict=True):
            held = {
                name
                for chain in self.chains
                for name, value in zip(
                    chain, self.runner.run(self.store.run(HELD, [keys[n] for n in chain], [epoch])), strict=True
                )
                if value
            }
            assert held == set(there), "the server holds what it should not, or lacks something"

    def teardown(self) -> None:
        if hasattr(self, "chains"):
            self.everything_is_written()


async def written(*gateways: PrefixIndex) -> None:
    async with asyncio.timeout(20):
        while any(gateway.pending for gateway in gateways):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("machine", [Matching, Writing])
def test_the_index_does_what_its_model_does(
    machine: type[Matching] | type[Writing], valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "GATHER_MS", 0)

    async def open_store() -> Store:
        return Store(parse_redis_url(valkey.url), connect_timeout_ms=30_000, command_timeout_ms=30_000)

    with asyncio.Runner() as runner:
        store = runner.run(open_store())
        here = type("Here", (machine,), {"runner": runner, "store": store})
        run_state_machine_as_test(here, settings=SETTINGS)
        runner.run(store.aclose())


async def test_every_kind_of_server_finds_the_chains_of_many_families(every_url: str, open_store: OpenStore) -> None:
    writer, reader = (PrefixIndex(open_store(every_url)) for _ in range(2))
    chains = [new_chain(length) for length in (1, 2, BATCH_NAMES_MAX + 9, *[3] * 40)]
    for number, chain in enumerate(chains):
        writer.seen("left", chain)
        writer.seen("right", chain[: number % 3])
    await written(writer)
    for number, chain in enumerate(chains):
        here = min(number % 3, len(chain))
        assert await reader.matched(chain, ["left", "right", "nobody"]) == [len(chain), here, 0]
    writer.gone("left", chains[2][5:])
    await written(writer)
    assert await reader.matched(chains[2], ["left"]) == [5]
    assert await reader.matched([], ["left"]) == [0] and await reader.matched(chains[0], []) == []
    await writer.aclose()


def test_the_names_are_those_of_the_engine() -> None:
    assert FAMILY_BYTES == prefix.FAMILY_BYTES
    names = prefix.indexed_names("t", range(300), 16)
    assert len({key_of(name).partition("}")[0] for name in names}) == 1
    assert len({key_of(name) for name in names}) == len(names) == 4


async def test_what_is_not_seen_again_is_forgotten(valkey: Server, open_store: OpenStore) -> None:
    store, (name, other) = open_store(valkey.url), new_chain(2)
    short, long = PrefixIndex(store, ttl_ms=250, refresh_ms=0), PrefixIndex(store)
    short.seen("a", [name, other])
    await written(short)
    async with asyncio.timeout(20):
        while await long.matched([name], ["a"]) != [0]:  # the key itself has gone
            short.seen("a", [other])
            await written(short)
        while await short.matched([other], ["a"]) != [1]:  # what is seen again stays; at once, but for a busy machine
            short.seen("a", [other])
            await written(short)
    await short.aclose()


async def test_without_the_server_news_wait_within_their_bound_and_none_is_invented(
    own_valkey: Server, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "RETRY_MS", 10)
    store = open_store(own_valkey.url, command_timeout_ms=100, probe_interval_ms=20)
    index = PrefixIndex(store, pending_max=10)
    chain = new_chain(14)
    index.seen("a", chain[:2])
    await written(index)
    own_valkey.freeze()
    with pytest.raises(Unavailable):
        await index.matched(chain, ["a"])
    index.gone("a", chain[:2])
    index.seen("a", chain[2:])
    assert (index.pending, index.dropped) == (10, 4)
    own_valkey.thaw()
    await written(index)
    # The oldest news are lost: that two have gone, and that two have come.
    assert await index.matched(chain, ["a"]) == [2]
    assert await index.matched(chain[4:], ["a"]) == [10]
    index.seen("a", chain)
    await written(index)
    assert await index.matched(chain, ["a"]) == [14]
    await index.aclose()


async def test_what_a_name_costs(own_valkey: Server, open_store: OpenStore) -> None:
    """The bound of memory that cache.prefix_index promises: 8 MB an engine, for names of one engine."""
    index, count = PrefixIndex(open_store(own_valkey.url)), 4000
    before = used_bytes(own_valkey)
    for _ in range(count // 8):
        index.seen(secrets.token_hex(8), new_chain(8))
    await written(index)
    each = (used_bytes(own_valkey) - before) / count
    assert 100 < each < 8_000_000 / NAMES_MAX, f"{each:.0f} bytes a name"
    assert PENDING_MAX < NAMES_MAX
    await index.aclose()


def used_bytes(server: Server) -> int:
    info = server.ask("INFO", "memory").decode()
    return int(info.partition("used_memory:")[2].split()[0])
