"""
A draft model beside a real one: the same output, whoever guesses; refusals; two models in one process.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.api import Delta, GenerateRequest, Sampling
from engine.config import EngineOptions, SchedulerConfig
from engine.device import runner
from engine.device.drafting import DraftModel
from engine.device.errors import MemoryShort, ModelError
from engine.device.form import choose_form
from engine.device.pair import load_pair
from engine.device.runner import Runner, needed_bytes
from engine.draft_model import ModelSpeculator
from engine.scheduler import Scheduler
from quant.formats.checkpoint import open_checkpoint
from tests.core.test_draft_model import Always
from tests.torch.test_speculation import _requests
from tests.torch.tiny import write_model

VOCAB = 259


def options(model: Path, draft: Path | str, **changes: object) -> EngineOptions:
    """Both models, small."""
    given: dict[str, object] = {"dtype": "float32", "quantization": "none", "threads": 1, "tokens_step_max": 64}
    given |= {"kv_memory_bytes": 8 << 20, "drafts_max": 7, "draft_model": str(draft)} | changes
    return msgspec.convert(
        {"model": str(model), "model_name": "tiny", "listen": "unix:/nowhere"} | given, EngineOptions
    )


def hear(
    device: Runner, drafter: DraftModel | None, requests: list[GenerateRequest], policy: Always, blocks_max: int = 0
) -> tuple[dict[str, Delta], int]:
    """Everything that each client hears, as one delta, and how often somebody was preempted."""
    config = SchedulerConfig(
        blocks_max=blocks_max or device.facts.blocks_max,
        block_slots=device.facts.block_slots,
        context_max=device.facts.context_max,
        vocab_size=VOCAB,
        drafts_max=7,
        draft_blocks_max=drafter.facts.blocks_max if drafter else 0,
        draft_context_max=drafter.facts.context_max if drafter else 0,
    )
    scheduler = Scheduler(config, speculation=ModelSpeculator(config, policy) if drafter else None)
    if not drafter:
        scheduler = Scheduler(msgspec.structs.replace(config, drafts_max=0))
    heard: dict[str, Delta] = {}
    now_ns, preemptions = 1, 0
    for request in requests:
        scheduler.apply(request, now_ns)
    while scheduler.has_work or scheduler.has_news:
        wishes = scheduler.wishes()
        if wishes.slices and drafter:
            scheduler.drafted(wishes, drafter.draft(wishes))
        plan = scheduler.plan(now_ns)
        now_ns += 1_000_000
        outcome = scheduler.commit(plan, device.run(plan), now_ns)
        preemptions += outcome.preemptions
        for delta in outcome.deltas:
            before = heard.get(delta.request_id)
            heard[delta.request_id] = before.merge(delta) if before else delta
        scheduler.check()
    return heard, preemptions


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one, with the same tokens."""
    return write_model(tmp_path_factory.mktemp("draft") / "m", seed=9, num_hidden_layers=1, max_position_embeddings=512)


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "auto")])
def test_the_same_model_is_always_right_about_greedy_requests(tiny_model: Path, dtype: str, quantization: str) -> None:
    device, drafter = load_pair(options(tiny_model, tiny_model, dtype=dtype, quantization=quantization))
    asked = [
        GenerateRequest(request_id=f"g{i}", prompt=(3 + i, 40, 7 * i), sampling=Sampling(temperature=0), tokens_max=30)
        for i in range(3)
    ]
    policy = Always(5)
    assert hear(device, drafter, asked, policy)[0] == hear(device, None, asked, policy)[0]
    assert policy.right > 50
    if device.facts.reproducible:
        assert policy.wrong == 0


@pytest.mark.parametrize("blocks_max", [0, 12])
@pytest.mark.parametrize("same", [True, False])
def test_nobody_hears_a_difference(tiny_model: Path, draft_model: Path, same: bool, blocks_max: int) -> None:
    """Penalties, seeds, bans, stop ids, logprobs to the last bit; with little KV also preemptions."""
    device, drafter = load_pair(options(tiny_model, tiny_model if same else draft_model))
    requests, policy = _requests(1), Always(4)
    plain, _ = hear(device, None, requests, policy, blocks_max)
    heard, preemptions = hear(device, drafter, requests, policy, blocks_max)
    assert heard == plain
    assert (preemptions > 0) == (blocks_max > 0)
    assert policy.passes > 10 and policy.wrong > (2 if blocks_max else 50)
    assert policy.right > (5 if blocks_max else 50) or not same


def test_poison_in_the_draft_model_is_nobody_s_fault(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = write_model(tmp_path / "broken", seed=9)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    device, drafter = load_pair(options(tiny_model, broken))
    requests, policy = _requests(2)[:4], Always(4)
    assert hear(device, drafter, requests, policy)[0] == hear(device, None, requests, policy)[0]
    assert policy.right == policy.wrong == 0 < policy.passes


def refused(model: Path, draft: Path | str, **changes: object) -> str:
    with pytest.raises(ModelError) as error:
        load_pair(options(model, draft, **changes))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: write_model(path, vocab_size=300), ("300 tokens", "259", "--draft-model")),
        (lambda path: write_model(path, eos_token_id=5), ("end with token 5", "with 2", "--draft-model")),
        (lambda path: path, ("other",)),
    ],
    ids=["vocabulary", "end", "nothing"],
)
def test_what_cannot_draft_is_refused(
    tiny_model: Path, tmp_path: Path, write: Callable[[Path], Path], words: tuple[str, ...]
) -> None:
    message = refused(tiny_model, write(tmp_path / "other"))
    assert message.startswith("the draft model: ")
    assert all(word in message for word in words)


def test_an_end_in_common_is_enough(tiny_model: Path, tmp_path: Path) -> None:
    _, drafter = load_pair(options(tiny_model, write_model(tmp_path / "other", eos_token_id=[5, 2])))
    assert drafter is not None


def test_the_context_is_the_smaller_one_and_the_memory_is_shared(tiny_model: Path, draft_model: Path) -> None:
    device, drafter = load_pair(options(tiny_model, draft_model))
    alone, nobody = load_pair(options(tiny_model, ""))
    assert drafter is not None and nobody is None
    assert (device.facts.context_max, drafter.facts.context_max) == (2048, 512)
    assert device.facts.blocks_max == alone.facts.blocks_max * 7 // 8
    assert device.facts.fingerprint == alone.facts.fingerprint


def test_both_models_are_counted_before_either_is_loaded(
    tiny_model: Path, draft_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options(tiny_model, draft_model)
    device, drafter = load_pair(asked)
    assert drafter is not None
    needed = [
        needed_bytes(choose_form(open_checkpoint(model), asked), facts.blocks_max, asked)
        for model, facts in ((tiny_model, device.facts), (draft_model, drafter.facts))
    ]
    monkeypatch.setattr(runner, "_load_native", None)  # nobody comes so far
    monkeypatch.setattr(runner, "memory_bytes", lambda: sum(needed) - 1)
    with pytest.raises(MemoryShort, match="GiB are free"):
        load_pair(asked)
    monkeypatch.setattr(runner, "memory_bytes", lambda: sum(needed))
    with pytest.raises(TypeError):
        load_pair(asked)
