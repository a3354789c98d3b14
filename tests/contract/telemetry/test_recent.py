"""
What is remembered of several tenants: no one's requests are hidden by those of another.
"""

from diagnosis.doctor import examine
from diagnosis.words import report_lines
from telemetry import clock
from telemetry.hub import Hub, LiveRequest
from telemetry.ledger import Ledger
from tests.contract.telemetry.test_hub import a_record, rows


def test_a_quiet_tenants_requests_are_found_under_a_busy_ones() -> None:
    listening = Hub()
    for number in range(5):
        tenant = "busy" if number > 1 else "quiet"
        listening.request(a_record(request_id=f"r{number}", tenant=tenant, accepted_ns=number, finished_ns=number + 9))
    listening.request_opened(LiveRequest(request_id="live", tenant="busy", ledger=Ledger("parse", 20)))
    shown = [row["request_id"] for row in rows(listening.debug_requests(2, "quiet"), "requests")]
    assert shown == ["r1", "r0"]
    assert [row["request_id"] for row in rows(listening.debug_requests(2, "busy"), "requests")] == ["live", "r4"]
    assert rows(listening.debug_requests(2, ""), "requests") == []


def test_a_name_that_two_tenants_have_chosen_is_of_both() -> None:
    listening = Hub()
    for at_ns, tenant in ((0, "blue"), (10, "green"), (20, "green")):
        listening.request(a_record(tenant=tenant, accepted_ns=at_ns, finished_ns=at_ns + 9))
    found = {(one.tenant, one.accepted_ns) for one in listening.record("r1")}
    assert found == {("blue", 0), ("green", 20)}, "of each the newest"
    listening.request_opened(LiveRequest(request_id="r1", tenant="red", ledger=Ledger("parse", 30)))
    assert {row["tenant"] for row in listening.debug_request("r1")} == {"blue", "green", "red"}
    assert {one.tenant for one in listening.record("r1")} == {"blue", "green", "red"}
    assert len(rows(listening.debug_requests(), "requests")) == 3


def test_who_has_not_ended_is_in_the_evidence_by_his_age_alone() -> None:
    listening = Hub()
    for number, route in enumerate(("/v1/completions", "/debug/live", "/v1/chat/completions")):
        opened_ns = clock.now_ns() - (number + 1) * 10**9
        listening.request_opened(LiveRequest(request_id=f"r{number}", route=route, ledger=Ledger("parse", opened_ns)))
    evidence = listening.evidence(0)
    assert [age_ns // 10**9 for age_ns in evidence.in_flight_ns] == [1, 3] and evidence.requests == []
    assert "In flight: 2 requests, the oldest for 3.0" in "\n".join(report_lines(examine(evidence)))
