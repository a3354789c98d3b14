"""
What there is to judge a stretch of time by: its requests, sums over its steps, and what is known of the system.
"""

from collections.abc import Iterable, Mapping

import msgspec

from telemetry.records import RequestRecord, StepRecord
from telemetry.totals import StepTotals


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """How it is set up; what nobody has said is None, or empty."""

    replicas: int = 1
    tokens_step_max: int | None = None
    prefix_cache: bool | None = None
    kv_slots: int | None = None  # of all replicas
    weights: str = ""
    why_torch: str = ""  # why there are no native kernels


UNKNOWN = Facts()
Memory = dict[str, list[tuple[int, int]]]
"""By process: when, in ns, and how many bytes were resident."""
GATEWAY = "gateway"
"""How a worker calls itself there; of several it is `gateway 1`."""
Spot = tuple[int, int]
"""A replica, and the id of one of its steps."""


class Evidence(msgspec.Struct, kw_only=True):
    """A stretch of time of a system."""

    window_ns: int = 0
    requests: list[RequestRecord] = []  # that ended in it, newest first
    mean_of: int = 0  # so many requests stand there as one, their mean, which has no tail; 0: all are there themselves
    totals: StepTotals = msgspec.field(default_factory=StepTotals)  # of all replicas
    steps: dict[Spot, StepRecord] = {}  # those that are still remembered
    names: dict[tuple[int, int], str] = {}  # of sequences that those served, by a replica and its number of each
    memory: Memory = {}
    pressure: dict[str, float] = {}  # by resource, the share of it in which something on this machine waited for that
    starts: int = 0  # engines that came, or came back, in it
    facts: Facts = UNKNOWN
    in_flight_ns: list[int] = []  # how long those have been there that want tokens and have not ended
    workers_silent: list[int] = []  # workers of the gateway whose requests are missing: they did not answer


def facts_of(details: Mapping[str, str], *, weights: str = "", kv_slots: int | None = None) -> Facts:
    """From what an engine says of itself, as `/health` shows it."""
    return Facts(
        tokens_step_max=int(step_max) if (step_max := details.get("tokens_step_max", "")).isdecimal() else None,
        prefix_cache={"on": True, "off": False}.get(details.get("prefix_cache", "")),
        kv_slots=kv_slots,
        weights=weights,
        why_torch=details.get("no_native_kernels", ""),
    )


def facts_together(several: Iterable[Facts]) -> Facts:
    """Of all replicas, which are set up alike."""
    found = list(several)
    if not found:
        return UNKNOWN
    slots = sum(one.kv_slots or 0 for one in found)
    return msgspec.structs.replace(found[0], replicas=len(found), kv_slots=slots or None)
