"""``Incident``: one round of one incident, with a page of its own in the Temporal UI.

On the fast path the job has decided already and acts while this round records the evidence, looks
closer and tells people. Without a decision (nothing points at a culprit yet) the job waits for this
round: it looks closer first and then decides with the same ladder. Either way its result is the
round's decision, and it ends by itself within seconds.

Not here: carrying the decision out. The job does that, since it owns its machines.
"""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities import contracts
    from everstep.decide.attribution import Finding
    from everstep.decide.words import IncidentState, Rung
    from everstep.spec import messages as m
    from workflows import incidents, page


@workflow.defn(name=m.INCIDENT)
class Incident:
    """One round: evidence, decision, people."""

    @workflow.run
    async def run(self, request: m.IncidentInput) -> m.IncidentResult:
        """Record, look closer, decide if asked to, notify."""
        finding, record = request.finding, request.decision
        self._show(request, finding, record, ())
        await self._record(request, finding, record, ())
        diagnosed = await contracts.call(
            contracts.diagnose_run,
            m.DiagnoseRun(
                job_id=request.job_id,
                run_id=request.run_id,
                generation=request.generation,
                incident_id=request.incident_id,
                reports=request.reports,
                observations=request.observations,
            ),
            summary=f"look closer at {request.run_id}",
        )
        if record is None:
            finding = diagnosed.finding
            record = incidents.decide_round(request, finding)
        self._show(request, finding, record, diagnosed.evidence)
        await self._record(request, finding, record, diagnosed.evidence)
        if record.decision.rung in (Rung.ASK_PERSON, Rung.GIVE_UP):
            await self._notify(request, record)
        return m.IncidentResult(decision=record, finding=finding)

    def _show(
        self,
        request: m.IncidentInput,
        finding: Finding,
        record: m.DecisionRecord | None,
        evidence: tuple[str, ...],
    ) -> None:
        workflow.set_current_details(page.incident_page(request, finding, record, evidence))

    async def _record(
        self,
        request: m.IncidentInput,
        finding: Finding,
        record: m.DecisionRecord | None,
        evidence: tuple[str, ...],
    ) -> None:
        needs_person = record is not None and record.decision.rung is Rung.ASK_PERSON
        await contracts.call(
            contracts.record_incident,
            m.RecordIncident(
                incident_id=request.incident_id,
                job_id=request.job_id,
                run_id=request.run_id,
                number=request.number,
                round_number=request.round_number,
                state=IncidentState.WAITING_FOR_PERSON if needs_person else IncidentState.OPEN,
                symptom=finding.symptom,
                opened_at=request.opened_at,
                summary=finding.reason[:600],
                detected_at=request.detected_at,
                stopped_at=request.stopped_at,
                reports=request.reports,
                observations=request.observations,
                evidence=evidence,
                decision=record,
            ),
            summary=f"record {finding.symptom}"
            + (f", decided: {record.decision.rung}" if record else ""),
        )

    async def _notify(self, request: m.IncidentInput, record: m.DecisionRecord) -> None:
        await contracts.call(
            contracts.notify,
            m.Notify(
                key=f"{record.decision_id}-{record.decision.rung}",
                severity="needs_person",
                job_id=request.job_id,
                incident_id=request.incident_id,
                text=f"{request.job_id}: {record.decision.reason}"[:600],
            ),
            summary=f"tell people: {record.decision.rung}",
        )
