"""
What a client sees of a working server: the real engine shell behind a live gateway.
"""

import pytest

from tests.http.asking import Body, Pair, chat, contents, post, prompt, stream
from tests.http.harness import LiveGateway


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

    @pytest.mark.parametrize("stop", [None, ["e", "a", "t"]])
    @pytest.mark.parametrize("n", [1, 4])
    @pytest.mark.parametrize("given", [None, "Hello the lazy dog", ["Hello", "the lazy dog"]])
    def test_the_record_is_the_bill(self, shell: LiveGateway, given: object, n: int, stop: list[str] | None) -> None:
        """`post` and `stream` compare them; here also for a stream that shows no usage."""
        fields: Body = {"n": n, "stop": stop, "seed": 9, "max_tokens": 32, "ignore_eos": True, "temperature": 1}
        path = "/v1/chat/completions" if given is None else "/v1/completions"
        body = chat(**fields) if given is None else prompt(prompt=given, **fields)
        usage = post(shell, body, path)["usage"]
        stops_early = usage["completion_tokens"] < 32 * n * (2 if isinstance(given, list) else 1)
        assert stops_early == (stop is not None)
        chunks, _ = stream(shell, {**body, "stream_options": {"include_usage": True}}, path)
        assert chunks[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
        unbilled, _ = stream(shell, body, path)
        record = shell.record(unbilled[0]["id"])
        assert (record.prompt_tokens, record.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert record.computed_tokens + record.cached_tokens >= record.prompt_tokens

    def test_the_model_says_in_which_numbers_it_is_held(self, shell: LiveGateway) -> None:
        model = shell.client.get("/v1/models").json()["data"][0]
        assert model["quantization"] == {
            "scheme": "gptq-4bit-g64",
            "method": "gptq",
            "bits": 4,
            "group_size": 64,
            "origin": "0123456789abcdef",
        }
        assert shell.client.get("/health").json()["engines"][0]["weights"] == "gptq-4bit-g64"

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
