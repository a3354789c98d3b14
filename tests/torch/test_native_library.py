"""
Which library is opened and why none is, the interface of both sides, and building it with and without a compiler.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.device.errors import ModelError
from engine.device.native import build, library
from engine.device.native.build import INSTRUCTION_SETS, REASON, BuildError, build_or_say_why, library_name
from engine.device.native.library import CHOICE, PARTS, Library, Unavailable, available, instruction_sets, open_library
from telemetry.records import COMPUTE_PARTS
from tests.torch.kernels import DIRECTORY, every_isa, native
from tests.torch.tiny import load, write_model

ROOT = Path(build.__file__).parents[3]


def test_the_parts_of_a_step_have_one_name_each() -> None:
    assert PARTS == COMPUTE_PARTS


@every_isa
def test_structures_have_one_layout(isa: str) -> None:
    """Every one of them, in every library; a number beyond the last is none."""
    layout = ctypes.CDLL(str(DIRECTORY / library_name(native(isa).isa))).pl_layout
    layout.restype = ctypes.c_int64
    assert [layout(i) for i in range(5)] == [ctypes.sizeof(structure) for structure in library._STRUCTURES]
    assert layout(5) == layout(-1) == -1 and native(isa).isa == isa


@every_isa
def test_another_version_is_refused(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(ctypes.Structure):
        _fields_ = (("more", ctypes.c_int64 * 40),)

    native(isa)
    monkeypatch.setattr(library, "_STRUCTURES", (*library._STRUCTURES[:-1], Longer))
    with pytest.raises(Unavailable, match="is of another version: install Pellucid again"):
        Library(DIRECTORY / library_name(isa))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of libraries of its own, without any."""
    monkeypatch.setattr(library, "LIBRARIES", tmp_path)
    monkeypatch.delenv(CHOICE, raising=False)
    return tmp_path


def test_the_best_that_there_is(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "instruction_sets", lambda: ("avx512-vnni", "avx2"))
    for name in INSTRUCTION_SETS:
        (installed / library_name(name)).touch()
    assert available() == "avx512-vnni"
    monkeypatch.setenv(CHOICE, "avx2")
    assert available() == "avx2"
    (installed / library_name("avx2")).unlink()
    with pytest.raises(Unavailable, match="not built"):
        available()
    monkeypatch.delenv(CHOICE)
    (installed / library_name("avx512-vnni")).unlink()
    (installed / library_name("avx2")).touch()
    assert available() == "avx2"


@pytest.mark.parametrize(
    ("error", "choice", "usable", "reason"),
    [
        (Unavailable, "torch", ("avx2",), "PELLUCID_KERNELS=torch asks for the decoder in torch"),
        (Unavailable, "", (), "the native kernels need a processor with AVX2"),
        (Unavailable, "", ("avx2",), "no native kernels: they were not built: install Pellucid again"),
        # What is forced and cannot be had is refused, not answered with something slower.
        (
            ModelError,
            "sse",
            ("avx2",),
            "PELLUCID_KERNELS=sse is not known: choose avx512-bf16, avx512-vnni, avx2 or torch",
        ),
        (
            ModelError,
            "avx512-bf16",
            ("avx2",),
            "PELLUCID_KERNELS=avx512-bf16 is not for this processor, which has avx2",
        ),
        (ModelError, "avx2", (), "PELLUCID_KERNELS=avx2 is not for this processor, which has none of them"),
    ],
)
def test_why_there_are_none(
    error: type[Exception],
    choice: str,
    usable: tuple[str, ...],
    reason: str,
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "instruction_sets", lambda: usable)
    monkeypatch.setenv(CHOICE, choice)
    with pytest.raises(error, match=f"^{re.escape(reason)}$"):
        available()


def test_the_note_of_the_installation_is_shown(installed: Path) -> None:
    (installed / REASON).write_text("no C++ compiler was found (g++)\n")
    if instruction_sets():
        with pytest.raises(Unavailable, match=r"^no native kernels: no C\+\+ compiler was found \(g\+\+\)$"):
            available()


@pytest.mark.parametrize("content", [b"", b"\x7fELF and no more", b"text"])
def test_a_broken_library_is_no_crash(content: bytes, tmp_path: Path) -> None:
    (tmp_path / library_name("avx2")).write_bytes(content)
    with pytest.raises(Unavailable, match="cannot be loaded"):
        open_library("avx2", tmp_path)


def test_a_library_of_something_else(tmp_path: Path) -> None:
    """It has not our functions."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "other.c"
    source.write_text("int other(void) { return 1; }\n")
    target = tmp_path / library_name("avx2")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", target], check=True, timeout=60)
    with pytest.raises(Unavailable, match=r"cannot be loaded \(.*pl_isa"):
        open_library("avx2", tmp_path)


# ---- building


def _fake_compiler(directory: Path, script: str) -> str:
    path = directory / "fake-c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


OUTPUT = 'while [ "$1" != "-o" ]; do shift; done; '
"""Shell for a compiler: the name of what it should write is $2 then."""


@pytest.mark.parametrize("how", ["named", "none"])
def test_no_compiler(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The installation goes on; what an earlier one left is gone; the note says what to do."""
    monkeypatch.setenv("CXX", "/nonexistent/c++" if how == "named" else "")
    monkeypatch.setenv("PATH", str(tmp_path))
    target = tmp_path / "lib"
    target.mkdir()
    (target / library_name("avx2")).write_bytes(b"old")
    build_or_say_why(target)
    assert [path.name for path in target.iterdir()] == [REASON]
    note = (target / REASON).read_text()
    assert note.startswith("no C++ compiler was found (") and "apt install g++" in note
    assert note.strip() in capsys.readouterr().err


def test_the_compiler_s_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", _fake_compiler(tmp_path, "echo 'error: no such option -mavx512bf16' >&2; exit 1"))
    build_or_say_why(tmp_path / "lib")
    assert [path.name for path in (tmp_path / "lib").iterdir()] == [REASON]
    assert "failed:\nerror: no such option -mavx512bf16" in (tmp_path / "lib" / REASON).read_text()


@pytest.mark.parametrize(
    ("flag", "left_out"),
    [
        ("-mavx512bf16", ["avx512-bf16"]),
        ("-mavx512vnni", ["avx512-bf16", "avx512-vnni"]),
        ("-mavx2", ["avx2"]),
        ("-DPL_AVX512=1", ["avx512-bf16", "avx512-vnni"]),
    ],
)
def test_a_compiler_that_lacks_a_flag_builds_the_rest(
    flag: str, left_out: list[str], installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what is not there, keeps no old library of it, and the engine opens the best that is."""
    refusing = f'case " $* " in *" {flag} "*) echo "error: no {flag}" >&2; exit 1;; esac; '
    monkeypatch.setenv("CXX", _fake_compiler(installed, f"{refusing}{OUTPUT} echo whole > $2"))
    monkeypatch.setattr(library, "instruction_sets", lambda: tuple(INSTRUCTION_SETS))
    for name in INSTRUCTION_SETS:
        (installed / library_name(name)).write_bytes(b"old")
    build_or_say_why(installed)
    kept = [name for name in INSTRUCTION_SETS if name not in left_out]
    assert {path.name for path in installed.glob("*.*")} == {library_name(name) for name in kept}
    assert all((installed / library_name(name)).read_text() == "whole\n" for name in kept)
    said = capsys.readouterr().err
    for name in INSTRUCTION_SETS:
        assert (f"without the native kernels for {name}: " in said) == (name in left_out)
    assert said.count(f"error: no {flag}") == len(left_out)
    assert available() == kept[0]


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        (" ", "no C++ compiler was found (g++, clang++ or c++)"),  # which names none
        ('""', 'no C++ compiler was found ("")'),
        ('g++ "-O2', 'CXX=g++ "-O2 is no command (No closing quotation)'),
        ("g++\\", "CXX=g++\\ is no command (No escaped character)"),
        (os.fsdecode(b"c\xff++"), "no C++ compiler was found (c?++)"),
    ],
)
def test_a_name_that_is_none_breaks_no_installation(
    named: str, reason: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", named)
    monkeypatch.setenv("PATH", str(installed))
    monkeypatch.setattr(library, "instruction_sets", lambda: ("avx2",))
    build_or_say_why(installed)
    with pytest.raises(Unavailable, match=f"^no native kernels: {re.escape(reason)}: "):
        available()


def test_a_blank_name_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are usual are looked for."""
    Path(_fake_compiler(tmp_path, f"{OUTPUT} echo whole > $2")).rename(tmp_path / "clang++")
    monkeypatch.setenv("CXX", " ")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert len(build.build(tmp_path / "lib")) == len(INSTRUCTION_SETS)


@pytest.mark.parametrize("named", ["/nonexistent/c++", "g++ '"])
def test_building_by_hand_ends_in_one_line(named: str) -> None:
    """Nothing was touched then."""
    command = [sys.executable, str(Path(build.__file__))]
    done = subprocess.run(
        command, env={**os.environ, "CXX": named}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("pellucid: ") and done.stderr.count("\n") == 1


def test_a_compiler_that_speaks_no_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", _fake_compiler(tmp_path, r"printf 'not \377 known' >&2; exit 1"))
    build_or_say_why(tmp_path / "lib")
    assert "not \ufffd known" in (tmp_path / "lib" / REASON).read_text(encoding="utf-8")


def test_a_compiler_that_fails_half_way_leaves_no_half_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", _fake_compiler(tmp_path, f"{OUTPUT} echo half > $2; exit 1"))
    with pytest.raises(BuildError):
        build.build(tmp_path / "lib")
    assert not list((tmp_path / "lib").iterdir())


def test_a_build_that_is_killed_leaves_no_half_library(tmp_path: Path) -> None:
    """The draft has another name until it is whole; the compiler tells when it is half done."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    compiler = _fake_compiler(tmp_path, f"{OUTPUT} echo half > $2; echo ready > {ready}; exec sleep 60")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from engine.device.native.build import build; "
    code += f"from pathlib import Path; build(Path({str(tmp_path / 'lib')!r}))"
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "CXX": compiler}, start_new_session=True)
    try:
        with ready.open() as said:
            assert said.read() == "ready\n"
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert not [path for path in (tmp_path / "lib").iterdir() if path.suffix == ".so"]


def test_a_build_takes_the_place_of_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", _fake_compiler(tmp_path, f"{OUTPUT} echo whole > $2"))
    target = tmp_path / "lib"
    target.mkdir()
    (target / REASON).write_text("once there was no compiler")
    build_or_say_why(target)
    assert {path.name for path in target.iterdir()} == {library_name(name) for name in INSTRUCTION_SETS}


def test_without_kernels_the_engine_computes_in_torch_and_says_why(
    installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What `auto` is then, and what /health shows."""
    (installed / REASON).write_text("no C++ compiler was found (g++, clang++ or c++): install one\n")
    runner = load(write_model(tmp_path_factory.mktemp("m") / "m"), dtype="bfloat16", quantization="auto")
    assert runner.facts.details["kernels"] == "onednn"
    if instruction_sets():
        assert runner.facts.details["no_native_kernels"] == (
            "no native kernels: no C++ compiler was found (g++, clang++ or c++): install one"
        )
    assert runner.facts.weights.method != "int8", "rounding is only worth its loss where it is fast"


@pytest.mark.parametrize("editable", [False, True])
def test_setup_puts_the_libraries_into_the_package(editable: bool, tmp_path: Path) -> None:
    """As pip runs it, with a compiler that is quick."""
    pytest.importorskip("setuptools")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "pellucid.py"):
        shutil.copy(ROOT / name, tree)
    ignored = shutil.ignore_patterns("lib", "__pycache__")
    for name in ("engine", "telemetry", "quant", "gateway", "launch"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    compiler = _fake_compiler(tmp_path, f"{OUTPUT} echo built > $2")
    place = tree if editable else tmp_path / "build"
    kind = "c = d.get_command_obj('build_py'); c.editable_mode = True; " if editable else ""
    code = (
        f"import distutils.core; d = distutils.core.run_setup('setup.py', stop_after='config'); {kind}"
        f"d.get_command_obj('build').build_lib = {str(place)!r}; d.run_command('build_py')"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import setuptools; {code}"],
        cwd=tree, env={**os.environ, "CXX": compiler}, check=True, timeout=100, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    lib = place / "engine/device/native/lib"
    assert {path.name for path in lib.iterdir()} == {library_name(name) for name in INSTRUCTION_SETS}
    assert (place / "engine/device/native/src/pellucid.cpp").is_file()
