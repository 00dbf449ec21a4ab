"""Who makes the job slow: a look at all ranks' stacks while training goes on (paper, section 6).

Begins when a watch has told that steps take longer, and no machine is known to be slowed down. What
it finds is the second round of that incident; nothing is stopped. It ends with the run.

Not here: the rounds and what they say (``activities.diagnosis``, ``everstep.decide.fail_slow``).
"""

from __future__ import annotations

import asyncio

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from temporalio.exceptions import ActivityError

    from activities import contracts
    from everstep.decide.words import IncidentState, Symptom, Verdict
    from everstep.spec import messages as m
    from everstep.spec.agent_api import EventKind
    from workflows.context import JobContext

PATCH = "look-for-slow-ranks"
GOES_ON = "; training goes on"
SUMMARY_MAX = 600


def begin(context: JobContext, run: m.RunRef, incident: m.IncidentSummary) -> None:
    """Look beside the main line."""
    if not workflow.patched(PATCH):
        return
    handle = contracts.schedule(
        contracts.find_slow_ranks,
        m.FindSlowRanks(
            job_id=context.state.job_id,
            run_id=run.run_id,
            generation=run.generation,
            machines=run.machines,
            policy=context.policy,
        ),
        summary=f"look who makes run {run.generation} slow",
    )
    context.look = handle
    context.beside(asyncio.create_task(_take(context, run, incident, handle)))


async def _take(
    context: JobContext,
    run: m.RunRef,
    incident: m.IncidentSummary,
    handle: workflow.ActivityHandle[m.FoundSlowRanks],
) -> None:
    """Record what was found, and tell people where to look."""
    began = workflow.now()
    try:
        found = await handle
    except ActivityError as error:
        workflow.logger.info("no look at slow ranks", extra={"error": str(error.cause or error)})
        return
    if found.finding is None:
        return
    finding = found.finding
    names = [run.machines[i].machine_id for i in finding.machines if i < len(run.machines)]
    told = f"{finding.reason}: {', '.join(names)}" if names else finding.reason
    seen = f"{incident.reason.removesuffix(GOES_ON)}; {told}"
    summary = seen[: SUMMARY_MAX - len(GOES_ON)] + GOES_ON
    culprits = {culprit.rank: culprit for culprit in finding.culprits}
    context.state.amend_incident(incident.incident_id, rounds=2, reason=summary)
    record = m.RecordIncident(
        incident_id=incident.incident_id,
        job_id=context.state.job_id,
        run_id=run.run_id,
        number=incident.number,
        round_number=2,
        state=IncidentState.STABLE,
        symptom=Symptom.MFU_DECLINE,
        opened_at=incident.opened_at,
        closed_at=workflow.now(),
        detected_at=began,
        summary=summary,
        observations=tuple(
            m.ObservationRecord(
                kind=EventKind.STEP_TIME_DECLINE,
                verdict=Verdict.FAULTY,
                machine_id=_machine_of(context, run, rank),
                rank=rank,
                reason=f"rank {rank} {culprit.reason} of stacks",
                data={"rule": finding.rule, "rounds": found.rounds, "suspects": names},
            )
            for rank, culprit in sorted(culprits.items())
        ),
        evidence=(finding.reason, *found.evidence),
    )
    context.beside(contracts.schedule(contracts.record_incident, record, summary=told[:200]))
    if names:
        context.tell(f"{run.generation}-slow", "warning", summary)
    context.show()


def _machine_of(context: JobContext, run: m.RunRef, rank: int) -> str | None:
    index = rank // context.state.spec.ranks_per_machine
    return run.machines[index].machine_id if index < len(run.machines) else None
