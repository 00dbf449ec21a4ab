"""What a person who has only the Temporal UI sees: pages in Markdown, made from the state.

Pure text; nothing here decides anything.
"""

from __future__ import annotations

from datetime import datetime

from everstep.decide.attribution import Finding, MachineReport
from everstep.decide.words import JobPhase, RankState
from everstep.spec.messages import DecisionRecord, IncidentInput, incident_workflow_id
from workflows.state import JobState


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _clock(at: datetime | None) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S UTC") if at else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def job_summary(state: JobState) -> str:
    """The job in one line."""
    spec = state.spec
    return f"{spec.name}: {spec.machines} machines x {spec.ranks_per_machine} ranks"


def job_page(state: JobState, *, namespace: str, ettr: float | None) -> str:
    """The job's current details."""
    spec, run = state.spec, state.run
    lines = [f"# {spec.name}: **{state.phase.value.replace('_', ' ')}**", ""]
    if state.reason:
        lines += [_cell(state.reason), ""]
    if state.phase is JobPhase.WAITING_FOR_PERSON:
        lines += [
            (
                "A person is needed: send the update `resume` to go on (budgets start afresh), "
                "or `cancel` to end the job."
            ),
            "",
        ]
    rows = [
        (
            "run",
            f"{run.generation} ({run.start_reason})"
            if run
            else f"none yet ({state.runs_total} so far)",
        ),
        ("step", state.progress.step if state.progress.step is not None else "-"),
        ("loss", _number(state.progress.loss)),
        ("gradient norm", _number(state.progress.grad_norm)),
        ("ETTR so far", f"{ettr:.1%}" if ettr is not None else "-"),
        ("machines", ", ".join(m.machine_id for m in run.machines[:20]) if run else "-"),
        ("code version", state.code_version or "-"),
        ("restored from step", run.restore.step if run and run.restore else "start"),
        ("policy", state.policy.hash if state.policy else "-"),
        ("incidents", state.incidents_total),
    ]
    if state.unreachable:
        rows.append(("not reachable now (unknown, not faulty)", ", ".join(state.unreachable[:20])))
    lines += ["| | |", "| --- | --- |", *(f"| {k} | {_cell(v)} |" for k, v in rows), ""]
    lines += _incident_table(state, namespace)
    return "\n".join(lines)


def _incident_table(state: JobState, namespace: str) -> list[str]:
    if not state.recent:
        return ["No incident so far."]
    lines = [
        "## Last incidents",
        "",
        "| incident | opened | symptom | action | steps lost | state |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for incident in state.recent:
        target = incident_workflow_id(state.job_id, incident.number, incident.rounds)
        link = f"[{incident.incident_id}](/namespaces/{namespace}/workflows/{target})"
        lost = "-" if incident.steps_lost is None else incident.steps_lost
        lines.append(
            f"| {link} | {_clock(incident.opened_at)} | {incident.symptom} "
            f"| {_cell(incident.action)} | {lost} | {incident.state} |"
        )
        lines.append(f"| | | {_cell(incident.reason)} | | | |")
    return lines


def incident_summary(finding: Finding, round_number: int) -> str:
    """The round in one line."""
    return f"round {round_number}: {finding.symptom} - {finding.reason}"[:200]


def incident_page(
    request: IncidentInput,
    finding: Finding,
    record: DecisionRecord | None,
    evidence: tuple[str, ...],
) -> str:
    """The round's current details: evidence, finding, decision."""
    first = finding.first_failed_rank
    lines = [
        f"# Incident {request.incident_id}, round {request.round_number}: {finding.symptom}",
        "",
        f"**{_cell(finding.reason)}**",
        "",
        "| | |",
        "| --- | --- |",
        f"| side | {finding.side} ({finding.confidence} confidence) |",
        f"| rule | `{finding.rule}` |",
        f"| first failed rank | {'-' if first is None else first} |",
        f"| suspects | {_cell(', '.join(finding.suspects) or 'none')} |",
        f"| witnesses | {_cell(', '.join(map(str, finding.witnesses[:32])) or 'none')} |",
        f"| run | {request.run_id} |",
        f"| detected | {_clock(request.detected_at)} |",
        f"| run stopped | {_clock(request.stopped_at)} |",
        "",
    ]
    if record is not None:
        decision = record.decision
        evict = f", evicting {', '.join(decision.evict)}" if decision.evict else ""
        left = "" if decision.budget_left is None else f" Budget left: {decision.budget_left}."
        lines += [
            "## Decision",
            "",
            f"**{decision.rung}** (`{decision.action}`{evict}): {_cell(decision.reason)}{left}",
            "",
            f"Ladder row `{decision.row}`, policy `{record.policy_hash}`.",
            "",
        ]
    lines += ["## What was seen", ""]
    lines += [
        f"- {o.kind}{'' if o.machine_id is None else f' on {o.machine_id}'}"
        f"{'' if o.rank is None else f', rank {o.rank}'}: {_cell(o.reason)}"
        for o in request.observations[:20]
    ]
    lines += [
        "",
        "## Ranks",
        "",
        "| rank | machine | end | step | last line |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [row for report in request.reports[:32] for row in _rank_rows(report)][:64]
    if evidence:
        lines += ["", "## Closer look", "", *(f"- {_cell(line)}" for line in evidence[:40])]
    return "\n".join(lines)


def _rank_rows(report: MachineReport) -> list[str]:
    if not report.reachable:
        state = "lost" if report.lost else "not reachable"
        return [f"| - | {report.machine_id} | {state} | - | {_cell(report.note)} |"]
    rows = []
    for rank in report.ranks:
        if rank.state is not RankState.EXITED:
            end = rank.state.value
        elif rank.stopped_by_us:
            end = "stopped by Everstep"
        elif rank.signal is not None:
            end = f"signal {rank.signal}"
        else:
            end = f"exit {rank.exit_code}"
        step = "-" if rank.step is None else rank.step
        last = rank.log_lines[-1] if rank.log_lines else ""
        rows.append(f"| {rank.rank} | {report.machine_id} | {end} | {step} | {_cell(last)[:160]} |")
    return rows
