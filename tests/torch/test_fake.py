"""
The fake device: an oracle for the scheduler only if wrong tables give wrong tokens.
"""

import pytest

from engine.api import Sampling
from engine.device.fake import FakeRunner, next_token
from engine.plan import SampleSpec, Slice, SliceResult, StepPlan

GREEDY = SampleSpec(sampling=Sampling(temperature=0, logprobs=3), uniforms=(0.5,))
TOKENS = tuple(range(5, 45))


def _run(fake: FakeRunner, *pieces: Slice) -> tuple[SliceResult, ...]:
    return fake.run(StepPlan(step_id=1, slices=pieces)).slices


def _piece(start: int, end: int, blocks: tuple[int, ...], spec: SampleSpec = GREEDY, sequence: int = 1) -> Slice:
    return Slice(sequence=sequence, start=start, tokens=TOKENS[start:end], blocks=blocks, sample=spec)


def test_chunks_company_and_tables_do_not_matter() -> None:
    fake = FakeRunner(blocks_max=16)
    expected = next_token(TOKENS, GREEDY, vocab_size=49152)
    assert _run(fake, _piece(0, 40, (0, 1, 2)))[0].emitted == (expected,)
    _run(fake, _piece(0, 17, (9, 3, 7)))
    _run(fake, _piece(17, 39, (9, 3, 7)), _piece(0, 5, (12,), sequence=2))
    result = _run(fake, _piece(0, 5, (13,), sequence=2), _piece(39, 40, (9, 3, 7)))[1]
    assert result.emitted == (expected,)
    assert len(result.logprobs[0].top) == 3


@pytest.mark.parametrize("blocks", [(3, 9, 7), (9, 3, 8), (9, 9, 7)])
def test_a_wrong_table_gives_a_wrong_token(blocks: tuple[int, ...]) -> None:
    fake = FakeRunner(blocks_max=16)
    _run(fake, _piece(0, 39, (9, 3, 7)))
    assert _run(fake, _piece(39, 40, blocks))[0].emitted != (next_token(TOKENS, GREEDY, vocab_size=49152),)


def test_a_block_overwritten_by_another_is_noticed() -> None:
    fake = FakeRunner(blocks_max=16)
    _run(fake, _piece(0, 39, (0, 1, 2)))
    _run(fake, Slice(sequence=2, start=0, tokens=(8, 8), blocks=(1,)))
    assert _run(fake, _piece(39, 40, (0, 1, 2)))[0].emitted != (next_token(TOKENS, GREEDY, vocab_size=49152),)


def test_reset_forgets() -> None:
    fake = FakeRunner(blocks_max=16)
    _run(fake, _piece(0, 39, (0, 1, 2)))
    fake.reset()
    assert _run(fake, _piece(39, 40, (0, 1, 2)))[0].emitted != (next_token(TOKENS, GREEDY, vocab_size=49152),)


def test_banned_and_uniform() -> None:
    fake = FakeRunner(vocab_size=4)
    for banned in ((0, 1, 2), (1, 2, 3), (3, 0)):
        spec = SampleSpec(sampling=Sampling(temperature=0), uniforms=(0.1,), banned=banned)
        (result,) = _run(fake, Slice(sequence=1, start=0, tokens=(1, 2, 3), blocks=(0,), sample=spec))
        assert result.emitted[0] not in banned
    wide = FakeRunner()
    drawn = {
        _run(wide, _piece(0, 9, (0,), SampleSpec(sampling=Sampling(), uniforms=(uniform / 10,))))[0].emitted
        for uniform in range(10)
    }
    assert len(drawn) == 10


def test_delays_and_faults() -> None:
    slept: list[float] = []
    fake = FakeRunner(
        step_delay_s=1.0,
        token_delay_s=0.5,
        sleep=slept.append,
        fault_of=lambda _plan, piece: "broken" if piece.sequence == 2 else "",
    )
    good, bad = _run(fake, _piece(0, 3, (0,)), _piece(0, 1, (1,), sequence=2))
    assert slept == [3.0]
    assert bad == SliceResult(fault="broken") and good.emitted


def test_broken_plans_are_our_bugs() -> None:
    fake = FakeRunner(blocks_max=4)
    for piece in (_piece(0, 20, (0,)), _piece(0, 1, (4,)), _piece(0, 0, (0,)), _piece(0, 20, (1, 1))):
        with pytest.raises(AssertionError):
            _run(fake, piece)
