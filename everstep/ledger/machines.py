"""Machines: who is there, who has them, which are kept out.

A machine's state is never stored: it follows from its live lease and its live block, which the
database allows at most once each and never together.

Not here: leasing, which is part of opening a run (``runs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlmodel import Session, col, select

from everstep.ledger import tables as t
from everstep.ledger.base import (
    Part,
    end_lease,
    has_ended,
    live_blocks,
    live_leases,
    newest_run,
    require_job,
)
from everstep.ledger.database import FLEET, lock_of
from everstep.ledger.views import MachineRow, MachineStanding, MachineState
from everstep.spec.agent_api import Registration
from everstep.spec.messages import EvictedMachines, EvictMachines

log = structlog.get_logger(__name__)

NAMESAKE_SEEN_WITHIN = timedelta(seconds=60)
"""How long an older boot stays refused after the newer one was last seen (twelve registrations at
the default interval): longer than a restart, so that two agents with one id do not take turns."""


class Machines(Part):
    """Registration, eviction, release, and where agents are."""

    def register_machine(self, request: Registration, *, now: datetime) -> MachineStanding:
        """Enter a machine, or note that it is still there.

        The newest boot wins: when another agent registers under the same id, the one that was there
        before is refused from then on, as long as the newer one is seen.
        """
        return self._database.write(
            lambda session: _register(session, request, now),
            locks=[lock_of("machine", request.machine_id)],
        )

    def machine_locations(self, machine_ids: Sequence[str]) -> dict[str, str]:
        """URL of the agent of each machine that is registered; others are absent."""
        return self._database.read(
            lambda session: dict(
                session.exec(
                    select(t.Machine.machine_id, t.Machine.url).where(
                        col(t.Machine.machine_id).in_(list(machine_ids))
                    )
                ).all()
            )
        )

    def machines(self) -> list[MachineRow]:
        """All machines with their state, sorted by id."""
        return self._database.read(_machines)

    def evict(self, request: EvictMachines) -> EvictedMachines:
        """Take machines out of use and block them, each exactly once.

        A repeat answers with the first result and does nothing, even after the machine's release.
        ``already`` names machines that this request did not block, each with the reason: another
        incident did, or the request is stale (a newer run was opened, the job ended, another job
        has the machine), so that a controller that was frozen cannot evict a machine in use.

        Raises:
            LedgerConflict: the job is not in this ledger.
        """
        return self._database.write(
            lambda session: _evict(session, request), locks=[FLEET], durable=True
        )

    def release(self, machine_id: str, *, reason: str, by: str, now: datetime) -> bool:
        """Let an evicted machine back in; False when it was not evicted.

        It is leased again only after its next registration, whose answer tells the agent.
        """
        return self._database.write(
            lambda session: _release(session, machine_id, reason, by, now),
            locks=[FLEET],
            durable=True,
        )


def _register(session: Session, request: Registration, now: datetime) -> MachineStanding:
    machine = session.get(t.Machine, request.machine_id)
    if machine is None:
        machine = t.Machine(
            **_facts(request), machine_id=request.machine_id, first_seen_at=now, last_seen_at=now
        )
    elif (
        request.agent_boot_id == machine.replaced_boot_id
        and now - machine.last_seen_at < NAMESAKE_SEEN_WITHIN
    ):
        return MachineStanding(
            accepted=False,
            message=f"machine id {request.machine_id} is used by another agent ({machine.url}), "
            "which started later; give each machine an id of its own",
        )
    else:
        if request.agent_boot_id != machine.agent_boot_id:
            machine.replaced_boot_id = machine.agent_boot_id
        for name, value in _facts(request).items():
            setattr(machine, name, value)
        machine.last_seen_at = max(now, machine.last_seen_at)
    evicted = machine.told_evicted = bool(live_blocks(session, [request.machine_id]))
    session.add(machine)
    fences = {
        job_id: fence
        for job_id in sorted(request.jobs)
        if (fence := _fence(session, job_id, request.machine_id)) is not None
    }
    return MachineStanding(evicted=evicted, fences=fences)


def _facts(request: Registration) -> dict[str, Any]:
    return request.model_dump(
        include={"url", "address", "slots", "version", "labels", "agent_boot_id"}
    )


def _fence(session: Session, job_id: str, machine_id: str) -> int | None:
    """Lowest generation of the job that may run on the machine; None for a job we do not know."""
    run = newest_run(session, job_id)
    if run is None:
        return None
    query = select(t.Lease).where(
        t.Lease.run_id == run.run_id,
        t.Lease.machine_id == machine_id,
        col(t.Lease.ended_at).is_(None),
    )
    may_run = run.closed_at is None and session.exec(query).first() is not None
    return run.generation if may_run else run.generation + 1


def _machines(session: Session) -> list[MachineRow]:
    leases, blocks = live_leases(session), live_blocks(session)
    rows = []
    for machine in session.exec(select(t.Machine).order_by(t.Machine.machine_id)):
        row = MachineRow.model_validate(machine)
        lease, block = leases.get(machine.machine_id), blocks.get(machine.machine_id)
        update: dict[str, object] = {}
        if lease is not None:
            update |= {"state": MachineState.LEASED, "job_id": lease.job_id, "run_id": lease.run_id}
        if block is not None:
            update |= {
                "state": MachineState.EVICTED,
                "blocked_reason": block.reason,
                "blocked_by": block.incident_id,
                "blocked_at": block.blocked_at,
            }
        rows.append(row.model_copy(update=update))
    return rows


def _evict(session: Session, request: EvictMachines) -> EvictedMachines:
    job = require_job(session, request.job_id)
    newest = newest_run(session, request.job_id)
    stale = None
    if has_ended(job):
        stale = f"job {job.job_id} has ended"
    elif newest is not None and newest.generation > request.generation:
        stale = f"run {newest.generation} was opened after this was decided"
    results = {
        machine_id: _evict_one(session, request, machine_id, stale)
        for machine_id in sorted(set(request.machines))
    }
    return EvictedMachines(
        evicted=tuple(name for name, already in results.items() if already is None),
        already={name: already for name, already in results.items() if already is not None},
    )


def _evict_one(
    session: Session, request: EvictMachines, machine_id: str, stale: str | None
) -> str | None:
    """None when this request blocks (or once blocked) the machine, else why it does not."""
    key = (request.incident_id, request.step, machine_id, request.generation)
    done = session.get(t.ActionEntry, key)
    if done is not None:
        answer: str | None = done.result["already"]
        return answer
    already = _why_not(session, request, machine_id, stale)
    if already is None:
        lease = live_leases(session).get(machine_id)
        if lease is not None:
            end_lease(session, lease, at=request.decided_at, reason="evicted")
            session.flush()  # before the block: no machine is ever both leased and blocked
        session.add(
            t.Block(
                machine_id=machine_id,
                job_id=request.job_id,
                incident_id=request.incident_id,
                reason=request.reason,
                blocked_at=request.decided_at,
            )
        )
    else:
        log.warning(
            "machine not evicted",
            machine_id=machine_id,
            reason=already,
            job_id=request.job_id,
            incident_id=request.incident_id,
        )
    session.add(
        t.ActionEntry(
            incident_id=request.incident_id,
            step=request.step,
            target=machine_id,
            generation=request.generation,
            kind="evict",
            job_id=request.job_id,
            result={"already": already},
            at=request.decided_at,
        )
    )
    session.flush()
    return already


def _why_not(
    session: Session, request: EvictMachines, machine_id: str, stale: str | None
) -> str | None:
    """The look at the current state before acting."""
    if session.get(t.Machine, machine_id) is None:
        return "is not a registered machine"
    block = live_blocks(session, [machine_id]).get(machine_id)
    if block is not None:
        return f"evicted before by incident {block.incident_id}: {block.reason}"[:600]
    if stale is not None:
        return stale
    lease = live_leases(session).get(machine_id)
    if lease is not None and lease.job_id != request.job_id:
        return f"leased to job {lease.job_id} since {lease.leased_at.isoformat()}"
    return None


def _release(session: Session, machine_id: str, reason: str, by: str, now: datetime) -> bool:
    block = live_blocks(session, [machine_id]).get(machine_id)
    if block is None:
        return False
    block.released_at, block.released_by, block.release_reason = now, by, reason
    session.add(block)
    return True
