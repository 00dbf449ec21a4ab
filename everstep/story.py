"""An incident told in order: what was seen, what it was taken for, what was done, how it ended.

Pure text from what the ledger holds; nothing is looked up here. Times are instants of the
workflow's clock and, in brackets, seconds since the incident was noticed.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from everstep.decide.words import RunPhase
from everstep.ledger.views import IncidentDetail, ObservationRow, RoundRow, RunRow
from everstep.render import clock, words
from everstep.spec.messages import CLEARED_AGO_S, DecisionRecord

LOG_LINES_SHOWN = 3
AGE_SHOWN_S = 0.05
SECONDS_SHOWN_MAX = 120
PHASES_TOLD = {
    RunPhase.OPENED: "machines claimed",
    RunPhase.START_COMMANDED: "start commanded",
    RunPhase.STARTED: "ranks started",
    RunPhase.FIRST_STEP: "first new step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """An incident and the runs around it."""

    incident: IncidentDetail
    runs: tuple[RunRow, ...]
    """The runs that failed in it and those that it led to, oldest first."""


def tell(story: Story) -> str:
    """The whole story as text."""
    incident = story.incident
    origin = _origin(incident)
    lines = [
        f"Incident {incident.incident_id} of job {incident.job_id}: {words(incident.symptom)}",
        f"  {incident.summary}",
        f"  opened {clock(incident.opened_at)}, "
        + (f"closed {clock(incident.closed_at)}" if incident.closed_at else "still open")
        + f"; {words(incident.state)}",
    ]
    for number in incident.rounds:
        lines += ["", *_round(story, number, origin)]
    if incident.closed_at is not None:
        lines += ["", f"{_when(incident.closed_at, origin)} over: {words(incident.state)}"]
    return "\n".join(lines)


def _origin(incident: IncidentDetail) -> datetime:
    seen = [r.detected_at for r in incident.rounds if r.detected_at is not None]
    return min(seen, default=incident.opened_at)


def _when(at: datetime | None, origin: datetime) -> str:
    if at is None:
        return "  at an unknown time:"
    return f"  {clock(at)} (+{(at - origin).total_seconds():.2f} s)"


def _round(story: Story, number: RoundRow, origin: datetime) -> list[str]:
    incident = story.incident
    failed = next((run for run in story.runs if run.run_id == number.run_id), None)
    where = f"run {failed.generation}" if failed else number.run_id
    lines = [f"Round {number.round_number}, {where}"]
    seen = [o for o in incident.observations if o.round_number == number.round_number]
    lines.append(f"{_when(number.detected_at, origin)} noticed")
    lines += [f"      {_observation(observation)}" for observation in seen]
    if number.stopped_at is not None:
        lines.append(f"{_when(number.stopped_at, origin)} all ranks ended; what they left:")
    for report in number.reports:
        lines += [f"      {line}" for line in _report(report)]
    if number.evidence:
        lines.append("  looked closer:")
        lines += [f"      {line}" for line in number.evidence]
    if number.cut:
        lines.append(f"      ({number.cut})")
    decisions = [d for d in incident.decisions if d.round_number == number.round_number]
    for decision in decisions:
        lines += _decision(decision, origin)
    lines += [
        f"{_when(action.at, origin)} {words(action.kind)} {action.target}"
        for action in incident.actions
        if failed is not None and action.generation == failed.generation
    ]
    return lines + _next_run(story, failed, origin)


def _observation(observation: ObservationRow) -> str:
    place = f"rank {observation.rank}" if observation.rank is not None else ""
    if observation.machine_id:
        place = f"{place} on {observation.machine_id}" if place else observation.machine_id
    head = f"{words(observation.kind)}: {place}" if place else words(observation.kind)
    seen = _seen(observation.data) if observation.kind == "probe" else ""
    ago = f", {age(observation.age_s)} before" if observation.age_s >= AGE_SHOWN_S else ""
    if CLEARED_AGO_S in observation.data:
        ago += f", gone for {age(observation.data[CLEARED_AGO_S])}"
    return f"{head} ({observation.verdict}{ago}) {observation.reason}{seen}".rstrip()


def _seen(data: Mapping[str, Any]) -> str:
    """Which probe, about what, by which rule, and what it called for."""
    what = " ".join(str(data[name]) for name in ("probe", "target") if data.get(name))
    rule = f", rule {data['rule']}" if data.get("rule") else ""
    action = f", calls for: {words(data['action'])}" if data.get("action") else ""
    return f" [{what}{rule}{action}]" if what else ""


def _probed(seen: Mapping[str, Any]) -> str:
    """An observation in a machine's report, with its ages."""
    observation = seen.get("observation", {})
    since = f"for {age(seen.get('age_s', 0.0))}"
    if seen.get("cleared_ago_s") is not None:
        since += f", gone for {age(seen['cleared_ago_s'])}"
    return (
        f"{observation.get('verdict', 'unknown')} {since}: "
        f"{observation.get('reason', '')}{_seen(observation)}"
    )


def age(seconds: float) -> str:
    """A span for people: ``0.4 s``, ``12 min``."""
    return f"{seconds:.1f} s" if seconds < SECONDS_SHOWN_MAX else f"{seconds / 60:.0f} min"


def _report(report: dict[str, Any]) -> list[str]:
    machine = report.get("machine_id", "?")
    if report.get("lost"):
        return [f"{machine}: lost (not reachable while training had stopped)"]
    if not report.get("reachable", True):
        return [f"{machine}: not reachable (unknown)"]
    lines = []
    if report.get("planned_stop"):
        lines.append(f"{machine}: planned stop ({report['planned_stop']})")
    if report.get("processes_vanished"):
        lines.append(f"{machine}: its processes vanished without a trace")
    if not report.get("teardown_clean", True):
        lines.append(f"{machine}: a process could not be ended")
    lines += [f"{machine}: {_probed(seen)}" for seen in report.get("observations", ())]
    if report.get("healthy_probes"):
        lines.append(f"{machine}: nothing wrong by {', '.join(report['healthy_probes'])}")
    for rank in report.get("ranks", ()):
        lines.append(f"{machine} rank {rank.get('rank')}: {_end(rank)}")
        lines += [f"    | {line}" for line in rank.get("log_lines", ())[-LOG_LINES_SHOWN:]]
    return lines


def _end(rank: dict[str, Any]) -> str:
    if rank.get("stopped_by_us"):
        how = "ended by us with the others"
    elif rank.get("signal") is not None:
        how = f"ended by signal {rank['signal']} ({_signal_name(int(rank['signal']))})"
    elif rank.get("exit_code") is not None:
        how = f"exited with {rank['exit_code']}"
    else:
        how = words(rank.get("state", "unknown"))
    parts = [how]
    if rank.get("step") is not None:
        parts.append(f"last step {rank['step']}")
    if rank.get("stalled_for_s") is not None:
        parts.append(f"stalled for {rank['stalled_for_s']:.1f} s")
    if rank.get("nonfinite_step") is not None:
        parts.append(f"not finite at step {rank['nonfinite_step']}")
    if rank.get("log_class") not in (None, "silent"):
        parts.append(f"log: {words(rank['log_class'])}")
    return ", ".join(parts)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _decision(record: DecisionRecord, origin: datetime) -> list[str]:
    finding, decision = record.finding, record.decision
    suspects = f"; suspects {', '.join(finding.suspects)}" if finding.suspects else ""
    budget = "" if decision.budget_left is None else f", {decision.budget_left} restarts left"
    lines = [
        f"  finding: {words(finding.symptom)}, {finding.confidence} confidence{suspects}",
        f"      side {words(finding.side)}",
        f"      rule {finding.rule}: {finding.reason}",
        *([f"      calls for: {words(finding.action)}"] if finding.action else []),
        *(["      ruled out:"] if finding.ruled_out else []),
        *(f"        {line}" for line in finding.ruled_out),
        f"{_when(record.decided_at, origin)} decided: {words(decision.rung)}"
        + (f" {', '.join(decision.evict)}" if decision.evict else "")
        + f" ({words(decision.action)})",
        f"      row {decision.row}: {decision.reason}",
        f"      charged to {words(decision.cause)}{budget}; policy {record.policy_hash}",
    ]
    if record.approved_by:
        lines.append(f"      approved by {record.approved_by}")
    return lines


def _next_run(story: Story, failed: RunRow | None, origin: datetime) -> list[str]:
    after = [
        run
        for run in story.runs
        if failed is not None
        and run.generation == failed.generation + 1
        and run.incident_id == story.incident.incident_id
    ]
    lines = []
    for run in after:
        restore = run.restore
        start = f"from the checkpoint of step {restore.step}" if restore else "from the beginning"
        machines = ", ".join(ref.machine_id for ref in run.machines)
        lines.append(f"  run {run.generation} on {machines}, {start}:")
        lines += [
            f"    {_when(mark.at, origin).strip()} {PHASES_TOLD[mark.phase]}"
            + (f" ({mark.step})" if mark.phase is RunPhase.FIRST_STEP and mark.step else "")
            for mark in run.phases
            if mark.phase in PHASES_TOLD
        ]
    return lines
