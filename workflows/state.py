"""All that a ``TrainingJob`` remembers: one serialisable model, carried through continue-as-new.

Anything a decision depends on is in here; the workflow object itself holds only handles of what is
in flight. Not here: how the state changes (``training_job``), how it is shown (``page``).
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from everstep.decide.ettr import RunTimes
from everstep.decide.ladder import LadderState
from everstep.decide.words import IncidentState, JobPhase, RunOutcome, Symptom
from everstep.spec.job import JobSpec
from everstep.spec.messages import IncidentSummary, Progress, RunRef
from everstep.spec.policy import PolicySnapshot

RECENT_INCIDENTS_MAX = 10
RUN_TIMES_MAX = 100


class Wish(StrEnum):
    """What a person asked for; taken up by the main loop at its next safe point."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"


class NextRun(BaseModel):
    """How the next run will be opened."""

    model_config = ConfigDict(extra="ignore")

    start_reason: str = "launch"
    keep: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    incident_id: str | None = None
    restore_before: int | None = None
    """Start before this step: its loss was not finite."""
    waiting_polls: int = 0


class OpenIncident(BaseModel):
    """The incident the job is in, until it has been stable for the policy's window."""

    model_config = ConfigDict(extra="ignore")

    incident_id: str
    number: int
    round_number: int
    symptom: Symptom
    opened_at: datetime
    action: str = ""
    reason: str = ""
    failed_step: int | None = None
    steps_lost: int | None = None
    recovered_at: datetime | None = None


class Effort(BaseModel):
    """What the ETTR is computed from (``everstep.decide.ettr``, paper section 10.1)."""

    model_config = ConfigDict(extra="ignore")

    runs: tuple[RunTimes, ...] = ()
    """The newest ended runs; older ones are summed up below, so that the state stays small."""
    folded_s: float = 0.0
    """Productive time of the runs before those."""


class JobState(BaseModel):
    """The state machine's memory."""

    model_config = ConfigDict(extra="ignore")

    spec: JobSpec
    policy: PolicySnapshot | None = None
    phase: JobPhase = JobPhase.VALIDATING
    reason: str = ""
    created_at: datetime
    run: RunRef | None = None
    runs_total: int = 0
    next_run: NextRun = Field(default_factory=NextRun)
    """What to open when ``run`` is None."""
    requests: int = 0
    """Counts commands and transactions: the last part of every idempotency key."""
    cursors: dict[str, str] = Field(default_factory=dict)
    progress: Progress = Progress()
    unreachable: tuple[str, ...] = ()
    ladder: LadderState = LadderState()
    incident: OpenIncident | None = None
    incidents_total: int = 0
    recent: tuple[IncidentSummary, ...] = ()
    code_version: str | None = None
    code_path: str | None = None
    effort: Effort = Field(default_factory=Effort)
    wish: Wish | None = None
    wish_note: str = ""
    roll: bool = False
    reports_steps: bool = False
    """True once any run has reported a step: the job uses the trainer library."""
    warned_generation: int = 0
    """The newest run of which a failed save has been recorded: once a run is enough."""
    told: tuple[str, ...] = ()
    """Warnings of probes and job signals that are on record, by ``told_as``; bounded."""
    continued: int = 0
    """How often this job has continued as new."""
    last_outcome: RunOutcome | None = None

    @property
    def job_id(self) -> str:
        """The job's name is its id."""
        return self.spec.name

    def note_incident(self, state: IncidentState) -> None:
        """Write the open incident into the list of recent ones, newest first."""
        incident = self.incident
        if incident is None:
            return
        summary = IncidentSummary(
            incident_id=incident.incident_id,
            number=incident.number,
            rounds=incident.round_number,
            symptom=incident.symptom,
            state=state,
            action=incident.action,
            reason=incident.reason[:600],
            opened_at=incident.opened_at,
            recovered_at=incident.recovered_at,
            steps_lost=incident.steps_lost,
        )
        others = tuple(i for i in self.recent if i.incident_id != incident.incident_id)
        self.recent = (summary, *others)[:RECENT_INCIDENTS_MAX]

    def amend_incident(self, incident_id: str, **changes: object) -> None:
        """Write what was learned later into the list of recent ones, if it is still there."""
        self.recent = tuple(
            i.model_copy(update=changes) if i.incident_id == incident_id else i for i in self.recent
        )
