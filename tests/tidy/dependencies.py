"""
What `make check` asks of the locked packages: a licence that we accept, and no vulnerability that is known.

    python -m tests.tidy.dependencies

Licences are in the packages themselves.  Vulnerabilities are in a database on the network: where that is not reachable
within AUDIT_S, a message says so, and that is no failure.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from email.message import Message
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
AUDIT_S = 120.0
REQUEST_S = 15
ALLOWED = frozenset(
    {
        "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
        "CNRI-Python", "ISC", "MIT", "PSF-2.0", "Unlicense", "Zlib",
        "MPL-2.0",  # whoever changes a file of it publishes that file; we change none
    }
)  # fmt: skip
NAMES = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "psfl": "PSF-2.0",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
}
"""Older packages have words in place of an SPDX expression."""
IGNORED: dict[str, str] = {}
"""Vulnerabilities that do not concern us: id -> why."""


def locked(lock: str) -> list[str]:
    """The names in the lock file."""
    return [line.partition("==")[0] for line in lock.splitlines() if line and not line.startswith("#")]


def licence(package: Message) -> str:
    """An SPDX expression; empty where the package does not say."""
    expression = package.get("License-Expression") or ""
    said = (package.get("License") or "").strip().partition("\n")[0]
    if not expression and said:
        expression = NAMES.get(said.lower(), said)
    if not expression:
        words = [line.split(" :: ")[-1] for line in package.get_all("Classifier") or [] if line.startswith("License ")]
        expression = " OR ".join(NAMES.get(word.lower(), word) for word in words if word != "DFSG approved")
    return expression


def accepted(expression: str) -> bool:
    """Whether one of its alternatives is all among the ALLOWED.  Parentheses are for people to read."""
    return any(
        all(part.strip() in ALLOWED for part in re.split(r"\s+AND\s+", alternative))
        for alternative in re.split(r"\s+OR\s+", expression)
    )


def licence_complaints(names: Iterable[str]) -> Iterator[str]:
    """What is wrong with the licences of these packages."""
    for name in names:
        try:
            expression = licence(metadata(name))  # type: ignore[arg-type]  # a Protocol of some of its methods
        except PackageNotFoundError:
            yield f"{name}: is not installed, so nobody can say what its licence is"
            continue
        if not accepted(expression):
            yield f"{name}: its licence {expression or '(none named)'!r} is not among those that we accept"


class Audit(NamedTuple):
    """What pip-audit found."""

    found: list[str]
    asked: int = 0
    """Packages that the database knows of."""
    left_out: str = ""
    """Why not all of them were asked for; empty: they were."""


def audit(command: Sequence[str], limit_s: float = AUDIT_S) -> Audit:
    """Run it; whatever becomes of it, it is over within `limit_s`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return Audit([], left_out=f"no answer within {limit_s:g} s")
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return Audit([], left_out=(done.stderr.strip().splitlines() or ["it says nothing"])[-1][:200])
    found = []
    for package in packages:
        for one in package.get("vulns", ()):
            if IGNORED.keys().isdisjoint({one["id"], *one.get("aliases", ())}):
                better = ", ".join(one.get("fix_versions", ())) or "none yet"
                found.append(f"{package['name']} {package['version']}: {one['id']}, mended in: {better}")
    skipped = [str(package["skip_reason"]) for package in packages if "skip_reason" in package]
    left_out = f"{len(skipped)} of {len(packages)} packages, such as: {skipped[0]}" if skipped else ""
    return Audit(found, len(packages) - len(skipped), left_out)


def audit_command(requirements: Path = LOCK) -> list[str]:
    """pip-audit, on exactly what is locked."""
    options = ["--requirement", str(requirements), "--no-deps", "--disable-pip", "--format", "json"]
    return [sys.executable, "-m", "pip_audit", *options, "--timeout", str(REQUEST_S), "--progress-spinner", "off"]


def main() -> int:
    """Print what is wrong; the exit code."""
    complaints = list(licence_complaints(locked(LOCK.read_text())))
    audited = audit(audit_command())
    print(f"known vulnerabilities: looked up {audited.asked} packages", end="")
    print(f"; skipped, the database does not say: {audited.left_out}" if audited.left_out else "")
    complaints += audited.found
    for complaint in complaints:
        print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
