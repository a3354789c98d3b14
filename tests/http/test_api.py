"""
What a client sees of a working server: the real engine shell behind a live gateway.
"""

import json
from typing import Any

import pytest

from tests.http.fake_engine import FakeEngine, Job
from tests.http.golden import check_golden
from tests.http.harness import LiveGateway

Pair = tuple[LiveGateway, FakeEngine]
Body = dict[str, Any]


def chat(**fields: object) -> Body:
    """A chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, **fields}


def prompt(**fields: object) -> Body:
    """A completion request."""
    return {"model": "tiny", "prompt": "Hello", "max_tokens": 12, **fields}


def post(gateway: LiveGateway, body: Body, path: str = "/v1/chat/completions", **headers: str) -> Body:
    """The answer's JSON; its record has been checked."""
    answer = gateway.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    record = gateway.record(answer.headers["x-request-id"])
    value: Body = answer.json()
    assert value["id"] == answer.headers["x-request-id"] == record.request_id
    assert record.outcome in ("stop", "length")
    assert record.output_tokens >= value["usage"]["completion_tokens"]
    return value


def stream(gateway: LiveGateway, body: Body, path: str = "/v1/chat/completions") -> tuple[list[Body], str]:
    """The chunks, and the whole transcript; the rules that hold for each stream have been checked."""
    with gateway.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        headers, transcript = answer.headers, "".join(answer.iter_text())
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache, no-transform"
    assert headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in headers
    assert float(headers["x-pellucid-overhead-ms"]) >= 0
    assert headers["server-timing"].startswith("parse;dur=")
    assert transcript.endswith("data: [DONE]\n\n")
    events = transcript.split("\n\n")[:-2]
    chunks: list[Body] = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert gateway.record(headers["x-request-id"]).stream
    return chunks, transcript


def contents(chunks: list[Body], choices: int = 1) -> list[str]:
    """Text by choice."""
    texts = [""] * choices
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return texts


class TestChat:
    def test_stream_equals_whole(self, shell: LiveGateway) -> None:
        for seed in range(4):
            body = chat(seed=seed, n=2, max_tokens=24, stop=["e ", "the"])
            whole = post(shell, body)
            chunks, _ = stream(shell, body)
            assert contents(chunks, 2) == [choice["message"]["content"] for choice in whole["choices"]]
            reasons = [
                choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]
            ]
            assert sorted(reasons) == sorted(choice["finish_reason"] for choice in whole["choices"])

    def test_shape_of_a_stream(self, shell: LiveGateway) -> None:
        chunks, _ = stream(shell, chat(n=3, stream_options={"include_usage": True}))
        roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
        assert roles == [0, 1, 2]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        ends = [chunk for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        assert len(ends) == 3
        assert all(end["choices"][0]["delta"] == {} for end in ends)
        assert [chunk for chunk in chunks if "usage" in chunk] == [chunks[-1]]
        assert chunks[-1]["choices"] == []

    def test_usage_only_if_asked(self, shell: LiveGateway) -> None:
        assert not [chunk for chunk in stream(shell, chat())[0] if chunk.get("usage")]
        assert not [chunk for chunk in stream(shell, chat(stream_options={}))[0] if chunk.get("usage")]

    def test_the_end_of_max_tokens_is_length(self, shell: LiveGateway) -> None:
        answer = post(shell, chat(ignore_eos=True, max_tokens=5))
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 5

    def test_without_max_tokens_the_context_is_the_limit(self, shell: LiveGateway) -> None:
        body = chat(ignore_eos=True)
        del body["max_tokens"]
        usage = post(shell, body)["usage"]
        assert usage["total_tokens"] == 512

    def test_choices_are_distinct_and_reproducible(self, shell: LiveGateway) -> None:
        body = chat(n=8, seed=7, temperature=1, ignore_eos=True)
        first, again = post(shell, body), post(shell, body)
        texts = [choice["message"]["content"] for choice in first["choices"]]
        assert [choice["index"] for choice in first["choices"]] == list(range(8))
        assert texts == [choice["message"]["content"] for choice in again["choices"]]
        assert len(set(texts)) == 8
        assert first["usage"]["completion_tokens"] == 8 * 12
        alone = post(shell, chat(seed=7, temperature=1, ignore_eos=True))
        assert alone["choices"][0]["message"]["content"] == texts[0]
        assert alone["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]

    def test_without_a_seed_answers_differ(self, shell: LiveGateway) -> None:
        texts = {post(shell, chat(ignore_eos=True))["choices"][0]["message"]["content"] for _ in range(3)}
        assert len(texts) == 3

    def test_temperature_zero_is_greedy(self, shell: LiveGateway) -> None:
        texts = {post(shell, chat(temperature=0, n=2))["choices"][1]["message"]["content"] for _ in range(2)}
        assert len(texts) == 1

    def test_logprobs(self, shell: LiveGateway) -> None:
        body = chat(logprobs=True, top_logprobs=3, ignore_eos=True, seed=1, max_tokens=24)
        whole = post(shell, body)["choices"][0]
        entries = whole["logprobs"]["content"]
        assert len(entries) == 24
        assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in entries)
        data = b"".join(bytes(entry["bytes"]) for entry in entries)
        plain = [entry for entry in entries if not entry["token"].startswith("<|")]
        if len(plain) == len(entries):  # else special tokens have bytes, but no text
            assert data.decode(errors="replace") == whole["message"]["content"]
        chunks, _ = stream(shell, body)
        streamed = [
            entry
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert streamed == entries
        assert (
            post(shell, chat(logprobs=True, max_tokens=1))["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
        )
        assert post(shell, chat())["choices"][0]["logprobs"] is None

    def test_cached_tokens_are_reported(self, shell: LiveGateway) -> None:
        body = chat(messages=[{"role": "user", "content": "a long prompt that is sent twice " * 4}], max_tokens=2)
        post(shell, body)
        assert post(shell, body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    def test_the_fingerprint_names_the_engine(self, shell: LiveGateway) -> None:
        assert post(shell, chat())["system_fingerprint"] == "fake-400"


class TestCompletions:
    PATH = "/v1/completions"

    @pytest.mark.parametrize("given", ["Hello", [40, 41, 42]])
    def test_one_prompt(self, shell: LiveGateway, given: object) -> None:
        answer = post(shell, prompt(prompt=given, seed=3), self.PATH)
        assert answer["object"] == "text_completion"
        chunks, _ = stream(shell, prompt(prompt=given, seed=3), self.PATH)
        assert contents(chunks) == [answer["choices"][0]["text"]]

    def test_a_list_of_prompts_is_as_if_each_were_alone(self, shell: LiveGateway) -> None:
        texts = ["Hello", "fox", "the lazy dog"]
        both = post(shell, prompt(prompt=texts, n=2, seed=5, ignore_eos=True), self.PATH)
        assert [choice["index"] for choice in both["choices"]] == list(range(6))
        alone = [post(shell, prompt(prompt=text, n=2, seed=5, ignore_eos=True), self.PATH) for text in texts]
        assert [choice["text"] for choice in both["choices"]] == [
            choice["text"] for answer in alone for choice in answer["choices"]
        ]
        assert both["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)
        chunks, _ = stream(shell, prompt(prompt=texts, n=2, seed=5, ignore_eos=True), self.PATH)
        assert contents(chunks, 6) == [choice["text"] for choice in both["choices"]]

    def test_lists_of_token_ids(self, shell: LiveGateway) -> None:
        ids = [shell.ids("Hello"), shell.ids("fox")]
        by_ids = post(shell, prompt(prompt=ids, seed=5), self.PATH)
        by_text = post(shell, prompt(prompt=["Hello", "fox"], seed=5), self.PATH)
        assert [one["text"] for one in by_ids["choices"]] == [one["text"] for one in by_text["choices"]]

    def test_echo(self, shell: LiveGateway) -> None:
        plain = post(shell, prompt(seed=5), self.PATH)["choices"][0]["text"]
        assert post(shell, prompt(seed=5, echo=True), self.PATH)["choices"][0]["text"] == "Hello" + plain
        chunks, _ = stream(shell, prompt(seed=5, echo=True), self.PATH)
        assert contents(chunks) == ["Hello" + plain]
        ids = post(shell, prompt(prompt=[shell.ids("fox"), shell.ids("dog")], echo=True), self.PATH)
        assert [choice["text"][:3] for choice in ids["choices"]] == ["fox", "dog"]

    def test_sixteen_tokens_unless_named(self, shell: LiveGateway) -> None:
        body = prompt(ignore_eos=True)
        del body["max_tokens"]
        assert post(shell, body, self.PATH)["usage"]["completion_tokens"] == 16

    def test_legacy_logprobs(self, shell: LiveGateway) -> None:
        body = prompt(logprobs=2, seed=9, ignore_eos=True)
        whole = post(shell, body, self.PATH)["choices"][0]
        lists = whole["logprobs"]
        assert {len(lists[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {12}
        assert lists["text_offset"] == sorted(lists["text_offset"])
        chunks, _ = stream(shell, body, self.PATH)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        for name, values in lists.items():
            assert [value for part in parts for value in part[name]] == values
        assert len(post(shell, prompt(logprobs=0), self.PATH)["choices"][0]["logprobs"]["top_logprobs"][0]) == 0


class TestTextTools:
    def test_tokenize_and_back(self, shell: LiveGateway) -> None:
        answer = shell.client.post("/tokenize", json={"model": "tiny", "prompt": "Hello world \U0001f600"}).json()
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 512
        back = shell.client.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": "Hello world \U0001f600"}

    def test_tokenize_messages_is_what_the_engine_gets(self, fake: Pair) -> None:
        gateway, engine = fake
        body = chat()
        post(gateway, body)
        tokens = gateway.client.post("/tokenize", json={"messages": body["messages"]}).json()["tokens"]
        assert engine.requests[-1].prompt == tuple(tokens)
        shorter = {"messages": body["messages"], "add_generation_prompt": False}
        assert len(gateway.client.post("/tokenize", json=shorter).json()["tokens"]) < len(tokens)

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
            (
                "/tokenize",
                {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
                "messages[0].content[0].type",
            ),
            ("/detokenize", {"tokens": [400]}, "tokens[0]"),
            ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
            ("/detokenize", {}, "tokens"),
        ],
    )
    def test_refusals(self, shell: LiveGateway, path: str, body: Body, param: str) -> None:
        answer = shell.client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


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
        assert engine.requests[-1].request_id == "my-id_1.2"
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
