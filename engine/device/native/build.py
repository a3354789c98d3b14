"""
Compile the native decoder: one shared library for each instruction set, in `lib/` beside this file; with --sanitize
those that check every access, for tests, in `lib-sanitized/`.

    python engine/device/native/build.py [--sanitize]

Run by setup.py when the package is installed, so it imports nothing but the standard library.  Without a compiler the
installation goes on: `lib/unavailable.txt` says what was missing, and the engine computes in torch.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "src"
LIBRARIES = Path(__file__).parent / "lib"
SANITIZED = Path(__file__).parent / "lib-sanitized"
REASON = "unavailable.txt"
COMPILE_S_MAX = 600
_VNNI = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c -mbmi2 -DPL_AVX512=1"
INSTRUCTION_SETS = {  # best first
    "avx512-bf16": f"{_VNNI} -mavx512bf16",
    "avx512-vnni": _VNNI,
    "avx2": "-mavx2 -mfma -mf16c -mbmi2 -DPL_AVX512=0",
}
# No contraction: whether a product and a sum become one rounding would depend on the compiler's mood.
_FLAGS = "-std=c++17 -O3 -fPIC -shared -fopenmp -ffp-contract=off -fno-math-errno -fvisibility=hidden -Wall -Wextra"
_GCC = "-Wno-uninitialized -Wno-maybe-uninitialized"  # of its own headers, whose undefined vectors are meant so
_SANITIZE = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"


class BuildError(Exception):
    """Nothing was built, and why."""


def library_name(instruction_set: str) -> str:
    """The file of one instruction set."""
    return f"libpellucid-{instruction_set}.so"


def compiler() -> list[str]:
    """The C++ compiler with its first arguments: $CXX, or the first that is installed.  Raises BuildError."""
    wanted = os.environ.get("CXX", "").strip()  # blank names none
    try:
        for name in [wanted] if wanted else ["g++", "clang++", "c++"]:
            program = shlex.split(name)
            if shutil.which(program[0]):
                return program
    except ValueError as error:
        raise BuildError(f"CXX={wanted} is no command ({error}): name a C++ compiler, or leave CXX out") from error
    looked = wanted or "g++, clang++ or c++"
    raise BuildError(f"no C++ compiler was found ({looked}): install one (on Debian and Ubuntu: apt install g++)")


def build(target: Path, *, sanitize: bool = False) -> list[Path]:
    """
    Compile for every instruction set into `target`; returns the libraries.  Raises BuildError if there are none.

    A compiler that is too old for one instruction set is good for the others: what is left out is said on stderr.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"the native kernels are for x86-64, and this is {platform.machine()}")
    program = compiler()
    target.mkdir(parents=True, exist_ok=True)
    built, left_out = [], {}
    for instruction_set in INSTRUCTION_SETS:
        path = target / library_name(instruction_set)
        try:
            _compile(program, instruction_set, path, sanitize=sanitize)
            built.append(path)
        except BuildError as error:
            left_out[instruction_set] = error
            least = error  # the last one asks for the least, so its reason is the one to show
    if not built:
        raise least
    for instruction_set, reason in left_out.items():
        (target / library_name(instruction_set)).unlink(missing_ok=True)  # of an earlier build, and of other sources
        sys.stderr.write(f"pellucid: without the native kernels for {instruction_set}: {reason}\n")
    (target / REASON).unlink(missing_ok=True)
    return built


def _compile(program: list[str], instruction_set: str, path: Path, *, sanitize: bool) -> None:
    """One library.  Raises BuildError."""
    draft = path.with_suffix(f".{os.getpid()}")
    flags = f"{_FLAGS} {_GCC} {INSTRUCTION_SETS[instruction_set]} {_SANITIZE if sanitize else ''}".split()
    command = [*program, *flags, str(SOURCE / "pellucid.cpp"), "-o", str(draft)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_S_MAX, check=False
        )
        if done.returncode:
            raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
        draft.replace(path)  # never half a library, also while another process opens it
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler failed: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


def build_or_say_why(target: Path) -> None:
    """For the installation: build, or leave a note that the engine can show."""
    try:
        build(target)
    except BuildError as error:
        target.mkdir(parents=True, exist_ok=True)
        for instruction_set in INSTRUCTION_SETS:
            (target / library_name(instruction_set)).unlink(missing_ok=True)
        (target / REASON).write_text(f"{error}\n", encoding="utf-8", errors="replace")  # CXX may be any bytes
        sys.stderr.write(f"pellucid: without native kernels, the engine will compute in torch: {error}\n")


if __name__ == "__main__":
    wanted = "--sanitize" in sys.argv[1:]
    try:
        libraries = build(SANITIZED if wanted else LIBRARIES, sanitize=wanted)
    except BuildError as error:
        sys.exit(f"pellucid: {error}")
    sys.stdout.writelines(f"{library}\n" for library in libraries)
