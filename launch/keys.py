"""
`pellucid keys`: API keys, their limits, and what becomes of them.

It works on the server that the gateway asks: the embedded one of the data directory, which is started for as long as it
takes where no `pellucid serve` runs, or that of --redis-url.
"""

import getpass
import json
import os
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal, TypeVar

import click
import msgspec

from cache.accounts import LIMIT_MAX, POLICIES, Limits, Policy
from cache.key_records import (
    DEFAULT_ORGANISATION,
    LABEL_RULE,
    MODELS_MAX,
    NAME_RULE,
    PRIORITIES,
    Issued,
    Key,
    Label,
    Models,
    Name,
    Organisation,
    Tenant,
)
from launch.errors import UserError
from launch.flags import flags, options_of
from launch.parse import MICROS, parse_amount

if TYPE_CHECKING:
    from cache.keys import Keys

PLACES = ("data_dir", "redis_url", "pepper_file")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,9})([smhd])")
_Result = TypeVar("_Result")
_Given = TypeVar("_Given", str, str | None, tuple[str, ...])
_Command = TypeVar("_Command", bound=Callable[..., None])
Value = str | bool | tuple[str, ...] | None


def _with_keys(given: dict[str, Value], do: "Callable[[Keys], Awaitable[_Result]]", *, create: bool = False) -> _Result:
    """What `do` answers, where the options that are `given` say.  Raises UserError."""
    options = options_of(given)
    from launch.keystore import with_keys  # noqa: PLC0415 - lazily

    return with_keys(options, os.environ, do, create=create)


def _life(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """The same, but a life of nothing."""
    life_s = _seconds(context, parameter, text)
    if life_s == 0:
        raise click.BadParameter("a key that has expired already is of no use")
    return life_s


def _seconds(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    """`30d`, `12h`, `45m` or `90s`, as seconds."""
    if text is None:
        return None
    found = _DURATION.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no duration such as 30d, 12h, 45m or 90s")
    return int(found[1]) * UNITS_S[found[2]]


def _micros(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    """An amount, as millionths."""
    if text is None:
        return None
    try:
        return parse_amount(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _like(kind: object, rule: str) -> Callable[[click.Context, click.Parameter, _Given], _Given]:
    """A check before anything is started or written: as the record of a key will have it."""

    def check(_context: click.Context, _parameter: click.Parameter, given: _Given) -> _Given:
        try:
            msgspec.convert(given, kind)
        except msgspec.ValidationError as error:
            raise click.BadParameter(rule) from error
        return given

    return check


COUNT = click.IntRange(0, LIMIT_MAX)
LIMIT_OPTIONS = (
    click.option("--rpm", type=COUNT, metavar="COUNT", help="Requests a minute. Unset: no limit."),
    click.option(
        "--tpm", type=COUNT, metavar="TOKENS", help="Tokens a minute, of prompts and outputs. Unset: no limit."
    ),
    click.option("--concurrent", type=COUNT, metavar="COUNT", help="Requests at the same time. Unset: no limit."),
    click.option(
        "--spend-per-day", callback=_micros, metavar="AMOUNT", help="What a day may cost, by the prices of `serve`."
    ),
)


def limit_options(command: _Command) -> _Command:
    """The options of all that has limits."""
    for option in reversed(LIMIT_OPTIONS):
        command = option(command)
    return command


def _limits(rpm: int | None, tpm: int | None, concurrent: int | None, spend_per_day: int | None) -> Limits:
    return Limits(
        requests_per_minute=rpm, tokens_per_minute=tpm, concurrent=concurrent, spend_micros_per_day=spend_per_day
    )


unlimited_option = click.option("--unlimited", is_flag=True, help="Take all of its limits away.")


def _new_limits(limits: Limits, *, unlimited: bool) -> Limits | None:
    """What takes the place of the limits that are there; None: nothing does.  Raises UserError."""
    if unlimited and limits.any:
        raise UserError("--unlimited takes all limits away: give no others")
    return limits if unlimited or limits.any else None


@click.group()
def keys() -> None:
    """API keys: with at least one, every request needs one."""


@keys.command()
@click.option(
    "--tenant",
    default=DEFAULT_ORGANISATION,
    callback=_like(Name, NAME_RULE),
    show_default=True,
    metavar="NAME",
    help="Whose key it is.",
)
@click.option("--label", default="", callback=_like(Label, LABEL_RULE), metavar="TEXT", help="For people.")
@limit_options
@click.option(
    "--allow-model",
    multiple=True,
    callback=_like(Models, f"at most {MODELS_MAX}, each of {LABEL_RULE}"),
    metavar="NAME",
    help="May be repeated. Unset: all models.",
)
@click.option("--priority", type=click.Choice(PRIORITIES), default="normal", show_default=True, help="Who goes first.")
@click.option(
    "--weight",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Its share of the tokens, beside waiting keys of its priority.",
)
@click.option("--expires-in", callback=_life, metavar="DURATION", help="30d, 12h, 45m, 90s. Unset: never.")
@click.option("--json", "as_json", is_flag=True, help="Print key_id and key as JSON.")
@flags(*PLACES)
def create(
    tenant: str,
    label: str,
    rpm: int | None,
    tpm: int | None,
    concurrent: int | None,
    spend_per_day: int | None,
    allow_model: tuple[str, ...],
    priority: Literal["low", "normal", "high"],
    weight: int,
    expires_in: int | None,
    as_json: bool,
    **given: Value,
) -> None:
    """Make a key, and show it, this once."""
    limits = _limits(rpm, tpm, concurrent, spend_per_day)

    async def do(keys: "Keys") -> Issued:
        return await keys.create(
            tenant=tenant,
            actor=_actor(),
            label=label,
            limits=limits,
            models=allow_model,
            priority=priority,
            weight=weight,
            expires_s=None if expires_in is None else int(time.time()) + expires_in,
        )

    _show_issued(_with_keys(given, do, create=True), as_json=as_json)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="All that is known of them, as JSON.")
@flags(*PLACES)
def list_keys(as_json: bool, **given: Value) -> None:
    """Show all keys, without their secrets."""
    options = options_of(given)
    from launch.keystore import any_keys, with_keys  # noqa: PLC0415 - lazily

    found: list[Key] = []
    if any_keys(options, os.environ):
        found = with_keys(options, os.environ, lambda keys: keys.list_keys())
    now_s = int(time.time())
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins([key.shown(now_s) for key in found])))
        return
    for key in found:
        state = key.shown(now_s).state
        click.echo(f"{key.id}  {state:8}  {key.tenant}  {_shown(key.limits)}  {key.priority}  {key.label}".rstrip())


@keys.command()
@click.argument("key_id")
@flags(*PLACES)
def revoke(key_id: str, **given: Value) -> None:
    """End the key KEY_ID; gateways follow within seconds."""
    _with_keys(given, lambda keys: keys.revoke(_id(key_id), actor=_actor()))
    click.echo(f"{_id(key_id)} is revoked.")


@keys.command()
@click.argument("key_id")
@click.option("--grace", callback=_seconds, default="0s", metavar="DURATION", help="How long the old one is good.")
@click.option("--json", "as_json", is_flag=True, help="Print key_id and key as JSON.")
@flags(*PLACES)
def rotate(key_id: str, grace: int, as_json: bool, **given: Value) -> None:
    """Make a new secret for the key KEY_ID, and show it, this once; its limits stay."""
    issued = _with_keys(
        given,
        lambda keys: keys.rotate(_id(key_id), actor=_actor(), grace_s=grace),
        create=True,
    )
    _show_issued(issued, as_json=as_json)


@keys.command()
@click.argument("name", callback=_like(Name, NAME_RULE))
@click.option(
    "--organisation",
    callback=_like(Name | None, NAME_RULE),
    metavar="NAME",
    help=f"Whose tenant it is. Unset: as it is, or {DEFAULT_ORGANISATION}.",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    help="While the server is away: its share of the limits, nothing, or everything. Unset: as it is, or local.",
)
@limit_options
@unlimited_option
@flags(*PLACES)
def tenant(
    name: str,
    organisation: str | None,
    policy: Policy | None,
    rpm: int | None,
    tpm: int | None,
    concurrent: int | None,
    spend_per_day: int | None,
    unlimited: bool,
    **given: Value,
) -> None:
    """Make the tenant NAME, or change it: limits that are given take the place of all that it has."""
    limits = _new_limits(_limits(rpm, tpm, concurrent, spend_per_day), unlimited=unlimited)

    async def do(keys: "Keys") -> Tenant:
        return await keys.change_tenant(name, actor=_actor(), organisation=organisation, limits=limits, policy=policy)

    click.echo(_tenant_line(_with_keys(given, do)))


@keys.command()
@click.argument("name", callback=_like(Name, NAME_RULE))
@limit_options
@unlimited_option
@flags(*PLACES)
def organisation(
    name: str,
    rpm: int | None,
    tpm: int | None,
    concurrent: int | None,
    spend_per_day: int | None,
    unlimited: bool,
    **given: Value,
) -> None:
    """Make the organisation NAME, or change it: limits that are given take the place of all that it has."""
    limits = _new_limits(_limits(rpm, tpm, concurrent, spend_per_day), unlimited=unlimited)

    async def do(keys: "Keys") -> Organisation:
        return await keys.change_organisation(name, actor=_actor(), limits=limits)

    click.echo(_organisation_line(_with_keys(given, do)))


@keys.command()
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@flags(*PLACES)
def tenants(as_json: bool, **given: Value) -> None:
    """Show organisations and tenants, with their limits."""
    options = options_of(given)
    from launch.keystore import anything, with_keys  # noqa: PLC0415 - lazily

    async def do(keys: "Keys") -> tuple[list[Organisation], list[Tenant]]:
        return await keys.list_organisations(), await keys.list_tenants()

    organisations, found = with_keys(options, os.environ, do) if anything(options, os.environ) else ([], [])
    if as_json:
        click.echo(msgspec.json.encode({"organisations": organisations, "tenants": found}).decode())
        return
    for line in (*map(_organisation_line, organisations), *map(_tenant_line, found)):
        click.echo(line)


def _organisation_line(one: Organisation) -> str:
    return f"organisation {one.name}  {_shown(one.limits)}"


def _tenant_line(one: Tenant) -> str:
    return f"tenant {one.name} of {one.organisation}  {_shown(one.limits)}  {one.policy}"


def _id(text: str) -> str:
    """The id of a key; of one that was pasted whole, too.  Raises UserError, without a word of it."""
    found = re.fullmatch(r"(?:pk-)?([0-9a-f]{16})(?:-[0-9a-f]{48})?", text)
    if found is None:
        raise UserError("KEY_ID is the 16 characters that `pellucid keys list` begins its lines with")
    return found[1]


def _actor() -> str:
    """Who does it, for the audit."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # a user id without a name
        return f"cli:{os.getuid()}"


def _show_issued(issued: Issued, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"key_id": issued.key_id, "key": issued.key}))
    else:
        click.echo(f"{issued.key}\n\nIts id is {issued.key_id}.  The key itself is shown this once: keep it.")


def _shown(limits: Limits) -> str:
    spend = None if limits.spend_micros_per_day is None else limits.spend_micros_per_day / MICROS
    amounts = {"rpm": limits.requests_per_minute, "tpm": limits.tokens_per_minute, "concurrent": limits.concurrent}
    words = [f"{name}={amount}" for name, amount in amounts.items() if amount is not None]
    return ",".join([*words, *([] if spend is None else [f"spend-per-day={spend:g}"])]) or "unlimited"
