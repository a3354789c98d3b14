"""
Bodies that are not acceptable: each is a 400 that names the field, none is a crash.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.decode import decode, parse_json, split_prompts, token_biases
from gateway.errors import ApiError
from gateway.wire import ChatRequest, CompletionRequest, DetokenizeRequest, Json, TokenizeRequest

DEPTH_MAX = 64
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> bytes:
    """A chat body."""
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


decode_any: Callable[..., object] = decode


def refused(body: bytes, kind: type = ChatRequest) -> ApiError:
    """The error of a body that must not be accepted."""
    with pytest.raises(ApiError) as caught:
        decode_any(body, kind, depth_max=DEPTH_MAX)
    assert caught.value.status == 400
    assert caught.value.kind == "invalid_request_error"
    json.loads(caught.value.body())
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'{"model": "m",}',
        b'{"model": "m"} x',
        b"\xff\xfe",
        b'{"model": "\xe9"}',
        b'\xef\xbb\xbf{"model": "m"}',
        b'{"model": "m", "messages": [], "temperature": NaN}',
        b'{"model": "m", "messages": [], "temperature": Infinity}',
        b'{"model": "m", "messages": [], "temperature": -Infinity}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 65 + b"]" * 65,
    ],
)
def test_what_is_no_json(body: bytes) -> None:
    assert refused(body).code == "invalid_value"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "m", "model": "m", "messages": []}', "model"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\udc00\\ud800"}]}', "messages[0].content"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "stop": ["\\uDEAD"]}', "stop[0]"),
        (b'{"model": "m", "\\ud800": 1}', "?"),
    ],
)
def test_duplicates_and_lone_surrogates(body: bytes, param: str) -> None:
    assert refused(body).param == param


def test_a_whole_surrogate_pair_is_a_character() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert decode(body, ChatRequest, depth_max=DEPTH_MAX).messages[0].content == "\U0001f600"


def test_depth_is_counted_exactly() -> None:
    def nested(levels: int) -> bytes:
        return b'{"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    parse_json(nested(DEPTH_MAX), depth_max=DEPTH_MAX)
    with pytest.raises(ApiError, match="64 levels"):
        parse_json(nested(DEPTH_MAX + 1), depth_max=DEPTH_MAX)


WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [USER, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
    ({"messages": [USER, USER, {"role": "user", "content": 3}]}, "messages[2].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[0].content[1].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"image_url": {"url": "x"}, "type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{**USER, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}]},
        "messages[0].tool_calls",
    ),
    ({"messages": [{**USER, "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{**USER, "audio": {"id": "x"}}]}, "messages[0].audio"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 1e19}, "seed"),
    ({"n": 1e300}, "n"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"user": 5}, "user"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"metadata": {"a": 1}}, "metadata"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_VALUES, ids=[json.dumps(one)[:60] for one, _ in WRONG_VALUES])
def test_wrong_values_are_named(fields: dict[str, Any], param: str) -> None:
    error = refused(chat(**fields))
    assert (error.code, error.param) == ("invalid_value", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope("}}}},
            "response_format",
        ),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(chat(**fields))
    assert (error.code, error.param) == ("invalid_value", param)
    assert "not supported" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"functions": []},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"n": 1},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"parallel_tool_calls": True},
        {"modalities": ["text"]},
        {"logit_bias": {}},
        {"logit_bias": None, "stop": None, "seed": None, "temperature": None, "max_tokens": None},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": -1},
        {"max_tokens": 16.0, "n": 1.0, "seed": -1e18, "top_k": -0.0},
        {"logit_bias": {"7": 1e2}},
        {"service_tier": "flex"},
        {
            "messages": [
                {"role": "developer", "content": "x"},
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
            ]
        },
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "content": "3", "tool_call_id": "1"},
            ]
        },
    ],
)
def test_what_is_harmless_is_accepted(fields: dict[str, Any]) -> None:
    decode(chat(**fields), ChatRequest, depth_max=DEPTH_MAX)


def test_a_number_too_large_for_a_float_is_out_of_range() -> None:
    assert refused(chat(temperature=1).replace(b'"temperature": 1', b'"temperature": 1e999')).param == "temperature"


def test_unknown_fields_come_with_the_nearest_name() -> None:
    error = refused(chat(temprature=1))
    assert (error.code, error.param) == ("unknown_parameter", "temprature")
    assert error.message.endswith("Did you mean 'temperature'?")
    nested = refused(chat(messages=[{**USER, "colour": "red"}]))
    assert (nested.code, nested.param) == ("unknown_parameter", "messages[0].colour")


def test_missing_fields_are_named() -> None:
    error = refused(b'{"messages": [{"role": "user", "content": "a"}]}')
    assert (error.code, error.param) == ("missing_required_parameter", "model")
    assert refused(b'{"model": "m"}').param == "messages"
    assert refused(chat(messages=[{"content": "x"}])).param == "messages[0].role"
    assert refused(b'{"model": "m"}', CompletionRequest).param == "prompt"


def test_max_completion_tokens_wins() -> None:
    asked = decode(chat(max_tokens=3, max_completion_tokens=5), ChatRequest, depth_max=DEPTH_MAX)
    assert asked.tokens_max == 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"prompt": None, "messages": None}, "prompt"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
def test_what_is_tokenized_is_one_thing(body: dict[str, Json], param: str) -> None:
    assert refused(json.dumps(body).encode(), TokenizeRequest).param == param


def test_echo_with_logprobs_is_refused() -> None:
    body = json.dumps({"model": "m", "prompt": "a", "echo": True, "logprobs": 1}).encode()
    assert refused(body, CompletionRequest).param == "echo"
    for fields, param in (({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix"), ({"logprobs": True}, "logprobs")):
        assert refused(json.dumps({"model": "m", "prompt": "a", **fields}).encode(), CompletionRequest).param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([1, 2**31], "prompt[1]"),
        ([[1], [2, "a"]], "prompt[1][1]"),
        ([[1], "a"], "prompt[1]"),
        (["a"] * 65, "prompt"),
        ([None], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([1] * 3 + [{}], "prompt[3]"),
    ],
)
def test_prompts_of_the_wrong_shape(prompt: list[object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        split_prompts(prompt)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_prompts_of_every_shape() -> None:
    assert split_prompts("a") == ["a"]
    assert split_prompts(["a", "b"]) == ["a", "b"]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts([[1], [2, 3]]) == [[1], [2, 3]]


@pytest.mark.parametrize("key", ["500", "x", "-1", "1.5", "", "٣", "9" * 30, " 1"])
def test_logit_bias_keys_are_token_ids_of_the_vocabulary(key: str) -> None:
    asked = decode(chat(logit_bias={key: 1}), ChatRequest, depth_max=DEPTH_MAX)
    with pytest.raises(ApiError) as caught:
        token_biases(asked, 500)
    assert (caught.value.status, caught.value.param) == (400, f"logit_bias.{key}")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_names = st.sampled_from(
    ["model", "messages", "prompt", "tokens", "n", "stop", "logit_bias", "stream", "tools", "echo"]
)


@given(
    fields=st.dictionaries(_names | st.text(max_size=8), _json, max_size=6),
    kind=st.sampled_from([ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]),
)
def test_whatever_comes_is_a_request_or_an_api_error(fields: dict[str, Json], kind: type) -> None:
    try:
        decode_any(json.dumps(fields).encode(), kind, depth_max=DEPTH_MAX)
    except ApiError as error:
        assert error.status == 400
        json.loads(error.body())


@given(st.binary(max_size=200))
def test_whatever_bytes_come(body: bytes) -> None:
    refused(body)
