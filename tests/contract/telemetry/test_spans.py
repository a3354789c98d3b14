"""
The span tree of a request: whole, touching, exact, named after the conventions, silent about content.
"""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry import clock, names
from telemetry.ledger import Ledger
from telemetry.live import LiveRequest, TraceContext, accept_trace
from telemetry.records import KvReading, RequestRecord
from telemetry.spans import SPANS_MAX, SpanData, phases, request_spans
from telemetry.vocabulary import OBSERVING_ROUTES, STATES
from tests.contract.telemetry.records_strategy import MODEL, request_records

OFFSET_NS = 1_700_000_000_000_000_000
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def a_record(**changes: object) -> RequestRecord:
    record = RequestRecord(
        request_id="r1",
        outcome="stop",
        accepted_ns=1000,
        finished_ns=1100,
        states={"decode": 60, "parse": 10, "stalled": 5, "prefill": 25},
        model=MODEL,
        route="/v1/chat/completions",
        status=200,
        prompt_tokens=40,
        cached_tokens=16,
        computed_tokens=24,
        output_tokens=9,
        first_token_ns=36,
        stream=True,
    )
    return msgspec.structs.replace(record, **changes)


def a_live(**changes: object) -> LiveRequest:
    live = LiveRequest(request_id="r1", ledger=Ledger("parse", 1000), model=MODEL, route="/v1/chat/completions")
    for name, value in changes.items():
        setattr(live, name, value)
    return live


def test_where_it_went_and_why_is_on_the_generation() -> None:
    record = a_record(replica=2, routing="cached", promised_tokens=64)
    attributes = request_spans(record, None, offset_ns=OFFSET_NS)[1].attributes
    expected = {"pellucid.replica": 2, "pellucid.routing": "cached", "pellucid.tokens.promised": 64}
    assert expected.items() <= attributes.items()
    unplaced = request_spans(a_record(), None, offset_ns=OFFSET_NS)[1].attributes
    assert not unplaced.keys() & expected.keys()


def test_how_full_the_pool_was_is_on_the_generation() -> None:
    readings = {"at_admission": KvReading(0.5, 0.4, 0.2), "worst": KvReading(0.9, 0.8, 0.1), "at_end": None}
    record = a_record(kv_at_admission=readings["at_admission"], kv_worst=readings["worst"], interconnect_wait_max_ns=7)
    attributes = request_spans(record, None, offset_ns=OFFSET_NS)[1].attributes
    assert {key: value for key, value in attributes.items() if key.startswith("pellucid.kv.")} == {
        "pellucid.kv.at_admission.utilization": 0.5,
        "pellucid.kv.at_admission.token_occupancy": 0.4,
        "pellucid.kv.at_admission.internal_fragmentation": 0.2,
        "pellucid.kv.worst.utilization": 0.9,
        "pellucid.kv.worst.token_occupancy": 0.8,
        "pellucid.kv.worst.internal_fragmentation": 0.1,
        "pellucid.kv.block_seconds": 0.0,
    }
    assert attributes["pellucid.interconnect.wait_max_ns"] == 7


@settings(max_examples=150, deadline=None)
@given(record=request_records().filter(lambda record: record.route not in OBSERVING_ROUTES))
def test_any_request_makes_one_whole_tree(record: RequestRecord) -> None:
    spans = request_spans(record, None, offset_ns=OFFSET_NS)
    root, leaves = spans[0], [span for span in spans if names.PHASE in span.attributes]
    assert 1 <= len(spans) <= SPANS_MAX
    assert len({span.span_id for span in spans}) == len(spans)
    assert {span.trace_id for span in spans} == {record.trace_id}
    assert [span for span in spans if span.is_server] == [root]
    assert root.started_ns == record.accepted_ns + OFFSET_NS
    assert root.ended_ns == record.finished_ns + OFFSET_NS
    parent = spans[1] if record.route in names.OPERATIONS else root
    assert (parent.started_ns, parent.ended_ns) == (root.started_ns, root.ended_ns)
    at_ns = root.started_ns
    for leaf in leaves:
        assert leaf.parent_id == parent.span_id
        assert leaf.started_ns == at_ns, "phases touch"
        at_ns = leaf.ended_ns
    if leaves:
        assert at_ns == root.ended_ns, "phases sum to the request"
    spent = {leaf.name: leaf.ended_ns - leaf.started_ns for leaf in leaves}
    assert spent == {state: spent_ns for state, spent_ns in record.states.items() if spent_ns}
    order = [STATES.index(leaf.name) for leaf in leaves]
    assert order == sorted(order), "a life has one order"
    for span in spans:
        generation = span is parent and parent is not root
        assert generation == any(key.startswith("gen_ai.") for key in span.attributes), span.name


@settings(max_examples=100, deadline=None)
@given(
    states=st.dictionaries(st.sampled_from((*STATES, "made_up", "other_one")), st.integers(0, 1000)),
    lost_ns=st.integers(-2000, 2000),
)
def test_a_book_that_does_not_close_is_shown_and_still_sums(states: dict[str, int], lost_ns: int) -> None:
    whole_ns = max(0, sum(states.values()) + lost_ns)
    record = a_record(states=states, accepted_ns=0, finished_ns=whole_ns)
    laid = phases(record)
    assert sum(spent_ns for _, spent_ns in laid) == whole_ns
    assert all(spent_ns > 0 for _, spent_ns in laid)
    assert (laid[-1][0] == "unaccounted" if laid else False) == (record.imbalance() > 0)


def test_a_flood_of_made_up_states_stays_within_the_bound() -> None:
    record = a_record(states={f"odd{number}": 1 for number in range(100)}, accepted_ns=0, finished_ns=100)
    spans = request_spans(record, a_live(), offset_ns=0)
    assert [span.name for span in spans[2:]] == ["unaccounted"]


def test_the_generation_span_says_what_the_conventions_ask_for() -> None:
    live = a_live(
        parameters={"max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "seed": 7, "min_p": 0.1, "stop": ("secret",)}
    )
    root, chat, *leaves = request_spans(a_record(choices=2), live, offset_ns=OFFSET_NS)
    assert (root.name, chat.name) == ("POST /v1/chat/completions", f"chat {MODEL}")
    assert [leaf.name for leaf in leaves] == ["parse", "prefill", "decode", "stalled"]
    assert (
        chat.attributes
        | {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "pellucid",
            "gen_ai.request.model": MODEL,
            "gen_ai.request.stream": True,
            "gen_ai.request.max_tokens": 50,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.seed": 7,
            "gen_ai.request.choice.count": 2,
            "pellucid.request.min_p": 0.1,
            "gen_ai.response.id": "r1",
            "gen_ai.response.model": MODEL,
            "gen_ai.response.finish_reasons": ("stop", "stop"),
            "gen_ai.response.time_to_first_chunk": 36e-9,
            "gen_ai.usage.input_tokens": 40,
            "gen_ai.usage.output_tokens": 9,
            "gen_ai.usage.cache_read.input_tokens": 16,
        }
        == chat.attributes
    )
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "pellucid.request_id": "r1",
        "pellucid.outcome": "stop",
        "pellucid.phase.layout": "coalesced",
    }
    assert "secret" not in repr([root, chat, *leaves]), "stop strings are the user's text"
    for leaf in leaves:
        assert all(key.startswith("pellucid.") for key in leaf.attributes)


def test_of_an_upstream_the_span_says_what_is_known() -> None:
    record = a_record(upstream="far", usage_estimated=True, states={"parse": 10, "upstream": 90})
    record = msgspec.structs.replace(record, finished_ns=record.accepted_ns + 100)
    _, chat, *leaves = request_spans(record, a_live(), offset_ns=OFFSET_NS)
    assert [leaf.name for leaf in leaves] == ["parse", "upstream"]
    assert chat.attributes["pellucid.upstream"] == "far" and chat.attributes["pellucid.usage.estimated"] is True
    own = request_spans(a_record(), a_live(), offset_ns=OFFSET_NS)[1].attributes.keys()
    assert own - chat.attributes.keys() == {
        *("pellucid.preemptions", "pellucid.steps", "pellucid.kv.block_seconds"),
        *("pellucid.interconnect.wait_ns", "pellucid.interconnect.transfer_ns", "pellucid.interconnect.wait_max_ns"),
        "pellucid.engine_ns",
        *("pellucid.tokens.computed", "pellucid.tokens.recomputed", "pellucid.tokens.drafted"),
        *("pellucid.tokens.draft_accepted", "pellucid.tokens.draft_rejected"),
    }


@pytest.mark.parametrize(
    ("status", "outcome", "failed", "error_type"),
    [
        (200, "stop", False, None),
        (200, "failed", True, "failed"),  # The status had been sent before it failed.
        (200, "client_gone", False, None),
        (499, "client_gone", False, None),
        (400, "invalid", False, None),
        (429, "rate_limited", False, None),
        (500, "failed", True, "500"),
        (503, "overloaded", True, "503"),
    ],
)
def test_4xx_leaves_the_server_span_unset_and_5xx_is_an_error(
    status: int, outcome: str, failed: bool, error_type: str | None
) -> None:
    root, chat, *_ = request_spans(a_record(status=status, outcome=outcome), a_live(), offset_ns=0)
    assert (root.failed, chat.failed) == (failed, failed)
    assert root.attributes.get("error.type") == error_type
    assert chat.attributes.get("error.type") == (None if outcome == "stop" else outcome)


def test_a_path_without_a_route_names_no_span() -> None:
    live = a_live(route="other", path="/v1/sk-canary4711/" + "x" * 500, method="GET")
    root = request_spans(a_record(route="other", status=404, outcome="not_found"), live, offset_ns=0)[0]
    assert root.name == "GET"
    assert "http.route" not in root.attributes
    path = root.attributes["url.path"]
    assert isinstance(path, str)
    assert path.startswith("/v1/[redacted]/")
    assert len(path) == 200


def test_the_callers_trace_goes_on() -> None:
    live = a_live(trace=accept_trace(CALLER, "vendor=1"))
    spans = request_spans(a_record(), live, offset_ns=0)
    assert {span.trace_id for span in spans} == {"4bf92f3577b34da6a3ce929d0e0e4736"}
    assert (spans[0].parent_id, spans[0].parent_is_remote) == ("00f067aa0ba902b7", True)
    assert spans[0].span_id == live.trace.span_id, "what the engine was told is its parent"
    assert live.trace.traceparent() == f"00-4bf92f3577b34da6a3ce929d0e0e4736-{live.trace.span_id}-01"
    assert {span.trace_state for span in spans} == {"vendor=1"}


def test_a_caller_who_does_not_sample_gets_no_spans() -> None:
    trace = accept_trace(CALLER[:-2] + "00")
    assert not trace.sampled
    assert trace.traceparent().endswith("-00")
    assert request_spans(a_record(), a_live(trace=trace), offset_ns=0) == []


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        CALLER.upper(),
        CALLER[3:],
        "ff" + CALLER[2:],
        CALLER + "-more",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
    ],
)
def test_a_malformed_traceparent_begins_a_trace_of_its_own(header: str | None) -> None:
    trace = accept_trace(header, "vendor=1")
    assert (trace.parent_id, trace.state, trace.sampled) == ("", "", True)
    assert len(trace.trace_id) == 32
    assert int(trace.trace_id, 16)


def test_a_later_version_of_the_header_may_say_more() -> None:
    assert accept_trace("01" + CALLER[2:] + "-more").parent_id == "00f067aa0ba902b7"


@given(header=st.text(max_size=80), state=st.text(max_size=600))
def test_no_header_raises(header: str, state: str) -> None:
    trace = accept_trace(header, state)
    assert accept_trace(trace.traceparent()).trace_id == trace.trace_id


def test_what_machines_ask_all_the_time_makes_no_spans() -> None:
    for route in OBSERVING_ROUTES:
        assert request_spans(a_record(route=route), a_live(route=route), offset_ns=0) == []


def test_the_conversion_to_time_of_day_is_one_offset_for_the_whole_tree() -> None:
    now_ns = clock.now_ns()
    here = request_spans(a_record(), a_live(), offset_ns=0)
    there = request_spans(a_record(), a_live(), offset_ns=now_ns)

    def times(spans: list[SpanData], offset_ns: int) -> list[tuple[str, int, int]]:
        return [(span.name, span.started_ns - offset_ns, span.ended_ns - offset_ns) for span in spans]

    assert times(here, 0) == times(there, now_ns)


def test_a_trace_context_is_what_it_was_made_of() -> None:
    trace = TraceContext(trace_id="a" * 32, span_id="b" * 16, sampled=False)
    assert trace.traceparent() == f"00-{'a' * 32}-{'b' * 16}-00"
