"""
The JSON of the admin interface as frozen types: bodies, with the ranges of what is kept, and answers.

The fields are those of cache.key_records and cache.accounts, as `pellucid keys list --json` shows them too.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from cache.accounts import Limits, Policy
from cache.key_records import (
    DEFAULT_ORGANISATION,
    AuditLine,
    Label,
    Models,
    Name,
    Organisation,
    Priority,
    ShownKey,
    Tenant,
    Weight,
)
from cache.keys import GRACE_S_MAX

LIFE_S_MAX = 10**10
"""Centuries."""


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to be made."""

    tenant: Name = DEFAULT_ORGANISATION
    label: Label = ""
    limits: Limits = Limits()
    models: Models = ()
    """Empty: all."""
    priority: Priority = "normal"
    weight: Weight = 1
    expires_in_s: Annotated[int, Meta(ge=1, le=LIFE_S_MAX)] | None = None


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new secret for a key."""

    grace_s: Annotated[int, Meta(ge=0, le=GRACE_S_MAX)] = 0
    """How long the old one is good."""


class TenantChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant becomes; what is null or not there stays as it is."""

    organisation: Name | None = None
    limits: Limits | None = None
    """In place of all that it has."""
    policy: Policy | None = None


class OrganisationChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an organisation becomes; what is null or not there stays as it is."""

    limits: Limits | None = None
    """In place of all that it has."""


class KeyList(msgspec.Struct, frozen=True):
    """All keys, oldest first."""

    keys: list[ShownKey]


class TenantList(msgspec.Struct, frozen=True):
    """All tenants, by name."""

    tenants: list[Tenant]


class OrganisationList(msgspec.Struct, frozen=True):
    """All organisations, by name."""

    organisations: list[Organisation]


class AuditLines(msgspec.Struct, frozen=True):
    """The last changes, newest first."""

    lines: list[AuditLine]
