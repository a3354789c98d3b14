"""
What the compiler made of the innermost loops: gcc puts accumulators on the stack when a kernel has one row too many.

Nothing is wrong then, only slow, so no other test would notice.
"""

import re
import shutil
import subprocess

import pytest

from engine.device.native.build import LIBRARIES, library_name

KERNELS = ("dot_int8<", "dot_int4<", "dot_bf16_rows<", "score<", "weigh<")
_FUNCTION = re.compile(r"^[0-9a-f]+ <(?:void )?(?:pl::)?(.+)>:$")
_LINE = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
_STACK = re.compile(r"\(%r[sb]p[,)]")
_VECTOR = re.compile(r"%[xyz]mm\d+")

Line = tuple[int, str, str]  # address, operation, operands


def _functions(text: str) -> dict[str, list[Line]]:
    """The kernels in a disassembly."""
    found: dict[str, list[Line]] = {}
    lines: list[Line] = []
    for row in text.splitlines():
        if head := _FUNCTION.match(row):
            lines = []
            if head[1].startswith(KERNELS):
                found[head[1].partition("(")[0]] = lines
        elif line := _LINE.match(row):
            lines.append((int(line[1], 16), line[2], line[3]))
    return found


def _inner_loops(lines: list[Line]) -> list[list[Line]]:
    """What lies between the target of a jump back and the jump, where no other such loop lies inside."""
    spans = []
    for address, operation, operands in lines:
        target = re.match(r"([0-9a-f]+) ", operands + " ")
        if operation.startswith("j") and target and lines[0][0] <= int(target[1], 16) < address:
            spans.append((int(target[1], 16), address))
    inner = [span for span in spans if not any(o != span and span[0] <= o[0] and o[1] <= span[1] for o in spans)]
    return [[line for line in lines if first <= line[0] <= last] for first, last in inner]


def _spills(loop: list[Line]) -> list[str]:
    """Vectors that come from or go to the stack."""
    return [f"{op} {operands}" for _, op, operands in loop if _STACK.search(operands) and _VECTOR.search(operands)]


def _disassembled(isa: str) -> dict[str, list[Line]]:
    path = LIBRARIES / library_name(isa)
    if shutil.which("objdump") is None or not path.is_file():
        pytest.skip("no objdump, or no library to look at with it")
    command = ["objdump", "-d", "--demangle", "--no-show-raw-insn", str(path)]
    return _functions(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.parametrize(
    ("isa", "larger"),
    [
        ("avx512-bf16", ()),
        ("avx512-vnni", ("score<pl::KvBf16, 6>", "weigh<pl::KvBf16, 6, 4>")),  # products of bfloat16 take more there
    ],
)
def test_no_accumulator_is_on_the_stack(isa: str, larger: tuple[str, ...]) -> None:
    """Not asked of AVX2, which has half as many registers, and spills in most of them."""
    functions = _disassembled(isa)
    for kernel in ("dot_int8<12>", "dot_bf16_rows<12>", "dot_int4<6, false>", "score<pl::KvInt8, 6>"):
        assert kernel in functions, sorted(functions)
    for name, lines in functions.items():
        loops = _inner_loops(lines)
        assert loops, f"{name} has a loop"
        for loop in loops if name not in larger else []:
            assert not _spills(loop), name


def test_a_spill_would_be_found() -> None:
    text = """
0000000000001000 <void pl::dot_int8<2>(unsigned char const*, int)>:
    1000:\tmov    %rsp,%rbp
    1004:\tvmovaps 0x40(%rsp),%zmm1
    1008:\tvpdpbusd %zmm1,%zmm2,%zmm3
    100c:\tvmovaps %zmm3,-0x40(%rbp)
    1010:\tmov    0x8(%rsp),%rax
    1014:\tjne    1008 <void pl::dot_int8<2>(unsigned char const*, int)+0x8>
    1018:\tret
"""
    (loop,) = _inner_loops(_functions(text)["dot_int8<2>"])
    assert _spills(loop) == ["vmovaps %zmm3,-0x40(%rbp)"]
