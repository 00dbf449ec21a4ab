"""What watches tell while training goes on: on record once, and nothing else.

Each symptom of one look at the run becomes an incident that is over at once (``warn_only``), so
that people see it, and whoever explains a later failure finds it. Not here: trouble
(``recovering``), what a warning is (``everstep.decide.warning``), and who makes a job slow
(``slow_look``).
"""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities import contracts
    from everstep.decide.warning import symptom_of_failed_save, symptom_of_warning
    from everstep.decide.words import Action, IncidentState, Symptom
    from everstep.spec import messages as m
    from everstep.spec.agent_api import EventKind
    from workflows import slow_look
    from workflows.context import JobContext
    from workflows.state import RECENT_INCIDENTS_MAX

TOLD_MAX = 128
"""Different warnings of one job that are recorded; a fleet that is ill is not told by one job."""


def note(context: JobContext, observations: tuple[m.ObservationRecord, ...]) -> None:
    """Record what probes and job signals warn of and was not recorded before."""
    state, run = context.state, context.state.run
    if run is None:
        return
    found: dict[Symptom, list[m.ObservationRecord]] = {}
    for observation in observations:
        symptom = symptom_of_warning(observation.as_trigger())
        word = observation.told_as(run.generation)
        if symptom is None or word in state.told or len(state.told) >= TOLD_MAX:
            continue
        state.told = (*state.told, word)
        found.setdefault(symptom, []).append(observation)
    for symptom in sorted(found):
        first = found[symptom][0]
        where = f"{first.machine_id}: " if first.machine_id else ""
        summary = _record(context, run, symptom, tuple(found[symptom]), f"{where}{first.reason}")
        if any(o.kind is EventKind.STEP_TIME_DECLINE for o in found[symptom]):
            slow_look.begin(context, run, summary)


def note_failed_saves(context: JobContext, saves: tuple[m.ObservationRecord, ...]) -> None:
    """Record that a checkpoint could not be saved: once a run."""
    state, run = context.state, context.state.run
    if run is None or state.warned_generation >= run.generation:
        return
    state.warned_generation = run.generation
    reason = saves[0].reason
    _record(context, run, symptom_of_failed_save(reason), saves, reason)


def _record(
    context: JobContext,
    run: m.RunRef,
    symptom: Symptom,
    observations: tuple[m.ObservationRecord, ...],
    reason: str,
) -> m.IncidentSummary:
    state, now = context.state, workflow.now()
    state.incidents_total += 1
    summary = m.IncidentSummary(
        incident_id=f"{state.job_id}-{state.incidents_total}",
        number=state.incidents_total,
        rounds=1,
        symptom=symptom,
        state=IncidentState.STABLE,
        action=Action.WARN_ONLY.value,
        reason=f"{reason}{slow_look.GOES_ON}"[:600],
        opened_at=now,
        recovered_at=now,
        steps_lost=0,
    )
    state.recent = (summary, *state.recent)[:RECENT_INCIDENTS_MAX]
    context.beside(
        contracts.schedule(
            contracts.record_incident,
            m.RecordIncident(
                incident_id=summary.incident_id,
                job_id=state.job_id,
                run_id=run.run_id,
                number=summary.number,
                round_number=1,
                state=IncidentState.STABLE,
                symptom=symptom,
                opened_at=now,
                closed_at=now,
                detected_at=now,
                summary=summary.reason,
                observations=observations,
            ),
            summary=f"record {symptom}: {observations[0].reason}"[:200],
        )
    )
    return summary
