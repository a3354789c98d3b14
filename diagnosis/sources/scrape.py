"""
A scrape of `/metrics`: means of everything since the start.
"""

from prometheus_client.parser import text_string_to_metric_families

from launch.errors import UserError
from telemetry.evidence import Evidence
from telemetry.records import RequestRecord

Sums = dict[str, dict[tuple[str, ...], float]]
"""By the name of a sample, and its label values in the order of the labels' names."""


def of_scrape(text: str) -> Evidence:
    """
    What `/metrics` says of everything since the start: means, and no single request.

    All that have ended stand there as one request that took as long as the mean.  Raises UserError.
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
    ended = sum(sums.get("pellucid_request_duration_seconds_count", {}).values())
    if not ended:
        raise UserError("the scrape has no pellucid_request_duration_seconds_count, or nothing has ended yet")
    found = Evidence(requests=[_mean(sums, ended)])
    _totals(found, sums)
    return found


def _mean(sums: Sums, ended: float) -> RequestRecord:
    def states(name: str, count: float) -> dict[str, int]:
        return {labels[0]: int(value * 1e9 / count) for labels, value in sums.get(name, {}).items() if value}

    whole = states("pellucid_request_state_seconds_total", ended)
    first_tokens = sum(sums.get("pellucid_request_time_to_first_token_seconds_count", {}).values())
    first = states("pellucid_request_first_token_state_seconds_total", first_tokens) if first_tokens else {}
    repeated = sum(sums.get("pellucid_request_repeated_tokens_total", {}).values())
    tokens = sums.get("pellucid_prompt_tokens_total", {})
    return RequestRecord(
        request_id="the mean of all requests",
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
    )


def _totals(found: Evidence, sums: Sums) -> None:
    def whole(name: str) -> float:
        return sum(sums.get(name, {}).values())

    totals = found.totals
    totals.steps = int(whole("pellucid_engine_steps_total"))
    for (part, _), value in sums.get("pellucid_engine_step_part_seconds_total", {}).items():
        totals.parts[part] = totals.parts.get(part, 0) + int(value * 1e9)
    totals.gc_pause_ns = int(whole("pellucid_engine_gc_pause_seconds_total") * 1e9)
    totals.starved_ns = int(whole("pellucid_engine_starved_seconds_total") * 1e9)
    totals.evictions = int(whole("pellucid_engine_evictions_total"))
    totals.preemptions = int(whole("pellucid_engine_preemptions_total"))
    totals.draft_rejected_ns = int(whole("pellucid_engine_draft_rejected_seconds_total") * 1e9)
    waits: dict[str, dict[str, float]] = {}
    for (rank, replica), value in sums.get("pellucid_engine_rank_wait_seconds_total", {}).items():
        waits.setdefault(replica, {})[rank] = value
    for replica, ranks in waits.items():  # Who waited least was waited for.
        for rank, value in ranks.items():
            totals.late_ranks[f"{replica}:{rank}"] = int((max(ranks.values()) - value) * 1e9)
    totals.drafted_tokens = int(whole("pellucid_engine_draft_tokens_total"))
    verdicts = sums.get("pellucid_engine_draft_tokens_total", {})
    totals.draft_rejected_tokens = int(sum(value for (_, verdict), value in verdicts.items() if verdict == "rejected"))
    totals.tokens = int(whole("pellucid_engine_tokens_total"))
    totals.prefill_tokens = int(
        sum(value for (_, work), value in sums.get("pellucid_engine_tokens_total", {}).items() if work == "prefill")
    )
