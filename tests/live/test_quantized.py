"""
From `pellucid quantize` to an answer, and what a broken checkpoint comes to, on a tiny model with real processes.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.live.conftest import ROOT, serve
from tests.live.test_appliance import wait_for
from tests.quant.small import write_model

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
QUESTION = [{"role": "user", "content": "Say anything."}]
OPTIONS = ("--kv-memory", "16MiB", "--threads", "1")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in 4 bits, by the real command."""
    folder = tmp_path_factory.mktemp("quantized")
    source, out = write_model(folder / "source", seed=4, **SIZES), folder / "tiny-gptq"
    command = [sys.executable, "-m", "quant", str(source), "--scheme", "gptq", "--group-size", "32", "--out", str(out)]
    gate = ["--max-ppl-increase", "100", "--min-top1", "0", "--calibration-tokens", "512"]  # random text has no meaning
    done = subprocess.run([*command, *gate], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_a_checkpoint_answers_and_says_what_it_is(quantized: Path) -> None:
    with serve("--model", str(quantized), "--kv-dtype", "int8", *OPTIONS) as appliance:
        model = appliance.http.get("/v1/models").json()["data"][0]
        assert (model["id"], model["quantization"]["scheme"]) == ("tiny-gptq", "gptq-4bit-g32")
        (engine,) = appliance.http.get("/health").json()["engines"]
        assert engine["details"]["kv_dtype"] == "int8"
        body = {"model": model["id"], "messages": QUESTION, "max_tokens": 8, "seed": 1, "ignore_eos": True}
        first, second = (appliance.http.post("/v1/chat/completions", json=body).json() for _ in range(2))
        assert first["usage"]["completion_tokens"] == 8
        assert first["choices"] == second["choices"]
        assert first["system_fingerprint"].startswith(f"fp_gptq-4bit-g32_{model['quantization']['origin']}_")


@pytest.mark.parametrize(("value", "kind"), [(0.0, "flat"), (float("nan"), "not_a_number")])
def test_a_broken_one_fails_its_requests_and_is_counted(
    value: float, kind: str, quantized: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in quantized.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], value)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with serve("--model", str(broken), *OPTIONS) as appliance:
        body = {"model": "broken", "messages": QUESTION, "max_tokens": 8}
        answer = appliance.http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "degenerate_output")
        assert "the checkpoint may be broken" in answer.json()["error"]["message"]

        def counted() -> list[float]:
            lines = appliance.http.get("/metrics").text.splitlines()
            found = [line for line in lines if line.startswith(f'pellucid_degenerate_outputs_total{{kind="{kind}"')]
            return [float(line.split()[-1]) for line in found]

        wait_for(lambda: counted() == [1], "it is counted, which may be after it was answered")
        assert appliance.http.get("/ready").status_code == 200
