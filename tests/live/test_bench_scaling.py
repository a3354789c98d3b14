"""`pellucid bench scaling` as a person calls it, on a tiny model."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.table import Report
from tests.live.conftest import ROOT
from tests.quant.small import write_model

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
SMALL = ("--rounds", "1", "--streams", "2", "--requests", "1", "--prompt-words", "4", "--output-tokens", "4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("scaling") / "tiny", seed=4, **SIZES)


def scaling(model: Path, *options: str) -> tuple[int, Report, str]:
    command = [sys.executable, "-m", "pellucid", "bench", "scaling", "--model", str(model), "--json", *SMALL, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    return done.returncode, msgspec.json.decode(done.stdout, type=Report), done.stderr


def test_ranks_and_replicas_are_compared_with_one_rank(tiny: Path) -> None:
    code, report, progress = scaling(tiny, "--ranks", "1,2", "--threads", "1", "--", "--kv-memory", "16MiB")
    assert code == 0, progress
    one, ranks, replicas = report.rows
    assert (one.name, ranks.name, replicas.name) == ("1 rank", "2 ranks", "2 replicas")
    for row in report.rows:
        assert row.refused == "", progress
        assert row.tokens_per_s > 0 and row.first_p99_ms >= row.first_p50_ms > 0
        assert row.shares["compute"] > 0 and sum(row.shares.values()) == pytest.approx(1)
    assert (one.speedup, one.efficiency) == (1, 1)
    assert (one.interconnect, replicas.interconnect) == ("none", "none") and ranks.interconnect != "none"
    assert ranks.shares["interconnect_wait"] + ranks.shares["interconnect_transfer"] > 0 and ranks.straggler_shares
    assert report.verdict and progress.count("round 1 of 1: ") == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ranks", "1", "--", "--kv-memory", "900TiB"), "too little memory: 900 TiB"),
        (("--ranks", "5", "--no-replicas", "--", "--kv-memory", "16MiB"), "--tensor-parallel 5: the model has 4"),
    ],
)
def test_what_is_refused_is_a_row_that_says_so(options: tuple[str, ...], words: str, tiny: Path) -> None:
    code, report, _ = scaling(tiny, *options)
    assert code == 1
    assert report.rows[0].refused.startswith(words)
    assert report.verdict.startswith("no verdict")
