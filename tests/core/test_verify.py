"""
Drafts against what the model says, on paper.
"""

import random

import pytest

from engine.api import Sampling, TokenLogprobs
from engine.device.verify import accept, accepted, row_specs, undrafted
from engine.plan import SampleSpec, Slice, SliceResult

PENALIZED = Sampling(presence_penalty=0.5)


def piece(*drafts: int, sampling: Sampling = PENALIZED, **more: object) -> Slice:
    """A slice that owes two tokens and guesses these."""
    count = len(drafts)
    uniforms = tuple((row + 1) / 100 for row in range(count + 1))
    sample = SampleSpec(sampling=sampling, uniforms=uniforms, outputs=(1, 2), **more)  # type: ignore[arg-type]
    return Slice(sequence=1, start=5, tokens=(8, 9, *drafts), blocks=(0,), sample=sample, drafts=count)


def said(*tokens: int | None) -> list[SliceResult]:
    """What each row says; None: that it cannot."""
    return [
        SliceResult(fault="no number", degenerate="not_a_number")
        if token is None
        else SliceResult((token,), (TokenLogprobs(-float(token)),))
        for token in tokens
    ]


def test_each_row_has_its_own_number_and_the_drafts_before_it_as_history() -> None:
    rows = row_specs(piece(30, 31))
    assert [row.uniforms for row in rows] == [(0.01,), (0.02,), (0.03,)]
    assert [row.outputs for row in rows] == [(1, 2), (1, 2, 30), (1, 2, 30, 31)]


def test_a_history_that_nobody_needs_is_not_made() -> None:
    assert all(row.outputs == () for row in row_specs(piece(30, 31, sampling=Sampling())))


@pytest.mark.parametrize("unbanned_rows", [0, 1, 2])
def test_a_ban_ends_at_its_row(unbanned_rows: int) -> None:
    rows = row_specs(piece(30, 31, banned=(4,), unbanned_rows=unbanned_rows))
    assert [bool(row.banned) for row in rows] == [row < 3 - unbanned_rows for row in range(3)]


def test_without_drafts_nothing_is_made_anew() -> None:
    plain = piece()
    assert row_specs(plain)[0] is plain.sample
    (answer,) = said(5)
    assert accept(plain, [answer]) is answer


@pytest.mark.parametrize(
    ("answers", "emitted"),
    [
        ((30, 31, 32, 50), (30, 31, 32, 50)),  # all right, and one more
        ((30, 31, 40, 50), (30, 31, 40)),  # the third is wrong: what the model said there counts, the rest is void
        ((40, 31, 32, 50), (40,)),
        ((40, None, None, None), (40,)),  # nobody's fault: these rows stand behind a wrong guess
        ((30, 40, None, 50), (30, 40)),
        ((30, None, 32, 50), (30,)),  # its own fault, which the next step will find again
        ((30, 31, 32, None), (30, 31, 32)),
    ],
)
def test_the_run_of_right_drafts_and_the_token_after_it(
    answers: tuple[int | None, ...], emitted: tuple[int, ...]
) -> None:
    found = accept(piece(30, 31, 32), said(*answers))
    assert found.emitted == emitted and not found.fault
    assert [one.logprob for one in found.logprobs] == [-float(token) for token in emitted]


def test_a_fault_of_the_first_row_is_the_sequence_s() -> None:
    found = accept(piece(30), said(None, 31))
    assert found.fault and found.degenerate == "not_a_number" and not found.emitted


def test_rows_go_to_their_slices() -> None:
    quiet = Slice(sequence=2, start=0, tokens=(1,), blocks=(1,))
    found = accepted([piece(30), quiet, piece(), piece(60, 61)], said(30, 3, 4, 60, 7, 8))
    assert [one.emitted for one in found] == [(30, 3), (), (4,), (60, 7)]


def test_a_slice_without_its_drafts_is_as_if_nobody_had_guessed() -> None:
    bare = undrafted(piece(30, 31, banned=(4,), unbanned_rows=2))
    assert bare.tokens == (8, 9) and bare.drafts == 0
    assert bare.sample == SampleSpec(sampling=PENALIZED, uniforms=(0.01,), banned=(4,), outputs=(1, 2))


@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_output_of_one_token_at_a_time(seed: int) -> None:
    """A model that is a function of what was said, asked token by token and with guesses."""
    dice = random.Random(seed)

    def model(*known: int) -> int:
        return hash((seed, known)) % 3

    drafts = [dice.randrange(3) for _ in range(dice.randrange(1, 6))]
    found = accept(piece(*drafts), said(*(model(*drafts[:row]) for row in range(len(drafts) + 1))))
    alone: list[int] = []
    while len(alone) < len(found.emitted):
        alone.append(model(*alone))
    assert list(found.emitted) == alone
    assert len(found.emitted) == len(drafts) + 1 or alone[-1] != drafts[len(alone) - 1]
