"""
One run: a fault, the background load, and what the doctor and `why` say of exactly that time.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from tests.faults.appliance import Patient, Row
from tests.faults.injections import Fault, Hurts, Strength, afflicted
from tests.faults.load import Background, come, introduce

SETTLE_S = 1.2  # the doctor takes whole seconds: one more than the run took must be quiet
WARM = Background(rate_s=4.0)
WARM_S = 3.0
OWN_WORK = ("prompt", "generation", "gateway")
"""What `why` says of a request's ordinary work: no fault."""
NO_ENGINE = ("no_healthy_engine", "engine_lost")
"""Outcomes of who lost it, or found none."""
RANKS = ("right", "second", "wrong")
HEALTHY = "healthy"


class Verdict(msgspec.Struct, frozen=True):
    """What was said of one run."""

    cause: str
    """That was inflicted."""
    strength: str
    seed: int
    doctor: tuple[str, ...]
    """The causes that it names, in its order."""
    why: tuple[str, ...] | None
    """Likewise of the worst request, without ordinary work; nothing if nobody is blamed.  None: it was not asked."""
    statuses: dict[int, int]
    """Of the background's requests."""
    raw: Row
    """Both answers, and the record of the request that `why` was asked about."""

    @property
    def doctor_rank(self) -> str:
        """Of RANKS."""
        return rank_of(self.cause, self.doctor)

    @property
    def why_rank(self) -> str | None:
        """Likewise; None: it was not asked."""
        return None if self.why is None else rank_of(self.cause, self.why)


def rank_of(cause: str, said: Sequence[str]) -> str:
    """Whether it is named first, second or not that soon; where nothing is wrong, whether nothing is named."""
    if cause == HEALTHY:
        return "wrong" if said else "right"
    return RANKS[min(2, said.index(cause))] if cause in said else RANKS[-1]


async def warm(patient: Patient) -> None:
    """What is slow the first time is not what is looked for."""
    await come(patient, WARM, "warm", WARM_S)
    await patient.quiet()


async def examine(patient: Patient, fault: Fault | None, strength: Strength, seed: int, window_s: float) -> Verdict:
    """Of a fault, or of none.  Raises aiohttp.ClientError and TimeoutError: the appliance does not answer any more."""
    await introduce(patient, strength.background)
    await asyncio.sleep(SETTLE_S if strength.background.beginnings else 0)
    began_ns = time.monotonic_ns()
    async with afflicted(patient, strength, f"{strength.label} {seed}"):
        statuses = await come(patient, strength.background, f"{strength.label} {seed}", window_s + strength.longer_s)
    spent_s = (time.monotonic_ns() - began_ns) / 1e9
    doctor = await patient.get(f"/debug/doctor?seconds={math.ceil(spent_s)}")
    rows = await patient.rows("/debug/requests", "requests")
    raw: Row = {"doctor": doctor}
    why = None
    hurts = "e2e_ns" if fault is None else fault.hurts
    sufferer = worst(rows, hurts, began_ns) if hurts is not None else None
    if sufferer is not None:
        found = await patient.get(f"/debug/why/{sufferer['request_id']}")
        why = named(found)
        raw |= {"why": found, "request": sufferer}
    await asyncio.sleep(SETTLE_S)
    await patient.quiet()
    return Verdict(
        cause=fault.cause if fault is not None else HEALTHY,
        strength=strength.label,
        seed=seed,
        doctor=causes_of(doctor["findings"]),
        why=why,
        statuses=dict(Counter(statuses)),
        raw=raw,
    )


def named(answer: Row) -> tuple[str, ...]:
    """As a person reads what `why` says: who is blamed, then what else took time; if nobody is, nothing was found."""
    blamed = answer["blamed"]
    others = (cause for cause in causes_of(answer["causes"]) if cause not in (*OWN_WORK, blamed))
    return (str(blamed), *others) if blamed else ()


def worst(rows: Sequence[Row], hurts: Hurts, began_ns: int) -> Row | None:
    """
    Of the requests for tokens that began since then.  Who lost an engine in the middle is worst off, then who found
    none, then who was slow; what else failed is not asked about.
    """

    def harm(row: Row) -> tuple[bool, bool, int]:
        interrupted = row["outcome"] == "engine_lost" or row.get("resumes", 0) != 0  # an upstream does not tell
        return interrupted, row["outcome"] in NO_ENGINE, msgspec.convert(row[hurts], int)

    own = [
        row
        for row in rows
        if row["outcome"] in ("stop", "length", *NO_ENGINE) and msgspec.convert(row["accepted_ns"], int) >= began_ns
    ]
    return max(own, key=harm, default=None)


def causes_of(findings: object) -> tuple[str, ...]:
    """Their names."""
    return tuple(str(one["cause"]) for one in msgspec.convert(findings, list[Row]))
