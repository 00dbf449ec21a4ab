"""Incidents: rounds with their evidence, decisions, and the end.

Records come from several workflows and may be repeated or overtake each other: the job closes an
incident while the round's own record is still under way, and a controller that was frozen writes
old news. So writes only ever add: a decision is never taken back, evidence never emptied, a closed
incident never reopened, and a later round never undone by an earlier one.

Not here: evictions, which are actions on machines (``machines``).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import TypeAdapter
from sqlalchemy import func
from sqlmodel import Session, col, select

from everstep.decide.attribution import Finding
from everstep.decide.ladder import Decision, LadderState
from everstep.decide.words import IncidentState
from everstep.ledger import tables as t
from everstep.ledger.base import Part, require_job, require_run
from everstep.ledger.bounds import (
    EVIDENCE_LINES_MAX,
    OBSERVATIONS_MAX,
    bounded_data,
    bounded_reports,
)
from everstep.ledger.database import lock_of
from everstep.ledger.views import (
    ActionRow,
    IncidentDetail,
    IncidentRow,
    ObservationRow,
    RoundRow,
)
from everstep.spec.messages import CloseIncident, DecisionRecord, ObservationRecord, RecordIncident

_OVER = frozenset({IncidentState.STABLE, IncidentState.GAVE_UP})


class Incidents(Part):
    """What happened, what was decided, and why."""

    def record_incident(self, request: RecordIncident) -> None:
        """Store an incident and its newest round; a repeat changes nothing.

        Raises:
            LedgerConflict: the job or the run is unknown.
        """
        self._database.write(
            lambda session: _record(session, request),
            locks=[lock_of("incident", request.incident_id)],
        )

    def close_incident(self, request: CloseIncident) -> None:
        """Mark an incident over; the first word holds. It may come before the first record."""
        self._database.write(
            lambda session: _close(session, request),
            locks=[lock_of("incident", request.incident_id)],
        )

    def incidents(self, job_id: str | None = None) -> list[IncidentRow]:
        """All incidents, or one job's, newest first."""
        return self._database.read(lambda session: _rows(session, job_id=job_id))

    def incident(self, incident_id: str) -> IncidentDetail | None:
        """Everything about one incident; None when this ledger does not know it."""
        return self._database.read(lambda session: _detail(session, incident_id))


# --- writing -----------------------------------------------------------------------------------


def _record(session: Session, request: RecordIncident) -> None:
    require_job(session, request.job_id)
    require_run(session, request.run_id)
    incident = session.get(t.Incident, request.incident_id)
    newest = _newest_round(session, request.incident_id)
    if incident is None:
        incident = t.Incident(incident_id=request.incident_id, state=request.state)
    if incident.job_id is None:
        incident.job_id, incident.number = request.job_id, request.number
        incident.symptom, incident.opened_at = request.symptom, request.opened_at
        incident.summary = incident.summary or request.summary
    row = session.get(t.Round, (request.incident_id, request.round_number))
    # News of an earlier round, or from before the decision that is here already, is old news.
    old = request.round_number < newest or (
        row is not None
        and request.decision is None
        and _has_decision(session, request.incident_id, request.round_number)
    )
    if not old:
        incident.symptom = request.symptom
        if incident.closed_at is None:
            incident.state, incident.closed_at = request.state, request.closed_at
            incident.summary = request.summary or incident.summary
        elif row is None and request.round_number > 1 and request.closed_at is not None:
            # A closer look at what was over at once says more.
            incident.summary = request.summary or incident.summary
    session.add(incident)
    session.flush()
    _record_round(session, request, row, old=old)
    if request.decision is not None:
        _record_decision(session, request.decision)


def _record_round(
    session: Session, request: RecordIncident, row: t.Round | None, *, old: bool
) -> None:
    reports, cut = bounded_reports(request.reports)
    observations = request.observations[:OBSERVATIONS_MAX]
    if len(request.observations) > len(observations):
        left_out = len(request.observations) - len(observations)
        cut = "; ".join(filter(None, [cut, f"left out: {left_out} observations"]))
    if row is None:
        row = t.Round(
            incident_id=request.incident_id,
            round_number=request.round_number,
            run_id=request.run_id,
            symptom=request.symptom,
        )
    if not old:
        row.symptom, row.summary = request.symptom, request.summary or row.summary
    row.detected_at = row.detected_at or request.detected_at
    row.stopped_at = row.stopped_at or request.stopped_at
    if reports and not (old and row.reports):
        row.reports, row.cut = reports, cut
    if request.evidence and not (old and row.evidence):
        row.evidence = list(request.evidence[:EVIDENCE_LINES_MAX])
    session.add(row)
    session.flush()
    _record_observations(session, request, observations)


def _record_observations(
    session: Session, request: RecordIncident, observations: Sequence[ObservationRecord]
) -> None:
    key = (
        t.Observation.incident_id == request.incident_id,
        t.Observation.round_number == request.round_number,
    )
    there = session.exec(select(func.count()).select_from(t.Observation).where(*key)).one()
    for position, observation in enumerate(observations):
        if position < there:
            continue  # a repeat; a round's observations are what opened it and never change
        session.add(
            t.Observation(
                incident_id=request.incident_id,
                round_number=request.round_number,
                position=position,
                kind=observation.kind,
                verdict=observation.verdict,
                machine_id=observation.machine_id,
                rank=observation.rank,
                age_s=observation.age_s,
                reason=observation.reason,
                data=bounded_data(observation),
                observed_at=request.detected_at or request.opened_at,
            )
        )


def _record_decision(session: Session, record: DecisionRecord) -> None:
    row = session.get(t.DecisionEntry, record.decision_id)
    if row is not None and record.decided_at <= row.decided_at:
        if row.approved_by is None and record.approved_by is not None:
            row.approved_by = record.approved_by
            session.add(row)
        return
    if row is not None:
        session.delete(row)  # a workflow that was reset decided this round anew
        session.flush()
    parts = record.model_dump(mode="json")
    session.add(
        t.DecisionEntry(
            decision_id=record.decision_id,
            incident_id=record.incident_id,
            round_number=record.round_number,
            rung=record.decision.rung,
            finding=parts["finding"],
            state_before=parts["state_before"],
            state_after=parts["state_after"],
            decision=parts["decision"],
            policy_hash=record.policy_hash,
            decided_at=record.decided_at,
            approved_by=record.approved_by,
        )
    )


def _close(session: Session, request: CloseIncident) -> None:
    incident = session.get(t.Incident, request.incident_id)
    if incident is None:
        # The job may close an incident before its round has recorded it; that record completes it.
        incident = t.Incident(incident_id=request.incident_id, state=request.state)
    if incident.closed_at is None:
        incident.state, incident.closed_at = request.state, request.closed_at
        incident.summary = request.summary
        session.add(incident)


# --- reading -----------------------------------------------------------------------------------


def _newest_round(session: Session, incident_id: str) -> int:
    query = select(func.max(t.Round.round_number)).where(t.Round.incident_id == incident_id)
    return session.exec(query).one() or 0


def _has_decision(session: Session, incident_id: str, round_number: int) -> bool:
    query = select(t.DecisionEntry.decision_id).where(
        t.DecisionEntry.incident_id == incident_id,
        t.DecisionEntry.round_number == round_number,
    )
    return session.exec(query.limit(1)).first() is not None


def _rows(
    session: Session, *, job_id: str | None = None, incident_id: str | None = None
) -> list[IncidentRow]:
    query = (
        select(t.Incident, func.count(col(t.Round.round_number)))
        .outerjoin(t.Round, col(t.Round.incident_id) == col(t.Incident.incident_id))
        .where(col(t.Incident.job_id).is_not(None))
        .group_by(col(t.Incident.incident_id))
        .order_by(col(t.Incident.opened_at).desc(), col(t.Incident.incident_id).desc())
    )
    if job_id is not None:
        query = query.where(t.Incident.job_id == job_id)
    if incident_id is not None:
        query = query.where(t.Incident.incident_id == incident_id)
    return [
        IncidentRow.model_validate(row).model_copy(update={"rounds_total": rounds})
        for row, rounds in session.exec(query)
    ]


def _detail(session: Session, incident_id: str) -> IncidentDetail | None:
    found = _rows(session, incident_id=incident_id)
    if not found:
        return None
    rounds = select(t.Round).where(t.Round.incident_id == incident_id)
    decisions = select(t.DecisionEntry).where(t.DecisionEntry.incident_id == incident_id)
    observations = select(t.Observation).where(t.Observation.incident_id == incident_id)
    actions = select(t.ActionEntry).where(t.ActionEntry.incident_id == incident_id)
    return IncidentDetail(
        **found[0].model_dump(),
        rounds=tuple(
            RoundRow.model_validate(row)
            for row in session.exec(rounds.order_by(col(t.Round.round_number)))
        ),
        decisions=tuple(
            _decision(row)
            for row in session.exec(
                decisions.order_by(
                    col(t.DecisionEntry.round_number), col(t.DecisionEntry.decided_at)
                )
            )
        ),
        observations=tuple(
            ObservationRow.model_validate(row)
            for row in session.exec(
                observations.order_by(col(t.Observation.round_number), col(t.Observation.position))
            )
        ),
        actions=tuple(
            ActionRow.model_validate(row)
            for row in session.exec(
                actions.order_by(col(t.ActionEntry.step), col(t.ActionEntry.target))
            )
        ),
    )


_FINDING = TypeAdapter(Finding)
_LADDER_STATE = TypeAdapter(LadderState)
_DECISION = TypeAdapter(Decision)


def _decision(row: t.DecisionEntry) -> DecisionRecord:
    return DecisionRecord(
        decision_id=row.decision_id,
        incident_id=row.incident_id,
        round_number=row.round_number,
        finding=_FINDING.validate_python(row.finding),
        state_before=_LADDER_STATE.validate_python(row.state_before),
        state_after=_LADDER_STATE.validate_python(row.state_after),
        decision=_DECISION.validate_python(row.decision),
        policy_hash=row.policy_hash,
        decided_at=row.decided_at,
        approved_by=row.approved_by,
    )
