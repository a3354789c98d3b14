"""
The split of a request's time is exact, and the doctor names what the evidence shows: each cause alone, and none of
them where there is none.
"""

import re
from copy import deepcopy

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.causes import BY_NAME, CAUSES
from diagnosis.doctor import examine
from diagnosis.split import shares_over, split
from diagnosis.why import UNSERVED, why
from diagnosis.words import report_lines, why_lines
from launch.options import OPTIONS
from telemetry.evidence import Evidence, Facts
from telemetry.records import RequestRecord, StepRecord
from tests.contract.telemetry.records_strategy import request_records, step_records

MS = 1_000_000


@settings(max_examples=150, deadline=None)
@given(
    record=request_records(),
    steps=st.lists(step_records(), max_size=4),
    others=st.lists(request_records(), max_size=6),
    facts=st.builds(Facts, prefix_cache=st.sampled_from((None, True, False)), why_torch=st.sampled_from(("", "no"))),
    starts=st.integers(0, 2),
)
def test_every_nanosecond_has_one_cause(
    record: RequestRecord, steps: list[StepRecord], others: list[RequestRecord], facts: Facts, starts: int
) -> None:
    evidence = Evidence(requests=[record, *others], facts=facts, starts=starts)
    for one in steps:
        evidence.totals.add(one)
        evidence.steps[one.replica, one.step_id] = one
    shares = shares_over(evidence)
    assert 0 <= sum(shares.of.values()) <= 1.000001
    for states in (record.states, record.first_token_states, record.gap_states):
        found = split(states, record, shares, evidence)
        assert sum(found.values()) == sum(states.values())
        assert all(spent_ns > 0 for spent_ns in found.values()) and found.keys() <= BY_NAME.keys()
    answer = why(record, evidence)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=type(answer)) == answer
    assert sum(one.ns for one in answer.causes) <= answer.e2e_ns
    assert [one.ns for one in answer.causes] == sorted((one.ns for one in answer.causes), reverse=True)
    assert why_lines(answer) and report_lines(examine(evidence))


# ---- one cause at a time


def request(number: int, states: dict[str, int], **more: object) -> RequestRecord:
    """A request that spent so many ms in each state; its first token came before `decode` and what follows."""
    spent = {state: amount * MS for state, amount in states.items()}
    late = ("decode", "send", "send_blocked", "deliver", "finalize", "resume", "recompute")
    first = {state: spent_ns for state, spent_ns in spent.items() if state not in late}
    record = RequestRecord(
        request_id=f"r{number}", outcome="stop", status=200, route="/v1/chat/completions", accepted_ns=0,
        finished_ns=sum(spent.values()), states=spent, first_token_ns=sum(first.values()), first_token_states=first,
        gap_max_ns=30 * MS, gap_states={"decode": 30 * MS}, replica=0, prompt_tokens=100, computed_tokens=100,
    )  # fmt: skip
    return msgspec.structs.replace(record, **more)


QUIET = {"parse": 1, "auth": 1, "tokenize": 1, "dispatch": 5, "prefill": 40, "decode": 200, "send": 1}


def healthy(**more: object) -> Evidence:
    """A hundred requests and a thousand steps in which nothing is the matter."""
    evidence = Evidence(window_ns=60_000 * MS, requests=[request(number, QUIET) for number in range(100)])
    evidence.facts = Facts(tokens_step_max=512, prefix_cache=True)
    for number in range(1000):
        evidence.totals.add(busy(number))
    return msgspec.structs.replace(evidence, **more)


def busy(number: int, **more: object) -> StepRecord:
    parts = {"compute": 9 * MS, "plan": MS // 2, "sample": MS // 2}
    step = StepRecord(
        step_id=number, ended_ns=number * 10 * MS, step_ns=10 * MS, parts=parts, served_ns=9 * MS,
        tokens=4 + number % 3, decode_tokens=4, running=4, prefill_tokens=number % 3, gc_pause_ns=0, starved_ns=MS,
    )  # fmt: skip
    return msgspec.structs.replace(step, **more)


def with_slow(states: dict[str, int], **more: object) -> Evidence:
    """The same with three requests that were slow."""
    evidence = healthy()
    evidence.requests += [request(number, QUIET | states, **more) for number in range(100, 103)]
    return evidence


def with_steps(**more: object) -> Evidence:
    evidence = healthy()
    evidence.requests = [request(number, QUIET | {"prefill": 300, "decode": 900}) for number in range(100)]
    for number in range(1000, 3000):
        evidence.totals.add(busy(number, **more))
    return evidence


def of_prompts(evidence: Evidence, **more: object) -> Evidence:
    evidence.requests = [request(number, QUIET | {"prefill": 400}, **more) for number in range(100)]
    return evidence


def small_steps() -> Evidence:
    evidence = healthy()
    evidence.requests = [request(number, QUIET | {"prefill": 900, "stalled": 300}) for number in range(50)]
    evidence.facts = Facts(tokens_step_max=16)
    for number in range(3000):
        rows = 16 if number % 8 else 2
        ns = (8 + rows // 2) * MS
        evidence.totals.add(busy(number, tokens=rows, prefill_tokens=rows - 1, served_ns=ns, parts={"compute": ns}))
    return evidence


def exchanging(wait: int, transfer: int, late: tuple[int, int]) -> Evidence:
    evidence = with_steps()
    parts = {"compute": 20 * MS, "interconnect_wait": wait * MS, "interconnect_transfer": transfer * MS}
    for number in range(3000, 6000):
        evidence.totals.add(busy(number, parts=parts))
    evidence.totals.late_ranks = {"0:0": late[0] * 3000 * MS, "0:1": late[1] * 3000 * MS}
    return evidence


def tails(evidence: Evidence, unfilled: float) -> Evidence:
    evidence.totals.kv_waits, evidence.totals.kv_wait_fragmentation = 100, 100 * unfilled
    return evidence


_CASES: dict[str, Evidence] = {
    "concurrency": with_slow({"queue_batch_full": 3000}),
    "kv_starvation": tails(with_slow({"queue_kv_full": 500, "preempted": 300, "recompute": 200}), 0.05),
    "fragmentation": tails(with_slow({"queue_kv_full": 900}), 0.45),
    "prefix_off": of_prompts(healthy(facts=Facts(prefix_cache=False)), repeated_tokens=90),
    "speculation": with_steps(draft_rejected_ns=5 * MS, drafted_tokens=10, draft_rejected_tokens=9),
    "step_tokens": small_steps(),
    "dequantize": of_prompts(healthy(facts=Facts(why_torch="fp8 has no native kernels", weights="fp8"))),
    "straggler": exchanging(10, 1, (0, 10)),
    "interconnect": exchanging(1, 40, (1, 1)),
    "client": with_slow({"send_blocked": 2000}),
    "garbage_collection": with_steps(gc_pause_ns=5 * MS),
    "event_loop": with_slow({"parse": 200, "deliver": 200}, loop_lag_ns=390 * MS),
    "memory_growth": healthy(memory={"engine 0": [(n * 1000 * MS, 500_000_000 + n * 3_000_000) for n in range(20)]}),
    "cold_start": with_slow({"resume": 4000}),
    "redis": with_slow({"limit": 80, "auth": 60}),
    "cpu_starvation": with_steps(starved_ns=9 * MS),
    "upstream": with_slow({"upstream": 4000}),
    "neighbours": with_slow({"stalled": 2000}),
}


def lost_prefixes() -> Evidence:
    evidence = of_prompts(healthy(), repeated_tokens=90)
    evidence.totals.evictions = 400
    return evidence


_CASES["prefix_lost"] = lost_prefixes()


def case(cause: str) -> Evidence:
    """What a window looks like in which this is the matter; whoever asks may change it."""
    return deepcopy(_CASES[cause])


def test_each_cause_has_a_case() -> None:
    assert _CASES.keys() == {cause.name for cause in CAUSES if not cause.ordinary} - {"unaccounted"}


@pytest.mark.parametrize("cause", _CASES)
def test_the_doctor_names_it_first_and_so_does_why(cause: str) -> None:
    evidence = case(cause)
    report = examine(evidence)
    assert report.findings[0].cause == cause, report.findings
    assert report.findings[0].change and BY_NAME[cause].words in report.findings[0].words
    if cause != "memory_growth":
        slowest = max(evidence.requests, key=lambda one: one.finished_ns - one.accepted_ns)
        assert why(slowest, evidence).blamed == cause


def test_nothing_is_reported_where_nothing_is_the_matter() -> None:
    report = examine(healthy())
    assert report.findings == ()
    assert "Nothing is the matter" in "\n".join(report_lines(report))
    assert examine(Evidence()).findings == ()


@pytest.mark.parametrize("outcome", UNSERVED)
def test_requests_that_were_not_served_are_a_finding_though_they_were_quick(outcome: str) -> None:
    evidence = healthy()
    refused = [request(n, {"auth": 1, "parse": 1}, outcome=outcome, status=503) for n in range(100, 110)]
    evidence.requests += refused
    cause, words = UNSERVED[outcome]
    found = examine(evidence).findings
    assert [one.cause for one in found] == [cause] and words in found[0].words and "10 of 110" in found[0].words
    answer = why(refused[0], evidence)
    if cause == "cold_start":
        assert answer.blamed == cause and "It was not served" in answer.summary
        assert cause not in {one.cause for one in answer.absent}
        assert answer.change and answer.change in "\n".join(why_lines(answer))


def test_all_is_not_well_where_the_only_ones_who_came_were_not_served() -> None:
    refused = request(0, {"auth": 1}, outcome="no_healthy_engine", status=503)
    assert [one.cause for one in examine(Evidence(requests=[refused])).findings] == ["cold_start"]
    few = healthy()
    few.requests += [refused, refused]
    assert examine(few).findings == ()


def test_who_was_refused_is_told_of_beside_who_waited() -> None:
    evidence = with_slow({"queue_batch_full": 3000})
    evidence.requests += [request(n, {"auth": 1}, outcome="overloaded", status=503) for n in range(200, 205)]
    found = examine(evidence).findings
    assert [one.cause for one in found] == ["concurrency"] and "5 of 108 requests failed" in found[0].words


@pytest.mark.parametrize(("outcome", "status", "slow"), [("deadline", 504, True), ("timeout", 408, False)])
def test_who_was_given_up_was_slow_and_who_sent_too_slowly_was_not(outcome: str, status: int, slow: bool) -> None:
    evidence = healthy()
    given_up = {"first_token_ns": 0, "first_token_states": {}, "outcome": outcome, "status": status}
    evidence.requests += [request(n, {"auth": 1, "queue_kv_full": 60_000}, **given_up) for n in range(100, 103)]
    assert [one.cause for one in examine(evidence).findings] == ["kv_starvation"] * slow


def test_its_own_prompt_is_nobody_elses() -> None:
    evidence = healthy()
    alone = request(100, {"auth": 1, "prefill": 300, "decode": 150}, request_id="alone", output_tokens=16)
    for number in range(20):
        own = {"prefill_tokens": 100, "decode_tokens": 0, "tokens": 100} if number < 4 else {"prefill_tokens": 0}
        ended_ns = (75 * (number + 1) if number < 4 else 300 + 9 * (number - 3)) * MS
        evidence.steps[0, number] = busy(number, slices=((1, own.get("tokens", 1)),), ended_ns=ended_ns, **own)
    evidence.names = {(0, 1): "alone#a-0"}
    answer = why(alone, evidence)
    assert answer.steps_known == 20 and "neighbours" not in {one.cause for one in answer.causes}


def test_who_is_better_off_than_others_has_nothing_to_complain_of() -> None:
    evidence = healthy(requests=[request(number, QUIET | {"limit": 400}) for number in range(20)])
    assert why(request(100, QUIET | {"limit": 380}), evidence).blamed == "redis"
    assert why(request(100, QUIET | {"limit": 90}), evidence).blamed is None


def test_what_is_said_and_what_is_denied_are_not_the_same() -> None:
    evidence = healthy()
    answer = why(request(100, {"parse": 1, "prefill": 4, "decode": 995}), evidence)
    assert not {one.cause for one in answer.absent} & {one.cause for one in answer.causes}


def test_where_nothing_has_ended_nothing_is_vouched_for() -> None:
    assert "nothing to judge" in "\n".join(report_lines(examine(Evidence())))


def test_of_a_request_in_flight_nobody_guesses_what_its_engine_does() -> None:
    evidence = healthy()
    answer = why(request(100, {"auth": 1, "limit": 90, "prefill": 30_000}, outcome="", status=0), evidence)
    assert (answer.causes[0].cause, answer.causes[0].ns) == ("engine", 30_000 * MS)
    assert answer.absent == () and answer.blamed is None
    answer = why(request(100, {"auth": 1, "limit": 900, "prefill": 300}, outcome="", status=0), evidence)
    assert answer.blamed == "redis", "what the gateway stamps is known"


def test_what_is_too_short_to_be_felt_is_nobodys_fault() -> None:
    evidence = healthy()
    assert why(request(100, {"auth": 1, "limit": 3, "prefill": 6, "decode": 3}), evidence).blamed is None


def test_a_gap_is_not_explained_by_a_step_of_another_life() -> None:
    evidence = healthy()
    gap = {"gap_max_ns": 300 * MS, "gap_states": {"decode": 300 * MS}, "gap_step": 7, "output_tokens": 100}
    paused = request(100, QUIET | {"decode": 1000}, accepted_ns=0, **gap)
    collecting = busy(7, gc_pause_ns=9 * MS, ended_ns=500 * MS)
    evidence.steps[0, 7] = collecting
    assert why(paused, evidence).blamed == "garbage_collection"
    evidence.steps[0, 7] = msgspec.structs.replace(collecting, ended_ns=5000 * MS)
    assert why(paused, evidence).blamed is None


def test_a_beginning_that_no_cache_could_have_had_is_no_fault_of_a_cache() -> None:
    for facts in (Facts(prefix_cache=True), Facts()):
        evidence = of_prompts(healthy(facts=facts), repeated_tokens=90)
        assert examine(evidence).findings == ()
        assert why(evidence.requests[0], evidence).blamed is None


def test_each_worker_may_remember_as_much_as_one_gateway() -> None:
    grown = [(n * 1000 * MS, 200_000_000 + n * 3_000_000) for n in range(20)]
    for process, suspected in (("gateway", False), ("gateway 1", False), ("engine 1", True)):
        assert bool(examine(healthy(memory={process: grown})).findings) is suspected


def test_what_the_machine_waited_for_stands_beside_what_the_engine_did_if_it_is_known() -> None:
    evidence = case("cpu_starvation")
    assert "machine_cpu_pressure" not in examine(evidence).findings[0].evidence
    evidence.pressure = {"cpu": 0.75, "memory": 0.5}
    numbers = examine(evidence).findings[0].evidence
    assert numbers["machine_cpu_pressure"] == 0.75 and len(numbers) == 2


def test_what_lay_unread_is_in_no_book_and_said_all_the_same() -> None:
    evidence = healthy()
    evidence.requests.append(request(100, QUIET, unread_ns=400 * MS))
    assert [one.cause for one in examine(evidence).findings] == ["event_loop"]
    answer = why(evidence.requests[-1], evidence)
    assert "lain unread for 400.0 ms" in answer.summary and answer.blamed == "event_loop"
    assert "event_loop" not in {one.cause for one in answer.absent}
    many = healthy(requests=[request(number, QUIET) for number in range(2000)])
    many.requests.append(evidence.requests[-1])
    assert examine(many).findings == (), "one of 2,000 is in no tail that is looked at"


def test_a_pause_has_a_cause_of_its_own_though_most_of_the_time_was_work() -> None:
    evidence = healthy()
    gap = {"gap_max_ns": 400 * MS, "gap_states": {"decode": 10 * MS, "deliver": 390 * MS}, "loop_lag_ns": 395 * MS}
    gap["starved_ns"] = 900 * MS  # most of it while the engine had the request anyway
    paused = request(100, QUIET | {"decode": 1600, "deliver": 160}, output_tokens=150, **gap)
    answer = why(paused, evidence)
    assert answer.blamed == "event_loop"
    assert "Its longest gap between tokens, 400.0 ms, came because" in answer.summary
    assert "No fault" not in answer.summary
    unknown = msgspec.structs.replace(paused, gap_states={})
    assert why(unknown, evidence).blamed is None
    short = msgspec.structs.replace(paused, gap_max_ns=90 * MS, gap_states={"deliver": 90 * MS})
    assert why(short, evidence).blamed is None
    slow_throughout = msgspec.structs.replace(paused, output_tokens=10)
    assert why(slow_throughout, evidence).blamed is None
    computing = msgspec.structs.replace(paused, gap_states={"decode": 400 * MS})
    assert why(computing, evidence).blamed is None


def test_two_ranks_that_are_late_in_turns_are_no_straggler() -> None:
    assert "straggler" not in [one.cause for one in examine(exchanging(10, 1, (5, 6))).findings]


def test_every_setting_that_helps_is_one_that_exists() -> None:
    known = {option.flag for option in OPTIONS} | {"--no-prefix-cache"}
    for evidence in _CASES.values():
        for cause in CAUSES:
            named = set(re.findall(r"--[a-z-]+[a-z]", cause.change(evidence)))
            assert named <= known, cause.name


# ---- why


def test_why_names_who_else_was_in_its_steps_and_what_is_usual() -> None:
    evidence = case("neighbours")
    record = evidence.requests[-1]
    record = msgspec.structs.replace(record, stalled_for={"loud": 2000 * MS})
    evidence.steps[0, 7] = busy(7, slices=((1, 1), (2, 3)), served_ns=8 * MS)
    evidence.names = {(0, 1): f"{record.request_id}#ab-0", (0, 2): "other#cd-0", (1, 2): "elsewhere#ef-0"}
    answer = why(record, evidence)
    assert [(one.request_id, one.ns) for one in answer.others] == [("loud", 2000 * MS), ("other", 6 * MS)]
    assert answer.steps_known == 1
    first = answer.causes[0]
    assert first.cause == "neighbours" and first.baseline_ns is not None and first.baseline_ns < first.ns
    assert "2.2" in answer.summary and "others' prompts" in answer.summary
    assert "redis" in {one.cause for one in answer.absent}
    text = "\n".join(why_lines(answer))
    assert "loud" in text and "--max-step-tokens" in text and "It did" not in text


def test_a_request_without_a_fault_is_explained_by_its_own_work() -> None:
    evidence = healthy()
    answer = why(evidence.requests[0], evidence)
    assert answer.causes[0].cause == "generation"
    assert "No fault stands out" in answer.summary
