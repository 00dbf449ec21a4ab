"""Runs: claiming machines, the generation, the restore point, and how a run ended.

``open_run`` is the transaction that everything else rests on: it finds machines, closes what the
job had open, hands out the next generation and leases the machines, or does none of it. Its answer
is stored under the request's key, so a repeat (a controller that died after the commit, or one
that was frozen and thaws) gets the same answer and changes nothing.

Not here: the choice of machines itself (``placing``), which is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import structlog
from pydantic import TypeAdapter, ValidationError
from sqlmodel import Session, col, select

from everstep.decide.restore import CheckpointId, LineageEntry
from everstep.decide.words import RunOutcome, RunPhase
from everstep.ledger import tables as t
from everstep.ledger.base import (
    Part,
    end_lease,
    has_ended,
    live_blocks,
    live_leases,
    mark_phase,
    newest_run,
    require_job,
    require_run,
)
from everstep.ledger.database import FLEET, lock_of
from everstep.ledger.errors import LedgerConflict
from everstep.ledger.placing import Candidate, place
from everstep.ledger.views import PhaseMark, RunRow
from everstep.spec.agent_api import RestorePointPlan
from everstep.spec.base import Duration
from everstep.spec.messages import CloseRun, LiveRun, MachineRef, OpenedRun, OpenRun

log = structlog.get_logger(__name__)

REGISTRATIONS_MISSED_MAX = 4
"""A machine that has missed more registrations than this in a row is not leased."""
REGISTER_INTERVAL_FALLBACK = timedelta(seconds=5)
_DURATION = TypeAdapter(Duration)
_PHASE_ORDER = {phase: position for position, phase in enumerate(RunPhase)}


class Runs(Part):
    """Opening, closing and reading runs."""

    def open_run(self, request: OpenRun, *, now: datetime | None = None) -> OpenedRun:
        """Claim machines and open the next run; all or nothing.

        A kept machine that is not blocked keeps its place. Other places are filled with machines
        that are idle, seen lately, big enough, not to be avoided and not told that they are
        evicted. When machines are missing, nothing is opened or leased. A run of the job that is
        still open is superseded.

        Args:
            request: what is wanted. Its instant is of the workflow's clock, which is the Temporal
                server's: no measure of when a machine was seen.
            now: by the clocks that machines' registrations are entered with, the controllers'.

        Raises:
            LedgerConflict: the job is unknown or has ended, or the request is older than one that
                was answered already (it comes from a controller that was frozen).
        """
        return self._database.write(
            lambda session: _open_run(session, request, now or request.opened_at),
            locks=[FLEET, lock_of("job", request.job_id)],
            durable=True,
        )

    def close_run(self, request: CloseRun) -> None:
        """Mark a run closed, once; ``release`` gives back the machines that are still its own.

        Raises:
            LedgerConflict: the run is unknown.
        """
        self._database.write(
            lambda session: _close_run(session, request),
            locks=[FLEET, lock_of("run", request.run_id)],
        )

    def set_restore_point(
        self, run_id: str, point: CheckpointId | None, *, path: str = ""
    ) -> RestorePointPlan | None:
        """Store where the run starts from (None: from scratch); returns what holds.

        The first choice holds: a second controller that repeats the choice gets the first one's.

        Raises:
            LedgerConflict: the run is unknown.
        """
        return self._database.write(
            lambda session: _set_restore_point(session, run_id, point, path),
            locks=[lock_of("run", run_id)],
        )

    def lineage(self, job_id: str) -> tuple[LineageEntry, ...]:
        """What each run of the job was started from, by generation.

        A run whose restore point was never chosen has not trained, so it is left out.
        """
        return self._database.read(lambda session: _lineage(session, job_id))

    def live_run(self, job_id: str) -> LiveRun | None:
        """The run of the job that is open, to be adopted; None when there is none."""
        return self._database.read(lambda session: live_run(session, job_id))

    def runs(self, job_id: str) -> list[RunRow]:
        """All runs of the job with machines and boundaries, by generation."""
        return self._database.read(lambda session: _runs(session, job_id))


# --- opening -----------------------------------------------------------------------------------


def _open_run(session: Session, request: OpenRun, now: datetime) -> OpenedRun:
    answered = session.exec(
        select(t.Claim).where(t.Claim.request_key == request.request_key)
    ).first()
    if answered is not None:
        if answered.job_id != request.job_id:
            raise LedgerConflict(
                f"request {request.request_key} was answered for job {answered.job_id}, "
                f"not for job {request.job_id}"
            )
        return OpenedRun.model_validate(answered.answer)
    job = require_job(session, request.job_id)
    if has_ended(job):
        raise LedgerConflict(f"job {job.job_id} has ended as {job.phase}: it opens no more runs")
    origin, number = _refuse_stale(session, request)
    previous = run_open_now(session, request.job_id)
    places = _choose(session, request, job, now)
    chosen = [machine_id for machine_id in places if machine_id is not None]
    if len(chosen) < request.machines_needed:
        if previous is None:
            _release_others(session, request, set(request.keep) - set(request.avoid))
        answer = OpenedRun(shortfall=request.machines_needed - len(chosen))
    else:
        if previous is not None:
            close(session, previous, RunOutcome.SUPERSEDED, request.opened_at)
        answer = _enter_run(session, request, chosen)
    session.add(
        t.Claim(
            request_key=request.request_key,
            job_id=request.job_id,
            origin=origin,
            number=number,
            answer=answer.model_dump(mode="json"),
            asked_at=request.opened_at,
        )
    )
    return answer


def _refuse_stale(session: Session, request: OpenRun) -> tuple[str, int]:
    """The parts of the request's key, when no later request was answered already.

    Raises:
        LedgerConflict: a later one was, or the key is not of the form ``<temporal run id>/<n>``.
    """
    origin, slash, number_text = request.request_key.rpartition("/")
    if not slash or not number_text.isdecimal():
        raise LedgerConflict(f"request key {request.request_key} is not <temporal run id>/<number>")
    number = int(number_text)
    mine = select(t.Claim).where(t.Claim.job_id == request.job_id)
    last = session.exec(mine.order_by(col(t.Claim.id).desc()).limit(1)).first()
    if last is not None:
        if last.origin == origin:
            stale = number < last.number
        else:
            stale = session.exec(mine.where(t.Claim.origin == origin).limit(1)).first() is not None
        if stale:
            raise LedgerConflict(
                f"request {request.request_key} is older than {last.request_key}, "
                f"which job {request.job_id} was answered already"
            )
    return origin, number


def _choose(session: Session, request: OpenRun, job: t.Job, now: datetime) -> list[str | None]:
    leases, blocks = live_leases(session), live_blocks(session)
    seen_since = now - REGISTRATIONS_MISSED_MAX * _register_interval(session, job)
    candidates = [
        Candidate(
            machine_id=machine.machine_id,
            slots=machine.slots,
            # Told by answers, not by instants: who releases and who registers have clocks of
            # their own, and the two transactions may cross.
            live=machine.last_seen_at >= seen_since and not machine.told_evicted,
            blocked=machine.machine_id in blocks,
            holder=leases[machine.machine_id].job_id if machine.machine_id in leases else None,
        )
        for machine in session.exec(select(t.Machine))
    ]
    return place(
        candidates,
        job_id=request.job_id,
        machines_needed=request.machines_needed,
        slots_needed=request.slots_needed,
        keep=request.keep,
        avoid=frozenset(request.avoid),
    )


def _register_interval(session: Session, job: t.Job) -> timedelta:
    """How often agents register, by the job's policy."""
    entry = session.get(t.PolicyEntry, job.policy_hash)
    try:
        written = entry.policy["machines"]["register_interval"] if entry is not None else None
        return _DURATION.validate_python(written)
    except (KeyError, TypeError, ValidationError):
        # A policy written by another version of Everstep: its shape is that version's business.
        return REGISTER_INTERVAL_FALLBACK


def _enter_run(session: Session, request: OpenRun, chosen: Sequence[str]) -> OpenedRun:
    newest = newest_run(session, request.job_id)
    generation = 1 if newest is None else newest.generation + 1
    run = t.Run(
        run_id=f"{request.job_id}.{generation}",
        job_id=request.job_id,
        generation=generation,
        start_reason=request.start_reason,
        code_version=request.code_version,
        incident_id=request.incident_id,
        opened_at=request.opened_at,
    )
    session.add(run)
    session.flush()
    _release_others(session, request, set(chosen))
    held = live_leases(session, job_id=request.job_id)
    refs = []
    for group_rank, machine_id in enumerate(chosen):
        machine = session.get_one(t.Machine, machine_id)
        refs.append(
            MachineRef(machine_id=machine_id, address=machine.address, group_rank=group_rank)
        )
        session.add(t.RunMachine(run_id=run.run_id, **refs[-1].model_dump()))
        lease = held.get(machine_id) or t.Lease(
            machine_id=machine_id,
            job_id=request.job_id,
            run_id=run.run_id,
            leased_at=request.opened_at,
        )
        lease.run_id = run.run_id
        session.add(lease)
    mark_phase(session, run.run_id, RunPhase.OPENED, request.opened_at)
    session.flush()
    return OpenedRun(run_id=run.run_id, generation=generation, machines=tuple(refs))


def _release_others(session: Session, request: OpenRun, wanted: set[str]) -> None:
    """Give back the job's machines that are not ``wanted`` any more."""
    for machine_id, lease in sorted(live_leases(session, job_id=request.job_id).items()):
        if machine_id not in wanted:
            end_lease(session, lease, at=request.opened_at, reason="not kept")
    session.flush()


# --- closing -----------------------------------------------------------------------------------


def run_open_now(session: Session, job_id: str) -> t.Run | None:
    """The job's open run within a transaction."""
    query = select(t.Run).where(t.Run.job_id == job_id, col(t.Run.closed_at).is_(None))
    return session.exec(query).first()


def close(session: Session, run: t.Run, outcome: RunOutcome, at: datetime) -> None:
    """Mark a run closed within a transaction; its leases stay."""
    run.closed_at, run.outcome = at, outcome
    session.add(run)
    session.flush()
    mark_phase(session, run.run_id, RunPhase.CLOSED, at, moves=True)


def _close_run(session: Session, request: CloseRun) -> None:
    run = require_run(session, request.run_id)
    # "Superseded" is the ledger's own guess, when the next run is opened before word of how this
    # one ended arrives; that word then holds.
    if run.closed_at is None or run.outcome == RunOutcome.SUPERSEDED:
        close(session, run, request.outcome, request.closed_at)
    if request.release:
        for _, lease in sorted(live_leases(session, job_id=run.job_id).items()):
            if lease.run_id == run.run_id:
                end_lease(session, lease, at=request.closed_at, reason="run closed")


# --- restore point and reads -------------------------------------------------------------------


def _set_restore_point(
    session: Session, run_id: str, point: CheckpointId | None, path: str
) -> RestorePointPlan | None:
    run = require_run(session, run_id)
    if not run.restore_chosen:
        run.restore_chosen = True
        if point is not None:
            run.restore_step, run.restore_generation = point.step, point.generation
            run.restore_path = path
        session.add(run)
    return _restore(run)


def _restore(run: t.Run) -> RestorePointPlan | None:
    if run.restore_step is None or run.restore_generation is None:
        return None
    return RestorePointPlan(
        step=run.restore_step, generation=run.restore_generation, path=run.restore_path or ""
    )


def _lineage(session: Session, job_id: str) -> tuple[LineageEntry, ...]:
    query = select(t.Run).where(t.Run.job_id == job_id, col(t.Run.restore_chosen).is_(True))
    marks = select(t.RunPhaseMark.run_id).where(t.RunPhaseMark.phase == RunPhase.FIRST_STEP)
    mine = select(t.Run.run_id).where(t.Run.job_id == job_id)
    stepped = set(session.exec(marks.where(col(t.RunPhaseMark.run_id).in_(mine))))
    return tuple(
        LineageEntry(
            generation=run.generation,
            restored=None
            if run.restore_step is None or run.restore_generation is None
            else CheckpointId(step=run.restore_step, generation=run.restore_generation),
            stepped=run.run_id in stepped,
        )
        for run in session.exec(query.order_by(col(t.Run.generation)))
    )


def live_run(session: Session, job_id: str) -> LiveRun | None:
    """The job's open run, as it is adopted, within a transaction."""
    run = run_open_now(session, job_id)
    if run is None:
        return None
    code = session.get(t.CodeVersion, (job_id, run.code_version))
    first_step = session.get(t.RunPhaseMark, (run.run_id, RunPhase.FIRST_STEP))
    return LiveRun(
        run_id=run.run_id,
        generation=run.generation,
        machines=_machines_of(session, [run.run_id]).get(run.run_id, ()),
        code_version=run.code_version,
        code_path=code.path if code is not None else None,
        restore=_restore(run),
        first_step_at=first_step.at if first_step is not None else None,
        opened_at=run.opened_at,
    )


def _machines_of(session: Session, run_ids: Sequence[str]) -> dict[str, tuple[MachineRef, ...]]:
    query = select(t.RunMachine).where(col(t.RunMachine.run_id).in_(run_ids))
    found: dict[str, list[MachineRef]] = {}
    for row in session.exec(query.order_by(col(t.RunMachine.group_rank))):
        found.setdefault(row.run_id, []).append(
            MachineRef(machine_id=row.machine_id, address=row.address, group_rank=row.group_rank)
        )
    return {run_id: tuple(refs) for run_id, refs in found.items()}


def _runs(session: Session, job_id: str) -> list[RunRow]:
    query = select(t.Run).where(t.Run.job_id == job_id).order_by(col(t.Run.generation))
    rows = list(session.exec(query))
    run_ids = [run.run_id for run in rows]
    machines = _machines_of(session, run_ids)
    marks: dict[str, list[PhaseMark]] = {}
    for mark in session.exec(select(t.RunPhaseMark).where(col(t.RunPhaseMark.run_id).in_(run_ids))):
        marks.setdefault(mark.run_id, []).append(PhaseMark.model_validate(mark))
    return [
        RunRow.model_validate(run).model_copy(
            update={
                "restore": _restore(run),
                "machines": machines.get(run.run_id, ()),
                "phases": tuple(
                    sorted(marks.get(run.run_id, []), key=lambda m: (m.at, _PHASE_ORDER[m.phase]))
                ),
            }
        )
        for run in rows
    ]
