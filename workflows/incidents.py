"""The life of an incident in the job's state: opened, next round, stable, given up.

Not here: what is done about it (``recovering``), its rounds' pages (``incident``), and what goes on
record though nothing stops (``warnings_beside``).
"""

from __future__ import annotations

from datetime import datetime

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities import contracts
    from everstep.decide.attribution import Finding, MachineReport
    from everstep.decide.ladder import decide
    from everstep.decide.words import IncidentState
    from everstep.spec import messages as m
    from everstep.spec.evidence import ROUND_BYTES_MAX, within
    from everstep.spec.limits import ladder_limits
    from workflows.context import JobContext
    from workflows.state import OpenIncident

OBSERVATIONS_MAX = 128
"""In the input of a round: each of many shards may report as many as a watch can."""


def open_round(
    context: JobContext,
    finding: Finding,
    observations: tuple[m.ObservationRecord, ...],
    reports: tuple[MachineReport, ...],
    detected_at: datetime,
    stopped_at: datetime,
) -> m.IncidentInput:
    """Open the incident, or the next round of the one that is open."""
    state, run = context.state, context.state.run
    if run is None:
        raise RuntimeError("trouble without a run")
    if state.incident is None:
        state.incidents_total += 1
        state.incident = OpenIncident(
            incident_id=f"{state.job_id}-{state.incidents_total}",
            number=state.incidents_total,
            round_number=1,
            symptom=finding.symptom,
            opened_at=detected_at,
        )
    else:
        state.incident.round_number += 1
        state.incident.symptom = finding.symptom
        state.incident.recovered_at = None
    incident = state.incident
    kept, left_out = within(reports, ROUND_BYTES_MAX)
    if left_out:
        workflow.logger.warning("evidence is cut", extra={"left_out": left_out})
    incident.reason = finding.reason
    incident.failed_step = finding.step if finding.step is not None else state.progress.step
    return m.IncidentInput(
        incident_id=incident.incident_id,
        job_id=state.job_id,
        run_id=run.run_id,
        generation=run.generation,
        number=incident.number,
        round_number=incident.round_number,
        opened_at=incident.opened_at,
        detected_at=detected_at,
        stopped_at=stopped_at,
        observations=observations[:OBSERVATIONS_MAX],
        reports=kept,
        finding=finding,
        ladder=state.ladder,
        policy=context.policy,
        machines=run.machines,
    )


def decide_round(request: m.IncidentInput, finding: Finding) -> m.DecisionRecord:
    """Take the next rung, with everything that explains it and lets it be decided again."""
    now = workflow.now()
    decision, after = decide(
        finding,
        request.ladder,
        limits=ladder_limits(request.policy.policy),
        now_s=now.timestamp(),
        run_machines=[ref.machine_id for ref in request.machines],
    )
    return m.DecisionRecord(
        decision_id=f"{request.incident_id}-r{request.round_number}",
        incident_id=request.incident_id,
        round_number=request.round_number,
        finding=finding,
        state_before=request.ladder,
        state_after=after,
        decision=decision,
        policy_hash=request.policy.hash,
        decided_at=now,
    )


def stable(context: JobContext) -> None:
    """The job has trained long enough since its restart: the incident is over."""
    state, incident = context.state, context.state.incident
    if incident is None:
        return
    lost = incident.steps_lost
    summary = f"{incident.symptom}: {incident.action}; stable again" + (
        f", {lost} steps lost" if lost is not None else ""
    )
    context.beside(
        contracts.schedule(
            contracts.close_incident,
            m.CloseIncident(
                incident_id=incident.incident_id,
                state=IncidentState.STABLE,
                closed_at=workflow.now(),
                summary=summary[:600],
            ),
            summary=f"close incident {incident.incident_id}: stable",
        )
    )
    state.note_incident(IncidentState.STABLE)
    state.incident = None
    context.show()


def gave_up(context: JobContext, reason: str) -> None:
    """The job ends with its incident open."""
    incident = context.state.incident
    if incident is None:
        return
    context.beside(
        contracts.schedule(
            contracts.close_incident,
            m.CloseIncident(
                incident_id=incident.incident_id,
                state=IncidentState.GAVE_UP,
                closed_at=workflow.now(),
                summary=reason[:600],
            ),
            summary=f"close incident {incident.incident_id}: {reason}"[:200],
        )
    )
    context.state.note_incident(IncidentState.GAVE_UP)
    context.state.incident = None
