"""API keys: what opens the door, what does not, what it costs to be told so, and what is written where."""

import asyncio
import re
from collections.abc import Sequence

import pytest

from cache.accounts import Limits
from cache.connection import Script, Store
from cache.errors import Misconfigured, NotAllowed, Unavailable
from cache.key_records import Identity, Issued, digest_of
from cache.keys import FRESH_S, Keys
from tests.cache.conftest import OpenStore
from tests.cache.servers import Server

PEPPER = b"a pepper for tests, of 32 bytes."
NS_PER_S = 1_000_000_000


class World:
    """Clocks that the test sets, and a count of what the server is asked."""

    def __init__(self, store: Store) -> None:
        self.now_s = 1_800_000_000
        self.asked = 0
        self._store = store
        self._run = store.run
        store.run = self.run  # type: ignore[method-assign]

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str]) -> list[bytes]:
        self.asked += 1
        return await self._run(script, keys, args)

    def process(self, pepper: bytes = PEPPER, **options: int) -> Keys:
        """One more process, with a cache of its own."""
        return Keys(
            self._store,
            pepper,
            now_ns=lambda: self.now_s * NS_PER_S,
            time_s=lambda: self.now_s,
            **options,
        )


@pytest.fixture
def world(own_valkey: Server, open_store: OpenStore) -> World:
    return World(open_store(own_valkey.url))


async def who(keys: Keys, issued: Issued) -> Identity:
    found = await keys.verify(issued.key)
    assert found is not None
    return found


async def test_a_key_opens_the_door_on_every_server(every_url: str, open_store: OpenStore) -> None:
    keys = Keys(open_store(every_url), PEPPER)
    limits = Limits(requests_per_minute=5, concurrent=2)
    await keys.change_organisation("acme", actor="t", limits=Limits(tokens_per_minute=10**15))
    await keys.change_tenant("ads", actor="t", organisation="acme", policy="closed")
    issued = await keys.create(
        tenant="ads", actor="t", label="CI", limits=limits, models=["m"], priority="high", weight=7
    )
    identity = await who(keys, issued)
    assert (identity.key.id, identity.key.label, identity.key.priority, identity.key.weight) == (
        issued.key_id, "CI", "high", 7,
    )  # fmt: skip
    assert identity.may_use("m") and not identity.may_use("n")
    account = identity.account
    assert (account.organisation, account.policy) == ("acme", "closed")
    assert [(level.name, level.id) for level in account.levels] == [
        ("organisation", "acme"), ("tenant", "ads"), ("key", issued.key_id),
    ]  # fmt: skip
    assert [level.name for level in account.limited] == ["organisation", "key"]
    assert issued.key_id in [key.id for key in await keys.list_keys()]
    await keys.revoke(issued.key_id, actor="t")
    assert await keys.verify(issued.key) is None


async def test_a_key_has_its_form_and_a_tenant_of_its_own(world: World) -> None:
    keys = world.process()
    issued = await keys.create(tenant="new", actor="t")
    assert re.fullmatch(r"pk-[0-9a-f]{16}-[0-9a-f]{48}", issued.key)
    assert issued.key_id in issued.key and issued.key[-48:] not in repr(issued)
    assert (await who(keys, issued)).account.organisation == "default"
    assert [tenant.name for tenant in await keys.list_tenants()] == ["new"]
    assert [one.name for one in await keys.list_organisations()] == ["default"]
    assert await keys.count() == 1


async def test_every_refusal_costs_one_look_up_and_one_digest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = world.process()
    good, revoked = await keys.create(tenant="t", actor="a"), await keys.create(tenant="t", actor="a")
    expired = await keys.create(tenant="t", actor="a", expires_s=world.now_s + 10)
    rotated = await keys.create(tenant="t", actor="a")
    for issued in (good, revoked, expired, rotated):
        await who(keys, issued)  # all of them are in the cache now
    await keys.revoke(revoked.key_id, actor="a")
    await keys.rotate(rotated.key_id, actor="a")
    other = world.process()
    digests = 0

    def counting(pepper: bytes, text: str) -> str:
        nonlocal digests
        digests += 1
        return digest_of(pepper, text)

    monkeypatch.setattr("cache.keys.digest_of", counting)
    world.now_s += 10
    unknown = f"pk-{'1' * 16}-{'2' * 48}"
    wrong = good.key[:-1] + ("0" if good.key[-1] != "0" else "1")
    for process in (keys, other):
        for text in (
            "",
            "sk-x",
            unknown,
            wrong,
            revoked.key,
            expired.key,
            rotated.key,
            good.key + "0",
            "\ud800" * 9999,
        ):
            for _ in range(2):  # the second time, nothing of it is remembered either
                before, digests = world.asked, 0
                assert await process.verify(text) is None
                assert (world.asked - before, digests) == (1, 1), text


async def test_a_success_is_remembered_for_a_few_seconds(world: World) -> None:
    admin, keys = world.process(), world.process()
    issued = await admin.create(tenant="t", actor="a")
    await who(keys, issued)
    before = world.asked
    for _ in range(100):
        await who(keys, issued)
    assert world.asked == before
    await admin.revoke(issued.key_id, actor="a")
    assert await admin.verify(issued.key) is None, "where it was revoked, at once"
    world.now_s += 3
    await who(keys, issued)
    world.now_s += 1
    assert await keys.verify(issued.key) is None, "elsewhere, after fresh_s"


async def test_an_expired_key_is_refused_from_the_cache_too(world: World) -> None:
    keys = world.process(fresh_s=1000)
    issued = await keys.create(tenant="t", actor="a", expires_s=world.now_s + 5)
    world.now_s += 4
    await who(keys, issued)
    world.now_s += 1
    assert await keys.verify(issued.key) is None
    with pytest.raises(NotAllowed):
        await keys.create(tenant="t", actor="a", expires_s=world.now_s)


async def test_rotation_keeps_the_key_and_the_old_text_for_its_grace(world: World) -> None:
    keys = world.process()
    first = await keys.create(tenant="t", actor="a", limits=Limits(concurrent=3))
    second = await keys.rotate(first.key_id, actor="a", grace_s=60)
    assert first.key_id == second.key_id and first.key != second.key
    for issued in (first, second):
        assert (await who(keys, issued)).key.limits == Limits(concurrent=3)
    world.now_s += 60
    assert await keys.verify(first.key) is None
    await who(keys, second)
    third = await keys.rotate(first.key_id, actor="a")
    assert await keys.verify(second.key) is None
    await who(keys, third)
    await keys.revoke(first.key_id, actor="a")
    assert await keys.verify(third.key) is None
    for wrong in (keys.rotate(first.key_id, actor="a"), keys.rotate("0" * 16, actor="a"), keys.revoke("x", actor="a")):
        with pytest.raises(NotAllowed):
            await wrong


async def test_changes_at_the_same_time_lose_nothing(world: World) -> None:
    keys = world.process()
    issued = await keys.create(tenant="t", actor="a")
    outcomes = await asyncio.gather(
        keys.revoke(issued.key_id, actor="a"),
        *(keys.rotate(issued.key_id, actor="a", grace_s=60) for _ in range(3)),
        return_exceptions=True,
    )
    assert all(
        not isinstance(outcome, Exception) or isinstance(outcome, NotAllowed | Unavailable) for outcome in outcomes
    )
    assert not isinstance(outcomes[0], Exception)
    key = await keys.get(issued.key_id)
    assert key is not None and key.revoked_s == world.now_s


async def test_another_pepper_opens_nothing(world: World) -> None:
    issued = await world.process().create(tenant="t", actor="a")
    assert await world.process(b"another pepper, of 32 bytes too.").verify(issued.key) is None
    with pytest.raises(Misconfigured, match="16 bytes"):
        world.process(b"salt")


async def test_while_the_server_is_away_the_known_ones_go_on(world: World, own_valkey: Server) -> None:
    keys = world.process()
    known, never_seen = await keys.create(tenant="t", actor="a"), await keys.create(tenant="t", actor="a")
    await who(keys, known)
    own_valkey.kill()
    world.now_s += 300
    await who(keys, known)
    for text in (never_seen.key, "", known.key + "0", known.key[:-1] + "x"):
        with pytest.raises(Unavailable):
            await keys.verify(text)
    world.now_s += 301
    with pytest.raises(Unavailable):
        await keys.verify(known.key)


async def test_no_secret_is_on_the_server(world: World, own_valkey: Server) -> None:
    keys = world.process()
    first = await keys.create(tenant="t", actor="me", label="x")
    second = await keys.rotate(first.key_id, actor="me", grace_s=5)
    names = own_valkey.ask("KEYS", "*")
    everything = names + own_valkey.ask("XRANGE", "pellucid:{keys}:audit", "-", "+")
    for name in re.findall(rb"pellucid:\S+", names):
        if b"audit" not in name:
            everything += own_valkey.ask("HGETALL", name.decode())
    for issued in (first, second):
        secret = issued.key.rpartition("-")[2].encode()
        assert secret not in everything and first.key_id.encode() in everything
    lines = await keys.audit()
    assert [(line.action, line.target, line.actor) for line in lines] == [
        ("rotate", first.key_id, "me"), ("create", first.key_id, "me"),
    ]  # fmt: skip


async def test_who_changes_a_tenant_keeps_what_others_have_changed(world: World) -> None:
    one, other = world.process(), world.process()
    limits = Limits(requests_per_minute=3)
    await asyncio.gather(
        one.change_tenant("ads", actor="one", organisation="acme", limits=limits),
        other.change_tenant("ads", actor="other", policy="closed"),
    )
    (tenant,) = await one.list_tenants()
    assert (tenant.organisation, tenant.limits, tenant.policy) == ("acme", limits, "closed")
    assert {organisation.name for organisation in await one.list_organisations()} >= {"acme"}
    made = await one.change_organisation("acme", actor="one", limits=limits)
    assert await other.change_organisation("acme", actor="other") == made
    assert [line.action for line in await one.audit()] == ["organisation", "organisation", "tenant", "tenant"]


async def test_a_changed_limit_holds_for_a_key_within_the_time_that_is_promised(world: World) -> None:
    one, other = world.process(), world.process()
    issued = await one.create(tenant="ads", actor="t")
    for keys in (one, other):
        assert not (await who(keys, issued)).account.limited
    await one.change_tenant("ads", actor="t", organisation="acme")
    await one.change_organisation("acme", actor="t", limits=Limits(concurrent=1))
    assert [level.name for level in (await who(one, issued)).account.limited] == ["organisation"]
    world.now_s += int(FRESH_S) + 1
    assert [level.name for level in (await who(other, issued)).account.limited] == ["organisation"]


async def test_what_is_out_of_bounds_is_refused_and_written_nowhere(world: World) -> None:
    keys = world.process(records_max=1)
    for wrong in (
        keys.create(tenant="a:{b}", actor="a"),
        keys.create(tenant="", actor="a"),
        keys.create(tenant="t", actor="a", weight=0),
        keys.create(tenant="t", actor="a", limits=Limits(requests_per_minute=-1)),
        keys.create(tenant="t", actor="a", limits=Limits(tokens_per_minute=10**15 + 1)),
        keys.create(tenant="t", actor="a", models=["m"] * 101),
        keys.change_tenant("t", actor="a", organisation="}"),
        keys.change_organisation("x" * 65, actor="a"),
        keys.rotate("x", actor="a", grace_s=-1),
    ):
        with pytest.raises(NotAllowed):
            await wrong
    assert await keys.audit() == [] and await keys.count() == 0
    await keys.create(tenant="t", actor="a")
    with pytest.raises(NotAllowed, match="1 of them already"):
        await keys.create(tenant="t", actor="a")


UNPRINTABLE = ("\n", "a\nb", "\r", "\x1b[2J", "\x00", "\x9b31m", "\u2028", "\u202eabc", "\ufeff")


@pytest.mark.parametrize("wrong", ["", "a\n", "a b", "{a}", "a:b", "a/b", "\u00e9", "-a", "a" * 65, *UNPRINTABLE])
async def test_a_name_that_may_not_stand_in_a_key_of_the_server(world: World, wrong: str) -> None:
    """What comes behind the hash tag's braces or the end of a line would be another key, or another line of a list."""
    keys = world.process()
    for doing in (
        keys.create(tenant=wrong, actor="a"),
        keys.change_tenant(wrong, actor="a"),
        keys.change_tenant("t", actor="a", organisation=wrong),
        keys.change_organisation(wrong, actor="a"),
    ):
        with pytest.raises(NotAllowed, match="letters, digits"):
            await doing
    assert await keys.list_tenants() == [] and await keys.list_organisations() == []


@pytest.mark.parametrize("wrong", UNPRINTABLE)
async def test_what_a_list_shows_is_one_line_for_each_key(world: World, wrong: str) -> None:
    keys = world.process()
    for doing in (keys.create(tenant="t", actor="a", label=wrong), keys.create(tenant="t", actor="a", models=[wrong])):
        with pytest.raises(NotAllowed, match="printable"):
            await doing
    await keys.create(tenant="t", actor="a", label="\u00fc \u4f60\u597d \U0001f600", models=["org/model:v1 (4 bit)"])


async def test_a_damaged_record_is_unavailable_and_lets_nobody_in(world: World, own_valkey: Server) -> None:
    keys = world.process()
    issued = await keys.create(tenant="t", actor="a")
    for damage in ("{}", "nonsense", '{"key": 1}'):
        own_valkey.ask("HSET", "pellucid:{keys}:keys", issued.key_id, damage)
        with pytest.raises(Unavailable):
            await keys.verify(issued.key)


async def test_many_who_ask_at_once_share_a_look_up_and_one_may_leave(world: World) -> None:
    keys = world.process()
    issued = await keys.create(tenant="t", actor="a")
    before = world.asked
    tasks = [asyncio.create_task(keys.verify(issued.key)) for _ in range(50)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError) and all(isinstance(one, Identity) for one in outcomes[1:])
    assert world.asked - before == 1


async def test_the_cache_is_bounded_and_strangers_do_not_fill_it(world: World) -> None:
    keys = world.process(entries_max=2)
    issued = [await keys.create(tenant="t", actor="a") for _ in range(3)]
    for one in issued[:2]:
        await who(keys, one)
    for number in range(20):
        assert await keys.verify(f"pk-{number:016x}-{'0' * 48}") is None
    before = world.asked
    await who(keys, issued[1])
    await who(keys, issued[0])
    assert world.asked == before
    await who(keys, issued[2])  # issued[1] makes room: it was used longest ago
    before = world.asked
    await who(keys, issued[0])
    assert world.asked == before
    await who(keys, issued[1])
    assert world.asked == before + 1


async def test_keys_survive_a_restart_and_many_are_listed(own_valkey: Server, open_store: OpenStore) -> None:
    keys = Keys(open_store(own_valkey.url, probe_interval_ms=20), PEPPER)
    issued = [await keys.create(tenant=f"t{number % 7}", actor="a") for number in range(700)]
    own_valkey.kill()
    own_valkey.restart()
    again = Keys(open_store(own_valkey.url), PEPPER)
    assert {key.id for key in await again.list_keys()} == {one.key_id for one in issued}
    await who(again, issued[0])
