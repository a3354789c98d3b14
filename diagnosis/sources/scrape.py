"""
A scrape of `/metrics`: means of everything since the start.

The time in states is not told apart by route or outcome; how long requests took is.  So the mean request is as long as
those for tokens were that an engine has worked on, and its parts are those of all time that is known.
"""

from itertools import product

from prometheus_client.parser import text_string_to_metric_families

from launch.errors import UserError
from telemetry.evidence import Evidence
from telemetry.records import RequestRecord
from telemetry.runtime import GC_PAUSE, LAG_PERIOD_S, LOOP_LAG
from telemetry.vocabulary import FINISHED_OUTCOMES, GENERATING_ROUTES, NS_PER_S

Sums = dict[str, dict[tuple[str, ...], float]]
"""By the name of a sample, and its label values in the order of the labels' names."""

_WORKED_ON = (*FINISHED_OUTCOMES, "client_gone", "deadline")
"""Outcomes of requests that took their time; who was refused was not slow, and who looks asks for no tokens."""
_DURATION = "pellucid_request_duration_seconds"
_FIRST_TOKEN = "pellucid_request_time_to_first_token_seconds"
_STATES = "pellucid_request_state_seconds_total"
_FIRST_TOKEN_STATES = "pellucid_request_first_token_state_seconds_total"


def of_scrape(text: str) -> Evidence:
    """
    What `/metrics` says of everything since the start: means, and no single request.

    All for tokens that have ended stand there as one request that took as long as the mean.  Raises UserError.
    """
    sums: Sums = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series = sums.setdefault(sample.name, {})
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                series[labels] = series.get(labels, 0.0) + sample.value
    except ValueError as error:
        raise UserError(f"this is no text of Prometheus: {error}") from None
    ended = _worked_on(sums, f"{_DURATION}_count")
    if not ended:
        raise UserError(f"the scrape has no {_DURATION}_count, or no request for tokens has ended yet")
    starts = int(_whole(sums, "pellucid_engine_restarts_total"))
    found = Evidence(requests=[_mean(sums, ended)], mean_of=int(ended), starts=starts)
    _totals(found, sums)
    return found


def _whole(sums: Sums, name: str) -> float:
    return sum(sums.get(name, {}).values())


def _worked_on(sums: Sums, name: str) -> float:
    """Of a histogram by outcome and route, the part of those that the mean is of."""
    return sum(sums.get(name, {}).get(labels, 0.0) for labels in product(_WORKED_ON, GENERATING_ROUTES))


def _mean(sums: Sums, ended: float) -> RequestRecord:
    def states(name: str, mean_s: float) -> dict[str, int]:
        scale = mean_s * NS_PER_S / max(_whole(sums, name), 1e-9)
        return {labels[0]: int(value * scale) for labels, value in sums.get(name, {}).items() if value}

    mean_s = _worked_on(sums, f"{_DURATION}_sum") / ended
    whole = states(_STATES, mean_s)
    first_tokens = max(1.0, _whole(sums, f"{_FIRST_TOKEN}_count"))
    first = states(_FIRST_TOKEN_STATES, _whole(sums, f"{_FIRST_TOKEN}_sum") / first_tokens)
    repeated = _whole(sums, "pellucid_request_repeated_tokens_total")
    tokens = sums.get("pellucid_prompt_tokens_total", {})
    gc_pause_s, held_up_s, starved_s = _overlaps(sums)
    return RequestRecord(
        request_id="the mean request for tokens",
        outcome="ok",
        accepted_ns=0,
        finished_ns=sum(whole.values()),
        states=whole,
        first_token_ns=sum(first.values()),
        first_token_states=first,
        route="all",
        repeated_tokens=int(repeated / ended),
        cached_tokens=int(tokens.get(("cached",), 0) / ended),
        computed_tokens=int(tokens.get(("computed",), 0) / ended),
        gc_pause_ns=int(mean_s * gc_pause_s * NS_PER_S),
        loop_lag_ns=int(mean_s * held_up_s * NS_PER_S),
        starved_ns=int(mean_s * starved_s * NS_PER_S),
    )


def _overlaps(sums: Sums) -> tuple[float, float, float]:
    """
    Of each second of an event loop: collecting garbage, held up by neither of the others, and without a processor.

    How long it has run is told by how often it was looked at, in this and in all other workers.
    """
    lag_s = _whole(sums, f"{LOOP_LAG}_sum")
    ran_s = _whole(sums, f"{LOOP_LAG}_count") * LAG_PERIOD_S + lag_s
    if not ran_s:
        return 0.0, 0.0, 0.0
    gc_pause_s, starved_s = _whole(sums, f"{GC_PAUSE}_sum"), _whole(sums, "pellucid_gateway_starved_seconds_total")
    return gc_pause_s / ran_s, max(0.0, lag_s - gc_pause_s - starved_s) / ran_s, starved_s / ran_s


def _totals(found: Evidence, sums: Sums) -> None:
    totals = found.totals
    totals.steps = int(_whole(sums, "pellucid_engine_steps_total"))
    for (part, _), value in sums.get("pellucid_engine_step_part_seconds_total", {}).items():
        totals.parts[part] = totals.parts.get(part, 0) + int(value * 1e9)
    totals.gc_pause_ns = int(_whole(sums, "pellucid_engine_gc_pause_seconds_total") * 1e9)
    totals.starved_ns = int(_whole(sums, "pellucid_engine_starved_seconds_total") * 1e9)
    totals.evictions = int(_whole(sums, "pellucid_engine_evictions_total"))
    totals.preemptions = int(_whole(sums, "pellucid_engine_preemptions_total"))
    totals.draft_rejected_ns = int(_whole(sums, "pellucid_engine_draft_rejected_seconds_total") * 1e9)
    waits: dict[str, dict[str, float]] = {}
    for (rank, replica), value in sums.get("pellucid_engine_rank_wait_seconds_total", {}).items():
        waits.setdefault(replica, {})[rank] = value
    for replica, ranks in waits.items():  # Who waited least was waited for.
        for rank, value in ranks.items():
            totals.late_ranks[f"{replica}:{rank}"] = int((max(ranks.values()) - value) * 1e9)
    totals.drafted_tokens = int(_whole(sums, "pellucid_engine_draft_tokens_total"))
    verdicts = sums.get("pellucid_engine_draft_tokens_total", {})
    totals.draft_rejected_tokens = int(sum(value for (_, verdict), value in verdicts.items() if verdict == "rejected"))
    totals.tokens = int(_whole(sums, "pellucid_engine_tokens_total"))
    totals.prefill_tokens = int(
        sum(value for (_, work), value in sums.get("pellucid_engine_tokens_total", {}).items() if work == "prefill")
    )
