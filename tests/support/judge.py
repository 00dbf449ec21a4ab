"""The judge: reads the ledger when all is over and says what must never be, in one line each.

An empty list is the only good answer. What is asked holds for every story, however it was broken:
tests add what their own story has to be.

Not here: what ranks computed (``tests.support.counting``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import create_engine, text

from everstep.decide.words import IncidentState
from everstep.ledger import IncidentDetail, Ledger, RunRow

_ENDED = frozenset({IncidentState.STABLE, IncidentState.GAVE_UP})


def rows(url: str, query: str, **values: Any) -> list[tuple[Any, ...]]:
    """What the ledger's database itself answers."""
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query), values)]
    finally:
        engine.dispose()


def details(ledger: Ledger, job_id: str) -> list[IncidentDetail]:
    """A job's incidents in full, oldest first."""
    found = sorted(ledger.incidents(job_id), key=lambda row: row.number)
    full = [ledger.incident(row.incident_id) for row in found]
    return [detail for detail in full if detail is not None]


def runs_of(ledger: Ledger, job_id: str) -> list[RunRow]:
    """A job's runs, oldest first."""
    return sorted(ledger.runs(job_id), key=lambda run: run.generation)


def story(incidents: Sequence[IncidentDetail]) -> list[str]:
    """What incidents were about, in lines short enough for a failed assertion."""
    lines = []
    for incident in incidents:
        lines += [
            f"{incident.incident_id} round {o.round_number} {o.observed_at:%H:%M:%S} saw {o.kind} "
            f"on {o.machine_id} rank {o.rank}, {o.age_s:.1f} s before: {o.reason}"
            for o in incident.observations
        ]
        lines += [
            f"{incident.incident_id} round {d.round_number} {d.decided_at:%H:%M:%S} "
            f"{d.decision.rung}: {d.finding.symptom} by {d.finding.rule}: {d.finding.reason}"
            for d in incident.decisions
        ]
        lines += [
            f"  {report['machine_id']} reachable {report['reachable']} rank {rank['rank']} "
            f"{rank['state']} code {rank['exit_code']} signal {rank['signal']} "
            f"ours {rank['stopped_by_us']} step {rank['step']} stalled {rank['stalled_for_s']}"
            for number in incident.rounds
            for report in number.reports
            for rank in report["ranks"]
        ]
    return lines


def ended_job(ledger: Ledger, url: str, job_id: str) -> list[str]:
    """What is wrong in the ledger with a job that has ended, however it ended."""
    runs, incidents = runs_of(ledger, job_id), details(ledger, job_id)
    return [
        *_runs(runs),
        *_incidents(incidents),
        *_evictions(runs, incidents),
        *machines(url),
        *(
            f"{machine} is still leased to {job_id}"
            for (machine,) in rows(
                url,
                "select machine_id from leases where job_id = :job and ended_at is null",
                job=job_id,
            )
        ),
    ]


def _runs(runs: Sequence[RunRow]) -> Iterable[str]:
    generations = [run.generation for run in runs]
    if generations != list(range(1, len(runs) + 1)):
        yield f"generations are {generations}"
    for run in runs:
        if run.closed_at is None:
            yield f"run {run.generation} is still open"
        if run.restore and run.restore.generation >= run.generation:
            yield f"run {run.generation} restored from run {run.restore.generation}"
    for before, after in pairwise(runs):
        if before.closed_at and before.closed_at > after.opened_at:
            yield f"runs {before.generation} and {after.generation} were open at once"
    # A later run never restores an older step than what an earlier run had restored already.
    restored = [run.restore.step for run in runs if run.restore]
    if restored != sorted(restored):
        yield f"restore points went back: {restored}"


def _incidents(incidents: Sequence[IncidentDetail]) -> Iterable[str]:
    numbers = [incident.number for incident in incidents]
    if numbers != list(range(1, len(incidents) + 1)):
        yield f"incidents are numbered {numbers}"
    for incident in incidents:
        if incident.closed_at is None or incident.state not in _ENDED:
            yield f"{incident.incident_id} is {incident.state}"
        decided = sorted(d.round_number for d in incident.decisions)
        rounds = sorted(r.round_number for r in incident.rounds)
        # A warning is an incident without a decision.
        if decided not in ([], rounds):
            yield f"{incident.incident_id} has rounds {rounds} and decisions {decided}"


def _evictions(runs: Sequence[RunRow], incidents: Sequence[IncidentDetail]) -> Iterable[str]:
    decided = sorted(
        (incident.incident_id, machine)
        for incident in incidents
        for record in incident.decisions
        for machine in record.decision.evict
    )
    done = sorted(
        (action.incident_id, action.target)
        for incident in incidents
        for action in incident.actions
        if action.kind == "evict"
    )
    if decided != done:
        yield f"evictions decided {decided}, carried out {done}"
    for incident in incidents:
        for action in incident.actions:
            for run in runs:
                used = action.target in {ref.machine_id for ref in run.machines}
                if run.generation > action.generation and used:
                    yield f"{action.target} was evicted and is in run {run.generation}"


def machines(url: str) -> Iterable[str]:
    """A machine has one lease at a time, and none that began while it was blocked."""
    leases = rows(url, "select machine_id, leased_at, ended_at, run_id from leases order by 1, 2")
    for (first, _, end, run_a), (second, begin, _, run_b) in pairwise(leases):
        if first == second and (end is None or end > begin):
            yield f"{first} was leased to {run_a} and {run_b} at once"
    blocks = rows(url, "select machine_id, blocked_at, released_at from blocks")
    for machine, begin, _, run in leases:
        for blocked, since, until in blocks:
            if machine == blocked and since < begin and (until is None or begin < until):
                yield f"{machine} was leased to {run} while it was blocked"
    for machine, end, *_ in ((m, e) for m, _, e, _ in leases):
        if end is None and any(machine == b and until is None for b, _, until in blocks):
            yield f"{machine} is blocked and leased"


def blocked(url: str) -> list[str]:
    """Machines that are evicted now."""
    query = "select machine_id from blocks where released_at is null order by 1"
    return [machine for (machine,) in rows(url, query)]
