"""Inputs and results of workflows, activities, updates and queries.

Every signal, update, query and activity takes exactly one of these (the Temporal UI can send only
one JSON payload). All are small: ids, counts and cut lines. Logs, stacks and arrays stay on agents.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from everstep.decide.attribution import Finding, MachineReport, Trigger
from everstep.decide.ladder import Decision, LadderState
from everstep.decide.stack_report import StackFinding
from everstep.decide.words import (
    IncidentState,
    JobPhase,
    RunOutcome,
    RunPhase,
    Symptom,
    Verdict,
)
from everstep.spec.agent_api import EventKind, RestorePointPlan
from everstep.spec.base import Line, Message
from everstep.spec.job import JobSpec
from everstep.spec.policy import PolicySnapshot
from everstep.spec.probe_events import observation_of

TASK_QUEUE = "everstep"
WATCH_QUEUE = "everstep-watch"
TRAINING_JOB = "TrainingJob"
INCIDENT = "Incident"
CLEARED_AGO_S = "cleared_ago_s"
"""In the data of what a probe saw: it had gone so long before the run stopped."""


def job_workflow_id(job_id: str) -> str:
    """Workflow id of a job: ``job-<name>``."""
    return f"job-{job_id}"


def incident_workflow_id(job_id: str, number: int, round_number: int) -> str:
    """Workflow id of one round of an incident: ``incident-<job>-<n>-r<round>``."""
    return f"incident-{job_id}-{number}-r{round_number}"


# --- shared parts ------------------------------------------------------------------------------


class MachineRef(Message):
    """A machine of a run. Its URL is looked up in the ledger at each call: agents move."""

    machine_id: str
    address: str
    group_rank: int


class ObservationRecord(Message):
    """What a probe or a watch saw; evidence of an incident."""

    kind: EventKind | Literal["unreachable"]
    verdict: Verdict
    machine_id: str | None = None
    rank: int | None = None
    age_s: float = 0.0
    """Age when it was received, measured by the machine's or the receiver's monotonic clock."""
    reason: Line = ""
    data: dict[str, Any] = Field(default_factory=dict)

    def as_trigger(self) -> Trigger:
        """What attribution needs of it."""
        step = self.data.get("step")
        return Trigger(
            kind=str(self.kind),
            machine_id=self.machine_id,
            rank=self.rank,
            reason=self.reason,
            step=step if isinstance(step, int) else None,
            observation=observation_of(self.reason, self.data)
            if self.kind is EventKind.PROBE
            else None,
            cleared=CLEARED_AGO_S in self.data,
        )

    def told_as(self, generation: int) -> str:
        """What it is about, in one word: of a probe for ever, of a job's signal for one run."""
        if self.kind is not EventKind.PROBE:
            return f"run-{generation}/{self.kind}"
        names = [str(self.data.get(name, "")) for name in ("probe", "target", "rule")]
        return "/".join([self.machine_id or "", *names])


class Progress(Message):
    """Newest known progress of a run."""

    step: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    from_log: bool = False
    """The step was printed by a script that keeps its own checkpoints."""


# --- launch ------------------------------------------------------------------------------------


class RegisterJob(Message):
    """Enter a job into the ledger, or find that it is there already."""

    job_id: str
    workflow_id: str
    temporal_run_id: str
    spec: JobSpec


class LiveRun(Message):
    """A run of this job that the ledger holds open: it is adopted, not doubled.

    Temporal's database was lost, or the workflow was started anew.
    """

    run_id: str
    generation: int
    machines: tuple[MachineRef, ...]
    code_version: str
    code_path: str | None
    restore: RestorePointPlan | None
    first_step_at: datetime | None
    opened_at: datetime


class RegisteredJob(Message):
    """The job's row in the ledger, as ``register_job`` found or made it."""

    policy: PolicySnapshot
    live_run: LiveRun | None = None
    incidents_total: int = 0
    created_at: datetime
    problem: Line | None = None
    """Set when the job may not start (it has ended already under this name, ...)."""


class DecisionRecord(Message):
    """A decision with all that is needed to explain it and to decide it again."""

    decision_id: str
    incident_id: str
    round_number: int
    finding: Finding
    state_before: LadderState
    state_after: LadderState
    decision: Decision
    policy_hash: str
    decided_at: datetime
    approved_by: str | None = None


class OpenRun(Message):
    """Claim machines and open the next run, in one ledger transaction."""

    request_key: str
    """Same key, same answer: ``<temporal run id>/<n>``."""
    job_id: str
    machines_needed: int
    slots_needed: int
    """Ranks for each machine."""
    keep: tuple[str, ...] = ()
    """Machines to keep, in group-rank order; blocked ones are dropped and replaced in place."""
    avoid: tuple[str, ...] = ()
    """Machines not to lease again for this job."""
    start_reason: str
    code_version: str
    incident_id: str | None = None
    opened_at: datetime


class OpenedRun(Message):
    """The new run, or the number of machines that are missing for it."""

    run_id: str = ""
    generation: int = 0
    machines: tuple[MachineRef, ...] = ()
    shortfall: int = 0


class PrepareRunInput(Message):
    """Reserve the run's rendezvous port on its first machine."""

    command_id: str
    job_id: str
    generation: int
    machine: MachineRef
    policy: PolicySnapshot


class PreparedRunResult(Message):
    """Where ranks meet, or why the machine could not say."""

    master_addr: str = ""
    master_port: int = 0
    unreachable: Line | None = None


class StartRanks(Message):
    """Start the ranks of one shard of machines."""

    command_id: str
    job_id: str
    run_id: str
    generation: int
    machines: tuple[MachineRef, ...]
    machines_total: int
    spec: JobSpec
    code_version: str
    code_path: str | None
    master_addr: str
    master_port: int
    start_reason: str
    restore: RestorePointPlan | None
    checkpoint_dir: str
    policy: PolicySnapshot


class StartedRanks(Message):
    """Machines that started, and for the others one line each."""

    started: tuple[str, ...] = ()
    refused: dict[str, str] = Field(default_factory=dict)
    """Machine to the agent's own refusal (it answered)."""
    unreachable: dict[str, str] = Field(default_factory=dict)
    """Machine to why it could not be reached (unknown, not faulty)."""


class StopRanks(Message):
    """Capture evidence and end a run on one shard of machines."""

    command_id: str
    job_id: str
    generation: int
    machines: tuple[MachineRef, ...]
    reason: str
    planned: bool
    """True: the full grace (pause, cancel); False: the run has failed already."""
    policy: PolicySnapshot


class StoppedRanks(Message):
    """One report for each machine of the shard."""

    reports: tuple[MachineReport, ...] = ()


class CloseRun(Message):
    """Mark a run closed. ``release`` also gives its machines back."""

    run_id: str
    outcome: RunOutcome
    closed_at: datetime
    release: bool


class CloseJob(Message):
    """Mark a job ended and give its machines back."""

    job_id: str
    phase: JobPhase
    reason: Line
    closed_at: datetime
    ettr: float | None = None


# --- detection ---------------------------------------------------------------------------------


class WatchUntil(Message):
    """When a watch returns although nothing is wrong. Any of these; the first wins."""

    first_step: bool = False
    after_s: float | None = None


class WatchRun(Message):
    """Follow the event streams of one shard until something has to be decided."""

    job_id: str
    run_id: str
    generation: int
    machines: tuple[MachineRef, ...]
    cursors: dict[str, str] = Field(default_factory=dict)
    """Machine to the cursor to resume its stream from."""
    until: WatchUntil = WatchUntil()
    policy: PolicySnapshot
    told: tuple[str, ...] = ()
    """Warnings that the job has recorded already: they are not worth a result again."""


class WatchResult(Message):
    """Why a watch returned."""

    kind: Literal["succeeded", "trouble", "first_step", "tick", "blind", "cancelled"]
    observations: tuple[ObservationRecord, ...] = ()
    cursors: dict[str, str] = Field(default_factory=dict)
    progress: Progress = Progress()
    unreachable: tuple[str, ...] = ()
    """Machines of the shard that cannot be reached at the moment (unknown)."""


class ConfirmMachines(Message):
    """Wait for machines that could not be reached until they answer or count as lost."""

    job_id: str
    generation: int
    machines: tuple[MachineRef, ...]
    command_id: str
    policy: PolicySnapshot


class ConfirmedMachines(Message):
    """A report for each: ``lost`` where the policy's time has run out.

    Else it is what the machine said when it came back (its ranks are stopped then).
    """

    reports: tuple[MachineReport, ...] = ()


# --- diagnosis, isolation, restore, code -------------------------------------------------------


class DiagnoseRun(Message):
    """Look closer at what is left of a run: whole log tails from the agents."""

    job_id: str
    run_id: str
    generation: int
    incident_id: str
    reports: tuple[MachineReport, ...]
    observations: tuple[ObservationRecord, ...]


class DiagnosedRun(Message):
    """The finding after the closer look, and what was looked at (for people)."""

    finding: Finding
    evidence: tuple[Line, ...] = ()


class FindSlowRanks(Message):
    """Look at the stacks of a run that has become slow, several times (paper, section 6)."""

    job_id: str
    run_id: str
    generation: int
    machines: tuple[MachineRef, ...]
    ranks_per_machine: int
    policy: PolicySnapshot


class FoundSlowRanks(Message):
    """Who was behind in most of the rounds."""

    finding: StackFinding | None = None
    """None: the run has ended meanwhile, or no stack could be had."""
    rounds: int = 0
    """Rounds that were looked at."""
    evidence: tuple[Line, ...] = ()
    """What those were doing, and what could not be seen; for people."""


class EvictMachines(Message):
    """Take machines out of use and block them, each exactly once."""

    incident_id: str
    job_id: str
    generation: int
    step: int
    """Which step of the round this is: part of the idempotency key."""
    machines: tuple[str, ...]
    reason: Line
    decided_at: datetime


class EvictedMachines(Message):
    """Machines that are blocked now, and those that were so before (by whom)."""

    evicted: tuple[str, ...] = ()
    already: dict[str, str] = Field(default_factory=dict)


class ChooseRestorePoint(Message):
    """Fence older generations off the checkpoint directory, then pick where to start."""

    job_id: str
    run_id: str
    generation: int
    checkpoint: str | None
    """The spec's directory, or None for the controllers' checkpoint root."""
    before_step: int | None = None
    """Start before this step: its loss was not finite. None: no step is in doubt."""


class RestorePoint(Message):
    """Where the run starts from, and where it saves."""

    restore: RestorePointPlan | None = None
    checkpoint_dir: str
    skipped: tuple[Line, ...] = ()
    """Checkpoints that were not used, one line each with the reason."""


class MaterialiseCodeInput(Message):
    """Bring a code version to machines."""

    command_id: str
    job_id: str
    generation: int
    source: str | None
    code_version: str | None = None
    """The version to bring (None: whatever ``source`` holds now, at the launch of a job). A source
    that has changed since is reported for each machine that has no copy yet, never used."""
    machines: tuple[MachineRef, ...]
    policy: PolicySnapshot


class MaterialisedCodeResult(Message):
    """The version's name and its folder on the machines (None: nothing to copy)."""

    code_version: str
    path: str | None = None
    failed: dict[str, str] = Field(default_factory=dict)


# --- ledger and notification -------------------------------------------------------------------


class RecordPhase(Message):
    """One boundary of a run."""

    run_id: str
    phase: RunPhase
    at: datetime
    step: int | None = None


class RecordProgress(Message):
    """Boundaries of runs and the job's phase, in one write."""

    job_id: str
    phase: JobPhase
    phases: tuple[RecordPhase, ...] = ()
    code_version: str | None = None
    at: datetime | None = None
    """When the job entered the phase (the workflow's clock): an older word never undoes a newer."""


class RecordIncident(Message):
    """An incident and its newest round, with evidence and decision; idempotent by ids."""

    incident_id: str
    job_id: str
    run_id: str
    number: int
    round_number: int
    state: IncidentState
    symptom: Symptom
    opened_at: datetime
    closed_at: datetime | None = None
    summary: Line = ""
    detected_at: datetime | None = None
    stopped_at: datetime | None = None
    reports: tuple[MachineReport, ...] = ()
    observations: tuple[ObservationRecord, ...] = ()
    evidence: tuple[Line, ...] = ()
    """What the closer look found, for people."""
    decision: DecisionRecord | None = None


class CloseIncident(Message):
    """An incident is over."""

    incident_id: str
    state: IncidentState
    closed_at: datetime
    summary: Line


class ReadPolicy(Message):
    """The policy as it is now, with the job's overrides laid over it."""

    job_id: str
    overrides: dict[str, Any] = Field(default_factory=dict)


class Notify(Message):
    """Tell people. ``key`` makes repeats harmless."""

    key: str
    severity: Literal["info", "warning", "needs_person"]
    job_id: str
    incident_id: str | None = None
    text: Line


class Done(Message):
    """Result of an activity that has nothing to say."""

    note: Line = ""


# --- workflows ---------------------------------------------------------------------------------


class RunRef(Message):
    """The run the job is in."""

    run_id: str
    generation: int
    machines: tuple[MachineRef, ...]
    code_version: str
    code_path: str | None = None
    restore: RestorePointPlan | None = None
    start_reason: str = "launch"
    opened_at: datetime
    first_step_at: datetime | None = None


class IncidentSummary(Message):
    """One line of the job's page about an incident."""

    incident_id: str
    number: int
    rounds: int
    symptom: Symptom
    state: IncidentState
    action: str
    reason: Line
    opened_at: datetime
    recovered_at: datetime | None = None
    steps_lost: int | None = None


class IncidentInput(Message):
    """One round of an incident.

    With ``decision`` the job has decided already (fast path) and the round records, looks closer
    and notifies; without, the round decides.
    """

    incident_id: str
    job_id: str
    run_id: str
    generation: int
    number: int
    round_number: int
    opened_at: datetime
    detected_at: datetime
    stopped_at: datetime
    observations: tuple[ObservationRecord, ...]
    reports: tuple[MachineReport, ...]
    finding: Finding
    decision: DecisionRecord | None = None
    ladder: LadderState
    policy: PolicySnapshot
    machines: tuple[MachineRef, ...]


class IncidentResult(Message):
    """What the round decided."""

    decision: DecisionRecord
    finding: Finding


class PauseRequest(Message):
    """Stop the ranks, keep the machines, wait for ``resume``."""

    reason: Annotated[str, Field(max_length=500)] = ""
    by: Annotated[str, Field(max_length=200)] = ""


class ResumeRequest(Message):
    """Go on after a pause, or after a person has looked at it (budgets start afresh)."""

    note: Annotated[str, Field(max_length=500)] = ""
    by: Annotated[str, Field(max_length=200)] = ""


class CancelRequest(Message):
    """End the job."""

    reason: Annotated[str, Field(max_length=500)] = ""
    by: Annotated[str, Field(max_length=200)] = ""


class RollRequest(Message):
    """Continue as new at the next safe point (after an upgrade, or for a test)."""

    reason: Annotated[str, Field(max_length=500)] = ""


class UpdateAnswer(Message):
    """Answer of every update."""

    accepted: bool = True
    phase: JobPhase
    message: Line = ""


class JobStatus(Message):
    """Answer of the ``status`` query."""

    job_id: str
    phase: JobPhase
    reason: Line = ""
    """Why it is in this phase, for a person."""
    run_id: str | None = None
    generation: int = 0
    code_version: str | None = None
    machines: tuple[str, ...] = ()
    world_size: int
    progress: Progress = Progress()
    restored_step: int | None = None
    incidents_total: int = 0
    open_incident: str | None = None
    incidents: tuple[IncidentSummary, ...] = ()
    """The most recent ones, newest first."""
    ettr: float | None = None
    """Productive time / wall-clock time so far, 0..1 (paper section 10.1)."""
    created_at: datetime
    policy_hash: str | None = None
    unreachable: tuple[str, ...] = ()


class JobResult(Message):
    """Result of a ``TrainingJob``."""

    job_id: str
    phase: JobPhase
    reason: Line = ""
    runs: int
    incidents: int
    final_step: int | None = None
    ettr: float | None = None
