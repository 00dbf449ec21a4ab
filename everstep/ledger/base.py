"""What the parts of the ledger share: the database, and a few lookups that many need.

Every public method of a part is one transaction. The work is a function of a session, so that it
can be run again from the start after a transient error.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlmodel import Session, col, select

from everstep.decide.words import FINAL_PHASES, JobPhase
from everstep.ledger import tables as t
from everstep.ledger.database import Database
from everstep.ledger.errors import LedgerConflict


class Part:
    """Base of the ledger's parts."""

    def __init__(self, database: Database) -> None:
        self._database = database


def require_job(session: Session, job_id: str) -> t.Job:
    """The job's row.

    Raises:
        LedgerConflict: there is none.
    """
    job = session.get(t.Job, job_id)
    if job is None:
        raise LedgerConflict(f"job {job_id}: not in this ledger")
    return job


def has_ended(job: t.Job) -> bool:
    """True when the job has reached a final phase."""
    return JobPhase(job.phase) in FINAL_PHASES


def require_run(session: Session, run_id: str) -> t.Run:
    """The run's row.

    Raises:
        LedgerConflict: there is none.
    """
    run = session.get(t.Run, run_id)
    if run is None:
        raise LedgerConflict(f"run {run_id}: not in this ledger")
    return run


def newest_run(session: Session, job_id: str) -> t.Run | None:
    """The job's run with the highest generation."""
    query = select(t.Run).where(t.Run.job_id == job_id).order_by(col(t.Run.generation).desc())
    return session.exec(query.limit(1)).first()


def live_leases(session: Session, *, job_id: str | None = None) -> dict[str, t.Lease]:
    """Live leases by machine, all or one job's."""
    query = select(t.Lease).where(col(t.Lease.ended_at).is_(None))
    if job_id is not None:
        query = query.where(t.Lease.job_id == job_id)
    return {lease.machine_id: lease for lease in session.exec(query)}


def live_blocks(session: Session, machine_ids: Sequence[str] | None = None) -> dict[str, t.Block]:
    """Live blocks by machine, all or those of ``machine_ids``."""
    query = select(t.Block).where(col(t.Block.released_at).is_(None))
    if machine_ids is not None:
        query = query.where(col(t.Block.machine_id).in_(machine_ids))
    return {block.machine_id: block for block in session.exec(query)}


def end_lease(session: Session, lease: t.Lease, *, at: datetime, reason: str) -> None:
    """Give the machine back."""
    lease.ended_at, lease.end_reason = at, reason
    session.add(lease)


def mark_phase(
    session: Session,
    run_id: str,
    phase: str,
    at: datetime,
    step: int | None = None,
    *,
    moves: bool = False,
) -> None:
    """Store one boundary of a run. The first word holds, unless this one ``moves`` it."""
    mark = session.get(t.RunPhaseMark, (run_id, phase))
    if mark is None:
        mark = t.RunPhaseMark(run_id=run_id, phase=phase, at=at, step=step)
    elif moves:
        mark.at = at
    session.add(mark)
