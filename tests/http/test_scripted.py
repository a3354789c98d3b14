"""
With an engine that follows a script: what it is told, and what the client gets, down to the byte.
"""

import msgspec
import pytest

from telemetry.records import RequestRecord
from tests.http.asking import Body, Pair, chat, contents, post, prompt, stream
from tests.http.conftest import Custom
from tests.http.fake_engine import Job
from tests.http.golden import check_golden
from tests.http.harness import LiveGateway


class TestPassedOn:
    """What the engine is told."""

    def test_sampling(self, fake: Pair) -> None:
        gateway, engine = fake
        wanted: Body = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": -0.2,
            "seed": -3,
        }
        body = chat(
            **wanted,
            logit_bias={"7": -100, "8": 2.5},
            min_tokens=3,
            service_tier="priority",
            logprobs=True,
            top_logprobs=2,
        )
        post(gateway, body)
        message = engine.requests[-1]
        assert {name: getattr(message.sampling, name) for name in wanted} == wanted
        assert message.sampling.logit_bias == {7: -100, 8: 2.5}
        assert message.sampling.logprobs == 2
        assert (message.tokens_max, message.tokens_min, message.stop_ids, message.priority) == (12, 3, (2,), -1)
        assert message.deadline_s == gateway.options.request_timeout_s

    def test_defaults_are_openai_s(self, fake: Pair) -> None:
        gateway, engine = fake
        post(gateway, chat())
        sampling = engine.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1, 1, 0, None)

    def test_stop_ids(self, fake: Pair) -> None:
        gateway, engine = fake
        post(gateway, chat(ignore_eos=True, stop_token_ids=[9, 9]))
        assert engine.requests[-1].stop_ids == (9,)

    def test_seeds_of_choices(self, fake: Pair) -> None:
        gateway, engine = fake
        before = len(engine.requests)
        post(gateway, chat(n=3, seed=11))
        seeds = [request.sampling.seed for request in engine.requests[before:]]
        assert seeds[0] == 11
        assert len(set(seeds)) == 3
        assert all(-(2**63) <= seed < 2**63 for seed in seeds)
        ids = [request.request_id for request in engine.requests[before:]]
        assert [name.rpartition("-")[2] for name in ids] == ["0", "1", "2"]

    def test_the_trace_goes_through(self, fake: Pair) -> None:
        gateway, engine = fake
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        answer = post(gateway, chat(), traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
        assert engine.requests[-1].traceparent.split("-")[1] == trace_id
        assert engine.requests[-1].traceparent.split("-")[2] != "b7ad6b7169203331"
        assert gateway.record(answer["id"]).trace_id == trace_id

    def test_a_wanted_request_id_is_used_if_it_is_fit(self, fake: Pair) -> None:
        gateway, engine = fake
        assert post(gateway, chat(), **{"x-request-id": "my-id_1.2"})["id"] == "my-id_1.2"
        assert engine.requests[-1].request_id.startswith("my-id_1.2#")
        for unfit in ("a b", "x" * 200, "../x", 'a"b', "-a"):
            assert post(gateway, chat(), **{"x-request-id": unfit})["id"].startswith("chatcmpl-")


class TestText:
    """Streams of a scripted engine, down to the byte."""

    def golden(self, gateway: LiveGateway, name: str, body: Body, path: str = "/v1/chat/completions") -> str:
        with gateway.client.stream(
            "POST", path, json={**body, "stream": True}, headers={"x-request-id": name}
        ) as answer:
            transcript = "".join(answer.iter_text())
        gateway.record(name)
        check_golden(f"{name}.sse", transcript)
        return transcript

    def test_an_emoji_split_over_tokens(self, fake: Pair) -> None:
        gateway, engine = fake
        ids = gateway.ids("a\U0001f600é!")
        assert len(ids) > 4

        async def one_by_one(job: Job) -> None:
            await job.accept()
            for token in ids:
                await job.emit([token])
            await job.finish("stop", tokens=[2], stop_id=2)

        async def at_once(job: Job) -> None:
            await job.accept()
            await job.finish("stop", tokens=[*ids, 2], stop_id=2)

        engine.behaviour = at_once
        self.golden(gateway, "emoji", chat(stream_options={"include_usage": True}))
        engine.behaviour = one_by_one
        chunks, transcript = stream(gateway, chat())
        assert contents(chunks) == ["a\U0001f600é!"]
        assert "\ufffd" not in transcript
        answer = post(gateway, chat(logprobs=True))
        assert answer["choices"][0]["message"]["content"] == "a\U0001f600é!"
        assert answer["usage"]["completion_tokens"] == len(ids) + 1
        assert [entry["bytes"] for entry in answer["choices"][0]["logprobs"]["content"]] == [
            list(gateway.text.piece(token)) for token in ids
        ]

    def test_the_first_token_ends_it(self, fake: Pair) -> None:
        gateway, engine = fake

        async def nothing(job: Job) -> None:
            await job.accept()
            await job.finish("stop", tokens=[2], stop_id=2)

        engine.behaviour = nothing
        answer = post(gateway, chat())
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
        self.golden(gateway, "first-token-ends", chat(stream_options={"include_usage": True}))
        completion = post(gateway, prompt(), "/v1/completions")
        assert completion["choices"][0]["text"] == ""

    def test_a_stop_token_that_is_text_is_left_out(self, fake: Pair) -> None:
        gateway, engine = fake
        ids = gateway.ids("Hello")

        async def until_last(job: Job) -> None:
            await job.accept()
            await job.finish("stop", tokens=ids, stop_id=ids[-1])

        engine.behaviour = until_last
        answer = post(gateway, chat(stop_token_ids=[ids[-1]], logprobs=True))
        expected = b"".join(gateway.text.piece(token) for token in ids[:-1]).decode()
        assert answer["choices"][0]["message"]["content"] == expected
        assert len(answer["choices"][0]["logprobs"]["content"]) == len(ids) - 1
        assert answer["usage"]["completion_tokens"] == len(ids)

    @pytest.mark.parametrize("stop", ["STOP", "OP", ["never", "ST"]])
    def test_a_stop_string_aborts_the_engine_at_once(self, fake: Pair, stop: object) -> None:
        gateway, engine = fake
        ids = gateway.ids("one two STOP three")
        end = next(
            n
            for n in range(len(ids) + 1)
            if "ST" in gateway.text.decode(ids[:n]) and "O" in gateway.text.decode(ids[:n])
        )

        async def talk_on(job: Job) -> None:
            await job.accept()
            for token in ids:
                await job.emit([token])
            await job.until_aborted()

        engine.behaviour = talk_on
        answer = post(gateway, chat(stop=stop, logprobs=True, max_tokens=50))
        engine.wait_for_abort(answer["id"])
        text = answer["choices"][0]["message"]["content"]
        wanted = "one two STOP three"
        assert text == wanted[: wanted.index("ST")] if stop != "OP" else text == "one two ST"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert 0 < answer["usage"]["completion_tokens"] < len(ids)
        made = b"".join(bytes(entry["bytes"]) for entry in answer["choices"][0]["logprobs"]["content"])
        assert made.decode().startswith(text)
        assert end <= len(ids)

    def test_no_beginning_of_a_stop_string_leaks(self, fake: Pair) -> None:
        gateway, engine = fake
        ids = gateway.ids("one two STOP three")

        async def talk_on(job: Job) -> None:
            await job.accept()
            await job.emit(ids)
            await job.until_aborted()

        engine.behaviour = talk_on
        self.golden(gateway, "stop-string", chat(stop=["STOP"], stream_options={"include_usage": True}))

    def test_tokens_of_one_frame_are_one_chunk(self, fake: Pair) -> None:
        gateway, engine = fake
        ids = gateway.ids("The quick brown fox")

        async def at_once(job: Job) -> None:
            await job.accept()
            await job.emit(ids)
            await job.finish("length")

        engine.behaviour = at_once
        chunks, _ = stream(gateway, chat())
        assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "The quick brown fox", None]

    def test_infinite_logprobs_are_clamped(self, fake: Pair) -> None:
        gateway, engine = fake

        async def certain(job: Job) -> None:
            await job.accept()
            await job.finish("length", tokens=[40], logprob=float("-inf"))

        engine.behaviour = certain
        entry = post(gateway, chat(logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"][0]
        assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
        legacy = post(gateway, prompt(logprobs=1), "/v1/completions")["choices"][0]["logprobs"]
        assert legacy["token_logprobs"] == [-9999.0]

    def test_completion_transcripts(self, fake: Pair) -> None:
        gateway, _ = fake
        self.golden(gateway, "completion", prompt(echo=True, n=2), "/v1/completions")
        self.golden(gateway, "completion-logprobs", prompt(logprobs=1), "/v1/completions")
        self.golden(gateway, "chat-logprobs", chat(logprobs=True, top_logprobs=1))


_NOT_SUMMED = {
    "accepted_ns", "finished_ns", "first_token_ns", "gap_max_ns",  # times, of the gateway's own clock
    "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens",  # the bill, which other tests compare
    "resumes", "status", "choices", "replica", "reserved_tokens", "charged_tokens", "charged_micros",  # its own facts
    "gc_pause_ns", "loop_lag_ns", "starved_ns", "repeated_tokens", "unread_ns",
}  # fmt: skip
_OF_ONE = {"interconnect_wait_max_ns", "gap_step"}


def test_what_the_engine_has_counted_for_each_choice_is_in_the_record(custom: Custom) -> None:
    """All of it: a number that is new in the engine's record and forgotten here would stay 0 for ever."""
    counted = [field.name for field in msgspec.structs.fields(RequestRecord) if field.type is int]
    spent = {name: 100 + place for place, name in enumerate(counted) if name not in _NOT_SUMMED}
    spent["drafted_tokens"] = spent["draft_accepted_tokens"] + spent["draft_rejected_tokens"]

    async def behave(job: Job) -> None:
        job.spent = spent
        await job.accept()
        await job.finish("length", tokens=[40, 41, 42])

    gateway, engine = custom()
    engine.behaviour = behave
    record = gateway.record(post(gateway, chat(n=2))["id"])
    expected = {name: value if name in _OF_ONE else 2 * value for name, value in spent.items()}
    assert {name: getattr(record, name) for name in spent} == expected
    shown = gateway.client.get(f"/debug/requests/{record.request_id}").json()
    assert {name: shown[name] for name in spent} == expected


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_may_ask_for_its_own_record(fake: Pair, streamed: bool) -> None:
    """Up to the moment in which the answer was made: what is left is to write it."""
    gateway, _ = fake
    body = chat(include_metrics=True)
    metrics = stream(gateway, body)[0][-1]["metrics"] if streamed else post(gateway, body)["metrics"]
    record = gateway.record(metrics["request_id"])
    assert sum(metrics["states"].values()) == metrics["e2e_ns"] <= record.finished_ns - record.accepted_ns
    assert metrics["outcome"] == record.outcome and metrics["output_tokens"] == record.output_tokens
    for state, spent_ns in metrics["states"].items():
        assert spent_ns <= record.states[state]
    assert sum(metrics["first_token_states"].values()) == metrics["first_token_ns"] == record.first_token_ns
    assert "metrics" not in post(gateway, chat())
