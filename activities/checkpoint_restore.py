"""Where a run starts from: fence first, then the newest whole checkpoint on the job's lineage.

The order matters. Once the fence is up, no older run can commit any more, so what is found then is
all there will ever be; without it a run that was cut off could commit behind our back. The choice
is stored in the ledger, and asking again gives the stored one.

A choice is for good: what a run was not started from is given up, and removed. So nothing is chosen
by what a file system does not show: a directory that has lost its fence is not the job's directory
(a mount is missing), and a checkpoint that cannot be read may be whole.

Not here: which checkpoints count (``everstep.decide.restore``), reading files
(``everstep.machine.checkpoints``), and loading (the trainer library, which verifies every byte).
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.clients import heartbeating, ledger_call
from activities.failpoints import after_effect
from activities.failures import one_line, permanent, temporary
from everstep.decide.restore import (
    CheckpointId,
    LineageEntry,
    in_doubt,
    newest_restorable,
    passed_over,
)
from everstep.machine import checkpoints
from everstep.spec import messages as m
from everstep.spec.agent_api import RestorePointPlan

VERIFY_BYTES_MAX = 256 * 1024 * 1024
"""Checkpoints up to this size are read whole before they are chosen (under a second), so that a
damaged one costs no run. Larger ones are verified by the ranks, each its own part, as they load,
and whole when a run was started from one and made no step."""
TRIES_MAX = 10
"""Tries, in half a minute, before a file system that does not answer counts."""
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

    def __init__(
        self,
        ledger: RestoreLedger,
        checkpoint_root: Path,
        *,
        verify_bytes_max: int = VERIFY_BYTES_MAX,
    ) -> None:
        self._ledger = ledger
        self._verify_bytes_max = verify_bytes_max
        self._root = checkpoint_root

    @activity.defn(name="choose_restore_point")
    async def choose_restore_point(self, request: m.ChooseRestorePoint) -> m.RestorePoint:
        """Fence older generations off and choose the newest complete checkpoint on the lineage."""
        async with heartbeating():
            lineage = await ledger_call(self._ledger.lineage, request.job_id)
            earlier = [entry for entry in lineage if entry.generation < request.generation]
            if earlier:
                await asyncio.to_thread(_check_history, self._directory(request))
            directory = await asyncio.to_thread(self._prepare, request)
            fence = await asyncio.to_thread(_raise_fence, directory, request.generation)
            if fence > request.generation:
                raise permanent(
                    f"{directory}: generation {fence} of job {request.job_id} has begun; "
                    f"generation {request.generation} is over"
                )
            choice = await asyncio.to_thread(
                _choose, directory, request, earlier, self._verify_bytes_max
            )
            _check_choice(directory, choice)
            chosen = await ledger_call(self._store, request.run_id, choice.plan)
        after_effect()
        log.info(
            "restore point chosen",
            job_id=request.job_id,
            run_id=request.run_id,
            step=chosen.step if chosen else None,
            path=chosen.path if chosen else None,
            skipped=choice.skipped,
        )
        return m.RestorePoint(restore=chosen, checkpoint_dir=str(directory), skipped=choice.skipped)

    def _store(self, run_id: str, wanted: RestorePointPlan | None) -> RestorePointPlan | None:
        if wanted is None:
            return self._ledger.set_restore_point(run_id, None)
        point = CheckpointId(step=wanted.step, generation=wanted.generation)
        return self._ledger.set_restore_point(run_id, point, path=wanted.path)

    def _directory(self, request: m.ChooseRestorePoint) -> Path:
        if request.checkpoint is None:
            return self._root / request.job_id
        return Path(request.checkpoint)

    def _prepare(self, request: m.ChooseRestorePoint) -> Path:
        """The job's directory, made if it is not there yet (its parent has to be)."""
        directory = self._directory(request)
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
            what = (
                "the checkpoint root (--checkpoint-root)"
                if request.checkpoint is None
                else "the parent of the job's checkpoint.dir"
            )
            raise permanent(
                f"{parent}: is not there; {what} must be a directory that the controllers and all "
                "machines share"
            ) from None
        except OSError as error:
            raise permanent(f"{directory}: cannot be made: {error.strerror}") from None
        return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    plan: RestorePointPlan | None
    skipped: tuple[str, ...]
    """One line for each newer checkpoint that was passed over."""
    unreadable: tuple[str, ...]
    """Those of them that could not be read, and would have been the choice."""


def _check_history(directory: Path) -> None:
    """Earlier runs of the job were fenced in its directory: without a fence it is not that one."""
    try:
        if checkpoints.is_fenced(directory):
            return
        problem = "is not the directory that earlier runs of the job have used (it has no FENCE)"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise _not_now(
        f"{directory}: {problem}; is the shared file system mounted? To train on from another "
        "place, copy the whole directory there; to begin anew, launch under a new name"
    )


def _check_choice(directory: Path, choice: _Choice) -> None:
    """A checkpoint that cannot be read is waited for, and never begun anew without."""
    if not choice.unreadable:
        return
    problem = f"{directory}: {choice.unreadable[0]}"
    if choice.plan is None or activity.info().attempt < TRIES_MAX:
        raise _not_now(problem)
    log.warning("a newer checkpoint is given up", reason=problem)


def _not_now(problem: str) -> ApplicationError:
    return permanent(problem) if activity.info().attempt >= TRIES_MAX else temporary(problem)


def _raise_fence(directory: Path, generation: int) -> int:
    try:
        return checkpoints.raise_fence(directory, generation)
    except OSError as error:
        raise permanent(
            f"{directory}: cannot be written, so older runs cannot be fenced off: {error.strerror}"
        ) from None


def _choose(
    directory: Path,
    request: m.ChooseRestorePoint,
    earlier: Sequence[LineageEntry],
    verify_bytes_max: int,
) -> _Choice:
    """The newest good checkpoint on the lineage of ``earlier`` runs."""
    try:
        found = checkpoints.scan(directory, job_id=request.job_id)
    except OSError as error:
        raise permanent(f"{directory}: cannot be read: {error.strerror}") from None
    before = request.before_step
    unreadable = {
        i: line
        for i, line in found.unreadable.items()
        if passed_over(i, earlier, before_step=before) is None
    }
    candidates = {checkpoint.id: checkpoint for checkpoint in found.complete}
    skipped = [
        f"{checkpoints.folder_name(identity)}: {reason}"
        for identity in candidates
        if (reason := passed_over(identity, earlier, before_step=before)) is not None
    ]
    skipped += found.skipped
    while (identity := newest_restorable(candidates, earlier, before_step=before)) is not None:
        checkpoint = candidates[identity]
        problem = None
        try:
            if checkpoint.total_bytes <= verify_bytes_max or in_doubt(identity, earlier):
                problem = checkpoints.damage(checkpoint)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
            unreadable[identity] = f"{checkpoints.folder_name(identity)}: {problem}"
        if problem is None:
            plan = RestorePointPlan(
                step=identity.step, generation=identity.generation, path=checkpoint.path
            )
            missed = [line for i, line in unreadable.items() if i > identity]
            return _Choice(plan=plan, skipped=_bounded(skipped), unreadable=_bounded(missed))
        skipped.append(f"{checkpoints.folder_name(identity)}: {problem}")
        del candidates[identity]
    return _Choice(
        plan=None, skipped=_bounded(skipped), unreadable=_bounded(list(unreadable.values()))
    )


def _bounded(lines: list[str]) -> tuple[str, ...]:
    kept = [one_line(line) for line in lines[:SKIPPED_MAX]]
    if len(lines) > SKIPPED_MAX:
        kept.append(f"and {len(lines) - SKIPPED_MAX} more")
    return tuple(kept)
