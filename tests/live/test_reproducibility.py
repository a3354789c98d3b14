"""
DESIGN 5 on the default configuration, and with quantized weights and KV: the same request gives the same tokens,
whatever happens around it.

The scheduler and the device run here without sockets, so that the batch is exactly what the test says.
"""

import random
from pathlib import Path

import msgspec
import pytest

from engine.api import GenerateRequest, Sampling
from engine.config import EngineOptions, SchedulerConfig
from engine.device import Device
from engine.device.runner import Runner
from engine.scheduler import Scheduler
from engine.speculate import Speculation
from tests.torch.prophet import Prophet
from tests.torch.rounded import SCHEMES, write_rounded_file

SEED = 5
REQUESTS = 24
OUTPUT_TOKENS = 16
BLOCK_SLOTS = 16
LAYERS = 4  # of the model, but in the default configuration: each runs the same kernels on the same shapes


@pytest.fixture(
    scope="module", params=["default", "original numbers", "gptq-g64 with int8 KV", "gptq-g64 with fp8 KV, in torch"]
)
def device(request: pytest.FixtureRequest, default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    options = EngineOptions(model=str(default_model), model_name="m", listen="", kv_memory_bytes=1 << 29)
    if request.param == "original numbers":
        directory = tmp_path_factory.mktemp("original")
        write_rounded_file(default_model, directory, None, LAYERS)
        options = msgspec.structs.replace(options, model=str(directory), quantization="none")
    elif request.param != "default":
        weights, _, kv_dtype, *_ = request.param.split()
        directory = tmp_path_factory.mktemp(weights)
        write_rounded_file(default_model, directory, SCHEMES[weights], LAYERS)
        options = msgspec.structs.replace(options, model=str(directory), kv_dtype=kv_dtype)
    runner = Runner.load(options)
    assert runner.facts.reproducible
    return runner


def workload(prompt_tokens_max: int = 700) -> list[GenerateRequest]:
    """Greedy and seeded, prompts from one token on, some with a shared beginning, some with penalties and bias."""
    pick = random.Random(SEED)
    longest = prompt_tokens_max
    lengths = [1, 2, 15, 16, 17, longest, *(pick.randrange(1, longest) for _ in range(REQUESTS - 6))]
    shared = [pick.randrange(1000, 40_000) for _ in range(300)]
    samplings = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.9, seed=pick.randrange(1 << 60)),
        Sampling(temperature=1.0, top_p=0.9, seed=pick.randrange(1 << 60)),
        Sampling(temperature=1.2, top_k=40, min_p=0.02, seed=pick.randrange(1 << 60)),
        Sampling(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=9),
        Sampling(temperature=0.0, logit_bias={50: 4.0, 198: -100.0}, logprobs=2),
    ]
    requests = []
    for index, length in enumerate(lengths):
        own = [pick.randrange(1000, 40_000) for _ in range(length)]
        prompt = (shared[: length - 1] + own[-1:]) if index % 3 == 0 else own
        requests.append(
            GenerateRequest(
                request_id=f"r{index}",
                prompt=tuple(prompt[:length] or own),
                sampling=samplings[index % len(samplings)],
                tokens_max=OUTPUT_TOKENS,
            )
        )
    return requests


class World:
    """A scheduler over the device; `play` runs requests to their end."""

    def __init__(
        self,
        device: Device,
        *,
        blocks_max: int | None = None,
        tokens_step_max: int = 512,
        speculation: Speculation | None = None,
    ) -> None:
        facts = device.facts
        config = SchedulerConfig(
            blocks_max=blocks_max or facts.blocks_max,
            block_slots=facts.block_slots,
            context_max=facts.context_max,
            tokens_step_max=tokens_step_max,
            vocab_size=facts.vocab_size,
        )
        self.device = device
        self.scheduler = Scheduler(config, speculation=speculation)
        self.now_ns = 0
        self.preemptions = 0
        self.cached_tokens = 0

    def play(self, requests: list[GenerateRequest]) -> dict[str, tuple[int, ...]]:
        """Tokens by request id."""
        tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
        for request in requests:
            self.scheduler.apply(request, self.now_ns)
        while self.scheduler.has_work:
            plan = self.scheduler.plan(self.now_ns)
            self.now_ns += 1
            outcome = self.scheduler.commit(plan, self.device.run(plan), self.now_ns)
            self.preemptions += outcome.preemptions
            self.cached_tokens += outcome.cached_tokens
            for delta in outcome.deltas:
                assert delta.finish is None or delta.finish.reason == "length", delta
                tokens[delta.request_id] += delta.tokens
        return tokens


@pytest.fixture(scope="module")
def requests(device: Runner) -> list[GenerateRequest]:
    """All on native kernels; fewer and shorter ones in torch."""
    return workload() if "native" in device.facts.details["kernels"] else workload(prompt_tokens_max=120)[:12]


@pytest.fixture(scope="module")
def alone(device: Runner, requests: list[GenerateRequest]) -> dict[str, tuple[int, ...]]:
    """Each request by itself, nothing cached."""
    tokens: dict[str, tuple[int, ...]] = {}
    for request in requests:
        tokens |= World(device).play([request])
    assert len(set(tokens.values())) > len(requests) // 2, "the requests are too much alike to show anything"
    return tokens


def test_all_at_once_then_with_a_warm_cache(
    device: Runner, requests: list[GenerateRequest], alone: dict[str, tuple[int, ...]]
) -> None:
    world = World(device)
    assert world.play(requests) == alone
    before = world.cached_tokens
    assert world.play(requests) == alone
    assert world.cached_tokens - before > sum(len(request.prompt) for request in requests) // 2


@pytest.mark.parametrize(("order", "tokens_step_max"), [(1, 512), (2, 64), (3, 17)])
def test_in_any_order_and_in_any_chunks(
    device: Runner,
    requests: list[GenerateRequest],
    alone: dict[str, tuple[int, ...]],
    order: int,
    tokens_step_max: int,
) -> None:
    shuffled = random.Random(order).sample(requests, len(requests))
    assert World(device, tokens_step_max=tokens_step_max).play(shuffled) == alone


def test_with_drafts_right_and_wrong(
    device: Runner, requests: list[GenerateRequest], alone: dict[str, tuple[int, ...]]
) -> None:
    future = {name: list(tokens) for name, tokens in alone.items()}
    prophet = Prophet(future, seed=3)
    assert World(device, speculation=prophet).play(requests) == alone
    assert 0 < prophet.accepted < prophet.drafted


def test_preempted_again_and_again(
    device: Runner, requests: list[GenerateRequest], alone: dict[str, tuple[int, ...]]
) -> None:
    longest = max(len(request.prompt) for request in requests) + OUTPUT_TOKENS
    preemptions = 0
    for spare in (3, 12):
        world = World(device, blocks_max=-(-longest // BLOCK_SLOTS) + spare, tokens_step_max=128)
        assert world.play(requests) == alone
        preemptions += world.preemptions
    assert preemptions > 0


def test_resumed_after_the_death_of_the_engine(
    device: Runner, requests: list[GenerateRequest], alone: dict[str, tuple[int, ...]]
) -> None:
    for request in requests[::5]:
        emitted = alone[request.request_id]
        for count in (1, OUTPUT_TOKENS // 2, OUTPUT_TOKENS - 1):
            again = GenerateRequest(
                request_id=request.request_id,
                prompt=request.prompt + emitted[:count],
                sampling=request.sampling,
                tokens_max=OUTPUT_TOKENS,
                resume=count,
            )
            assert World(device).play([again])[request.request_id] == emitted[count:]
