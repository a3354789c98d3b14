"""
What is promised to those who ask (service level objectives), and the rules that keep account of it.

Burn rate: how many times faster than it lasts the budget of bad requests is spent.  At 1 it lasts PERIOD_DAYS, exactly.
An alert asks a long window, whether it matters, and a short one, whether it still goes on (Google's SRE Workbook, 5).
"""

from dataclasses import dataclass

from dashboards.promql import Scope, Where, share
from telemetry.vocabulary import FAULTS, GENERATING_ROUTES, TIME_PER_OUTPUT_TOKEN_S, TIME_TO_FIRST_TOKEN_S

PERIOD_DAYS = 30
REQUESTS_MIN = 20
"""In the long window, for an alert: one bad request of two is not worth waking somebody."""

FAULTY: dict[str, Where] = {"outcome": FAULTS, "status_class": "!4xx"}  # a timeout may be the client's: 408


@dataclass(frozen=True, slots=True)
class Objective:
    """One promise: the share `target` of requests is good."""

    slo: str
    """Its name, a value of the label `slo`."""
    alert: str
    shown: str
    target: float
    histogram: str = ""
    bound_s: float = 0.0
    """What its histogram may say of a good request; without one a request is good that does not fail."""

    @property
    def counter(self) -> str:
        """Of all requests that the promise is about."""
        return f"{self.histogram}_count" if self.histogram else "pellucid_requests_total"

    def bad(self, scope: Scope) -> str:
        """The share of bad requests, of those that generate."""
        if self.histogram:
            return scope.above(self.histogram, self.bound_s, route=GENERATING_ROUTES)
        every = scope.rate(self.counter, route=GENERATING_ROUTES)
        return share(scope.rate(self.counter, route=GENERATING_ROUTES, **FAULTY), every)


OBJECTIVES = (
    Objective(
        slo="time_to_first_token",
        alert="TimeToFirstToken",
        shown=f"first token within {TIME_TO_FIRST_TOKEN_S:g} s",
        target=0.99,
        histogram="pellucid_request_time_to_first_token_seconds",
        bound_s=TIME_TO_FIRST_TOKEN_S,
    ),
    Objective(
        slo="time_per_output_token",
        alert="TimePerOutputToken",
        shown=f"at most {TIME_PER_OUTPUT_TOKEN_S:g} s between tokens, on average",
        target=0.99,
        histogram="pellucid_request_time_per_output_token_seconds",
        bound_s=TIME_PER_OUTPUT_TOKEN_S,
    ),
    Objective(slo="errors", alert="Errors", shown="no failure of ours", target=0.999),
)


@dataclass(frozen=True, slots=True)
class Burn:
    """Two windows and the burn rate that is too high in both."""

    long: str
    short: str
    rate: float


FAST = (Burn("1h", "5m", 14.4), Burn("6h", "30m", 6.0))
"""2 % of the budget in an hour, or 5 % in six: somebody should look now."""
SLOW = (Burn("1d", "2h", 3.0), Burn("3d", "6h", 1.0))
"""10 % of it in a day, or in three: somebody should look today."""
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
LONG_WINDOWS = tuple(burn.long for burn in FAST + SLOW)


def burn_rate(window: str) -> str:
    """The series with the burn rate of every objective, by `slo`."""
    return f"pellucid:slo_burn:rate{window}"


def requests(window: str) -> str:
    """The series with how many requests each objective was about, by `slo`."""
    return f"pellucid:slo_requests:increase{window}"


def scope(window: str) -> Scope:
    """Objectives are of a job: of all its instances together."""
    return Scope(window, kept=("job",))


RECORDED: dict[str, tuple[str, ...]] = {
    **{burn_rate(window): ("slo",) for window in WINDOWS},
    **{requests(window): ("slo",) for window in LONG_WINDOWS},
}
"""The series that the recording rules make, and their labels."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording rule."""

    record: str
    expr: str
    slo: str


def recordings() -> list[Recording]:
    """All of them, objective by objective."""
    rules = []
    for one in OBJECTIVES:
        budget = round(1 - one.target, 6)
        rules += [Recording(burn_rate(window), f"({one.bad(scope(window))}) / {budget}", one.slo) for window in WINDOWS]
        rules += [
            Recording(requests(window), scope(window).increase(one.counter, route=GENERATING_ROUTES), one.slo)
            for window in LONG_WINDOWS
        ]
    return rules


def burns(one: Objective, several: tuple[Burn, ...]) -> str:
    """Whether its budget burns too fast, in both windows of any of these, and not for the sake of a few requests."""

    def of(series: str) -> str:
        return Scope("").select(series, slo=one.slo)

    return " or ".join(
        f"({of(burn_rate(burn.long))} > {burn.rate:g} and {of(burn_rate(burn.short))} > {burn.rate:g} "
        f"and {of(requests(burn.long))} >= {REQUESTS_MIN})"
        for burn in several
    )
