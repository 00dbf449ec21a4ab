"""Jobs: entering them, their phase, their end, and their code versions.

A job's name is its id for ever: a second launch under a name that has ended is refused with the
reason, one under a name that is running finds what is there.

Not here: runs (``runs``) and incidents (``incidents``).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import func
from sqlmodel import Session, col, select

from everstep.decide.words import FINAL_PHASES, JobPhase, RunOutcome, RunPhase
from everstep.ledger import tables as t
from everstep.ledger.base import (
    Part,
    end_lease,
    has_ended,
    live_leases,
    mark_phase,
    require_job,
    require_run,
)
from everstep.ledger.database import FLEET, lock_of
from everstep.ledger.errors import LedgerConflict
from everstep.ledger.policies import remember
from everstep.ledger.runs import close, live_run, run_open_now
from everstep.ledger.views import CodeVersionRow, JobRow
from everstep.spec.messages import CloseJob, RecordProgress, RegisteredJob, RegisterJob
from everstep.spec.policy import PolicySnapshot

_OUTCOMES = {
    JobPhase.SUCCEEDED: RunOutcome.SUCCEEDED,
    JobPhase.FAILED: RunOutcome.FAILED,
    JobPhase.CANCELLED: RunOutcome.STOPPED,
}
_SAFE_TO_CHANGE = frozenset({"policy", "labels"})
"""Parts of a spec that do not matter to a run that is adopted."""


class Jobs(Part):
    """The life of a job, without its runs."""

    def register_job(
        self, request: RegisterJob, policy: PolicySnapshot, *, now: datetime
    ) -> RegisteredJob:
        """Enter a job, or find it; ``problem`` says why it may not start."""
        return self._database.write(
            lambda session: _register(session, request, policy, now),
            locks=[
                FLEET,
                lock_of("job", request.job_id),
                lock_of("policy", policy.hash),
            ],
        )

    def record_progress(self, request: RecordProgress) -> None:
        """Store boundaries of runs, the job's phase and its code version.

        A word that comes late (from a controller that was frozen) never undoes a newer one:
        boundaries are written once, and a phase holds against an older one.

        Raises:
            LedgerConflict: the job or a run is unknown.
        """
        self._database.write(
            lambda session: _record(session, request),
            locks=[
                lock_of("job", request.job_id),
                *(lock_of("run", phase.run_id) for phase in request.phases),
            ],
        )

    def close_job(self, request: CloseJob) -> None:
        """Mark a job ended, close what it has open, give its machines back; the first word holds.

        Raises:
            LedgerConflict: the job is unknown, or the phase is not a final one.
        """
        self._database.write(
            lambda session: _close(session, request),
            locks=[FLEET, lock_of("job", request.job_id)],
            durable=True,
        )

    def record_code_version(
        self,
        job_id: str,
        code_version: str,
        *,
        now: datetime,
        source: str | None = None,
        path: str | None = None,
        author: str = "",
        reason: str = "",
    ) -> bool:
        """Enter a code version of a job; False when it is there already (nothing is changed).

        Raises:
            LedgerConflict: the job is unknown.
        """
        entry = {"source": source, "path": path, "author": author, "reason": reason}
        return self._database.write(
            lambda session: _record_code(session, job_id, code_version, now, entry),
            locks=[lock_of("job", job_id)],
        )

    def code_versions(self, job_id: str) -> list[CodeVersionRow]:
        """The job's code versions, oldest first."""
        query = (
            select(t.CodeVersion)
            .where(t.CodeVersion.job_id == job_id)
            .order_by(col(t.CodeVersion.recorded_at), t.CodeVersion.code_version)
        )
        return self._database.read(
            lambda session: [CodeVersionRow.model_validate(row) for row in session.exec(query)]
        )

    def jobs(self) -> list[JobRow]:
        """All jobs, newest first."""
        return self._database.read(lambda session: _jobs(session, None))

    def job(self, job_id: str) -> JobRow | None:
        """One job, or None when this ledger does not know it."""
        return next(
            iter(self._database.read(lambda session: _jobs(session, job_id))),
            None,
        )


def _register(
    session: Session, request: RegisterJob, policy: PolicySnapshot, now: datetime
) -> RegisteredJob:
    remember(session, policy, now)
    job = session.get(t.Job, request.job_id)
    spec = request.spec.model_dump(mode="json")
    problem, live = None, None
    if job is None:
        job = t.Job(
            job_id=request.job_id,
            workflow_id=request.workflow_id,
            temporal_run_id=request.temporal_run_id,
            spec=spec,
            policy_hash=policy.hash,
            phase=JobPhase.VALIDATING,
            phase_at=now,
            created_at=now,
        )
    else:
        live = live_run(session, request.job_id)
        problem = _problem(job, request, spec, has_live_run=live is not None)
        if problem is None:
            job.temporal_run_id, job.policy_hash, job.spec = (
                request.temporal_run_id,
                policy.hash,
                spec,
            )
    session.add(job)
    highest = select(func.max(t.Incident.number)).where(t.Incident.job_id == request.job_id)
    return RegisteredJob(
        policy=policy,
        live_run=live if problem is None else None,
        incidents_total=session.exec(highest).one() or 0,
        created_at=job.created_at,
        problem=problem,
    )


def _problem(
    job: t.Job, request: RegisterJob, spec: dict[str, Any], *, has_live_run: bool
) -> str | None:
    """Why the job may not start under this name; None when it may."""
    if has_ended(job):
        ended = f" at {job.ended_at.isoformat(timespec='seconds')}" if job.ended_at else ""
        return (
            f"job {job.job_id} has ended already (it {_ENDED[JobPhase(job.phase)]}{ended}); "
            "launch it under a new name"
        )
    if job.workflow_id != request.workflow_id:
        return (
            f"job {job.job_id} belongs to workflow {job.workflow_id}; "
            "launch under a new name, or cancel that one first"
        )
    if has_live_run:
        changed = sorted(
            key
            for key in (spec.keys() | job.spec.keys()) - _SAFE_TO_CHANGE
            if spec.get(key) != job.spec.get(key)
        )
        if changed:
            return (
                f"job {job.job_id} has a live run with another spec (changed: "
                f"{', '.join(changed)}); adopt it with `everstep adopt {job.job_id}`, "
                "or launch under a new name"
            )
    return None


_ENDED = {
    JobPhase.SUCCEEDED: "succeeded",
    JobPhase.FAILED: "failed",
    JobPhase.CANCELLED: "was cancelled",
}


def _record(session: Session, request: RecordProgress) -> None:
    job = require_job(session, request.job_id)
    for mark in request.phases:
        run = require_run(session, mark.run_id)
        mark_phase(session, mark.run_id, mark.phase, mark.at, mark.step)
        if mark.phase is RunPhase.START_COMMANDED and request.code_version is not None:
            # The first run is opened before its code version has a name.
            run.code_version = request.code_version
            session.add(run)
    if has_ended(job):
        return
    at = request.at or max((mark.at for mark in request.phases), default=job.phase_at)
    if at >= job.phase_at and request.phase not in FINAL_PHASES:
        job.phase, job.phase_at = request.phase, at
        if request.code_version is not None:
            job.code_version = request.code_version
        session.add(job)


def _close(session: Session, request: CloseJob) -> None:
    if request.phase not in FINAL_PHASES:
        raise LedgerConflict(f"job {request.job_id}: {request.phase} is not the end of a job")
    job = require_job(session, request.job_id)
    if has_ended(job):
        return
    job.phase, job.phase_at, job.reason = request.phase, request.closed_at, request.reason
    job.ended_at, job.ettr = request.closed_at, request.ettr
    session.add(job)
    run = run_open_now(session, request.job_id)
    if run is not None:
        close(session, run, _OUTCOMES[request.phase], request.closed_at)
    for _, lease in sorted(live_leases(session, job_id=request.job_id).items()):
        end_lease(session, lease, at=request.closed_at, reason=f"job {request.phase}")


def _record_code(
    session: Session, job_id: str, code_version: str, now: datetime, entry: dict[str, Any]
) -> bool:
    require_job(session, job_id)
    if session.get(t.CodeVersion, (job_id, code_version)) is not None:
        return False
    session.add(t.CodeVersion(job_id=job_id, code_version=code_version, recorded_at=now, **entry))
    return True


def _jobs(session: Session, job_id: str | None) -> list[JobRow]:
    query = select(t.Job).order_by(col(t.Job.created_at).desc(), t.Job.job_id)
    runs = select(t.Run.job_id, func.count()).group_by(t.Run.job_id)
    incidents = select(t.Incident.job_id, func.count()).group_by(col(t.Incident.job_id))
    if job_id is not None:
        query = query.where(t.Job.job_id == job_id)
        runs = runs.where(t.Run.job_id == job_id)
        incidents = incidents.where(t.Incident.job_id == job_id)
    run_counts, incident_counts = (
        dict(session.exec(runs).all()),
        dict(session.exec(incidents).all()),
    )
    held: dict[str, list[str]] = {}
    for machine_id, lease in sorted(live_leases(session, job_id=job_id).items()):
        held.setdefault(lease.job_id, []).append(machine_id)
    return [
        JobRow.model_validate(job).model_copy(
            update={
                "runs_total": run_counts.get(job.job_id, 0),
                "incidents_total": incident_counts.get(job.job_id, 0),
                "machines": tuple(held.get(job.job_id, ())),
            }
        )
        for job in session.exec(query)
    ]
