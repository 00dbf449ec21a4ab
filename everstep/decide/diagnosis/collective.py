"""Who is missing from a collective, by what the NCCL watchdog and its relatives print.

Counters of one process group are compared between ranks: the one that has enqueued less than all
the others has not reached the collective in which they wait. Equal counters name nobody.

Not here: flight-recorder dumps (``flight``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from everstep.decide.diagnosis.hits import Item

START_UP_WORK_MAX = 10
"""The first few collectives of a job are barriers of its start-up."""

_NAMED = (
    re.compile(r"Ranks? (\d+)[\d, ]* failed to pass monitoredBarrier", re.IGNORECASE),
    re.compile(r"task:(\d+) heartbeat timeout"),
    re.compile(r"\brank (\d+) did not send (?:a |its )?heartbeat"),
    re.compile(r"[Mm]issing ranks?\b[^\d\[{(]{0,20}[\[{(]?(\d+)"),
    re.compile(
        r"rank (\d+) (?:has not|did not|never) (?:joined?|reach|call|enter|participat)",
        re.IGNORECASE,
    ),
)
_WORK = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+)")
_COUNTERS = re.compile(
    r"last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)"
)
_GROUP = re.compile(r"PG (?:ID )?(\S+)")


@dataclass(frozen=True, slots=True)
class Missing:
    """The rank that the others waited for."""

    rank: int
    item: Item
    why: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the watchdogs say together."""

    missing: Missing | None
    start_up: bool
    """All of it is the first barrier of the job: somebody prepares something for long."""


def waiting(items: Iterable[Item]) -> Waiting:
    """Read all lines of a job that speak of collectives."""
    enqueued: dict[str, dict[int, tuple[int, Item]]] = {}
    works: list[tuple[int, int, int | None, Item]] = []
    for item in items:
        for pattern in _NAMED:
            found = pattern.search(item.text)
            if found is not None:
                named = Missing(int(found[1]), item, "the library names the rank that was missing")
                return Waiting(named, start_up=False)
        rank = item.mentioned if item.mentioned is not None else item.rank
        if (counters := _COUNTERS.search(item.text)) is not None and rank is not None:
            group = _GROUP.search(item.text)
            known = enqueued.setdefault(group[1] if group else "", {})
            known.setdefault(rank, (int(counters[1]), item))
        if (work := _WORK.search(item.text)) is not None:
            works.append((int(work[1]), int(work[3]), rank, item))
    behind = _behind(enqueued)
    if behind is not None:
        return Waiting(behind, start_up=False)
    return _start_up(works)


def _behind(enqueued: dict[str, dict[int, tuple[int, Item]]]) -> Missing | None:
    for counts in enqueued.values():
        ordered = sorted((count, rank) for rank, (count, _) in counts.items())
        if len(ordered) >= 3 and ordered[0][0] < ordered[1][0]:
            count, rank = ordered[0]
            why = f"rank {rank} had enqueued work {count}, all others more"
            return Missing(rank, counts[rank][1], why)
    return None


def _start_up(works: list[tuple[int, int, int | None, Item]]) -> Waiting:
    if not works or any(
        number > START_UP_WORK_MAX or elements > 1 for number, elements, _, _ in works
    ):
        return Waiting(None, start_up=False)
    complaining = {rank for _, _, rank, _ in works if rank is not None}
    if not complaining or 0 in complaining:
        return Waiting(None, start_up=True)
    why = "the others wait in the first barrier of the job, which rank 0 has not reached"
    return Waiting(Missing(0, works[0][3], why), start_up=True)
