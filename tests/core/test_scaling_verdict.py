"""What `pellucid bench scaling` says limits it, on made-up figures: each rule, and which of them comes first."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.verdict import ALONE, SCALES_MIN, Row, verdict

PROCESSORS = 4


def row(
    ranks: int = 1, tokens_per_s: float = 100.0, *, processors: int = 0, replicas: int = 1, **parts_us: float
) -> Row:
    """Of `parts_us` for each token; those of one rank sum to 10000, at 100 tokens/s."""
    parts = parts_us or {"compute": 10000.0}
    total = sum(parts.values())
    return Row(
        ranks=ranks,
        replicas=replicas,
        processors=processors or min(ranks * replicas, PROCESSORS),
        tokens_per_s=tokens_per_s,
        speedup=tokens_per_s / 100,
        efficiency=tokens_per_s / 100 / ranks / replicas,
        part_us=parts,
        shares={name: spent / total for name, spent in parts.items()},
        interconnect="gloo",
    )


def straggling(one: Row, **shares: float) -> Row:
    return msgspec.structs.replace(one, straggler_shares={rank[1:]: share for rank, share in shares.items()})


def said(*rows: Row, processors: int = PROCESSORS) -> str:
    return verdict((row(), *rows), processors)


def test_it_scales() -> None:
    assert said(row(2, 180.0)) == "it scales: 2 ranks are 1.80 times as fast, efficiency 0.90"


def test_on_the_same_processors_nothing_can_be_gained() -> None:
    words = verdict((row(processors=2), row(2, 97.0, processors=2)), 2)
    assert words.startswith("it scales as far as it can: one rank used all 2 processors already, and 2 ranks on the")
    assert words.endswith("0.97 times as fast")


def test_fewer_processors_than_ranks() -> None:
    words = verdict((row(), row(3, 60.0)), 2)
    assert words == "fewer processors than ranks: 3 ranks on 2 processors, 0.60 times as fast as one rank"
    assert "3 ranks on 1 processor," in verdict((row(), row(3, 60.0)), 1)


def test_the_most_ranks_that_fit_are_judged_and_the_others_are_named() -> None:
    words = verdict((row(), row(2, 190.0, processors=2), row(3, 90.0), row(5, 80.0)), 2)
    assert words.startswith("it scales: 2 ranks are 1.90 times")
    assert words.endswith("; fewer processors than ranks: 3 ranks on 2 processors")


def test_waiting_names_the_straggler() -> None:
    slow = row(2, 110.0, compute=5500.0, interconnect_wait=3000.0, interconnect_transfer=600.0)
    assert said(straggling(slow, r0=0.1, r1=0.8)) == (
        "wait: 33% of the step, and rank 1 is the straggler in 80% of steps"
    )
    assert said(straggling(slow, r0=0.4, r1=0.4)).endswith(
        "no rank is the straggler in more than 40% of steps: they are disturbed in turn"
    )
    assert said(slow).endswith("no rank is the straggler in more than 0% of steps: they are disturbed in turn")


def test_the_wire() -> None:
    slow = row(2, 110.0, compute=5500.0, interconnect_wait=450.0, interconnect_transfer=3200.0)
    assert said(slow) == "transfer: 35% of the step is the wire (gloo)"


def test_too_little_load() -> None:
    assert said(row(2, 110.0, compute=5000.0, idle=4000.0)).startswith("idle: the engine has nothing to do in 44% of")


def test_compute_that_every_rank_does() -> None:
    words = said(row(2, 110.0, compute=9000.0, sample=1000.0))
    assert words == "compute that is not divided: 40% of the step, beyond each rank's part of one's work"


def test_compute_on_the_same_processors_should_stay_as_it_is() -> None:
    """Two ranks of one thread each do together what one of two threads does, in the same time."""
    words = verdict((row(processors=2), row(2, 60.0, processors=2, compute=15000.0)), 2)
    assert words.startswith("compute that is not divided: 33% of the step")


@pytest.mark.parametrize("part", ALONE)
def test_what_rank_0_does_alone(part: str) -> None:
    parts_us = {"compute": 5000.0, part: 4000.0}
    shares = {"compute": 5 / 9, part: 4 / 9}
    words = said(msgspec.structs.replace(row(2, 110.0), part_us=parts_us, shares=shares))
    assert words == "what rank 0 does alone: 44% of the step is planning, sampling and the like"


def test_what_nothing_explains() -> None:
    assert (
        said(row(2, 110.0, compute=5000.0)) == "no part of the step explains it: 2 ranks are 1.10 times as fast as one"
    )


def test_replicas_that_give_more_are_mentioned() -> None:
    wire = row(2, 110.0, compute=5500.0, interconnect_transfer=3500.0)
    assert said(wire, row(replicas=2, tokens_per_s=198.0)).endswith("; 2 replicas give 1.80 times as many tokens")
    assert "replicas" not in said(wire, row(replicas=3, tokens_per_s=198.0))  # not as many processes
    assert "replicas" not in said(wire, row(replicas=2, tokens_per_s=112.0))


def test_other_programs_are_mentioned_whatever_is_said() -> None:
    busy, words = msgspec.structs.replace(row(2, 180.0), others_share=0.4), "; but other programs had 40% of the"
    assert words in said(busy) and words in said(busy, processors=1)
    assert "other programs" not in said(msgspec.structs.replace(busy, others_share=0.1))


def test_what_did_not_run_is_no_verdict() -> None:
    refused = Row(ranks=2, processors=2, refused="2 heads cannot be shared")
    assert said(refused) == "no verdict: 2 ranks did not run: 2 heads cannot be shared"
    assert verdict((Row(processors=1, refused="no room"), row(2)), 2) == "no verdict: 1 rank did not run: no room"
    assert "--ranks 1,2" in said() and "--ranks 1,2" in verdict((row(2),), 2)
    assert said(refused, row(4, 390.0)).startswith("it scales: 4 ranks")


@given(
    st.integers(2, 8),
    st.floats(1, 1000),
    st.dictionaries(st.sampled_from(("compute", "idle", "interconnect_wait", "sample")), st.floats(0, 1e5), min_size=1),
    st.integers(1, 8),
)
def test_there_is_always_one_line(ranks: int, tokens_per_s: float, parts: dict[str, float], processors: int) -> None:
    total = sum(parts.values()) or 1.0
    shares = {name: spent / total for name, spent in parts.items()}
    one = msgspec.structs.replace(row(ranks, tokens_per_s), part_us=parts, shares=shares)
    words = said(one, processors=processors)
    assert words and "\n" not in words
    if ranks <= processors:
        assert words.startswith("it scales") == (tokens_per_s / 100 / one.processors >= SCALES_MIN)
