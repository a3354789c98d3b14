"""
One token over and over: when it ends a sequence, when it is left alone, and that it is counted.
"""

import pytest

from engine.api import DEGENERATE, GenerateRequest, Sampling
from engine.config import SchedulerConfig
from engine.degenerate import REPEATS_MAX, REPEATS_OF_PROMPT_MAX
from engine.plan import SliceResult, StepPlan, StepResult
from engine.scheduler import Scheduler
from telemetry.records import RequestRecord

STUCK = 33
PROMPT = (5, 6, 7)
STOP = (2,)


def _play(request: GenerateRequest, *, differs_at: int = -1) -> tuple[list[int], str, RequestRecord]:
    """The tokens, the code of the fault and the record, where the device emits STUCK but for output `differs_at`."""
    scheduler = Scheduler(SchedulerConfig(blocks_max=64, context_max=1024, vocab_size=100))
    scheduler.apply(request, 0)
    tokens: list[int] = []
    now_ns, length = 0, request.resume
    while True:
        plan: StepPlan = scheduler.plan(now_ns)
        now_ns += 1
        answers = []
        for piece in plan.slices:
            token = 40 if length == differs_at else STUCK
            length += piece.sample is not None
            answers.append(SliceResult((token,) if piece.sample else ()))
        outcome = scheduler.commit(plan, StepResult(step_id=plan.step_id, slices=tuple(answers)), now_ns)
        scheduler.check()
        for delta in outcome.deltas:
            tokens += delta.tokens
            if delta.finish is not None:
                (record,) = outcome.finished
                return tokens, delta.finish.fault.code if delta.finish.fault else delta.finish.reason, record


def _request(**fields: object) -> GenerateRequest:
    known: dict[str, object] = {"prompt": PROMPT, "sampling": Sampling(temperature=0), "tokens_max": 400}
    return GenerateRequest(request_id="r", **({"stop_ids": STOP} | known | fields))  # type: ignore[arg-type]


def test_it_ends_with_its_tokens_an_error_and_a_count() -> None:
    tokens, code, record = _play(_request())
    assert tokens == [STUCK] * REPEATS_MAX
    assert code == DEGENERATE
    assert (record.outcome, record.degenerate, record.output_tokens) == ("failed", "repeated", REPEATS_MAX)


def test_a_token_of_the_prompt_may_have_been_asked_for() -> None:
    tokens, code, _ = _play(_request(prompt=(5, STUCK, 7)))
    assert (len(tokens), code) == (REPEATS_OF_PROMPT_MAX, DEGENERATE)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens_max": REPEATS_MAX},
        {"stop_ids": ()},
        {"sampling": Sampling(logit_bias={STUCK: 5.0})},
        {"tokens_min": 400},
        {"prompt": (5, STUCK), "tokens_max": REPEATS_OF_PROMPT_MAX},
    ],
    ids=["short", "nothing could end it", "biased", "made to go on", "asked for"],
)
def test_who_may_repeat(fields: dict[str, object]) -> None:
    request = _request(**fields)
    tokens, code, record = _play(request)
    assert (len(tokens), code, record.degenerate) == (request.tokens_max, "length", "")


@pytest.mark.parametrize("differs_at", [0, 1, REPEATS_MAX - 1])
def test_a_loop_after_something_else_is_the_model_s_style(differs_at: int) -> None:
    tokens, code, _ = _play(_request(), differs_at=differs_at)
    assert (len(tokens), code) == (400, "length")


@pytest.mark.parametrize("resume", [1, 10, REPEATS_MAX - 1])
def test_outputs_of_an_earlier_try_count(resume: int) -> None:
    tokens, code, _ = _play(_request(prompt=PROMPT + (STUCK,) * resume, resume=resume))
    assert (len(tokens), code) == (REPEATS_MAX - resume, DEGENERATE)
