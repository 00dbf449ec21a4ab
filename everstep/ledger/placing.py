"""Which machines a run gets: pure, so that the choice is the same for every controller.

Machines that are kept stay in their places (group ranks), since moving a rank to another machine
costs its local state. Empty places are filled in sorted order from machines that nobody holds.

Not here: reading machines from the ledger and writing leases (``runs``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the choice depends on."""

    machine_id: str
    slots: int
    live: bool
    """Its agent has registered lately, and does not take itself for evicted."""
    blocked: bool
    holder: str | None
    """The job that leases it."""


def place(
    candidates: Iterable[Candidate],
    *,
    job_id: str,
    machines_needed: int,
    slots_needed: int,
    keep: Sequence[str],
    avoid: Collection[str],
) -> list[str | None]:
    """The machine for each group rank, None where none is left.

    A kept machine that the job holds already need not be live: an agent that does not answer is
    unknown, not faulty. Machines that are taken anew have to be.
    """
    usable = {
        candidate.machine_id: candidate
        for candidate in candidates
        if candidate.machine_id not in avoid
        and not candidate.blocked
        and candidate.slots >= slots_needed
        and candidate.holder in (None, job_id)
        and (candidate.live or (candidate.holder == job_id and candidate.machine_id in keep))
    }
    places: list[str | None] = []
    for rank in range(machines_needed):
        kept = keep[rank] if rank < len(keep) else None
        places.append(kept if kept in usable and kept not in places else None)
    # The job's own machines first (their caches are warm), then the smallest that is big enough.
    free = sorted(
        (machine for machine in usable.values() if machine.machine_id not in places),
        key=lambda c: (c.holder != job_id, c.slots, c.machine_id),
    )
    fill = iter(free)
    return [
        kept if kept is not None else next((c.machine_id for c in fill), None) for kept in places
    ]
