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
    from everstep.decide.stack_outliers import listed
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
            ranks_per_machine=context.state.spec.ranks_per_machine,
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
    names = [run.machines[i].machine_id for i in finding.machines]
    told = f"{finding.reason}: {listed('machine', names)}" if names else finding.reason
    ranks_per_machine = context.state.spec.ranks_per_machine
    seen = f"{incident.reason.removesuffix(GOES_ON)}; {told}"
    summary = seen[: SUMMARY_MAX - len(GOES_ON)] + GOES_ON
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
                machine_id=run.machines[culprit.rank // ranks_per_machine].machine_id,
                rank=culprit.rank,
                reason=f"rank {culprit.rank} {culprit.reason} of stacks",
                data={"rule": finding.rule, "rounds": found.rounds},
            )
            for culprit in finding.culprits
        ),
        evidence=(told, *found.evidence),
    )
    context.beside(contracts.schedule(contracts.record_incident, record, summary=told[:200]))
    if names:
        context.tell(f"{run.generation}-slow", "warning", summary)
    context.show()
