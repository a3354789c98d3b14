"""
API keys: made, shown once, looked up, revoked, rotated.

Verification is answered from a cache in the process for `fresh_s`, so a revocation takes effect within that time.  Only
a success is ever answered from it: every refusal costs one look-up and one digest, whether the text was missing,
unknown, wrong, revoked or expired, so the time that it takes tells nothing.  And a new key works at once.

While the server is away, what the cache has seen within `stale_s` is still good, also if it was revoked meanwhile; of
anything else nobody can say whether it is good, and that is Unavailable, not a refusal.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from cache.accounts import Limits, Policy
from cache.connection import Script, Store
from cache.errors import Misconfigured, NotAllowed, Unavailable
from cache.key_records import (
    DEFAULT_ORGANISATION,
    NOBODY,
    PEPPER_BYTES_MIN,
    RULES,
    AuditLine,
    Identity,
    Issued,
    Key,
    Organisation,
    Priority,
    Stored,
    Tenant,
    account_of,
    digest_of,
    fits,
    id_in,
    new_id,
    new_text,
)
from telemetry import clock

SCRIPT = Script(Path(__file__).with_name("keys.lua").read_text(encoding="utf-8"))
FRESH_S = 3.0
STALE_S = 600.0
ENTRIES_MAX = 10_000
RECORDS_MAX = 100_000
AUDIT_LINES_MAX = 10_000
GRACE_S_MAX = 30 * 86_400
ACTOR_CHARS_MAX = 200
TRIES_MAX = 5
_KEYS = [f"pellucid:{{keys}}:{name}" for name in ("organisations", "tenants", "keys", "audit")]
_NS_PER_S = 1_000_000_000
_Hash = Literal["organisations", "tenants", "keys"]
_Record = TypeVar("_Record", bound=Organisation | Tenant | Stored)
_Group = TypeVar("_Group", bound=Organisation | Tenant)


class _Entry(msgspec.Struct, frozen=True):
    stored: Stored
    identity: Identity
    asked_ns: int

    def whose(self, digest: str, now_s: int) -> Identity | None:
        return self.identity if fits(self.stored, digest, now_s) else None


class Keys:
    """The keys on one server, with this process's cache of them."""

    def __init__(
        self,
        store: Store,
        pepper: bytes,
        *,
        fresh_s: float = FRESH_S,
        stale_s: float = STALE_S,
        entries_max: int = ENTRIES_MAX,
        records_max: int = RECORDS_MAX,
        now_ns: Callable[[], int] = clock.now_ns,
        time_s: Callable[[], float] = time.time,
    ) -> None:
        """Raises Misconfigured: the pepper is too short to keep anything secret."""
        if len(pepper) < PEPPER_BYTES_MIN:
            raise Misconfigured(f"the pepper of the API keys has at least {PEPPER_BYTES_MIN} bytes")
        self._store = store
        self._pepper = pepper
        self._fresh_ns = round(fresh_s * _NS_PER_S)
        self._stale_ns = round(stale_s * _NS_PER_S)
        self._entries_max = entries_max
        self._records_max = records_max
        self._now_ns = now_ns
        self._time_s = time_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[_Entry]] = {}
        nobody = Key(id=NOBODY, tenant="nobody", created_s=0, revoked_s=0)
        stored = Stored(key=nobody, digest=digest_of(pepper, NOBODY))
        records = (stored, Tenant(name="nobody"), Organisation(name="nobody"))
        self._nobody = [msgspec.json.encode(record) for record in records]

    # ---- verification

    async def verify(self, presented: str) -> Identity | None:
        """Whose key this is; None, after the same time, for every reason why it is nobody's.  Raises Unavailable."""
        key_id, digest = id_in(presented), digest_of(self._pepper, presented)
        seen = self._entries.get(key_id)
        age_ns = self._now_ns() - seen.asked_ns if seen is not None else 0
        if seen is not None and age_ns <= self._fresh_ns:
            identity = seen.whose(digest, int(self._time_s()))
            if identity is not None:
                self._entries.move_to_end(key_id)
                return identity
        try:
            entry = await self._look_up(key_id)
        except Unavailable:
            identity = None
            if seen is not None and age_ns <= self._stale_ns:
                identity = seen.whose(digest, int(self._time_s()))
            if identity is None:
                raise
            return identity
        return entry.whose(digest, int(self._time_s()))

    async def _look_up(self, key_id: str) -> _Entry:
        """From the server; those who ask for the same key at the same time share one look-up."""
        task = self._lookups.get(key_id)
        if task is None:
            task = self._lookups[key_id] = asyncio.create_task(self._fetch(key_id))
            task.add_done_callback(lambda task: self._looked_up(key_id, task))
        return await asyncio.shield(task)  # one of them may leave

    def _looked_up(self, key_id: str, task: asyncio.Task[_Entry]) -> None:
        del self._lookups[key_id]
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain where all have left

    async def _fetch(self, key_id: str) -> _Entry:
        asked_ns = self._now_ns()
        words = await self._run("lookup", key_id)
        known = all(words)
        key_text, tenant_text, organisation_text = words if known else self._nobody
        stored = _decode(key_text, Stored)
        account = account_of(stored.key, _decode(tenant_text, Tenant), _decode(organisation_text, Organisation))
        entry = _Entry(stored, Identity(key=stored.key, account=account), asked_ns)
        self._entries.pop(key_id, None)
        if known:
            self._entries[key_id] = entry
            if len(self._entries) > self._entries_max:
                self._entries.popitem(last=False)
        return entry

    # ---- administration

    async def change_organisation(self, name: str, *, actor: str, limits: Limits | None = None) -> Organisation:
        """Make it, or change it: what is None stays.  What has become of it.  Raises NotAllowed, Unavailable."""
        return await self._make_or_change(Organisation(name=name), {"limits": limits}, actor)

    async def change_tenant(
        self,
        name: str,
        *,
        actor: str,
        organisation: str | None = None,
        limits: Limits | None = None,
        policy: Policy | None = None,
    ) -> Tenant:
        """The same; its organisation is made where that is missing.  Raises NotAllowed, Unavailable."""
        given = {"organisation": organisation, "limits": limits, "policy": policy}
        return await self._make_or_change(Tenant(name=name), given, actor)

    async def _make_or_change(self, new: _Group, given: Mapping[str, str | Limits | None], actor: str) -> _Group:
        changes = {field: value for field, value in given.items() if value is not None}
        new = _checked(msgspec.structs.replace(new, **changes))
        of: _Hash = "tenants" if isinstance(new, Tenant) else "organisations"
        for _ in range(TRIES_MAX):
            (record,) = await self._run("get", of, new.name)
            changed = msgspec.structs.replace(_decode(record, type(new)), **changes) if record else new
            details = msgspec.structs.asdict(changed) | {"limits": _words(changed.limits)}
            name = details.pop("name")
            line = self._line("tenant" if isinstance(new, Tenant) else "organisation", actor, name, **details)
            parents = (Organisation(name=changed.organisation),) if isinstance(changed, Tenant) else ()
            if await self._put(of, name, record, changed, line, *parents):
                self._entries.clear()
                return changed
        raise Unavailable(f"others are changing these {of} at the same time")

    async def create(
        self,
        *,
        tenant: str,
        actor: str,
        label: str = "",
        limits: Limits = Limits(),  # noqa: B008 - frozen
        models: Sequence[str] = (),
        priority: Priority = "normal",
        weight: int = 1,
        expires_s: int | None = None,
    ) -> Issued:
        """
        A new key; a tenant that is not there yet is made, without limits, in the organisation `default`.

        Raises NotAllowed, Unavailable.  After Unavailable a key may be there that nobody has seen: it can do nothing.
        """
        now_s = int(self._time_s())
        if expires_s is not None and expires_s <= now_s:
            raise NotAllowed("a key that has expired already is of no use")
        key = Key(
            id=new_id(),
            tenant=tenant,
            label=label,
            limits=limits,
            models=tuple(models),
            priority=priority,
            weight=weight,
            created_s=now_s,
            expires_s=expires_s,
        )
        text = new_text(key.id)
        stored = _checked(Stored(key=key, digest=digest_of(self._pepper, text)))
        line = self._line("create", actor, key.id, tenant=tenant, limits=_words(limits), models=",".join(models))
        parents = (Tenant(name=tenant), Organisation(name=DEFAULT_ORGANISATION))
        if not await self._put("keys", key.id, b"", stored, line, *parents):
            raise NotAllowed("the id of the new key is taken: try again")
        return Issued(key_id=key.id, key=text)

    async def revoke(self, key_id: str, *, actor: str) -> Key:
        """From now on nobody's, other processes follow within their `fresh_s`.  Raises NotAllowed, Unavailable."""
        now_s = int(self._time_s())

        def revoked(stored: Stored) -> Stored:
            key = stored.key
            if key.revoked_s is None:
                key = msgspec.structs.replace(key, revoked_s=now_s)
            return msgspec.structs.replace(stored, key=key)

        return (await self._change(key_id, revoked, self._line("revoke", actor, key_id))).key

    async def rotate(self, key_id: str, *, actor: str, grace_s: int = 0) -> Issued:
        """A new text for the same key; the old one is good for `grace_s` more.  Raises NotAllowed, Unavailable."""
        if not 0 <= grace_s <= GRACE_S_MAX:
            raise NotAllowed(f"the grace is 0 to {GRACE_S_MAX} seconds")
        now_s = int(self._time_s())
        text = new_text(key_id)

        def rotated(stored: Stored) -> Stored:
            if stored.key.revoked_s is not None:
                raise NotAllowed("a revoked key cannot be rotated: create a new one")
            key = msgspec.structs.replace(stored.key, rotated_s=now_s, old_until_s=now_s + grace_s)
            return Stored(key=key, digest=digest_of(self._pepper, text), old_digest=stored.digest)

        await self._change(key_id, rotated, self._line("rotate", actor, key_id, grace_s=str(grace_s)))
        return Issued(key_id=key_id, key=text)

    async def get(self, key_id: str) -> Key | None:
        """One key, without its digests.  Raises Unavailable."""
        (record,) = await self._run("get", "keys", key_id)
        return _decode(record, Stored).key if record else None

    async def list_keys(self) -> list[Key]:
        """All keys, oldest first.  Raises Unavailable."""
        found = {stored.key.id: stored.key async for stored in self._scan("keys", Stored)}
        return sorted(found.values(), key=lambda key: (key.created_s, key.id))

    async def list_tenants(self) -> list[Tenant]:
        """All tenants, by name.  Raises Unavailable."""
        found = {tenant.name: tenant async for tenant in self._scan("tenants", Tenant)}
        return [found[name] for name in sorted(found)]

    async def list_organisations(self) -> list[Organisation]:
        """All organisations, by name.  Raises Unavailable."""
        found = {one.name: one async for one in self._scan("organisations", Organisation)}
        return [found[name] for name in sorted(found)]

    async def count(self) -> int:
        """How many keys there are, revoked ones included.  Raises Unavailable."""
        (number,) = await self._run("count", "keys")
        return int(number)

    async def audit(self, *, lines: int = 100) -> list[AuditLine]:
        """The last changes, newest first; about AUDIT_LINES_MAX are kept.  Raises Unavailable."""
        found = await self._run("audit", str(min(max(lines, 0), AUDIT_LINES_MAX)))
        return [msgspec.json.decode(line, type=AuditLine) for line in found]

    # ---- the script

    async def _run(self, *args: str) -> list[bytes]:
        return await self._store.run(SCRIPT, _KEYS, args)

    async def _scan(self, of: _Hash, kind: type[_Record]) -> AsyncIterator[_Record]:
        cursor, pages = b"0", 0
        while pages == 0 or (cursor != b"0" and pages < self._records_max):
            cursor, *records = await self._run("list", of, cursor.decode())
            pages += 1
            for record in records:
                yield _decode(record, kind)

    async def _change(self, key_id: str, change: Callable[[Stored], Stored], line: AuditLine) -> Stored:
        """Read, change, write if nobody else has written meanwhile; else once more."""
        for _ in range(TRIES_MAX):
            (record,) = await self._run("get", "keys", key_id)
            if not record:
                raise NotAllowed("there is no such key")
            changed = change(_decode(record, Stored))
            if await self._put("keys", key_id, record, changed, line):
                self._entries.pop(key_id, None)
                return changed
        raise Unavailable("others are changing this key at the same time")

    async def _put(
        self,
        of: _Hash,
        name: str,
        expected: bytes,
        record: Organisation | Tenant | Stored,
        line: AuditLine,
        *parents: Organisation | Tenant,
    ) -> bool:
        words = ["put", of, name, expected.decode(), msgspec.json.encode(record).decode()]
        words += [str(self._records_max), str(AUDIT_LINES_MAX), msgspec.json.encode(line).decode()]
        for parent in parents:
            place = "tenants" if isinstance(parent, Tenant) else "organisations"
            words += [place, parent.name, msgspec.json.encode(parent).decode()]
        (answer,) = await self._run(*words)
        if answer == b"full":
            raise NotAllowed(f"there are {self._records_max} of them already")
        return answer == b"1"

    def _line(
        self,
        action: Literal["create", "revoke", "rotate", "organisation", "tenant"],
        actor: str,
        target: str,
        **details: str,
    ) -> AuditLine:
        return AuditLine(
            at_s=int(self._time_s()), actor=actor[:ACTOR_CHARS_MAX], action=action, target=target, details=details
        )


def _words(limits: Limits) -> str:
    return msgspec.json.encode(limits).decode()


def _decode(record: bytes, kind: type[_Record]) -> _Record:
    try:
        return msgspec.json.decode(record, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unavailable(f"a record of the API keys is damaged: {type(error).__name__}") from None


def _checked(record: _Record) -> _Record:
    """The same, held against the types' bounds.  Raises NotAllowed."""
    try:
        return msgspec.convert(msgspec.to_builtins(record), type(record))
    except msgspec.ValidationError as error:
        raise NotAllowed(_words_of(str(error))) from None


def _words_of(error: str) -> str:
    """msgspec's words, but for a rule rather than its regular expression."""
    what, _, path = error.rstrip("`").rpartition(" - at `$.")
    if "regex" not in what:
        return error
    field = path.rpartition(".")[2]
    return f"{field}: {RULES[field.partition('[')[0]]}"
