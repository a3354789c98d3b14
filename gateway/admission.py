"""
Who may ask, and how much: API keys and limits, before an engine hears of a request.

    admit      the headers -> a Ticket: whose request it is; 401, or 503 where nobody can say
    reserve    the ticket, and about how many tokens -> charged to its key, its tenant and its organisation; 429
    settle     what it has really used in place of that: once, whatever the end, before the client learns of the end

Keys are needed as soon as one was ever made, and from then on for good: a server that has lost them lets nobody in.  A
pepper says so too, since it is made with the first key: also to a gateway that begins when the keys are lost already.
How many keys there are is asked when a request comes and the last answer is older than COUNTED_MS.  While nobody can
say, keys are needed if there may be any: a person has named the server, and it has not said otherwise for STALE_S.
"""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import structlog

from cache.accounts import Account
from cache.connection import Store
from cache.errors import Misconfigured, Unavailable
from cache.key_records import NOBODY, Identity, id_in
from cache.keys import STALE_S, Keys
from cache.limits import Limiter, Refusal, Reservation
from cache.pepper import UNSET, read_pepper
from cache.redis_url import parse_redis_url
from gateway import errors
from gateway.config import GatewayOptions
from gateway.refusals import figures_headers, refused
from telemetry import clock
from telemetry.records import RequestRecord
from telemetry.views import JsonObject
from telemetry.vocabulary import LimitsView

COUNTED_MS = 100
DEGRADED = "x-pellucid-degraded"
PRICED_TOKENS = 1_000_000
"""What a price is of."""
PRIORITIES = {"high": -1, "normal": 0, "low": 1}
"""A key's class as the engine's priority: lower goes first."""

_log = structlog.get_logger("pellucid.gateway")


class Ticket:
    """One request's: whose it is, and what is reserved for it."""

    def __init__(self, identity: Identity | None = None) -> None:
        self.identity = identity
        """None: no keys are needed, and nothing is limited."""
        self.headers: dict[str, str] = {}
        """For its response."""
        self.reserved_tokens = 0
        """Of the limits; 0: it has none, or they have not been asked yet."""
        self.charged_tokens = 0
        """In their place, at its end."""
        self.charged_micros = 0
        """What they cost."""
        self._held: tuple[Admission, Reservation, int] | None = None

    @property
    def tenant(self) -> str:
        """Empty without a key."""
        return self.identity.key.tenant if self.identity is not None else ""

    @property
    def share(self) -> str:
        """Whose turn in the engine it uses up: the key's.  Empty without one."""
        return self.identity.key.id if self.identity is not None else ""

    @property
    def weight(self) -> int:
        """Of the share."""
        return self.identity.key.weight if self.identity is not None else 1

    def priority(self, asked: int) -> int:
        """Of the engine's priorities the one that was asked for, but none above that of the key."""
        if self.identity is None:
            return asked
        own = PRIORITIES[self.identity.key.priority]
        return max(own, asked) if asked else own

    def check_model(self, model: str) -> None:
        """Raises ApiError: this key is not for that model."""
        if self.identity is not None and not self.identity.may_use(model):
            raise errors.model_not_allowed(model)

    @property
    def sees_all(self) -> bool:
        """Whether all requests may be shown to it: there are no keys."""
        return self.identity is None

    @property
    def eyes(self) -> str | None:
        """The tenant whose requests may be shown to it; None: those of all."""
        return None if self.sees_all else self.tenant

    def sees(self, tenant: str) -> bool:
        """Whether requests of `tenant` may be shown to it."""
        return self.sees_all or tenant == self.tenant

    def shown(self, request: JsonObject) -> JsonObject:
        """A request as it may be shown to it: of others that were served instead there is the time, and no name."""
        served = request.get("stalled_for")
        if self.sees_all or not isinstance(served, dict) or not served:
            return request
        whole = sum(spent_ns for spent_ns in served.values() if isinstance(spent_ns, int))
        return request | {"stalled_for": {"": whole}}

    def hold(self, admission: "Admission", reservation: Reservation, prompt_tokens: int) -> None:
        """It may run; from now on something is to be settled."""
        assert self._held is None, "a request reserves once"
        self._held = (admission, reservation, prompt_tokens)
        if reservation.source != "unlimited":
            self.reserved_tokens = reservation.tokens

    @property
    def held(self) -> bool:
        """Whether there is something to settle."""
        return self._held is not None

    def recount(self, prompt_tokens: int) -> None:
        """So long was the prompt, which could only be estimated before."""
        if self._held is not None:
            self._held = (*self._held[:2], prompt_tokens)

    async def settle(self, *, output_tokens: int, complete: bool) -> None:
        """
        The request's end, as far as the engine is concerned.  What comes later does nothing.

        A failure before the first token costs nothing; what was generated is charged, whatever came of it.
        """
        if self._held is not None:
            _, _, prompt_tokens = self._held
            used = bool(complete or output_tokens)
            await self._settle(prompt_tokens if used else 0, output_tokens, whole=not used)

    async def close(self, record: RequestRecord) -> None:
        """
        The end of a request whose client was not told of one: it left.  What was computed for it is charged.

        Also before its first token: only a failure of ours is free.  Nobody knows how far an upstream came with a
        prompt that it was sent: the whole of it is charged.
        """
        if self._held is not None:
            _, _, prompt_tokens = self._held
            whole = record.output_tokens or record.states.get("upstream")
            computed = prompt_tokens if whole else min(prompt_tokens, record.computed_tokens)
            await self._settle(computed, record.output_tokens)

    async def _settle(self, prompt_tokens: int, output_tokens: int, *, whole: bool = False) -> None:
        held, self._held = self._held, None  # first: who is cancelled while it waits has settled all the same
        assert held is not None
        admission, reservation, _ = held
        micros = admission.cost_micros(prompt_tokens, output_tokens)
        if reservation.source != "unlimited":
            self.charged_tokens, self.charged_micros = prompt_tokens + output_tokens, micros
        await admission.settle(reservation, tokens=prompt_tokens + output_tokens, micros=micros, whole=whole)


class Admission:
    """The gateway's keys and limits; without a server for them, everybody may ask for everything."""

    def __init__(self, options: GatewayOptions) -> None:
        """Raises Misconfigured."""
        self._options = options
        self._store: Store | None = None
        self._keys_needed = False
        self._pepper_missing = False
        self._pepper_trouble = ""
        self._warned = False
        self.refusals: Counter[tuple[str, str]] = Counter()
        """Of the limits, by level and limit."""
        self._counted_ns: int | None = None  # when the server last said how many keys there are
        if not options.redis_url:
            return
        self._store = Store(parse_redis_url(options.redis_url))
        self._limiter = Limiter(self._store, workers=options.workers, worker=options.worker)
        self._pepper = self._read_pepper()
        self._keys = Keys(self._store, self._pepper or UNSET)

    async def start(self) -> None:
        """Look whether the server is there; it may come later."""
        if self._store is not None:
            await self._store.start()
            await self._limiter.start()
            if self.trouble:
                _log.warning("starting all the same", trouble=self.trouble)

    async def stop(self) -> None:
        """After the last request."""
        if self._store is not None:
            await self._limiter.aclose()
            await self._store.aclose()

    @property
    def store(self) -> Store | None:
        """The server of keys and limits, for others that have something to keep there."""
        return self._store

    @property
    def trouble(self) -> str:
        """What is the matter with the server, and what that means for requests; empty while all is well."""
        if self._store is None:
            return ""
        if self._pepper_missing:
            return "API keys exist, and the pepper that they were made with is not here: every request gets a 503."
        if self._store.health.state == "closed":
            return ""
        away = "The server for API keys and limits does not answer"
        if self._keys_needed or self._pepper is not None:
            return (
                f"{away}: keys that were seen in the last {STALE_S:g} s are good, with others a request gets a 503; "
                "each gateway keeps to its share of the limits."
            )
        if self._unknown(clock.now_ns()):
            return f"{away}, and nobody can say whether there are API keys: every request gets a 503."
        return f"{away}; there were no API keys, so everybody is served."

    def view(self) -> LimitsView | None:
        """For /metrics; None without a server."""
        if self._store is None:
            return None
        health = self._store.health
        return LimitsView(
            up=health.state == "closed",
            openings=health.openings,
            commands_failed=health.failed,
            workers=self._limiter.workers,
            held=self._limiter.held,
            owed=self._limiter.owed,
            forgotten=self._limiter.forgotten,
            unknown=self._limiter.unknown,
            refusals=dict(self.refusals),
        )

    # ---- who

    async def admit(self, headers: Mapping[str, str]) -> Ticket:
        """Whose request it is.  Raises ApiError; missing, unknown, revoked and expired keys look alike."""
        if self._store is None:
            return Ticket()
        presented = presented_key(headers)
        try:
            if not await self._needs_key(presented):
                return self._ticket(None)
            identity = await self._keys.verify(presented)
        except Unavailable:
            raise errors.keys_unavailable() from None
        if identity is None:
            raise errors.unauthorized()
        return self._ticket(identity)

    def _ticket(self, identity: Identity | None) -> Ticket:
        ticket = Ticket(identity)
        if self._store is not None and self._store.health.state == "open":
            ticket.headers[DEGRADED] = "limits"
        return ticket

    async def _needs_key(self, presented: str) -> bool:
        """Raises Unavailable."""
        fresh_ns = COUNTED_MS * 1_000_000
        now_ns = clock.now_ns()
        fresh = self._counted_ns is not None and now_ns - self._counted_ns < fresh_ns
        if not self._keys_needed and (not fresh or id_in(presented) != NOBODY):
            try:
                self._keys_needed = await self._keys.count() > 0
                self._counted_ns = clock.now_ns()
            except Unavailable:
                if not self._find_pepper() and self._unknown(now_ns):
                    raise
            if not self._keys_needed and self._find_pepper():
                self._keys_needed = True
                _log.warning(
                    "keys are needed: there is a pepper, though no key; if there were any, the server lost them"
                )
        missing = self._keys_needed and not self._find_pepper()
        if missing and not self._pepper_missing:
            _log.error("API keys exist, but their pepper is missing", file=self._options.pepper_file)
        self._pepper_missing = missing
        if missing:
            raise Unavailable("no pepper")
        return self._keys_needed

    def _unknown(self, now_ns: int) -> bool:
        """Whether there may be keys for all that we know.  In a data directory of our own they come with a pepper."""
        if not self._options.redis_named:
            return False
        return self._counted_ns is None or now_ns - self._counted_ns > STALE_S * 1e9

    def _find_pepper(self) -> bool:
        """Whether there is one by now: the first key may have been made since the last look."""
        assert self._store is not None
        if self._pepper is None:
            try:
                self._pepper = self._read_pepper()
            except Misconfigured as error:
                if str(error) != self._pepper_trouble:
                    _log.error("the pepper cannot be used", error=str(error))
                self._pepper_trouble = str(error)
            if self._pepper is not None:
                self._keys = Keys(self._store, self._pepper)
        return self._pepper is not None

    def _read_pepper(self) -> bytes | None:
        file = self._options.pepper_file
        return read_pepper(Path(file) if file else None, os.environ)

    # ---- how much

    async def reserve(self, ticket: Ticket, *, prompt_tokens: int, sequences: int, tokens_max: int | None) -> None:
        """
        Charge about what the request will use.  Raises ApiError: not now, or never.

        Args:
            ticket: whose it is.
            prompt_tokens: of all its prompts, each once.
            sequences: how many will be generated.
            tokens_max: what the client allows each of them; None: it has not said.
        """
        if ticket.identity is None:
            return
        account = ticket.identity.account
        tokens = account.estimate_tokens(
            prompt_tokens=prompt_tokens,
            asked_tokens=None if tokens_max is None else tokens_max * sequences,
            default_tokens=self._options.output_tokens_estimated * sequences,
        )
        self._warn_without_prices(account)
        micros = account.estimate_micros(
            prompt_micros=self.cost_micros(prompt_tokens, 0),
            micros=self.cost_micros(prompt_tokens, tokens - prompt_tokens),
            named=tokens_max is not None,
        )
        try:
            answer = await self._limiter.reserve(account, tokens=tokens, micros=micros)
        except Unavailable:
            raise errors.limits_unavailable() from None
        ticket.headers |= figures_headers(answer.figures)
        if answer.source in ("local", "open"):
            ticket.headers[DEGRADED] = "limits"
        if isinstance(answer, Refusal):
            self.refusals[answer.level.name, answer.limit] += 1
            raise refused(answer, tokens)
        ticket.hold(self, answer, prompt_tokens)

    async def settle(self, reservation: Reservation, *, tokens: int, micros: int, whole: bool) -> None:
        """Charge so much, or give all of it back.  Whoever is cancelled meanwhile, it happens, and once."""
        if whole:
            await self._limiter.refund(reservation)
        else:
            await self._limiter.settle(reservation, tokens=tokens, micros=micros)

    def _warn_without_prices(self, account: Account) -> None:
        options = self._options
        if self._warned or options.price_prompt_micros or options.price_output_micros:
            return
        if any(level.limits.spend_micros_per_day is not None for level in account.levels):
            self._warned = True
            _log.warning("a key has a spend limit, and nothing has a price: set --price-prompt and --price-output")

    def cost_micros(self, prompt_tokens: int, output_tokens: int) -> int:
        """What they cost, rounded up."""
        options = self._options
        cost = prompt_tokens * options.price_prompt_micros + output_tokens * options.price_output_micros
        return -(-cost // PRICED_TOKENS)


def presented_key(headers: Mapping[str, str]) -> str:
    """The key that a request shows; empty without one."""
    scheme, _, text = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return text.strip()
    return headers.get("x-api-key", "").strip()
