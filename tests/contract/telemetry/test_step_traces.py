"""
Traces of steps: few, exact, and linked both ways with the requests that they served.
"""

from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.ledger import Ledger
from telemetry.live import LiveRequest, TraceContext
from telemetry.records import InterconnectBook, StepRecord
from telemetry.spans import SPANS_MAX, Link, SpanData
from telemetry.step_spans import BEFORE, busy_ns, step_spans
from telemetry.step_traces import (
    BURST_MAX,
    LINKS_MAX,
    REQUESTS_MAX,
    SLOWEST_MAX,
    STEPS_PER_SHARE,
    StepTraces,
)
from tests.contract.telemetry.records_strategy import step_records

MS = 1_000_000
S = 1_000_000_000


def live(number: int, *, sampled: bool = True) -> LiveRequest:
    trace = TraceContext(trace_id=f"{number + 1:032x}", span_id=f"{number + 1:016x}", sampled=sampled)
    return LiveRequest(request_id=f"r{number}", ledger=Ledger("parse", 0), route="/v1/completions", trace=trace)


def link(number: int) -> Link:
    return Link(f"{number + 1:032x}", f"{number + 1:016x}")


def a_step(
    step_id: int, numbers: list[int], *, busy: int = 10 * MS, first: bool = False, **changes: object
) -> StepRecord:
    record = StepRecord(
        step_id=step_id,
        ended_ns=step_id * S,
        step_ns=busy + 3 * MS,
        parts={"idle": 2 * MS, "publish": MS, "compute": busy},
        tokens=len(numbers),
        slices=tuple((number, 1) for number in numbers),
        requests={number: f"r{number}#abcd-0" for number in numbers} if first else {},
    )
    return msgspec.structs.replace(record, **changes)


def followed(*numbers: int, share: bool = False) -> StepTraces:
    """These requests have begun, and a first step has served them."""
    traces = StepTraces(share=share)
    for number in numbers:
        traces.opened(live(number))
    assert traces.step(a_step(1, list(numbers), first=True), offset_ns=0) == []
    return traces


@settings(max_examples=100, deadline=None)
@given(step=step_records())
def test_any_step_makes_one_whole_tree(step: StepRecord) -> None:
    spans = step_spans(step, (link(1),), offset_ns=7, because="slow")
    root, *parts = spans
    assert len(spans) <= SPANS_MAX
    assert (root.name, root.parent_id, root.links) == ("engine step", "", (link(1),))
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert {part.parent_id for part in parts} <= {root.span_id}
    assert root.ended_ns == step.ended_ns + 7 and root.ended_ns - root.started_ns == busy_ns(step)
    if parts:
        assert parts[0].started_ns == root.started_ns and parts[-1].ended_ns == root.ended_ns
    assert all(one.ended_ns == other.started_ns for one, other in pairwise(parts))
    spent = {part.name: part.ended_ns - part.started_ns for part in parts}
    assert spent == {part: ns for part, ns in step.parts.items() if ns and part not in BEFORE}
    before = {part: root.attributes[f"pellucid.step.before.{part}_ns"] for part in BEFORE}
    assert before == {part: step.parts.get(part, 0) for part in BEFORE}


def test_an_ordinary_step_has_no_trace_and_its_requests_remember_the_slowest() -> None:
    traces = followed(0, 1)
    for step_id, busy in enumerate((20, 5, 40, 30, 1, 25), 2):
        assert traces.step(a_step(step_id, [0, 1] if busy != 40 else [1], busy=busy * MS), offset_ns=0) == []
    slowest, trees = traces.ended("r0", trace=False, offset_ns=0)
    assert (slowest.names, slowest.longest_ns, slowest.links, trees) == (("0/5", "0/7", "0/2"), 30 * MS, (), [])
    slowest, trees = traces.ended("r1", trace=True, offset_ns=0)
    assert slowest.names == ("0/4", "0/5", "0/7")
    assert [because(tree) for tree in trees] == ["request"] * SLOWEST_MAX
    assert slowest.links == tuple(Link(tree[0].trace_id, tree[0].span_id) for tree in trees)
    assert [tree[0].links for tree in trees] == [(link(1),), (link(0), link(1)), (link(0), link(1))]


def because(tree: list[SpanData]) -> object:
    return tree[0].attributes["pellucid.sampled_because"]


def test_no_step_is_traced_twice() -> None:
    traces = followed(0, 1)
    [root, *_] = traces.step(a_step(2, [0, 1], busy=50 * MS, preemptions=1), offset_ns=0)
    first, trees = traces.ended("r0", trace=True, offset_ns=0)
    assert first.links[0] == Link(root.trace_id, root.span_id) and len(trees) == 1
    second, trees = traces.ended("r1", trace=True, offset_ns=0)
    assert second.links == first.links and trees == []


def test_what_is_unusual_about_a_step_is_said() -> None:
    def of(step_id: int = 2, **changes: object) -> object:
        step = msgspec.structs.replace(a_step(step_id, [0]), **changes)
        tree = followed(0, share=True).step(step, offset_ns=0)
        return because(tree) if tree else ""

    assert of(preemptions=2) == "preemption"
    assert of(interconnect=InterconnectBook(kind="gloo", wait_ns=int(2.1 * MS))) == "interconnect_wait"
    assert of(interconnect=InterconnectBook(kind="gloo", wait_ns=int(1.9 * MS))) == ""
    assert of(step_id=STEPS_PER_SHARE) == "share"
    assert of() == ""
    assert followed(0).step(a_step(STEPS_PER_SHARE, [0]), offset_ns=0) == [], "only bad ones are wanted"


def test_a_slow_step_is_one_that_is_slow_for_its_size() -> None:
    traces = followed(0)
    for step_id in range(2, 1200):
        large = step_id % 2
        step = a_step(step_id, [0], busy=(100 if large else 10) * MS + step_id % 7, tokens=500 if large else 1)
        assert traces.step(step, offset_ns=0) == []
    assert traces.step(a_step(2000, [0], busy=100 * MS, tokens=500), offset_ns=0) == []
    assert because(traces.step(a_step(2001, [0], busy=100 * MS, tokens=1), offset_ns=0)) == "slow"


def test_what_happens_all_the_time_is_no_anomaly() -> None:
    traces = followed(0)
    steps = [a_step(step_id, [0], ended_ns=step_id * S // 100, preemptions=1) for step_id in range(2, 3002)]
    traced = sum(bool(traces.step(step, offset_ns=0)) for step in steps)
    assert 30 <= traced <= 30 + BURST_MAX, "one in a second, after the first few"


def test_links_are_bounded_and_to_those_with_most_rows() -> None:
    numbers = list(range(100))
    traces = followed(*numbers)
    rows = tuple((number, number + 1) for number in numbers)
    [root, *_] = traces.step(a_step(2, numbers, slices=rows, preemptions=1), offset_ns=0)
    assert root.links == tuple(link(number) for number in range(99, 99 - LINKS_MAX, -1))


def test_choices_of_a_request_are_one_link_and_who_is_not_traced_is_none() -> None:
    traces = StepTraces(share=False)
    traces.opened(live(0))
    traces.opened(live(1, sampled=False))
    names = {7: "r0#aa-0", 8: "r0#aa-1", 9: "r1#bb-0"}
    [root, *_] = traces.step(a_step(1, [7, 8, 9], requests=names, preemptions=1), offset_ns=0)
    assert root.links == (link(0),)


def test_steps_that_served_none_of_ours_are_anothers_to_trace() -> None:
    traces = followed(0)
    assert traces.step(a_step(2, [5], preemptions=1), offset_ns=0) == []
    traces.ended("r0", trace=False, offset_ns=0)
    assert traces.step(a_step(3, [0], preemptions=1), offset_ns=0) == [], "it has ended"


def test_a_new_engine_counts_again() -> None:
    traces = followed(0)
    traces.opened(live(3))
    [root, *_] = traces.step(a_step(1, [0], requests={0: "r3#cd-0"}, preemptions=1), offset_ns=0)
    assert root.links == (link(3),)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("open", "step", "end")), st.integers(0, 2 * REQUESTS_MAX)), max_size=200))
def test_whatever_happens_memory_is_bounded(happened: list[tuple[str, int]]) -> None:
    traces = StepTraces(share=True)
    for number in range(REQUESTS_MAX + 100):
        traces.opened(live(number))
    for what, number in happened:
        match what:
            case "open":
                traces.opened(live(number))
            case "step":
                numbers = list(range(number, number + 50))
                traces.step(a_step(number, numbers, first=True), offset_ns=0)
            case "end":
                traces.ended(f"r{number}", trace=True, offset_ns=0)
        assert len(traces._requests) <= REQUESTS_MAX and len(traces._sequences) <= REQUESTS_MAX
    for request in list(traces._requests):
        traces.ended(request, trace=False, offset_ns=0)
    assert not traces._requests and not traces._sequences
