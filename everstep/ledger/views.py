"""What the ledger answers: frozen models, ready for ``-o json``.

The messages of ``everstep.spec.messages`` are used where one exists; these are the rest. Not here:
the tables themselves, which never leave this package (a row belongs to its transaction).
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, Field

from everstep.decide.words import (
    IncidentState,
    JobPhase,
    RunOutcome,
    RunPhase,
    Symptom,
    Verdict,
)
from everstep.spec.agent_api import RestorePointPlan
from everstep.spec.base import Message
from everstep.spec.messages import DecisionRecord, MachineRef


class View(Message):
    """Base: built from a table's row."""

    model_config = ConfigDict(from_attributes=True)


class MachineState(StrEnum):
    """What a machine is doing, derived from its live lease and its live block."""

    IDLE = "idle"
    LEASED = "leased"
    EVICTED = "evicted"


class MachineStanding(View):
    """What a registering machine has to know."""

    accepted: bool = True
    message: str = ""
    evicted: bool = False
    fences: dict[str, int] = Field(default_factory=dict)
    """For each job it reported: the lowest generation that may run on this machine. Jobs that this
    ledger does not know are absent: unknown is not a reason to stop anything."""


class MachineRow(View):
    """A machine and who has it."""

    machine_id: str
    url: str
    address: str
    slots: int
    version: str
    labels: dict[str, str]
    agent_boot_id: str
    first_seen_at: datetime
    last_seen_at: datetime
    state: MachineState = MachineState.IDLE
    job_id: str | None = None
    run_id: str | None = None
    blocked_reason: str | None = None
    blocked_by: str | None = None
    """The incident that evicted it."""
    blocked_at: datetime | None = None


class JobRow(View):
    """A job, as the ledger knows it."""

    job_id: str
    workflow_id: str
    temporal_run_id: str
    phase: JobPhase
    phase_at: datetime
    reason: str
    spec: dict[str, Any]
    policy_hash: str
    code_version: str | None
    created_at: datetime
    ended_at: datetime | None
    ettr: float | None
    runs_total: int = 0
    incidents_total: int = 0
    machines: tuple[str, ...] = ()
    """Machines it holds now."""


class PhaseMark(View):
    """The instant of one boundary of a run."""

    phase: RunPhase
    at: datetime
    step: int | None


class RunRow(View):
    """A run with its boundaries, in the order in which they happened."""

    run_id: str
    job_id: str
    generation: int
    start_reason: str
    code_version: str
    incident_id: str | None
    opened_at: datetime
    closed_at: datetime | None
    outcome: RunOutcome | None
    restore_chosen: bool
    restore: RestorePointPlan | None = None
    machines: tuple[MachineRef, ...] = ()
    phases: tuple[PhaseMark, ...] = ()

    def at(self, phase: RunPhase) -> datetime | None:
        """When the run passed ``phase``, or None."""
        return next((mark.at for mark in self.phases if mark.phase is phase), None)


class IncidentRow(View):
    """One line about an incident."""

    incident_id: str
    job_id: str
    number: int
    state: IncidentState
    symptom: Symptom
    summary: str
    opened_at: datetime
    closed_at: datetime | None
    rounds_total: int = 0


class RoundRow(View):
    """One round: when, and the evidence its decision rests on."""

    round_number: int
    run_id: str
    symptom: Symptom
    summary: str
    detected_at: datetime | None
    stopped_at: datetime | None
    reports: list[dict[str, Any]]
    evidence: list[str]
    cut: str
    """What was left out of the evidence, or pruned since; empty: nothing."""


class ObservationRow(View):
    """An observation that is kept as evidence."""

    round_number: int
    position: int
    kind: str
    verdict: Verdict
    machine_id: str | None
    rank: int | None
    age_s: float
    reason: str
    data: dict[str, Any]
    observed_at: datetime


class ActionRow(View):
    """A destructive action, exactly once for its key, and its result."""

    incident_id: str
    step: int
    target: str
    generation: int
    kind: str
    job_id: str
    result: dict[str, Any]
    at: datetime


class IncidentDetail(IncidentRow):
    """Everything about an incident: what ``everstep explain`` shows."""

    rounds: tuple[RoundRow, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()
    observations: tuple[ObservationRow, ...] = ()
    actions: tuple[ActionRow, ...] = ()


class PolicyRow(View):
    """A policy that a person applied."""

    hash: str
    yaml_text: str
    author: str
    reason: str
    applied_at: datetime
    active: bool


class CodeVersionRow(View):
    """A code version of a job."""

    job_id: str
    code_version: str
    source: str | None
    path: str | None
    author: str
    reason: str
    recorded_at: datetime


class Pruned(View):
    """What ``prune`` removed."""

    observations: int = 0
    rounds: int = 0
    """Rounds whose reports and evidence lines were removed."""
    claims: int = 0
    notifications: int = 0
