"""Several upstreams, and upstreams beside an engine: who is asked, who is left alone, what is said of them."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import UpstreamOptions
from gateway.errors import ApiError
from gateway.upstream import REST_MS_MAX, Pool, Upstream
from gateway.upstream_breaker import NS_PER_S
from gateway.upstream_errors import Failure, of_status
from tests.http.asking import raw_request
from tests.http.conftest import Custom, Relaying, relay_options
from tests.http.guard import until
from tests.http.harness import LiveGateway
from tests.http.scripted_upstream import ScriptedUpstream, Visit, well
from tests.http.test_upstream import CHAT_URL, chat, streamed
from tests.http.test_upstream_trouble import answers


async def hanging(visit: Visit) -> None:
    """Say nothing."""
    await visit.until_gone()


def named(trouble: object) -> str:
    """The same in each process that collects these tests: no address of a function."""
    return getattr(trouble, "__name__", str(trouble))


async def hangs_up(visit: Visit) -> None:
    """Close without a word."""
    visit.writer.transport.abort()


def status(gateway: LiveGateway, path: str = "/ready") -> tuple[int, Any]:
    answer = gateway.client.get(path)
    return answer.status_code, answer.json()


class TestAnotherIsAsked:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("trouble", [500, 503, 429, 401, 404, 302, hangs_up], ids=named)
    def test_where_the_first_has_given_up(
        self,
        upstream: ScriptedUpstream,
        other_upstream: ScriptedUpstream,
        relaying: Relaying,
        trouble: Any,
        stream: bool,
    ) -> None:
        gateway = relaying(upstream, other_upstream)
        upstream.behaviour = answers(trouble) if isinstance(trouble, int) else trouble
        for _ in range(4):
            answer = gateway.client.post(CHAT_URL, json=chat(stream=stream))
            assert answer.status_code == 200
            record = gateway.record(answer.headers["x-request-id"])
            assert (record.upstream, record.outcome) == ("up1", "stop")
        assert len(other_upstream.visits) == 4 and len(upstream.visits) <= 4

    @pytest.mark.parametrize("trouble", [400, 413, 504])
    def test_not_where_it_would_say_the_same_or_is_still_at_it(
        self, upstream: ScriptedUpstream, other_upstream: ScriptedUpstream, relaying: Relaying, trouble: int
    ) -> None:
        gateway = relaying(upstream, other_upstream)
        upstream.behaviour = other_upstream.behaviour = answers(trouble)
        assert gateway.client.post(CHAT_URL, json=chat()).status_code == trouble
        assert len(upstream.visits) + len(other_upstream.visits) == 1

    def test_where_nobody_listens(
        self, upstream: ScriptedUpstream, other_upstream: ScriptedUpstream, relaying: Relaying
    ) -> None:
        gateway = relaying(upstream, other_upstream, probe_interval_s=3600)
        upstream.pause()
        try:
            for _ in range(5):
                chunks, record = streamed(gateway, chat())
                assert record.upstream == "up1" and chunks
            other_upstream.pause()
            answer = gateway.client.post(CHAT_URL, json=chat())
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_healthy_engine")
            reasons = {one["reason"] for one in status(gateway, "/health")[1]["upstreams"]}
            assert reasons <= {"cannot be connected to: Connection refused", None}
            assert gateway.record(answer.headers["x-request-id"]).outcome == "no_healthy_engine"
        finally:
            upstream.start()
            other_upstream.start()

    def test_what_kills_two_is_not_given_to_a_third(
        self, upstream: ScriptedUpstream, other_upstream: ScriptedUpstream, relaying: Relaying
    ) -> None:
        third = ScriptedUpstream()
        third.start()
        try:
            gateway = relaying(upstream, other_upstream, third, probe_interval_s=3600)
            for one in (upstream, other_upstream, third):
                one.behaviour = hangs_up
            assert gateway.client.post(CHAT_URL, json=chat()).status_code == 502
            assert len(upstream.visits) + len(other_upstream.visits) + len(third.visits) == 2
        finally:
            third.stop()

    def test_an_old_connection_that_just_closed_is_nobodys_fault(
        self, upstream: ScriptedUpstream, relaying: Relaying
    ) -> None:
        gateway = relaying(upstream, probe_interval_s=3600)

        async def once(visit: Visit) -> None:
            if len(upstream.visits) == 2:
                visit.writer.transport.abort()
            else:
                await well(visit)

        upstream.behaviour = once
        assert [gateway.client.post(CHAT_URL, json=chat()).status_code for _ in range(2)] == [200, 200]
        assert len(upstream.visits) == 3
        [behind] = gateway.application.upstreams.upstreams
        assert behind.results == {"complete": 2, "abandoned": 1}

    def test_nothing_is_asked_twice_once_the_client_has_heard_something(
        self, upstream: ScriptedUpstream, other_upstream: ScriptedUpstream, relaying: Relaying
    ) -> None:
        async def breaks_off(visit: Visit) -> None:
            await visit.begin()
            await visit.say("one")
            visit.writer.transport.abort()

        gateway = relaying(upstream, other_upstream)
        upstream.behaviour = other_upstream.behaviour = breaks_off
        assert "bad_gateway" in gateway.client.post(CHAT_URL, json=chat(stream=True)).text
        assert len(upstream.visits) + len(other_upstream.visits) == 1


def silent_upstream(name: str, **changes: object) -> Upstream:
    """One that is never asked."""
    table = {"name": name, "url": "http://127.0.0.1:1", "model": "m", **changes}
    return Upstream(msgspec.convert(table, UpstreamOptions), "")


class TestChoice:
    @given(loads=st.lists(st.integers(0, 3), min_size=1, max_size=6), keys=st.lists(st.binary(max_size=8), max_size=20))
    def test_the_least_busy_one_and_among_equals_by_affinity(self, loads: list[int], keys: list[bytes]) -> None:
        pool = Pool("m", [silent_upstream(f"u{number}") for number in range(len(loads))])
        for one, load in zip(pool.upstreams, loads, strict=True):
            one.in_flight = load
        for key in keys:
            chosen = pool.choose(key, [], 0)
            assert chosen.in_flight == min(loads)
            assert pool.choose(key, [], 0) is chosen
            without = [one for one in pool.upstreams if one is not chosen]
            for gone in without:  # when another goes, this key stays where it is
                assert pool.choose(key, [gone], 0) is chosen

    def test_keys_spread(self) -> None:
        pool = Pool("m", [silent_upstream(f"u{number}") for number in range(4)])
        counts = Counter(pool.choose(f"key {number}".encode(), [], 0).name for number in range(4000))
        assert all(850 < count < 1150 for count in counts.values())

    def test_full_ones_are_left_out_and_all_full_is_overload(self) -> None:
        pool = Pool("m", [silent_upstream("a", requests_max=2), silent_upstream("b", requests_max=5)])
        for one in pool.upstreams:
            one.in_flight = 2
        assert pool.choose(b"", [], 0).name == "b"
        pool.upstreams[1].in_flight = 5
        with pytest.raises(ApiError) as caught:
            pool.choose(b"", [], 0)
        assert (caught.value.status, caught.value.code) == (503, "overloaded")

    def test_a_rest_is_bounded(self) -> None:
        pool = Pool("m", [silent_upstream("a")])
        failure = of_status(429, b"", rest_ms=3_000_000, secrets=())
        assert failure.error.headers["retry-after"] == "3000"
        pool.upstreams[0].failed(failure)
        now_ns = pool.upstreams[0].rests_until_ns
        with pytest.raises(ApiError) as caught:
            pool.choose(b"", [], now_ns - 1_500_000)
        assert caught.value.headers["retry-after-ms"] == "2"
        assert pool.choose(b"", [], now_ns).name == "a"
        assert pool.upstreams[0].rest_ms(now_ns - (REST_MS_MAX + 1) * 1_000_000) >= REST_MS_MAX

    def test_one_that_is_open_is_tried_by_one_request_each_pause(self) -> None:
        pool = Pool("m", [silent_upstream("a"), silent_upstream("b")])
        for _ in range(3):
            pool.upstreams[0].failed(Failure("x", ApiError(502, None, "x")))
        later_ns = 1 << 62
        assert pool.choose(b"", [pool.upstreams[1]], later_ns).name == "a"
        pool.upstreams[0].breaker.began(later_ns)
        with pytest.raises(ApiError):
            pool.choose(b"", [pool.upstreams[1]], later_ns + NS_PER_S - 1)
        assert pool.choose(b"", [pool.upstreams[1]], later_ns + NS_PER_S).name == "a"

    def test_requests_that_are_alike_go_the_same_way_and_load_comes_first(
        self, upstream: ScriptedUpstream, other_upstream: ScriptedUpstream, relaying: Relaying
    ) -> None:
        gateway = relaying(upstream, other_upstream)
        first = {"role": "system", "content": [{"type": "text", "text": "You are a poet."}]}
        for number in range(6):
            messages = [first, {"role": "user", "content": f"{number}"}]
            assert gateway.client.post(CHAT_URL, json=chat(messages=messages)).status_code == 200
        assert {len(upstream.visits), len(other_upstream.visits)} == {0, 6}
        used = len(upstream.visits)
        for number in range(40):
            gateway.client.post(CHAT_URL, json=chat(prompt_cache_key=f"key {number}"))
        assert 5 < len(upstream.visits) - used < 35
        upstream.behaviour = other_upstream.behaviour = hanging
        with gateway.connect() as one, gateway.connect() as two:
            counts = len(upstream.visits), len(other_upstream.visits)
            for raw, name in ((one, "one"), (two, "two")):
                raw.sendall(raw_request(chat(user="same"), name))
                until(lambda: sum(u.in_flight for u in _behind(gateway)) == (1 if name == "one" else 2), "sent")  # noqa: B023
            until(lambda: len(upstream.visits) == counts[0] + 1, "one of them is here")
            until(lambda: len(other_upstream.visits) == counts[1] + 1, "and one there")


def _behind(gateway: LiveGateway) -> list[Upstream]:
    return gateway.application.upstreams.upstreams


class TestBesideAnEngine:
    def test_each_model_goes_its_own_way(self, custom: Custom, upstream: ScriptedUpstream) -> None:
        tables = relay_options(upstream).upstreams
        shadowed = msgspec.structs.replace(tables[0], name="shadowed", model="tiny")
        gateway, engine = custom(upstreams=(*tables, shadowed))
        until(lambda: status(gateway)[1]["upstreams"] == {}, "it has answered a probe")
        assert [one["name"] for one in status(gateway, "/health")[1]["upstreams"]] == ["up0"], "one is never asked"
        listed = gateway.client.get("/v1/models").json()["data"]
        assert [(one["id"], one["owned_by"]) for one in listed] == [("tiny", "pellucid"), ("remote", "upstream")]
        assert listed[1]["quantization"] is None and listed[1]["max_model_len"] is None
        assert gateway.client.get("/v1/models/remote").json() == listed[1]
        assert gateway.client.get("/v1/models/their/model").status_code == 404
        here = gateway.client.post(CHAT_URL, json=chat(model="tiny")).json()
        there = gateway.client.post(CHAT_URL, json=chat()).json()
        assert (here["model"], there["model"]) == ("tiny", "remote")
        assert (len(engine.requests), len(upstream.visits)) == (1, 1)
        assert gateway.client.post(CHAT_URL, json=chat(model="their/model")).status_code == 404
        refused = gateway.client.post(CHAT_URL, json=chat(model="tiny", tools=[{"type": "function"}]))
        assert refused.json()["error"]["param"] == "tools"
        assert gateway.client.post("/tokenize", json={"prompt": "x"}).status_code == 200

    def test_either_is_enough_to_be_ready(self, custom: Custom, upstream: ScriptedUpstream, socket_path: str) -> None:
        gateway, _ = custom(
            upstreams=relay_options(upstream).upstreams, engines=(f"unix:{socket_path}.none",), ready=False
        )
        until(lambda: status(gateway)[0] == 200, "the upstream has answered")
        assert "not connected" in status(gateway)[1]["engines"]["0"]
