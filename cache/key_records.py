"""
What is kept of organisations, tenants and API keys, and the text of a key.

    pk-<16 hex digits: the key's id>-<48 hex digits: 192 bits that nobody can guess>

The id is inside, so one look-up finds the record.  At rest there is only HMAC-SHA256 of the whole text, keyed with a
pepper that is not on the server: who reads the server can neither use nor forge a key.
"""

import hmac
import re
import secrets
from typing import Annotated, Literal

import msgspec

from cache.accounts import Account, Level, Limits, Policy

PRIORITIES = ("low", "normal", "high")
Priority = Literal["low", "normal", "high"]
Weight = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""May stand in a key of the server: no braces, no colons; and no newline at its end, which `$` would let pass."""
NAME_RULE = "1 to 64 letters, digits, dots, dashes and underscores, and a letter or digit first"
Label = Annotated[
    str,
    msgspec.Meta(
        max_length=200, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]*\Z"
    ),
]
"""May be shown on a terminal: one line, and nothing that moves the cursor or turns the writing round."""
LABEL_RULE = "at most 200 printable characters"
RULES = {
    **dict.fromkeys(("name", "tenant", "organisation"), NAME_RULE),
    **dict.fromkeys(("label", "models"), LABEL_RULE),
}
"""Of the fields whose type is a pattern, for people."""
MODELS_MAX = 100
Models = Annotated[tuple[Label, ...], msgspec.Meta(max_length=MODELS_MAX)]
PRESENTED_CHARS_MAX = 256
PEPPER_BYTES_MIN = 16
DEFAULT_ORGANISATION = "default"
_TEXT = re.compile(r"pk-([0-9a-f]{16})-[0-9a-f]{48}", re.ASCII)
NOBODY = "0" * 16
"""The id that is looked up for a text without one: no key ever has it."""


class Organisation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The widest level."""

    name: Name
    limits: Limits = Limits()


class Tenant(msgspec.Struct, frozen=True, kw_only=True):  # with its defaults: keys.lua reads `organisation`
    """A team; its name is the only one of its kind."""

    name: Name
    organisation: Name = DEFAULT_ORGANISATION
    limits: Limits = Limits()
    policy: Policy = "local"


class Key(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What may be known of a key."""

    id: str
    tenant: Name
    label: Label = ""
    """For people."""
    limits: Limits = Limits()
    models: Models = ()
    """Empty: all."""
    priority: Priority = "normal"
    weight: Weight = 1
    """Its share of the tokens, among keys of its priority that wait."""
    created_s: int
    """Unix time, as the others."""
    expires_s: int | None = None
    revoked_s: int | None = None
    rotated_s: int | None = None
    old_until_s: int | None = None
    """Until when the text before the last rotation is good."""

    def shown(self, now_s: int) -> "ShownKey":
        """The same, with its state."""
        expired = self.expires_s is not None and self.expires_s <= now_s
        state: Literal["active", "revoked", "expired"] = "expired" if expired else "active"
        return ShownKey(**msgspec.structs.asdict(self), state=state if self.revoked_s is None else "revoked")


class ShownKey(Key, frozen=True, kw_only=True, omit_defaults=True):
    """A key without its secret, and what it is good for now."""

    state: Literal["active", "revoked", "expired"]


class Stored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key at rest."""

    key: Key
    digest: str
    old_digest: str = ""


class Issued(msgspec.Struct, frozen=True, kw_only=True):
    """A new text, to be shown once.  Its own text form hides it."""

    key_id: str
    key: str

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Issued(key_id={self.key_id!r})"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and what for them holds."""

    key: Key
    account: Account

    def may_use(self, model: str) -> bool:
        """Whether this key is for that model."""
        return not self.key.models or model in self.key.models


class AuditLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change.  No secret, no digest."""

    at_s: int
    actor: str
    action: Literal["create", "revoke", "rotate", "organisation", "tenant"]
    target: str
    details: dict[str, str] = {}


def new_text(key_id: str) -> str:
    """A new secret under this id."""
    return f"pk-{key_id}-{secrets.token_hex(24)}"


def new_id() -> str:
    """64 bits: no two keys share them."""
    return secrets.token_hex(8)


def id_in(text: str) -> str:
    """The id inside a presented text; NOBODY's where there is none."""
    found = _TEXT.fullmatch(text)
    return found.group(1) if found else NOBODY


def digest_of(pepper: bytes, text: str) -> str:
    """HMAC-SHA256 in hex.  What is longer than any key is cut: it fits none."""
    return hmac.digest(pepper, text[:PRESENTED_CHARS_MAX].encode(errors="replace"), "sha256").hex()


def fits(stored: Stored, digest: str, now_s: int) -> bool:
    """Whether the text behind `digest` is good now.  All comparisons are made, in constant time."""
    key = stored.key
    current = hmac.compare_digest(digest, stored.digest)
    old = hmac.compare_digest(digest, stored.old_digest or "0" * len(digest)) and bool(stored.old_digest)
    within_grace = key.old_until_s is not None and now_s < key.old_until_s
    alive = key.revoked_s is None and (key.expires_s is None or now_s < key.expires_s)
    return (current or (old and within_grace)) and alive


def account_of(key: Key, tenant: Tenant, organisation: Organisation) -> Account:
    """The three levels."""
    return Account(
        organisation=organisation.name,
        levels=(
            Level("organisation", organisation.name, organisation.limits),
            Level("tenant", tenant.name, tenant.limits),
            Level("key", key.id, key.limits),
        ),
        policy=tenant.policy,
    )
