"""
From settings to a checkpoint: everything that can be wrong is found before the work begins, or leaves nothing behind.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import click
import torch
from rich.console import Console
from torch import Tensor

from launch.errors import UserError
from launch.options import read_options
from launch.sizes import format_bytes
from launch.store import Model, Store, data_dir
from quant import table
from quant.convert import convert
from quant.formats.checkpoint import Checkpoint, open_checkpoint
from quant.formats.errors import ModelError
from quant.formats.layouts import quantization_config
from quant.options import ConvertOptions, Progress
from quant.plan import Plan, plan
from quant.progress import progress
from quant.report import Measured
from quant.settings import BY_NAME, SOLVED, QuantizeSettings
from quant.source_config import config_of, rotated_config
from quant.text_files import is_quantized, tokenizing, write_text_files
from quant.texts import EVALUATION, SEQUENCE_TOKENS, read_calibration, read_evaluation, sample
from quant.write import (
    CheckpointWriter,
    growing,
    publish,
    refuse_full_disk,
    refuse_out,
    replace_file,
    report_place,
    write_file,
    write_json,
)

BELOW_THE_GATE = 3
CALIBRATION_TOKENS_MIN = 128
EVALUATION_TOKENS_MIN = 128
SPARE_BYTES = 16 * 2**20  # of disk, for tokenizers and headers


class Convert(Protocol):
    """`quant.convert.convert`"""

    def __call__(
        self,
        checkpoint: Checkpoint,
        options: ConvertOptions,
        calibration: Tensor,
        evaluation: list[Tensor],
        sink: Callable[[dict[str, Tensor]], None],
        progress: Progress,
    ) -> Measured:
        """Quantize and measure, layer by layer."""
        ...


def run(settings: QuantizeSettings, environ: dict[str, str], work: Convert = convert) -> int:
    """The exit code: 0, or 3 if the result is below the gate.  Raises UserError; then nothing is left."""
    try:
        return _run(settings, environ, work)
    except ModelError as error:
        raise UserError(str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise UserError(
            "too little memory for this conversion: fewer --calibration-tokens or a shorter --eval need less"
        ) from error


def _run(settings: QuantizeSettings, environ: dict[str, str], work: Convert) -> int:
    if settings.out is not None:
        refuse_out(settings.out)
    _refuse_absent(settings)
    model = _model(settings, environ)
    method = is_quantized(model.path)
    if method is not None:
        raise UserError(f"{model.path} is quantized already ({method}): name the float model that it was made from")
    checkpoint = open_checkpoint(model.path)
    planned = plan(checkpoint, settings.scheme, settings.keep, rotate=settings.rotate)
    if settings.dry_run:
        _print_plan(settings, model, planned)
        return 0
    assert settings.out is not None
    refuse_full_disk(settings.out.parent, planned.size_bytes + SPARE_BYTES)
    return _Conversion(settings, model, checkpoint, planned, settings.out).run(work)


def _model(settings: QuantizeSettings, environ: dict[str, str]) -> Model:
    """Where the source is; it is fetched if it has to be.  Raises UserError."""
    given = {"data_dir": settings.data_dir} if settings.data_dir else {}
    store = Store(data_dir(read_options(given, environ).data_dir, environ))
    if not settings.dry_run:
        return store.pull(settings.model)
    found = store.find(settings.model)
    if found is None:
        raise UserError(f"{settings.model} is not here, and --dry-run fetches nothing: pellucid model pull it first")
    return found


def _refuse_absent(settings: QuantizeSettings) -> None:
    """Raises UserError if something that the settings need is not on this machine."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here")
    if settings.backend == "auto-gptq" and settings.device != "cuda":
        raise UserError("--backend auto-gptq needs --device cuda: it waits for CUDA after each layer")
    if settings.backend == "auto-gptq" and importlib.util.find_spec("auto_gptq") is None:
        raise UserError(
            "--backend auto-gptq needs the package: in an environment of its own, pip install 'pellucid[auto-gptq]'"
        )
    if settings.scheme.method in ("nf4", "llm-int8") and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"--scheme {settings.scheme.method} needs bitsandbytes: pip install 'pellucid[bnb]'")
    for flag, path in (("--calibration", settings.calibration), ("--eval", settings.evaluation)):
        if path is not None and not path.is_file():
            raise UserError(f"{flag}: there is no file {path}")


class _Conversion:
    """One conversion, from open files to a directory."""

    def __init__(
        self, settings: QuantizeSettings, model: Model, checkpoint: Checkpoint, planned: Plan, out: Path
    ) -> None:
        self._settings = settings
        self._model = model
        self._checkpoint = checkpoint
        self._plan = planned
        self._out = out
        self._started_s = time.monotonic()
        self._hashes: dict[Path, str] = {}  # of the texts

    def run(self, work: Convert) -> int:
        """Convert, judge, publish."""
        with growing(self._out) as folder:
            writer = CheckpointWriter(folder, tensors_max=self._plan.tensors_max)
            try:
                report = self._convert(work, writer)
                if report.gate.passed:
                    self._write(folder, report, writer.dtype)
                    publish(folder, self._out)
                    report_place(self._out).unlink(missing_ok=True)  # of an earlier try that failed
            finally:
                writer.abandon()
        place = self._out
        if not report.gate.passed:
            place = report_place(self._out)
            replace_file(place, report.encode())
        self._print(report, place)
        return 0 if report.gate.passed else BELOW_THE_GATE

    def _convert(self, work: Convert, writer: CheckpointWriter) -> table.Report:
        settings = self._settings
        with progress(silent=settings.json) as tell:
            calibration, evaluation = self._texts(tell)
            options = ConvertOptions(
                scheme=settings.scheme,
                damp=settings.damp,
                backend=settings.backend,
                smooth=settings.smooth,
                rotate=settings.rotate,
                keep=settings.keep,
                seed=settings.seed,
                device=settings.device,
            )
            measured = work(self._checkpoint, options, calibration, evaluation, writer.add, tell)
        writer.finish()
        return self._report(measured, calibration, evaluation, writer.size_bytes)

    def _texts(self, tell: Progress) -> tuple[Tensor, list[Tensor]]:
        """Token ids to calibrate on, and to be measured on."""
        settings, checkpoint = self._settings, self._checkpoint
        tokens = min(SEQUENCE_TOKENS, checkpoint.architecture.context_max)
        sequences = max(1, settings.calibration_tokens // tokens)
        evaluation_file = settings.evaluation or EVALUATION
        for path in filter(None, (settings.calibration, evaluation_file)):  # now: who knows what is there at the end
            self._hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        with tokenizing(self._model.path) as tokenize:
            evaluation = read_evaluation(evaluation_file, tokenize, checkpoint.architecture)
            _refuse_short(sum(map(len, evaluation)), EVALUATION_TOKENS_MIN, evaluation_file, "measure")
            if settings.calibration is not None:
                calibration = read_calibration(
                    settings.calibration, tokenize, checkpoint, sequences=sequences, tokens=tokens
                )
                _refuse_short(calibration.numel(), CALIBRATION_TOKENS_MIN, settings.calibration, "calibrate")
                return calibration, evaluation
        calibration = sample(
            checkpoint,
            sequences=sequences,
            tokens=tokens,
            seed=settings.seed,
            device=settings.device,
            progress=tell,
        )
        return calibration, evaluation

    def _write(self, folder: Path, report: table.Report, dtype: str) -> None:
        """All files but the tensors, whose floats are `dtype`."""
        quantization = quantization_config(report.scheme, layers=self._checkpoint.architecture.layers)
        if report.scheme.method == "gptq":
            quantization["damp_percent"] = report.settings.damp
        config = config_of(self._model.path, self._checkpoint, dtype=dtype)
        if self._settings.rotate != "none":
            config = rotated_config(config, points=report.scheme.mix)
        config |= {"quantization_config": quantization, "pellucid": {"origin": self._checkpoint.origin}}
        write_json(folder / "config.json", config)
        if report.scheme.method == "gptq":  # others would prefer this file to config.json
            write_json(folder / "quantize_config.json", quantization)
        write_text_files(self._model.path, folder, self._checkpoint.eos_ids)
        write_file(folder / "report.json", report.encode())

    def _report(
        self, measured: Measured, calibration: Tensor, evaluation: list[Tensor], result_bytes: int
    ) -> table.Report:
        settings = self._settings
        method = settings.scheme.method
        sampled = f"sampled from the model itself, seed {settings.seed}"
        return table.Report(
            label=measured.scheme.label,
            scheme=measured.scheme,
            settings=table.Settings(
                seed=settings.seed,
                damp=settings.damp if method in SOLVED else None,
                smooth=settings.smooth,
                rotate=settings.rotate if method in BY_NAME["rotate"].schemes else None,
                keep=settings.keep,
            ),
            source=table.Source(
                name=self._model.name, identity=self._checkpoint.identity, size_bytes=self._model.size_bytes
            ),
            gate=table.judge(measured, max_ppl_increase=settings.max_ppl_increase, min_top1=settings.min_top1),
            quality=measured.quality,
            size=table.Size(source_bytes=self._model.size_bytes, result_bytes=result_bytes),
            cost=_cost(self._started_s, settings.device),
            calibration=self._text(settings.calibration, sampled, calibration.numel()),
            evaluation=self._text(settings.evaluation or EVALUATION, "", sum(map(len, evaluation))),
            versions=_versions(method in ("nf4", "llm-int8")),
            host=_host(settings.device),
            worst=table.worst(measured.linears),
            linears=measured.linears,
        )

    def _text(self, path: Path | None, otherwise: str, tokens: int) -> table.Text:
        if path is None:
            return table.Text(origin=otherwise, sha256=None, tokens=tokens)
        origin = "the text that ships with Pellucid" if path == EVALUATION else path.name
        return table.Text(origin=origin, sha256=self._hashes[path], tokens=tokens)

    def _print(self, report: table.Report, place: Path) -> None:
        if self._settings.json:
            click.echo(report.encode(), nl=False)
            return
        table.print_report(report, place, _console())
        if not report.gate.passed:
            ways = " ".join(f"--keep {name}" for name in report.gate.suggestions[:3])
            click.echo(
                f"pellucid: below the gate, nothing was kept but {place}"
                + (f"; the layers that cost most: {ways}" if ways else ""),
                err=True,
            )


def _refuse_short(tokens: int, least: int, path: Path, purpose: str) -> None:
    if tokens < least:
        raise UserError(f"{path.name} holds {tokens} tokens, too few to {purpose} on: at least {least} are needed")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 110, highlight=False, soft_wrap=True)


def _print_plan(settings: QuantizeSettings, model: Model, planned: Plan) -> None:
    """What `--dry-run` has to say."""
    quantized = [linear for linear in planned.linears if not linear.kept]
    kept = [linear.name for linear in planned.linears if linear.kept]
    facts: dict[str, object] = {
        "label": settings.scheme.label,
        "source": model.name,
        "source_bytes": model.size_bytes,
        "result_bytes": planned.size_bytes,
        "quantized": [linear.name for linear in quantized],
        "kept": [*kept, "model.embed_tokens", *([] if planned.tied else ["lm_head"]), "norms and biases"],
    }
    if settings.json:
        click.echo(table.pretty(facts), nl=False)
        return
    console = _console()
    head = "embeddings (which are the head too)" if planned.tied else "embeddings and head"
    kinds = sorted({linear.name.split(".", 3)[3] for linear in quantized})
    console.print(f"{settings.scheme.label} of {model.name}")
    console.print(f"{'quantized':<20}{len(quantized)} linear layers: {', '.join(kinds)}")
    console.print(f"{'kept':<20}{', '.join([*kept, head, 'norms and biases'])}")
    console.print(f"{'size':<20}{format_bytes(model.size_bytes)} -> about {format_bytes(planned.size_bytes)}")
    console.print("nothing was written")


def _cost(started_s: float, device: str) -> table.Cost:
    unit = 1 if sys.platform == "darwin" else 1024
    return table.Cost(
        seconds=round(time.monotonic() - started_s, 3),
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        peak_device_bytes=torch.cuda.max_memory_allocated() if device == "cuda" else None,
    )


def _versions(bitsandbytes: bool) -> table.Versions:
    from pellucid import VERSION  # noqa: PLC0415 - it imports the command, which imports us

    return table.Versions(
        pellucid=VERSION,
        torch=str(torch.__version__),
        python=platform.python_version(),
        bitsandbytes=importlib.metadata.version("bitsandbytes") if bitsandbytes else None,
    )


def _host(device: str) -> table.Host:
    processors = Path("/proc/cpuinfo")
    lines = processors.read_text().splitlines() if processors.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return table.Host(
        processor=names[0] if names else platform.processor() or platform.machine(),
        system=f"{platform.system()} {os.uname().release}",
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
    )
