"""Which checkpoint may a run start from: the newest complete one on the job's own line of history.

A run that was cut off may go on committing checkpoints after its replacement has started (the file
system may be the one thing it can still reach). Those must never be restored: a checkpoint counts
only if it lies on the *lineage*: each run may contribute steps after the one it was restored from
and up to the one its successor was restored from.

Not here: reading the checkpoint directory (``everstep.machine.checkpoints``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CheckpointId:
    """One complete checkpoint: the step it holds the state after, and the run that wrote it."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEntry:
    """One run of the job and what it was started from (None: from scratch)."""

    generation: int
    restored: CheckpointId | None
    stepped: bool = True
    """Whether it is known to have made a step: its starting point was good then."""


def in_doubt(candidate: CheckpointId, lineage: Sequence[LineageEntry]) -> bool:
    """True when the newest run was started from ``candidate`` and made no step.

    Its ranks may have failed because they could not load it, so it is looked at closely before
    another run is started from it.
    """
    newest = max(lineage, key=lambda e: e.generation, default=None)
    return newest is not None and newest.restored == candidate and not newest.stepped


def on_lineage(candidate: CheckpointId, lineage: Sequence[LineageEntry]) -> bool:
    """True when ``candidate`` belongs to the history that the newest run continues.

    Args:
        candidate: a complete checkpoint found in storage.
        lineage: all runs of the job that chose where to start, in any order.
    """
    runs = sorted(lineage, key=lambda e: e.generation)
    position = next((i for i, e in enumerate(runs) if e.generation == candidate.generation), None)
    if position is None:
        return False
    own = runs[position].restored
    if own is not None and candidate.step < own.step:
        return False  # a run adds steps after its own starting point, or that point once more
    for later in runs[position + 1 :]:
        # A later run that started from scratch, or from an earlier point, abandoned the candidate.
        if later.restored is None or later.restored < candidate:
            return False
    return True


def passed_over(
    candidate: CheckpointId, lineage: Sequence[LineageEntry], *, before_step: int | None = None
) -> str | None:
    """Why a run must not start from ``candidate``; None when it may.

    Args:
        candidate: a checkpoint found in storage.
        lineage: all runs of the job that chose where to start, in any order.
        before_step: the first step whose loss or gradients were not finite: what holds the state
            after it or after a later one is spoilt. None: no step is in doubt. Once a run has
            started before it, the spoilt ones are off the lineage for good.
    """
    if not on_lineage(candidate, lineage):
        return "belongs to a line of the job that was given up"
    if before_step is not None and candidate.step >= before_step:
        return f"not before step {before_step}, whose loss or gradients were not finite"
    return None


def newest_restorable(
    complete: Iterable[CheckpointId],
    lineage: Sequence[LineageEntry],
    *,
    before_step: int | None = None,
) -> CheckpointId | None:
    """The newest complete checkpoint that is not ``passed_over``; None to start from scratch."""
    return max(
        (c for c in complete if passed_over(c, lineage, before_step=before_step) is None),
        default=None,
    )
