"""
A client cannot tell whether tokens came one by one or several in a step: text, logprobs, stop strings and the bill.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.http.asking import Body, chat, contents, post, prompt, stream
from tests.http.conftest import options_for
from tests.http.harness import LiveGateway, ShellEngine
from tests.sim.guesses import Guesser

GREEDY: Body = {"temperature": 0, "max_tokens": 60}
BODIES: dict[str, Body] = {
    "greedy": chat(**GREEDY),
    "seeded": chat(seed=3, temperature=1, max_tokens=60),
    "choices": chat(seed=4, n=3, max_tokens=40),
    "logprobs": chat(seed=5, logprobs=True, top_logprobs=2, max_tokens=30),
    "end": chat(seed=6, max_tokens=400),
    "at least": chat(seed=7, max_tokens=200, min_tokens=50),
}


@pytest.fixture(scope="module")
def guessing(model_dir: Path, vocab_size: int) -> Iterator[LiveGateway]:
    """A gateway in front of the real shell, whose core guesses, mostly right."""
    with TemporaryDirectory(prefix="pellucid") as directory:
        path = f"{directory}/engine.sock"
        guesser = Guesser(1, drafts_max=9, vocab_size=vocab_size)
        engine = ShellEngine(path, vocab_size=vocab_size, speculation=guesser)
        engine.start()
        gateway = LiveGateway(options_for(model_dir, path))
        gateway.start()
        yield gateway
        gateway.stop()
        engine.stop()


def without_time(answer: Body) -> Body:
    """What has to be the same; how much of the prompt was cached depends on what came before."""
    usage = {name: value for name, value in answer["usage"].items() if name != "prompt_tokens_details"}
    return {"choices": answer["choices"], "usage": usage}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_answers_are_the_same(shell: LiveGateway, guessing: LiveGateway, body: Body) -> None:
    assert without_time(post(guessing, body)) == without_time(post(shell, body))
    chunks, _ = stream(guessing, body)
    expected = post(shell, body)["choices"]
    assert contents(chunks, len(expected)) == [choice["message"]["content"] for choice in expected]


def test_a_stop_string_inside_a_bite_cuts_text_and_bill_alike(shell: LiveGateway, guessing: LiveGateway) -> None:
    whole = post(shell, prompt(**GREEDY), "/v1/completions")["choices"][0]["text"]
    for start in range(5, len(whole) - 5, 7):
        stop = whole[start : start + 3]
        body = prompt(**GREEDY, stop=[stop], logprobs=1)
        assert without_time(post(guessing, body, "/v1/completions")) == without_time(
            post(shell, body, "/v1/completions")
        )


def test_the_record_says_how_many_guesses_were_right(guessing: LiveGateway) -> None:
    answer = guessing.client.post("/v1/chat/completions", json=chat(**GREEDY))
    record = guessing.record(answer.headers["x-request-id"])
    assert 0 < record.draft_accepted_tokens < record.output_tokens
    assert record.drafted_tokens == record.draft_accepted_tokens + record.draft_rejected_tokens
    shown = guessing.client.get(f"/debug/requests/{record.request_id}").json()
    assert shown["drafted_tokens"] == record.drafted_tokens
    text = guessing.client.get("/metrics").text
    assert 'pellucid_engine_draft_tokens_total{replica="0",verdict="accepted"}' in text
    assert "pellucid_engine_draft_rejected_seconds_total" in text
