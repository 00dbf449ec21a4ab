"""Taking in what watches report while nothing is wrong: steps, milestones, blindness, recovery.

Not here: trouble (``recovering``).
"""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.decide.ettr import FROM_SCRATCH
    from everstep.decide.words import IncidentState, JobPhase, RunPhase, Verdict
    from everstep.spec import messages as m
    from everstep.spec.agent_api import EventKind
    from workflows import incidents, warnings_beside
    from workflows.context import JobContext


def note(context: JobContext, results: list[m.WatchResult]) -> None:
    """Take in progress and milestones."""
    state = context.state
    run = state.run
    if run is None:
        return
    for result in results:
        if result.progress.step is not None:
            state.progress = result.progress
        if result.kind in ("tick", "first_step", "blind"):
            state.unreachable = result.unreachable
        if result.kind == "first_step" and run.first_step_at is None:
            _first_step(context)
        elif result.kind == "blind":
            _blind(context, result)
        saves = tuple(o for o in result.observations if o.kind is EventKind.SAVE_FAILED)
        if saves:
            warnings_beside.note_failed_saves(context, saves)
        if result.kind != "trouble":
            warnings_beside.note(context, result.observations)
    _note_recovery(context, ticked=any(r.kind == "tick" for r in results))
    context.show()


def _note_recovery(context: JobContext, *, ticked: bool) -> None:
    """Close the open incident once the job has been stable for the policy's window."""
    state = context.state
    incident, run = state.incident, state.run
    if incident is None or run is None or state.phase is not JobPhase.RUNNING:
        return
    # Without the trainer library there is no first step: count from the first look at the run.
    counts = run.first_step_at is not None or (ticked and not state.reports_steps)
    if incident.recovered_at is None and counts:
        incident.recovered_at = workflow.now()
    window = context.policy.policy.ladder.stable_after
    if incident.recovered_at is not None and workflow.now() - incident.recovered_at >= window:
        incidents.stable(context)


def _first_step(context: JobContext) -> None:
    state = context.state
    if state.run is None:
        return
    now = workflow.now()
    state.run = state.run.model_copy(update={"first_step_at": now})
    state.reports_steps = True
    incident = state.incident
    if incident is not None:
        incident.recovered_at = now
        restored = state.run.restore.step if state.run.restore else FROM_SCRATCH
        if state.progress.from_log and state.progress.step is not None:
            # Such a script restores itself: where it goes on shows in the first step it prints.
            restored = max(restored, state.progress.step - 1)
        if incident.failed_step is not None:
            incident.steps_lost = max(0, incident.failed_step - restored)
        state.note_incident(IncidentState.OPEN)
    context.enter(JobPhase.RUNNING, f"run {state.run.generation} is training")
    context.record({RunPhase.FIRST_STEP: now}, step=state.progress.step)


def _blind(context: JobContext, result: m.WatchResult) -> None:
    """No machine can be reached. Training may well go on: tell a person, touch nothing."""
    state = context.state
    names = ", ".join(result.unreachable[:5]) or "the machines"
    why = result.observations[0].reason if result.observations else f"cannot reach {names}"
    context.enter(JobPhase.RUNNING, f"blind: {why}. Nothing is done to the run meanwhile.")
    generation = state.run.generation if state.run else 0
    # A run lasts for weeks: once a day is enough, and once a run is not.
    context.tell(f"{generation}-blind-{workflow.now():%Y-%m-%d}", "warning")


def early_exit() -> m.WatchResult:
    """Some shards have finished and others have not for too long."""
    return m.WatchResult(
        kind="trouble",
        observations=(
            m.ObservationRecord(
                kind=EventKind.EARLY_EXIT,
                verdict=Verdict.FAULTY,
                reason="some machines' ranks have all exited with 0 while others go on",
            ),
        ),
    )
