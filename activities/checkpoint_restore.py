"""Where a run starts from: fence first, then the newest whole checkpoint on the job's lineage.

The order matters. Once the fence is up, no older run can commit any more, so what is found then is
all there will ever be; without it a run that was cut off could commit behind our back. The choice
is stored in the ledger, and asking again gives the stored one.

Not here: which checkpoints count (``everstep.decide.restore``), reading files
(``everstep.machine.checkpoints``), and loading (the trainer library, which verifies every byte).
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import structlog
from temporalio import activity

from activities.clients import heartbeating, ledger_call
from activities.failpoints import after_effect
from activities.failures import one_line, permanent
from everstep.decide.restore import CheckpointId, LineageEntry, newest_restorable, on_lineage
from everstep.machine import checkpoints
from everstep.spec import messages as m
from everstep.spec.agent_api import RestorePointPlan

VERIFY_BYTES_MAX = 256 * 1024 * 1024
"""Checkpoints up to this size are read whole before they are chosen (under a second), so that a
damaged one costs no run. Larger ones are verified by the ranks, each its own part, as they load."""
SKIPPED_MAX = 20
"""Lines about checkpoints that were not used; the result enters Temporal's history."""

log = structlog.get_logger(__name__)


class RestoreLedger(Protocol):
    """What choosing needs of the ledger."""

    def lineage(self, job_id: str, /) -> Sequence[LineageEntry]:
        """What each run was started from."""

    def set_restore_point(
        self, run_id: str, point: CheckpointId | None, *, path: str = ...
    ) -> RestorePointPlan | None:
        """Store the choice; the first one holds and is returned."""


class CheckpointRestore:
    """The activity of this file."""

    def __init__(self, ledger: RestoreLedger, checkpoint_root: Path) -> None:
        self._ledger = ledger
        self._root = checkpoint_root

    @activity.defn(name="choose_restore_point")
    async def choose_restore_point(self, request: m.ChooseRestorePoint) -> m.RestorePoint:
        """Fence older generations off and choose the newest complete checkpoint on the lineage."""
        async with heartbeating():
            directory = await asyncio.to_thread(self._prepare, request)
            fence = await asyncio.to_thread(_raise_fence, directory, request.generation)
            if fence > request.generation:
                raise permanent(
                    f"{directory}: generation {fence} of job {request.job_id} has begun; "
                    f"generation {request.generation} is over"
                )
            lineage = await ledger_call(self._ledger.lineage, request.job_id)
            wanted, skipped = await asyncio.to_thread(_choose, directory, request, lineage)
            chosen = await ledger_call(self._store, request.run_id, wanted)
        after_effect()
        log.info(
            "restore point chosen",
            job_id=request.job_id,
            run_id=request.run_id,
            step=chosen.step if chosen else None,
            path=chosen.path if chosen else None,
            skipped=skipped,
        )
        return m.RestorePoint(restore=chosen, checkpoint_dir=str(directory), skipped=skipped)

    def _store(self, run_id: str, wanted: RestorePointPlan | None) -> RestorePointPlan | None:
        if wanted is None:
            return self._ledger.set_restore_point(run_id, None)
        point = CheckpointId(step=wanted.step, generation=wanted.generation)
        return self._ledger.set_restore_point(run_id, point, path=wanted.path)

    def _prepare(self, request: m.ChooseRestorePoint) -> Path:
        """The job's directory, made if it is not there yet (its parent has to be)."""
        if request.checkpoint is None:
            directory, what = self._root / request.job_id, "the checkpoint root (--checkpoint-root)"
        else:
            directory, what = Path(request.checkpoint), "the parent of the job's checkpoint.dir"
        parent = directory.parent
        try:
            if not directory.is_dir():
                # Made like its parent, so that whoever may write there (the ranks' user) may here.
                like = parent.stat()
                directory.mkdir(exist_ok=True)
                directory.chmod(stat.S_IMODE(like.st_mode))
                if os.geteuid() == 0:
                    os.chown(directory, like.st_uid, like.st_gid)
        except FileNotFoundError:
            raise permanent(
                f"{parent}: is not there; {what} must be a directory that the controllers and all "
                "machines share"
            ) from None
        except OSError as error:
            raise permanent(f"{directory}: cannot be made: {error.strerror}") from None
        return directory


def _raise_fence(directory: Path, generation: int) -> int:
    try:
        return checkpoints.raise_fence(directory, generation)
    except OSError as error:
        raise permanent(
            f"{directory}: cannot be written, so older runs cannot be fenced off: {error.strerror}"
        ) from None


def _choose(
    directory: Path, request: m.ChooseRestorePoint, lineage: Sequence[LineageEntry]
) -> tuple[RestorePointPlan | None, tuple[str, ...]]:
    """The newest good checkpoint, and one line for each newer one that was passed over."""
    try:
        found = checkpoints.scan(directory, job_id=request.job_id)
    except OSError as error:
        raise permanent(f"{directory}: cannot be read: {error.strerror}") from None
    earlier = [entry for entry in lineage if entry.generation < request.generation]
    candidates = {checkpoint.id: checkpoint for checkpoint in found.complete}
    skipped = [
        f"{checkpoints.folder_name(identity)}: belongs to a line of the job that was given up"
        for identity in candidates
        if not on_lineage(identity, earlier)
    ]
    skipped += found.skipped
    while (identity := newest_restorable(candidates, earlier)) is not None:
        checkpoint = candidates[identity]
        problem = None
        if checkpoint.total_bytes <= VERIFY_BYTES_MAX:
            problem = checkpoints.damage(checkpoint)
        if problem is None:
            plan = RestorePointPlan(
                step=identity.step, generation=identity.generation, path=checkpoint.path
            )
            return plan, _bounded(skipped)
        skipped.append(f"{checkpoints.folder_name(identity)}: {problem}")
        del candidates[identity]
    return None, _bounded(skipped)


def _bounded(lines: list[str]) -> tuple[str, ...]:
    kept = [one_line(line) for line in lines[:SKIPPED_MAX]]
    if len(lines) > SKIPPED_MAX:
        kept.append(f"and {len(lines) - SKIPPED_MAX} more")
    return tuple(kept)
