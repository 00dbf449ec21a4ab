"""From trouble to the next run: stop with evidence, attribute, decide, isolate.

This is the fast path of the design: one command for each shard, the pure ladder right here, and the
incident's round beside it. Only a finding of low confidence waits for the round's closer look.
"""

from __future__ import annotations

from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from datetime import timedelta

    from temporalio.common import WorkflowIDReusePolicy
    from temporalio.exceptions import ActivityError

    from activities import contracts
    from everstep.decide.attribution import Finding, MachineReport, attribute
    from everstep.decide.evidence import all_succeeded
    from everstep.decide.words import (
        Cause,
        Confidence,
        IncidentState,
        JobPhase,
        Rung,
        RunOutcome,
        RunPhase,
    )
    from everstep.spec import messages as m
    from everstep.spec.policy import PolicySnapshot
    from workflows import incidents, page
    from workflows.context import JobContext, cancelled
    from workflows.state import NextRun


async def stop_run(context: JobContext, reason: str, *, planned: bool) -> tuple[MachineReport, ...]:
    """End the run on all of its machines, evidence first; one report for each machine."""
    run = context.state.run
    if run is None:
        return ()
    handles = [
        contracts.schedule(
            contracts.stop_ranks,
            m.StopRanks(
                command_id=context.key(),
                job_id=context.state.job_id,
                generation=run.generation,
                machines=shard,
                reason=reason[:200],
                planned=planned,
                policy=context.policy,
            ),
            summary=f"stop run {run.generation}: {reason}"[:200],
        )
        for shard in context.shards()
    ]
    reports: list[MachineReport] = []
    for handle, shard in zip(handles, context.shards(), strict=True):
        try:
            stopped: m.StoppedRanks = await handle
            reports += stopped.reports
        except ActivityError as error:
            if cancelled(error):
                raise
            note = str(error.cause or error)[:300]
            reports += [
                MachineReport(machine_id=ref.machine_id, reachable=False, note=note)
                for ref in shard
            ]
    return tuple(reports)


async def recover(context: JobContext, observations: tuple[m.ObservationRecord, ...]) -> bool:
    """Handle one trouble.

    Leaves the job with ``run`` None and ``next_run`` set, or waiting for a person, or with a final
    phase to be finished by the caller.

    Returns:
        True when it was none: all ranks had finished. The run is still open then.
    """
    state, run = context.state, context.state.run
    if run is None:
        raise RuntimeError("trouble without a run")
    detected_at = workflow.now()
    context.note_trouble(state.progress.step)
    first = observations[0].reason if observations else "unknown trouble"
    context.enter(JobPhase.RECOVERING, f"run {run.generation}: {first}")
    policy_handle = contracts.schedule(
        contracts.read_policy,
        m.ReadPolicy(job_id=state.job_id, overrides=state.spec.policy),
        summary="read the policy as it is now",
    )
    reports = await stop_run(context, "the run has failed", planned=False)
    state.policy = await _policy(policy_handle, context.policy)
    reports = await _confirm(context, reports)
    if all_succeeded(reports, state.spec.world_size):
        return True
    stopped_at = workflow.now()
    finding = attribute(
        reports,
        triggers=[observation.as_trigger() for observation in observations],
    )
    request = incidents.open_round(context, finding, observations, reports, detected_at, stopped_at)
    record = await _decide(context, request)
    await _carry_out(context, record, finding)
    context.record(
        {
            RunPhase.TROUBLE: detected_at,
            RunPhase.STOPPED: stopped_at,
            RunPhase.DECIDED: record.decided_at,
        },
        step=finding.step if finding.step is not None else state.progress.step,
    )
    close_run(context, RunOutcome.FAILED)
    return False


async def _policy(handle: Any, fallback: PolicySnapshot) -> PolicySnapshot:
    try:
        snapshot: PolicySnapshot = await handle
    except ActivityError as error:
        if cancelled(error):
            raise
        workflow.logger.warning("policy not read, keeping the one at hand")
        return fallback
    return snapshot


async def _confirm(
    context: JobContext, reports: tuple[MachineReport, ...]
) -> tuple[MachineReport, ...]:
    """Give machines that did not answer the policy's time before they count as lost."""
    state, run = context.state, context.state.run
    silent = {r.machine_id for r in reports if not r.reachable}
    if run is None or not silent:
        return reports
    after = context.policy.policy.detection.machine_lost_after
    context.enter(
        JobPhase.RECOVERING,
        f"training has stopped and {', '.join(sorted(silent))[:200]} cannot be reached; "
        f"lost after {after.total_seconds():g} s",
    )
    confirming = contracts.schedule(
        contracts.confirm_machines,
        m.ConfirmMachines(
            job_id=state.job_id,
            generation=run.generation,
            machines=tuple(ref for ref in run.machines if ref.machine_id in silent),
            command_id=context.key(),
            policy=context.policy,
        ),
        summary=f"wait for {', '.join(sorted(silent))}"[:200],
    )
    confirmed: m.ConfirmedMachines = await context.unless_cancelled(confirming)
    newer = {report.machine_id: report for report in confirmed.reports}
    return tuple(newer.get(report.machine_id, report) for report in reports)


async def _decide(context: JobContext, request: m.IncidentInput) -> m.DecisionRecord:
    """The next rung: here and now, or by the round after its closer look."""
    state = context.state
    if request.finding.confidence is Confidence.LOW and request.finding.cause is not Cause.PLANNED:
        result: m.IncidentResult = await (await _start_round(request))
        record = result.decision
    else:
        record = incidents.decide_round(request, request.finding)
        context.beside(await _start_round(request.model_copy(update={"decision": record})))
    state.ladder = record.state_after
    return record


async def _start_round(request: m.IncidentInput) -> Any:
    return await workflow.start_child_workflow(
        m.INCIDENT,
        request,
        id=m.incident_workflow_id(request.job_id, request.number, request.round_number),
        result_type=m.IncidentResult,
        task_timeout=timedelta(seconds=2),
        # One that is still at work is of a workflow that was reset or has ended: this one counts.
        id_reuse_policy=WorkflowIDReusePolicy.TERMINATE_IF_RUNNING,
        # A job that ends must not cut off the record of why it ended.
        parent_close_policy=workflow.ParentClosePolicy.ABANDON,
        static_summary=page.incident_summary(request.finding, request.round_number),
    )


async def _carry_out(context: JobContext, record: m.DecisionRecord, finding: Finding) -> None:
    state, run, incident = context.state, context.state.run, context.state.incident
    if run is None or incident is None:
        raise RuntimeError("a decision without a run or incident")
    decision = record.decision
    incident.action = decision.rung.value
    incident.symptom = record.finding.symptom
    incident.reason = record.finding.reason
    if decision.evict:
        incident.action = f"evict {', '.join(decision.evict)}"
        await contracts.call(
            contracts.evict_machines,
            m.EvictMachines(
                incident_id=incident.incident_id,
                job_id=state.job_id,
                generation=run.generation,
                step=incident.round_number,
                machines=decision.evict,
                reason=f"{finding.symptom}: {finding.reason}"[:600],
                decided_at=record.decided_at,
            ),
            summary=f"evict and block {', '.join(decision.evict)}"[:200],
        )
    state.next_run = NextRun(
        start_reason=decision.rung.value,
        keep=tuple(ref.machine_id for ref in run.machines),
        avoid=decision.evict,
        incident_id=incident.incident_id,
        restore_before=_earliest(state.next_run.restore_before, record.finding.nonfinite_step),
    )
    if decision.rung is Rung.ASK_PERSON:
        context.enter(JobPhase.WAITING_FOR_PERSON, decision.reason)
        state.note_incident(IncidentState.WAITING_FOR_PERSON)
    elif decision.rung is Rung.GIVE_UP:
        context.enter(JobPhase.STOPPING, decision.reason)
        state.note_incident(IncidentState.GAVE_UP)
    else:
        context.enter(JobPhase.RECOVERING, f"{incident.action}: {record.finding.reason}")
        state.note_incident(IncidentState.OPEN)


def _earliest(first: int | None, second: int | None) -> int | None:
    return min((step for step in (first, second) if step is not None), default=None)


def close_run(context: JobContext, outcome: RunOutcome) -> None:
    """Close the run's books; its machines stay leased."""
    state, run = context.state, context.state.run
    if run is None:
        return
    context.end_look()
    context.beside(
        contracts.schedule(
            contracts.close_run,
            m.CloseRun(run_id=run.run_id, outcome=outcome, closed_at=workflow.now(), release=False),
            summary=f"close run {run.generation}: {outcome}",
        )
    )
    state.last_outcome = outcome
    state.run = None
    state.cursors = {}
    state.unreachable = ()
    context.show()
