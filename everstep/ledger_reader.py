"""What commands read from the ledger: each function opens it, asks, and closes it.

Only reading: these run in a person's shell, beside controllers of possibly another version, so they
never create or migrate a database. Not here: how answers look (``everstep.render``,
``everstep.story``), and writing, which is the controllers' work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from everstep.errors import IncidentNotFound, JobNotFound, NotFound
from everstep.ledger import Ledger
from everstep.ledger.views import IncidentRow, JobRow, MachineRow, RunRow
from everstep.spec.job import JobSpec
from everstep.spec.messages import IncidentSummary, JobStatus

if TYPE_CHECKING:
    from everstep.story import Story


@contextmanager
def reading(url: str) -> Iterator[Ledger]:
    """The ledger, checked and closed again."""
    ledger = Ledger(url)
    try:
        ledger.check()
        yield ledger
    finally:
        ledger.close()


def machine_ids(url: str) -> set[str]:
    """Ids of all machines that have registered."""
    with reading(url) as ledger:
        return {row.machine_id for row in ledger.machines()}


def list_machines(url: str) -> list[MachineRow]:
    """All machines, by id."""
    with reading(url) as ledger:
        return sorted(ledger.machines(), key=lambda row: row.machine_id)


def list_jobs(url: str) -> list[JobRow]:
    """All jobs, newest first."""
    with reading(url) as ledger:
        return sorted(ledger.jobs(), key=lambda row: row.created_at, reverse=True)


def read_job(url: str, job_id: str) -> JobRow:
    """One job.

    Raises:
        JobNotFound: it is not in the ledger.
    """
    with reading(url) as ledger:
        return _job(ledger, job_id)


def read_job_spec(url: str, job_id: str) -> JobSpec:
    """The spec that a job was launched with."""
    return JobSpec.model_validate(read_job(url, job_id).spec)


def read_runs(url: str, job_id: str) -> list[RunRow]:
    """A job's runs, oldest first.

    Raises:
        JobNotFound: it is not in the ledger.
    """
    with reading(url) as ledger:
        _job(ledger, job_id)
        return sorted(ledger.runs(job_id), key=lambda run: run.generation)


def read_job_status(url: str, job_id: str) -> JobStatus:
    """What the ledger knows of where a job is: what its workflow would say, less the progress."""
    with reading(url) as ledger:
        job = _job(ledger, job_id)
        spec = JobSpec.model_validate(job.spec)
        newest = max(ledger.runs(job_id), key=lambda run: run.generation, default=None)
        incidents = sorted(ledger.incidents(job_id), key=lambda row: row.number, reverse=True)
    return JobStatus(
        job_id=job_id,
        phase=job.phase,
        reason=job.reason[:600],
        run_id=newest.run_id if newest else None,
        generation=newest.generation if newest else 0,
        code_version=job.code_version,
        machines=job.machines,
        world_size=spec.world_size,
        restored_step=newest.restore.step if newest and newest.restore else None,
        incidents_total=job.incidents_total,
        incidents=tuple(
            IncidentSummary(
                incident_id=row.incident_id,
                number=row.number,
                rounds=row.rounds_total,
                symptom=row.symptom,
                state=row.state,
                action="",
                reason=row.summary[:600],
                opened_at=row.opened_at,
            )
            for row in incidents[:10]
        ),
        ettr=job.ettr,
        created_at=job.created_at,
        policy_hash=job.policy_hash,
    )


def list_incidents(url: str, job_id: str | None = None) -> list[IncidentRow]:
    """Incidents of one job or of all, newest first.

    Raises:
        JobNotFound: the job is not in the ledger.
    """
    with reading(url) as ledger:
        if job_id is not None:
            _job(ledger, job_id)
        found = ledger.incidents(job_id)
    return sorted(found, key=lambda row: row.opened_at, reverse=True)


def read_story(url: str, incident_id: str) -> Story:
    """An incident with the runs around it.

    Raises:
        IncidentNotFound: it is not in the ledger.
    """
    from everstep.story import Story

    with reading(url) as ledger:
        incident = ledger.incident(incident_id)
        if incident is None:
            raise IncidentNotFound(incident_id)
        failed = {number.run_id for number in incident.rounds}
        runs = [
            run
            for run in ledger.runs(incident.job_id)
            if run.run_id in failed or run.incident_id == incident_id
        ]
    return Story(incident=incident, runs=tuple(sorted(runs, key=lambda run: run.generation)))


def read_run(url: str, job_id: str, generation: int | None) -> RunRow:
    """One run of a job, the newest by default.

    Raises:
        JobNotFound: the job is not in the ledger.
        NotFound: it has no such run.
    """
    runs = read_runs(url, job_id)
    chosen = [run for run in runs if generation is None or run.generation == generation]
    if not chosen:
        which = "no run yet" if generation is None else f"no run {generation}"
        raise NotFound(f"{job_id} has {which} (it has {len(runs)})")
    return chosen[-1]


def _job(ledger: Ledger, job_id: str) -> JobRow:
    found = ledger.job(job_id)
    if found is None:
        raise JobNotFound(job_id)
    return found
