"""How upstreams do: what is left alone and heals, and what is said of them."""

import pytest

from tests.http.conftest import Relaying
from tests.http.guard import until
from tests.http.scripted_upstream import ScriptedUpstream, well
from tests.http.test_upstream import CHAT_URL, chat, streamed
from tests.http.test_upstream_trouble import answers
from tests.http.test_upstreams import hanging, status


class TestHealth:
    def test_what_fails_is_left_alone_and_heals_by_itself(self, upstream: ScriptedUpstream, relaying: Relaying) -> None:
        gateway = relaying(upstream, probe_interval_s=0.05)
        fine: dict[str, object] = {"status": "ready", "reason": None, "engines": {}, "degraded": None, "upstreams": {}}
        assert status(gateway) == (200, fine)
        upstream.behaviour = upstream.probed = answers(500)
        until(lambda: status(gateway)[0] == 503, "the probes notice it")
        assert status(gateway)[1]["reason"] == "upstream up0 answers 500 to GET /models"
        asked = len(upstream.visits)
        answer = gateway.client.post(CHAT_URL, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_healthy_engine")
        assert len(upstream.visits) == asked
        health = status(gateway, "/health")[1]
        assert (health["status"], health["degraded"]) == ("degraded", "Upstream up0: answers 500 to GET /models.")
        [shown] = health["upstreams"]
        assert shown == {
            "name": "up0",
            "model": "remote",
            "status": "trouble",
            "reason": "answers 500 to GET /models",
            "requests_in_flight": 0,
        }
        assert 'pellucid_upstream_up{upstream="up0"} 0.0' in gateway.client.get("/metrics").text
        upstream.behaviour, upstream.probed = well, upstream.fresh().probed
        until(lambda: gateway.client.post(CHAT_URL, json=chat()).status_code == 200, "it heals")
        assert status(gateway)[0] == 200
        assert 'pellucid_upstream_up{upstream="up0"} 1.0' in gateway.client.get("/metrics").text

    def test_requests_alone_find_out_too(self, upstream: ScriptedUpstream, relaying: Relaying) -> None:
        gateway = relaying(upstream, probe_interval_s=3600)
        upstream.behaviour = answers(502)
        codes = [gateway.client.post(CHAT_URL, json=chat()).status_code for _ in range(5)]
        assert codes == [502, 502, 502, 503, 503] and len(upstream.visits) == 3
        upstream.behaviour = well
        until(lambda: gateway.client.post(CHAT_URL, json=chat()).status_code == 200, "it is tried after a pause")

    @pytest.mark.parametrize("status_code", [500, 403, 404, 501])
    def test_one_bad_request_does_not_have_it_left_alone_for_the_others(
        self, upstream: ScriptedUpstream, relaying: Relaying, status_code: int
    ) -> None:
        gateway = relaying(upstream, probe_interval_s=3600)
        upstream.behaviour = answers(status_code)  # llama.cpp, say, to an image that it cannot read
        assert {gateway.client.post(CHAT_URL, json=chat()).status_code for _ in range(5)} == {502}
        assert len(upstream.visits) == 5 and status(gateway)[0] == 200
        [shown] = status(gateway, "/health")[1]["upstreams"]
        assert shown["status"] == "trouble" and str(status_code) in shown["reason"]
        upstream.behaviour = well
        assert gateway.client.post(CHAT_URL, json=chat()).status_code == 200
        [shown] = status(gateway, "/health")[1]["upstreams"]
        assert (shown["status"], shown["reason"]) == ("ok", None)

    @pytest.mark.parametrize("stream", [False, True])
    def test_what_another_one_can_do_counts_against_the_first(
        self, upstream: ScriptedUpstream, other_upstream: ScriptedUpstream, relaying: Relaying, stream: bool
    ) -> None:
        gateway = relaying(upstream, other_upstream, probe_interval_s=3600)

        def post() -> int:
            return gateway.client.post(CHAT_URL, json=chat(stream=stream)).status_code

        assert post() == 200
        by_name = {"up0": upstream, "up1": other_upstream}
        (name, first), (_, second) = sorted(by_name.items(), key=lambda item: not item[1].visits)
        first.behaviour = second.behaviour = answers(500)
        assert [post() for _ in range(4)] == [502] * 4
        assert (len(first.visits), len(second.visits)) == (1 + 4, 4)
        second.behaviour = well
        assert [post() for _ in range(6)] == [200] * 6
        assert (len(first.visits), len(second.visits)) == (1 + 4 + 3, 4 + 6)
        assert status(gateway)[1]["upstreams"] == {name: "answers 500"}

    @pytest.mark.parametrize("probed", [404, 405, 403])
    def test_not_every_server_lists_its_models(
        self, upstream: ScriptedUpstream, relaying: Relaying, probed: int
    ) -> None:
        upstream.probed = answers(probed)
        assert status(relaying(upstream))[0] == 200

    def test_one_that_never_answered_is_not_ready_but_is_asked(
        self, upstream: ScriptedUpstream, relaying: Relaying
    ) -> None:
        upstream.probed = hanging
        gateway = relaying(upstream, ready=False)
        assert status(gateway)[1]["reason"] == "upstream up0 has not answered yet"
        assert gateway.client.post(CHAT_URL, json=chat()).status_code == 200
        assert status(gateway)[0] == 200

    def test_the_metrics_know_them(self, upstream: ScriptedUpstream, relaying: Relaying) -> None:
        gateway = relaying(upstream)
        streamed(gateway, chat())
        upstream.behaviour = answers(400)
        gateway.client.post(CHAT_URL, json=chat())
        text = gateway.client.get("/metrics").text
        for line in (
            'pellucid_upstream_requests_live{upstream="up0"} 0.0',
            'pellucid_upstream_attempts_total{result="complete",upstream="up0"} 1.0',
            'pellucid_upstream_attempts_total{result="refused",upstream="up0"} 1.0',
            'pellucid_upstream_attempts_total{result="failed",upstream="up0"} 0.0',
            'pellucid_upstream_tokens_total{upstream="up0",usage="prompt"} 27.0',
            'pellucid_upstream_tokens_total{upstream="up0",usage="cached"} 16.0',
            'pellucid_upstream_tokens_total{upstream="up0",usage="output"} 3.0',
            'pellucid_prompt_tokens_total{source="computed"} 0.0',
            'pellucid_prompt_tokens_total{source="cached"} 0.0',
            "pellucid_prefix_cache_hit_tokens_total 0.0",
            "pellucid_prefix_cache_query_tokens_total 0.0",
            'pellucid_book_mismatches_total{book="latency"} 0.0',
            'pellucid_book_mismatches_total{book="token"} 0.0',
        ):
            assert line in text.splitlines()
        assert 'pellucid_request_state_seconds_total{state="upstream"}' in text
        assert 'gen_ai_request_model="remote"' in text

    def test_what_it_cannot_tell_is_absent(self, upstream: ScriptedUpstream, relaying: Relaying) -> None:
        gateway = relaying(upstream)
        _, record = streamed(gateway, chat())
        shown = gateway.client.get(f"/debug/requests/{record.request_id}").json()
        assert shown["upstream"] == "up0" and shown["usage_estimated"] is False and shown["states"]["upstream"] > 0
        assert not {"kv_block_ns", "computed_tokens", "steps", "preemptions", "drafted_tokens"} & shown.keys()
