"""
Speculation on equals speculation off, bit by bit: real logits, mixed requests in one batch, drafts right and wrong.
"""

import random
from collections.abc import Sequence as Many
from pathlib import Path

import pytest

from engine.api import Delta, GenerateRequest, Sampling
from engine.config import SchedulerConfig
from engine.device.runner import Runner
from engine.plan import SampleSpec, Slice
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.speculate import Speculation, Speculator
from tests.torch.prophet import Prophet
from tests.torch.tiny import GREEDY, load, run, write_model

VOCAB = 259
TOKENS_MAX = 24


def _requests(seed: int) -> list[GenerateRequest]:
    """Every sampling parameter, alone and together."""
    dice = random.Random(seed)
    samplings = [
        Sampling(temperature=0),
        Sampling(temperature=0, logprobs=3),
        Sampling(temperature=0.7, seed=5, logprobs=0),
        Sampling(temperature=1.0, seed=6, top_k=20, top_p=0.9),
        Sampling(temperature=0.9, seed=7, min_p=0.05, repetition_penalty=1.3),
        Sampling(temperature=0, presence_penalty=1.5, frequency_penalty=0.7, logprobs=2),
        Sampling(temperature=0, repetition_penalty=1.2, logit_bias={3: 4.0, 8: -50.0}),
        Sampling(temperature=1.2, seed=8, frequency_penalty=1.0, logit_bias={11: 2.0}, logprobs=5),
    ]
    return [
        GenerateRequest(
            request_id=f"r{number}",
            prompt=tuple(dice.randrange(VOCAB) for _ in range(dice.choice((3, 15, 16, 40)))),
            sampling=sampling,
            tokens_max=TOKENS_MAX,
            tokens_min=dice.choice((0, 6, 12)),
            stop_ids=tuple(dice.randrange(VOCAB) for _ in range(dice.choice((0, 2, 25)))),
        )
        for number, sampling in enumerate(samplings * 2)
    ]


def _play(runner: Runner, requests: Many[GenerateRequest], speculation: Speculation | None) -> dict[str, Delta]:
    """Everything that each client hears, as one delta."""
    facts = runner.facts
    config = SchedulerConfig(
        blocks_max=facts.blocks_max, block_slots=facts.block_slots, context_max=facts.context_max, vocab_size=VOCAB
    )
    scheduler = Scheduler(config, speculation=speculation)
    heard: dict[str, Delta] = {}
    now_ns = 1
    for request in requests:
        scheduler.apply(request, now_ns)
    while scheduler.has_work or scheduler.has_news:
        plan = scheduler.plan(now_ns)
        now_ns += 5_000_000
        for delta in scheduler.commit(plan, runner.run(plan), now_ns).deltas:
            before = heard.get(delta.request_id)
            heard[delta.request_id] = before.merge(delta) if before else delta
        scheduler.check()
    return heard


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, tiny_model: Path) -> Runner:
    return load(tiny_model, dtype=request.param)


@pytest.mark.parametrize("seed", range(3))
def test_nobody_hears_a_difference(runner: Runner, seed: int) -> None:
    """Tokens, logprobs to the last bit, ends and their reasons."""
    requests = _requests(seed)
    plain = _play(runner, requests, None)
    reasons = {heard.finish.reason for heard in plain.values() if heard.finish}
    assert reasons == {"stop", "length"}
    prophet = Prophet({name: list(heard.tokens) for name, heard in plain.items()}, seed)
    assert _play(runner, requests, prophet) == plain
    assert prophet.accepted > 50 and prophet.drafted - prophet.accepted > 50


def test_nobody_hears_a_difference_when_it_is_the_engine_that_guesses(tiny_model: Path) -> None:
    """Output of three words only repeats itself sooner or later: the engine finds that out."""
    runner = load(tiny_model)
    requests = [
        GenerateRequest(
            request_id=f"r{number}",
            prompt=tuple(random.Random(number).choices(range(VOCAB), k=20)),
            sampling=Sampling(temperature=0, logit_bias={5: 90.0, 9: 90.0, 11: 90.0}),
            tokens_max=300,
        )
        for number in range(4)
    ]
    plain = _play(runner, requests, None)
    speculator = Speculator(7)
    drafted: list[int] = []
    wish = speculator.wish

    def counted(asking: Many[Sequence], budget: int) -> dict[int, tuple[int, ...]]:
        wishes = wish(asking, budget)
        drafted.extend(map(len, wishes.values()))
        return wishes

    speculator.wish = counted  # type: ignore[method-assign]  # looked at, not changed
    assert _play(runner, requests, speculator) == plain
    assert sum(drafted) > 50


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_that_is_poison_hurts_nobody(tmp_path: Path, dtype: str) -> None:
    """Token 7 carries an infinity.  Guessed, it spoils no other row; said, it is the sequence's fault, as ever."""
    from safetensors.torch import load_file, save_file

    directory = write_model(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("inf")
    save_file(tensors, directory / "model.safetensors")
    runner = load(directory, dtype=dtype)
    good = Slice(sequence=1, start=0, tokens=(1, 2), blocks=(0,), sample=GREEDY)
    other = Slice(sequence=2, start=0, tokens=(5, 9), blocks=(1,), sample=GREEDY)
    expected = run(runner, good, other)
    runner.reset()
    (first,) = expected[0].emitted
    for drafts in ((7,), (first, 7), (7, 7, 3), (3, 7)):
        spec = SampleSpec(sampling=Sampling(temperature=0), uniforms=(0.0,) * (len(drafts) + 1))
        guessed = Slice(sequence=1, start=0, tokens=(1, 2, *drafts), blocks=(0,), sample=spec, drafts=len(drafts))
        found = run(runner, guessed, other)
        assert found[0].emitted[:1] == expected[0].emitted and found[1] == expected[1], drafts
        after = Slice(sequence=1, start=2, tokens=(first,), blocks=(0,), sample=GREEDY)
        again = run(runner, after)
        runner.reset()
        run(runner, good)
        assert again == run(runner, after), drafts
        runner.reset()
