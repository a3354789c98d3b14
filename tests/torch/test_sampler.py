"""
The sampler against plain numpy in float64, and each row's independence of the others.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.api import Sampling
from engine.device.compute import from_logits
from engine.device.native.library import instruction_sets
from engine.device.native.sampling import NativeDraw
from engine.device.sampler import Draw, choose, logits_wanted
from engine.plan import SampleSpec, SliceResult
from tests.torch.kernels import native

VOCAB = 600  # more than the head that is sorted first
Logits = np.ndarray[tuple[int], np.dtype[np.float32]]
Real = np.ndarray[tuple[int], np.dtype[np.float64]]


@pytest.fixture(params=["torch", *instruction_sets()], autouse=True)
def draw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of drawing at random: in torch, and natively for each instruction set that this processor has."""
    if request.param != "torch":
        monkeypatch.setitem(DRAWING, "by", NativeDraw(native(request.param), 2))


DRAWING: dict[str, Draw | None] = {"by": None}


def _sample(rows: Sequence[Logits], specs: Sequence[SampleSpec]) -> list[SliceResult]:
    logits = torch.tensor(np.stack(rows[: len(specs)]))
    with torch.inference_mode():
        return choose(from_logits(logits, [logits_wanted(spec) for spec in specs]), specs, DRAWING["by"])


def _adjusted(logits: Logits, spec: SampleSpec) -> Real:
    """What logprobs are made of; float32 steps, as the sampler promises for the adjustments only."""
    row, s = logits.copy(), spec.sampling
    for token in set(spec.prompt + spec.outputs):
        penalty = np.float32(s.repetition_penalty)
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(spec.outputs):
        row[token] -= np.float32(s.presence_penalty + s.frequency_penalty * spec.outputs.count(token))
    for token, bias in s.logit_bias.items():
        row[token] += np.float32(bias)
    for token in spec.banned:
        row[token] = -np.inf
    return row.astype(np.float64)


def _oracle(logits: Logits, spec: SampleSpec) -> tuple[int, float]:
    """The token, and how far `uniform` is from a boundary: too close is no fair question."""
    row, s = _adjusted(logits, spec), spec.sampling
    if s.temperature == 0:
        return int(np.argmax(row)), 1.0
    weights = np.exp((row - row.max()) / s.temperature)
    weights = weights / weights.sum()
    order = np.lexsort((np.arange(len(row)), -row))
    kept = order[: s.top_k] if s.top_k else order
    sums = np.cumsum(weights[kept])
    slack = 1.0
    if s.top_p < 1:
        slack = float(np.abs(sums - s.top_p * sums[-1]).min())
        kept = kept[: int(np.searchsorted(sums, s.top_p * sums[-1])) + 1]
    kept = kept[weights[kept] >= s.min_p * weights.max()]
    if not s.top_k and s.top_p >= 1:
        kept = np.sort(kept)  # nothing to rank: along the vocabulary
    cdf = np.cumsum(weights[kept]) / weights[kept].sum()
    slack = min(slack, float(np.abs(cdf - spec.uniforms[0]).min()))
    return int(kept[np.searchsorted(cdf, spec.uniforms[0], side="right")]), slack


def _random_spec(generator: np.random.Generator) -> SampleSpec:
    def choose(*values: float) -> float:
        return float(generator.choice(values))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in generator.integers(0, VOCAB, count))

    sampling = Sampling(
        temperature=choose(0, 0.3, 1.0, 2.5),
        top_p=choose(1, 1, 0.2, 0.9, 0.999),
        top_k=int(choose(0, 0, 1, 5, 50, VOCAB, VOCAB * 2)),
        min_p=choose(0, 0, 0.1, 1.0),
        repetition_penalty=choose(1, 1, 0.7, 1.3),
        presence_penalty=choose(0, 0.5, -1.0),
        frequency_penalty=choose(0, 0.4, -0.5),
        logit_bias={token: choose(-100, 3, 100) for token in ids(3)} if generator.random() < 0.3 else {},
        logprobs=int(choose(0, 3, 20)) if generator.random() < 0.3 else None,
    )
    return SampleSpec(
        sampling=sampling,
        uniforms=(float(generator.random()),),
        banned=ids(3) if generator.random() < 0.3 else (),
        prompt=ids(20),
        outputs=ids(10) + ids(1) * 3,
    )


def _random_logits(generator: np.random.Generator) -> Logits:
    """Flat, peaked or full of ties, as bfloat16 logits are."""
    row: Logits = generator.normal(0, generator.choice([0.1, 1, 4]), VOCAB).astype(np.float32)
    if generator.random() < 0.5:
        row = (np.round(row * 4) / 4).astype(np.float32)
    return row


@pytest.mark.parametrize("seed", range(12))
def test_equals_numpy(seed: int) -> None:
    generator = np.random.default_rng(seed)
    specs = [_random_spec(generator) for _ in range(24)]
    rows = [_random_logits(generator) for _ in specs]
    checked = 0
    for row, spec, result in zip(rows, specs, _sample(rows, specs), strict=True):
        expected, slack = _oracle(row, spec)
        if slack > 1e-9:
            assert result.emitted == (expected,), spec
            checked += 1
        _check_logprobs(_adjusted(row, spec), spec, result)
    assert checked >= 20


def _check_logprobs(row: Real, spec: SampleSpec, result: SliceResult) -> None:
    if spec.sampling.logprobs is None:
        assert result.logprobs == ()
        return
    logs = row - row.max() - math.log(np.exp(row - row.max()).sum())
    (found,) = result.logprobs
    assert found.logprob == pytest.approx(logs[result.emitted[0]], abs=1e-6)
    order = np.lexsort((np.arange(VOCAB), -row))[: spec.sampling.logprobs]
    assert [token for token, _ in found.top] == order.tolist()
    assert [value for _, value in found.top] == pytest.approx(logs[order].tolist(), abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_a_row_does_not_know_its_neighbours(seed: int) -> None:
    generator = np.random.default_rng(100 + seed)
    specs = [_random_spec(generator) for _ in range(17)]
    rows = [_random_logits(generator) for _ in specs]
    together = _sample(rows, specs)
    order = generator.permutation(17)
    shuffled = _sample([rows[i] for i in order], [specs[i] for i in order])
    for place, i in enumerate(order):
        assert shuffled[place] == together[i]
        assert _sample([rows[i]], [specs[i]]) == [together[i]]  # equal floats: bit by bit
        assert _sample([rows[i], rows[0]], [specs[i]]) == [together[i]]  # a row that only pads


def test_ties_go_to_the_lowest_id() -> None:
    flat = np.zeros(49152, np.float32)
    peaks = flat.copy()
    flat[49000] = -1  # if all were equal, the model would be broken
    peaks[[40000, 7, 300]] = 5
    greedy = SampleSpec(sampling=Sampling(temperature=0, logprobs=4), uniforms=(0.9,))
    first, second = _sample([flat, peaks], [greedy, greedy])
    assert (first.emitted, second.emitted) == ((0,), (7,))
    assert [token for token, _ in first.logprobs[0].top] == [0, 1, 2, 3]
    assert [token for token, _ in second.logprobs[0].top] == [7, 300, 40000, 0]
    ranked = SampleSpec(sampling=Sampling(top_k=2), uniforms=(0.999,))
    assert [result.emitted for result in _sample([flat, peaks], [ranked, ranked])] == [(1,), (300,)]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_distribution(uniform: float) -> None:
    """The first and the last token that have any weight; never one that has none."""
    row = np.full(VOCAB, -np.inf, np.float32)
    row[[3, 9, 500]] = [1.0, 2.0, 1.5]
    for sampling in (Sampling(), Sampling(top_p=0.999999), Sampling(top_k=5), Sampling(min_p=0.01)):
        (result,) = _sample([row], [SampleSpec(sampling=sampling, uniforms=(uniform,))])
        ranked = sampling.top_k or sampling.top_p < 1
        assert result.emitted == ((9 if uniform == 0 else 3) if ranked else (3 if uniform == 0 else 500),)


@pytest.mark.parametrize("poison", ["nan", "inf", "nothing", "bias", "all_banned"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_fails_alone(poison: str, temperature: float) -> None:
    generator = np.random.default_rng(7)
    rows = [_random_logits(generator) for _ in range(3)]
    bias: dict[int, float] = {}
    banned: tuple[int, ...] = ()
    match poison:
        case "nan":
            rows[1][17] = np.nan
        case "inf":
            rows[1][17] = np.inf
        case "nothing":
            rows[1][:] = -np.inf
        case "bias":
            bias = {VOCAB: 1.0}
        case "all_banned":
            banned = tuple(range(VOCAB))
    good = SampleSpec(sampling=Sampling(temperature=temperature, logprobs=2), uniforms=(0.4,))
    bad = SampleSpec(
        sampling=Sampling(temperature=temperature, logprobs=2, logit_bias=bias), uniforms=(0.4,), banned=banned
    )
    first, second, third = _sample(rows, [good, bad, good])
    assert second.fault and not second.emitted and not second.logprobs
    assert second.degenerate == ("not_a_number" if poison in ("nan", "inf", "nothing") else "")
    assert [first, third] == _sample([rows[0], rows[2]], [good, good])


def test_a_row_that_finds_all_tokens_alike_is_a_broken_model_s() -> None:
    """Whatever the client banned or preferred; a hair's breadth between two tokens is enough to be one."""
    flat = np.full(VOCAB, 0.25, np.float32)
    almost = flat.copy()
    almost[5] += 1e-6
    spec = SampleSpec(sampling=Sampling(logit_bias={3: 2.0}, repetition_penalty=2.0), uniforms=(0.5,), banned=(1,))
    first, second = _sample([flat, almost], [spec, spec])
    assert (first.degenerate, first.emitted) == ("flat", ()) and "equally likely" in first.fault
    assert second.emitted and not second.degenerate


def test_banned_tokens_are_never_drawn() -> None:
    row = np.zeros(50, np.float32)
    row[:10] = 20
    for uniform in np.linspace(0, 0.9999, 40):
        for sampling in (Sampling(), Sampling(top_k=20), Sampling(top_p=0.99), Sampling(temperature=0)):
            spec = SampleSpec(sampling=sampling, uniforms=(float(uniform),), banned=tuple(range(1, 10)))
            (result,) = _sample([row], [spec])
            assert result.emitted[0] not in range(1, 10)


def test_tiny_temperature_is_greedy() -> None:
    row = _random_logits(np.random.default_rng(3))
    spec = SampleSpec(sampling=Sampling(temperature=1e-300), uniforms=(0.99,))
    assert _sample([row], [spec])[0].emitted == (int(np.argmax(row)),)
