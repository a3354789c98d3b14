"""
Suspects against a plain Python model, on each kind of server, with a clock that the test sets.
"""

import secrets

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.connection import Script
from cache.suspects import SCRIPT, Suspects
from tests.cache.conftest import OpenStore

TIME = "redis.call('TIME')"
assert SCRIPT.source.count(TIME) == 1
TTL_MS = 1000
NAMES_MAX = 3
NAMES = [bytes([number]) * 16 for number in range(5)]

names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)
deeds = st.tuples(st.sampled_from(("suspect", "convict", "acquit")), names)
acts = st.lists(st.one_of(deeds, st.tuples(st.just("wait"), st.integers(1, 700))), max_size=25)


class Model:
    """What the script does, in Python."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.deaths: dict[bytes, int] = {}
        self.until_ms: dict[bytes, int] = {}

    def act(self, act: str, names: list[bytes]) -> None:
        self.expire()
        for name in names:
            if act == "acquit":
                self.forget(name)
            else:
                self.deaths[name] = 2 if act == "convict" else self.deaths.get(name, 0) + 1
                self.until_ms[name] = self.now_ms + TTL_MS
        for name in sorted(self.until_ms, key=lambda name: (self.until_ms[name], name))[: -NAMES_MAX or None]:
            if len(self.until_ms) > NAMES_MAX:
                self.forget(name)

    def expire(self) -> None:
        for name in [name for name, until_ms in self.until_ms.items() if until_ms <= self.now_ms]:
            self.forget(name)

    def forget(self, name: bytes) -> None:
        self.deaths.pop(name, None)
        self.until_ms.pop(name, None)


@pytest.fixture
def clock() -> str:
    return f"pellucid:{{suspects}}:clock-{secrets.token_hex(4)}"


async def test_as_the_model(every_url: str, open_store: OpenStore, clock: str) -> None:
    store = open_store(every_url)
    clocked = Script(SCRIPT.source.replace(TIME, f"redis.call('HMGET', '{clock}', 's', 'us')"))
    set_clock = Script(f"redis.call('HSET', '{clock}', 's', ARGV[1], 'us', ARGV[2]) return {{}}")
    clear = Script("redis.call('DEL', KEYS[1], KEYS[2]) return {}")
    keys = ("pellucid:{suspects}:deaths", "pellucid:{suspects}:until")
    plays: list[list[tuple[str, list[bytes]] | tuple[str, int]]] = []

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(play=acts)
    def collect(play: list[tuple[str, list[bytes]] | tuple[str, int]]) -> None:
        plays.append(play)

    collect()
    suspects = Suspects(store, ttl_ms=TTL_MS, names_max=NAMES_MAX, script=clocked)
    for play in plays:
        await store.run(clear, keys, ())
        model = Model()
        for act, what in play:
            if isinstance(what, int):
                model.now_ms += what
            await store.run(set_clock, (clock,), (str(model.now_ms // 1000), str(model.now_ms % 1000 * 1000)))
            if not isinstance(what, int):
                model.act(act, what)
                await (suspects.convict(what, 2) if act == "convict" else getattr(suspects, act)(what))
            model.expire()
            assert await suspects.known() == model.deaths, (play, act)


async def test_two_gateways_know_of_each_other(every_url: str, open_store: OpenStore) -> None:
    first, second = Suspects(open_store(every_url)), Suspects(open_store(every_url))
    name = secrets.token_bytes(16)
    await first.suspect([name])
    await second.suspect([name])
    assert (await first.known())[name] == 2
    await second.acquit([name])
    assert name not in await first.known()
