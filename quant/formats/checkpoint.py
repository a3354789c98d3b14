"""
From files to an `Architecture` and its tensors, one tensor at a time: safetensors here, GGUF in `gguf_weights`.

Tensors go by the names that transformers gives them, whatever the file.  They are read lazily, so that loading needs
the memory of the prepared model and of one tensor, not of two models.  Pickle (.bin, .pt) is never opened.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quant.formats.architecture import Architecture, from_directory
from quant.formats.errors import ModelError
from quant.formats.gguf_weights import open_gguf
from quant.formats.kept import is_kept
from quant.formats.layouts import read_scheme, suffixes, unpack
from quant.formats.mixing import is_mixed, mix_points
from quant.formats.scheme import Scheme
from quant.formats.weights import Quantized

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
ORIGIN_DIGITS = 16
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_HASHED_AT_ONCE_MAX = 4  # files; a disk gives no more to more readers


class TensorSource(Protocol):
    """Where tensors come from."""

    def names(self) -> frozenset[str]:
        """What there is, by the names of transformers."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, float32, float16 or bfloat16.  Raises ModelError."""
        ...


class Checkpoint:
    """One model's files, opened."""

    def __init__(
        self,
        architecture: Architecture,
        eos_ids: tuple[int, ...],
        source: TensorSource,
        identity: Callable[[], str],
        *,
        scheme: Scheme | None = None,
        origin: Callable[[], str] | None = None,
    ) -> None:
        self.architecture = architecture
        self.scheme = scheme  # None: all weights are floats
        self.eos_ids = tuple(sorted({token for token in eos_ids if 0 <= token < architecture.vocab_size}))
        self._identify = identity  # not now: it reads all the files, and who only looks at shapes does not want it
        self._tell_origin = origin
        self._source = source
        self.names = source.names()
        self.tied = "lm_head.weight" not in self.names if architecture.tied is None else architecture.tied

    @functools.cached_property
    def identity(self) -> str:
        """A hash of all that is in its files, for what is kept beside them.  Raises ModelError."""
        return self._identify()

    @property
    def origin(self) -> str:
        """Which float weights it has or was made of, where the files tell.  Raises ModelError."""
        return self.identity[:ORIGIN_DIGITS] if self._tell_origin is None else self._tell_origin()

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor of that name as a contiguous `dtype` tensor.  Raises ModelError if it is missing or misshapen."""
        if name not in self.names:
            raise ModelError(f"the model lacks the tensor {name}: an incomplete download, or a model of another kind")
        tensor = self.stored(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(tensor.shape)}, its configuration says {shape}")
        if tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"tensor {name} is {kind}, not a float: take the original float checkpoint or a GGUF")
        return tensor.to(dtype).contiguous()

    def stored(self, name: str) -> Tensor:
        """One of `names`, as it is stored and unchecked.  Raises ModelError."""
        return self._source.read(name)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self.names

    def weight(self, prefix: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | Quantized:
        """The weight [out, in] of the linear layer `prefix`, quantized if it is so stored.  Raises ModelError."""
        if self.scheme is None or is_kept(self.scheme, prefix):
            return self.read(f"{prefix}.weight", shape, dtype)
        names = {suffix: f"{prefix}.{suffix}" for suffix in suffixes(self.scheme)}
        found = {suffix: self.stored(name) for suffix, name in names.items() if name in self.names}
        if set(found) == {"weight"} and found["weight"].dtype in FLOATS:  # left alone, whatever the configuration says
            return self.read(f"{prefix}.weight", shape, dtype)
        return unpack(self.scheme, found, shape, name=prefix)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory or a GGUF file.  Raises ModelError."""
    if path.suffix.lower() in PICKLES:
        raise ModelError(f"{path.name} is a pickle, which could run code: convert it to safetensors")
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise ModelError(f"{path} does not exist: name a Hugging Face model directory or a .gguf file")
    if path.suffix.lower() == ".gguf":
        architecture, eos_ids, source = open_gguf(path)
        return Checkpoint(architecture, eos_ids, source, functools.partial(_identity, (path,)))
    if path.suffix.lower() == ".safetensors":
        raise ModelError(f"{path.name} is only the weights: name its directory, which has config.json beside them")
    raise ModelError(f"{path.name} is neither a Hugging Face directory nor a .gguf file: name one of these")


def _open_directory(directory: Path) -> Checkpoint:
    architecture, eos_ids = from_directory(directory)
    files = _shards(directory)
    config = json.loads((directory / "config.json").read_bytes())  # was understood a moment ago
    quantization = config.get("quantization_config")
    beside = directory / "quantize_config.json"  # where auto-gptq alone used to write it
    if quantization is None and beside.is_file():
        try:
            quantization = json.loads(beside.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{beside.name} is broken ({error}): download the model again") from error
    if quantization is not None and not isinstance(quantization, dict):
        raise ModelError("quantization_config of config.json is no object: download the model again")
    scheme = None if quantization is None else read_scheme(quantization)
    points = 0 if scheme is None else scheme.mix
    if is_mixed(config) != (points > 0) or points not in (0, mix_points(architecture.intermediate)):
        raise ModelError("config.json contradicts itself about mixed inputs: convert the model again, and edit nothing")
    ours = config.get("pellucid")  # what our converter notes of the weights that it was given
    origin = str(ours.get("origin", "")) if isinstance(ours, dict) else ""
    identity = functools.partial(_identity, (directory / "config.json", *files))
    source = SafetensorsSource(files)
    told = (lambda: origin) if origin else None
    return Checkpoint(architecture, eos_ids, source, identity, scheme=scheme, origin=told)


def _shards(directory: Path) -> tuple[Path, ...]:
    """The weight files of a directory: those of the index, or the single one."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.exists():
        names = _index(index)
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelError(f"{directory} lacks {missing[0]}, which its index names: download the model again")
        return tuple(directory / name for name in names)
    if single.is_file():
        return (single,)
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise ModelError(f"{directory} has only a pickle ({pickles[0]}), never loaded: convert it to safetensors")
    ggufs = sorted(file.name for file in directory.glob("*.gguf"))
    if ggufs:
        raise ModelError(f"{directory} has no safetensors but GGUF files: name one, for example {directory / ggufs[0]}")
    raise ModelError(f"{directory} has no model.safetensors: download the model again")


def _index(index: Path) -> tuple[str, ...]:
    """Names of the shards.  A name that leads out of the directory is refused."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index.name} is broken ({error}): download the model again") from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index.name} names {name!r}, which is no safetensors file beside it")
    if not names:
        raise ModelError(f"{index.name} names no files: download the model again")
    return tuple(names)


class SafetensorsSource:
    """One or several safetensors files as one set of tensors."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._file_of: dict[str, Path] = {}
        for file in files:
            try:
                with safe_open(str(file), framework="pt") as shard:
                    self._file_of.update(dict.fromkeys(shard.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file.name} is broken ({error}): download the model again") from error

    def names(self) -> frozenset[str]:
        """All tensors of all files."""
        return frozenset(self._file_of)

    def read(self, name: str) -> Tensor:
        """One tensor, as it is stored."""
        file = self._file_of[name]
        try:
            with safe_open(str(file), framework="pt") as shard:
                tensor: Tensor = shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file.name} is broken at {name} ({error}): download the model again") from error
        return tensor


def _identity(files: tuple[Path, ...]) -> str:
    """A hash of every byte: packed weights are found by it, so two models must never share it by chance or by plan."""
    with ThreadPoolExecutor(min(len(files), _HASHED_AT_ONCE_MAX)) as pool:  # hashing lets other threads run
        digests = list(pool.map(_digest, files))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
