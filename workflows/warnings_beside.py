"""What probes and job signals tell while training goes on: on record once, and nothing else.

Each symptom of one look at the run becomes an incident that is over at once (``warn_only``), so
that people see it, and whoever explains a later failure finds it. Not here: trouble
(``recovering``), and saves that fail (``incidents.warn_only``).
"""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities import contracts
    from everstep.decide.words import Action, Confidence, IncidentState, Symptom, Verdict
    from everstep.spec import messages as m
    from everstep.spec.agent_api import EventKind
    from everstep.spec.probe_events import observation_of
    from workflows.context import JobContext
    from workflows.state import RECENT_INCIDENTS_MAX

TOLD_MAX = 128
"""Different warnings of one job that are recorded; a fleet that is ill is not told by one job."""
SIGNALS = {
    EventKind.LOSS_SPIKE: Symptom.LOSS_SPIKE,
    EventKind.STEP_TIME_DECLINE: Symptom.MFU_DECLINE,
    EventKind.LOG_SILENT: Symptom.HANG,
    EventKind.RDMA_SILENT: Symptom.HANG,
}


def note(context: JobContext, observations: tuple[m.ObservationRecord, ...]) -> None:
    """Record those that are warnings and were not recorded before."""
    state, run = context.state, context.state.run
    if run is None:
        return
    found: dict[Symptom, list[m.ObservationRecord]] = {}
    for observation in observations:
        symptom = _symptom(observation)
        word = observation.told_as(run.generation)
        if symptom is None or word in state.told or len(state.told) >= TOLD_MAX:
            continue
        state.told = (*state.told, word)
        found.setdefault(symptom, []).append(observation)
    for symptom in sorted(found):
        _record(context, run, symptom, tuple(found[symptom]))


def _symptom(observation: m.ObservationRecord) -> Symptom | None:
    """The symptom of a warning; None for everything that is none."""
    if observation.verdict is not Verdict.FAULTY:
        return None
    if observation.kind is not EventKind.PROBE:
        return SIGNALS.get(EventKind(observation.kind)) if observation.kind in SIGNALS else None
    seen = observation_of(observation.reason, observation.data)
    if seen is None:
        return None
    if seen.action is Action.EVICT_MACHINE and seen.confidence is Confidence.HIGH:
        return None  # that is trouble, and an incident of its own
    return seen.symptom or Symptom.UNKNOWN


def _record(
    context: JobContext,
    run: m.RunRef,
    symptom: Symptom,
    observations: tuple[m.ObservationRecord, ...],
) -> None:
    state, now, first = context.state, workflow.now(), observations[0]
    state.incidents_total += 1
    where = f"{first.machine_id}: " if first.machine_id else ""
    summary = m.IncidentSummary(
        incident_id=f"{state.job_id}-{state.incidents_total}",
        number=state.incidents_total,
        rounds=1,
        symptom=symptom,
        state=IncidentState.STABLE,
        action=Action.WARN_ONLY.value,
        reason=f"{where}{first.reason}; training goes on"[:600],
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
            summary=f"record {symptom}: {first.reason}"[:200],
        )
    )
