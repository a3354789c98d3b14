"""Our own lints: what ruff and mypy do not know about this house."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.options import OPTIONS, OTHER_VARIABLES
from tests.tidy.imports import ROOT, module_name, row_of, tracked

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
REASON = re.compile(r"# long: \w+")
PYTHON = tracked("*.py")
PLAIN = [path for path in tracked() if path.suffix not in (".gguf", ".png", ".safetensors")]

# Split, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
HOSTS = re.compile(
    r"https?://[\w.-]*(" + "|".join(("py" + "pi", "python" + "hosted", "npm" + "js", "deb" + "ian")) + ")"
)
MACHINE = re.compile(
    r"(?<![\w.}])/(" + "|".join(("wo" + "rk", "ro" + "ot", "fa" + "rm", "tmp/" + "w", "ho" + "me")) + r")/\w"
)
HOLLOW = re.compile(
    r"^\s*assert (True|1)\s*(,|#|$)|pytest\.skip\(\s*\)|pytest\.mark\.skip\b(?!\w|\(reason)", re.MULTILINE
)
PICKLES = re.compile(
    r"\b(pickle\.(load|loads|Unpickler)|import " + "pick" + r"le|torch\.load|joblib\.load|allow_pickle=True)"
)
MAY_PRINT = ("pellucid", "launch", "tests")


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def lines_with(pattern: re.Pattern[str], text: str) -> list[str]:
    return [f"{number}: {line.strip()}" for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def long_functions(source: str) -> list[str]:
    lines = source.splitlines()
    found = []
    for node in functions(ast.parse(source)):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES_MAX and not REASON.search(lines[node.lineno - 1]):
            found.append(f"{node.lineno}: {node.name} has {length} lines and no `# long: why`")
    return found


def set_iterations(source: str) -> list[str]:
    """Loops over what is visibly a set: its order depends on addresses and hashes.  Sorted ones are fine."""
    tree = ast.parse(source)
    sets = {
        ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        for node in ast.walk(tree)
        if (isinstance(node, ast.AnnAssign) and re.match(r"(set|frozenset)\b", ast.unparse(node.annotation)))
        or (isinstance(node, ast.Assign) and _makes_set(node.value))
    }
    sets |= {
        argument.arg
        for function in functions(tree)
        for argument in (*function.args.args, *function.args.kwonlyargs)
        if argument.annotation and re.match(r"(set|frozenset)\b", ast.unparse(argument.annotation))
    }
    loops = [node.iter for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension)]
    loops += [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("list", "tuple", "iter", "enumerate") and node.args
    ]
    return [f"{loop.lineno}: {ast.unparse(loop)}" for loop in loops if _makes_set(loop) or ast.unparse(loop) in sets]


def _makes_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("set", "frozenset")


@pytest.mark.parametrize("path", PYTHON, ids=str)
def test_python_file(path: Path) -> None:
    source = read(path)
    head = "\n".join(source.splitlines()[:12])
    tree = ast.parse(source)
    complaints = long_functions(source)
    if len(source.splitlines()) > FILE_LINES_MAX and not REASON.search(head):
        complaints.append(f"{len(source.splitlines())} lines and no `# long: why` near the top")
    if source.strip() and not ast.get_docstring(tree):
        complaints.append("no module docstring")
    complaints += lines_with(PICKLES, source) if path.parts[:2] != ("tests", "tidy") else []
    complaints += lines_with(HOLLOW, source) if path.parts[:2] != ("tests", "tidy") else []
    if module_name(path).partition(".")[0] not in MAY_PRINT and path.name != "__main__.py":
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        complaints += [f"{call.lineno}: print" for call in calls if ast.unparse(call.func) == "print"]
    row = row_of(module_name(path))
    if row is not None and row.name == "engine core":
        complaints += [f"iterates over a set: {line}" for line in set_iterations(source)]
    assert complaints == []


@pytest.mark.parametrize("path", PLAIN, ids=str)
def test_text_file(path: Path) -> None:
    text = read(path)
    assert lines_with(UNFINISHED, text) == []
    assert lines_with(HOSTS, text) == [], "package indexes belong to the configuration of pip"
    assert lines_with(MACHINE, text) == [], "a path of one machine"


@pytest.mark.parametrize("path", [path for path in PYTHON if path.parts[0] != "tests"], ids=str)
def test_every_ignored_lint_is_named(path: Path) -> None:
    bare = re.compile(r"# noqa(?!: [A-Z]+\d+)|# type: ignore(?!\[)")
    assert lines_with(bare, read(path)) == []


def test_the_lints_bite() -> None:
    long = "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX
    assert long_functions(long)
    assert not long_functions(long.replace("def f():", "def f():  # long: one table"))
    assert set_iterations("for x in {1, 2}: pass")
    assert set_iterations("self.a: set[int] = set()\nfor x in self.a: pass")
    assert set_iterations("b = set()\nc = [x for x in b]")
    assert set_iterations("def f(b: frozenset[int]): return list(b)")
    assert not set_iterations("b = set()\nfor x in sorted(b): pass\nd = {}\nfor x in d: pass")
    assert lines_with(PICKLES, "weights = torch.load(path)")
    assert lines_with(HOLLOW, "    assert True") and lines_with(HOLLOW, "pytest.skip()")
    assert not lines_with(HOLLOW, "pytest.skip(f'no {x}')")
    assert lines_with(UNFINISHED, "# TO" + "DO: later")


def test_every_variable_that_something_here_reads_or_sets_is_known() -> None:
    """`pellucid` refuses the others as spelling mistakes."""
    read_or_set = re.compile(
        r"""environ\.get\("(PELLUCID_\w+)|^\w+ = "(PELLUCID_\w+)"|\b(PELLUCID_\w+)(?: :)?=(?!=)""", re.MULTILINE
    )
    places = [path for path in PYTHON if path != Path("tests/tidy/test_lints.py")]
    found = {
        name
        for path in [*places, Path("Makefile"), Path(".ci/run")]
        for match in read_or_set.finditer(read(path))
        for name in match.groups()
        if name
    }
    known = {option.variable for option in OPTIONS} | OTHER_VARIABLES
    assert found >= {"PELLUCID_KERNELS", "PELLUCID_TEST_LIBRARIES", "PELLUCID_PORT"}
    assert found - known == set()
    assert OTHER_VARIABLES - found == {"PELLUCID_CONFIG"}


def test_the_lock_pins_every_requirement_exactly() -> None:
    lock = [line for line in read(Path("requirements.lock")).splitlines() if line and not line.startswith("#")]
    assert [line for line in lock if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    locked = {_canonical(line.partition("==")[0]) for line in lock}
    project = tomllib.loads(read(Path("pyproject.toml")))["project"]
    wanted = [
        *project["dependencies"],
        *(
            name
            for extra, names in project["optional-dependencies"].items()
            for name in names
            if extra != "auto-gptq"  # old versions, pinned where they stand, for an environment of their own
        ),
    ]
    assert {_canonical(re.split(r"[><=;\[ ]", name)[0]) for name in wanted} - locked == set()


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
