"""Whose failure it is: the rank and the machines that a hit or an end is about.

Not here: which of them is the first failure (``verdict``), and prefixes of lines (``prefix``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from everstep.decide.diagnosis.case import Case, launcher_rank
from everstep.decide.diagnosis.hits import Hit
from everstep.decide.diagnosis.types import Signature
from everstep.decide.words import Symptom

_DEVICE = re.compile(r"\bGPU (\d{1,2})(?: has a total capacity|; [\d.]+ GiB total)")
_VICTIM = re.compile(r"[Kk]ill(?:ed)? process (\d+),? \(?([\w./:-]*)")
_PID = re.compile(r"\(pid: (\d+)\)")
_PYTHON = re.compile(r"^$|python|^pt_|torch|train|ray|^total-vm")
_NUMBERS = re.compile(r"\d+")
_ALIKE = frozenset(
    {
        Symptom.ENVIRONMENT_MISMATCH,
        Symptom.CONFIG_ERROR,
        Symptom.CHECKPOINT_ERROR,
        Symptom.DATA_ERROR,
        Symptom.USER_CODE,
    }
)
"""What several ranks meet at the same place; the first of them is chance."""


def rank_of(case: Case, hit: Hit) -> int | None:
    """The rank of a root: by its own line, by its twins', else by the launcher's word."""
    if _met_by_many(case, hit):
        return None
    if hit.rank is not None:
        return hit.rank
    twins = {h.rank for h in case.hits if h.signature.name == hit.signature.name}
    twins.discard(None)
    if len(twins) == 1:
        return twins.pop()
    named = launcher_rank(case)
    if named is not None:
        return named
    given = [end.rank for end in case.given if end.rank is not None and not end.stopped_by_us]
    if len(given) == 1:
        return given[0]
    return _rank_of_device(case, hit)


def _met_by_many(case: Case, hit: Hit) -> bool:
    if hit.signature.symptom not in _ALIKE:
        return False
    text = _NUMBERS.sub("#", hit.item.text)
    ranks = {
        h.rank
        for h in case.hits
        if h.signature.name == hit.signature.name and _NUMBERS.sub("#", h.item.text) == text
    }
    return len(ranks - {None}) > 1


def _rank_of_device(case: Case, hit: Hit) -> int | None:
    """On one machine the number of the GPU that a line names is the rank, by common custom."""
    device = _DEVICE.search(hit.item.text)
    machines = {item.machine for lines in case.items for item in lines} - {None}
    return int(device[1]) if device is not None and len(machines) <= 1 else None


def quiet_rank(case: Case, live: Sequence[Hit]) -> int | None:
    """The one rank that a launcher reports and that does not complain about others."""
    named = launcher_rank(case)
    complaining = {hit.rank for hit in live}
    return named if named is not None and named not in complaining else None


def machines_of(
    case: Case, hit: Hit | None, signature: Signature, rank: int | None, machine: str | None
) -> tuple[str, ...]:
    """Machines under suspicion: only where the fault is one of a machine, or a rank is named."""
    if not signature.machine_specific and rank is None:
        return ()
    if machine is not None:
        return (machine,)
    if hit is not None and hit.item.machine is not None:
        return (hit.item.machine,)
    named = [
        end.machine for end in case.ends if end.rank == rank and end.machine and rank is not None
    ]
    if named:
        return (named[0],)
    hosts = {
        item.machine
        for lines in case.items
        for item in lines
        if item.machine is not None and (rank is None or item.rank == rank)
    }
    return tuple(hosts) if len(hosts) == 1 else ()


def killed_another(case: Case, hit: Hit) -> bool:
    """The kernel's line names a process that none of the ends reported is about."""
    victim = _VICTIM.search(hit.item.text)
    if victim is None:
        return False
    ended = {m[1] for end in case.ends if (m := _PID.search(end.item.text)) is not None}
    known = bool(ended) and victim[1] not in ended
    return known or _PYTHON.search(victim[2]) is None
