"""
Asking a live gateway, and checking what holds for every answer.
"""

import json
import socket
from typing import Any

import openai

from telemetry.books import request_mismatches
from telemetry.records import RequestRecord
from tests.http.fake_engine import FakeEngine
from tests.http.harness import LiveGateway

Pair = tuple[LiveGateway, FakeEngine]
Body = dict[str, Any]
CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"


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
    check_bill(record, value["usage"])
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
    record = gateway.record(headers["x-request-id"])
    assert record.stream
    for usage in (chunk["usage"] for chunk in chunks if chunk.get("usage")):
        check_bill(record, usage)
    return chunks, transcript


def check_bill(record: RequestRecord, usage: Body) -> None:
    """The record says what the client was billed, and its books close."""
    assert record.prompt_tokens == usage["prompt_tokens"]
    assert record.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]
    assert record.output_tokens == usage["completion_tokens"]
    assert list(request_mismatches(record)) == []


CLIENTS: list[openai.OpenAI] = []
"""Of the running test, which the fixture `closed` closes."""


def sdk(gateway: LiveGateway, key: str = "unused") -> openai.OpenAI:
    """The official client, which asks once."""
    CLIENTS.append(openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0))
    return CLIENTS[-1]


def contents(chunks: list[Body], choices: int = 1) -> list[str]:
    """Text by choice."""
    texts = [""] * choices
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return texts


def raw_request(body: dict[str, Any], request_id: str, path: str = CHAT_URL) -> bytes:
    """The bytes of a POST."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-request-id: {request_id}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def read_until(raw: socket.socket, wanted: bytes) -> bytes:
    """What comes up to, and with, `wanted`."""
    data = b""
    while wanted not in data:
        more = raw.recv(65536)
        assert more, data
        data += more
    return data
