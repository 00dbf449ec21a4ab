"""The tables of the ledger. Invariants that must hold are constraints here, not habits in code.

Instants come from the messages (the workflow's clock), never from the database's clock. Ids that a
person sees (job, run, machine, incident) are text keys; counted keys are internal.

Not here: the triggers that guard what an index cannot (``migrations/versions``), and queries.
``docs/ledger.md`` explains every table and invariant to operators.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKeyConstraint,
    Index,
    MetaData,
    UniqueConstraint,
    false,
    text,
)
from sqlmodel import Field, SQLModel

from everstep.ledger.types import CleanJson, CleanText, RowId, UtcTime

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Table(SQLModel):
    """Base of every table: metadata of our own, with names that migrations can refer to."""

    metadata: ClassVar[MetaData] = MetaData(naming_convention=NAMING)


def _one_live(name: str, column: str, condition: str) -> Index:
    """A partial unique index: at most one row with ``condition`` for each value of ``column``."""
    return Index(
        name, column, unique=True, sqlite_where=text(condition), postgresql_where=text(condition)
    )


def _counted() -> Any:
    """A primary key that the database counts."""
    return Field(default=None, sa_column=Column(RowId, primary_key=True, autoincrement=True))


# --- machines ----------------------------------------------------------------------------------


class Machine(Table, table=True):
    """A machine whose agent has registered. Its state (idle, leased, evicted) is derived."""

    __tablename__ = "machines"

    machine_id: str = Field(primary_key=True)
    url: str
    address: str
    slots: int
    version: str
    labels: dict[str, str] = Field(default_factory=dict, sa_type=CleanJson)
    agent_boot_id: str
    replaced_boot_id: str | None = None
    """The boot before this one. It is refused while this one lives: the newest boot wins."""
    told_evicted: bool = Field(default=False, sa_column_kwargs={"server_default": false()})
    """What its last registration was answered. An agent that was told so starts nothing until it is
    told otherwise, also when its block has been released meanwhile."""
    first_seen_at: datetime = Field(sa_type=UtcTime)
    last_seen_at: datetime = Field(sa_type=UtcTime)


class Block(Table, table=True):
    """A machine kept out after its eviction, until it is released."""

    __tablename__ = "blocks"
    __table_args__ = (
        _one_live("uq_blocks_live", "machine_id", "released_at IS NULL"),
        CheckConstraint("(released_at IS NULL) = (released_by IS NULL)", name="released_whole"),
    )

    id: int | None = _counted()
    machine_id: str = Field(foreign_key="machines.machine_id")
    job_id: str = Field(foreign_key="jobs.job_id")
    incident_id: str
    """No foreign key: on the fast path the eviction may be written before the incident's record."""
    reason: str = Field(sa_type=CleanText)
    blocked_at: datetime = Field(sa_type=UtcTime)
    released_at: datetime | None = Field(default=None, sa_type=UtcTime)
    released_by: str | None = Field(default=None, sa_type=CleanText)
    release_reason: str | None = Field(default=None, sa_type=CleanText)


class Lease(Table, table=True):
    """A machine in the hands of a job. Belongs to the run that uses it, or used it last."""

    __tablename__ = "leases"
    __table_args__ = (
        _one_live("uq_leases_live", "machine_id", "ended_at IS NULL"),
        CheckConstraint("(ended_at IS NULL) = (end_reason IS NULL)", name="ended_whole"),
    )

    id: int | None = _counted()
    machine_id: str = Field(foreign_key="machines.machine_id")
    job_id: str = Field(foreign_key="jobs.job_id", index=True)
    run_id: str = Field(foreign_key="runs.run_id")
    leased_at: datetime = Field(sa_type=UtcTime)
    ended_at: datetime | None = Field(default=None, sa_type=UtcTime)
    end_reason: str | None = None


# --- jobs and runs -----------------------------------------------------------------------------


class Job(Table, table=True):
    """One training job, across all its runs."""

    __tablename__ = "jobs"

    job_id: str = Field(primary_key=True)
    workflow_id: str
    temporal_run_id: str
    spec: dict[str, Any] = Field(sa_type=CleanJson)
    policy_hash: str
    phase: str
    phase_at: datetime = Field(sa_type=UtcTime)
    reason: str = Field(default="", sa_type=CleanText)
    code_version: str | None = None
    created_at: datetime = Field(sa_type=UtcTime)
    ended_at: datetime | None = Field(default=None, sa_type=UtcTime)
    ettr: float | None = None


class Run(Table, table=True):
    """One uninterrupted execution of a job. A trigger keeps generations rising."""

    __tablename__ = "runs"
    __table_args__ = (
        UniqueConstraint("job_id", "generation"),
        _one_live("uq_runs_open", "job_id", "closed_at IS NULL"),
        CheckConstraint("generation >= 1", name="generation"),
        CheckConstraint("(closed_at IS NULL) = (outcome IS NULL)", name="closed_whole"),
    )

    run_id: str = Field(primary_key=True)
    job_id: str = Field(foreign_key="jobs.job_id")
    generation: int
    start_reason: str = Field(sa_type=CleanText)
    code_version: str
    incident_id: str | None = None
    """The incident that led to this run. No foreign key, for the same reason as in ``Block``."""
    opened_at: datetime = Field(sa_type=UtcTime)
    closed_at: datetime | None = Field(default=None, sa_type=UtcTime)
    outcome: str | None = None
    restore_chosen: bool = False
    """False: no restore point has been chosen yet, so the run is not on the lineage."""
    restore_step: int | None = Field(default=None, sa_type=BigInteger)
    restore_generation: int | None = None
    restore_path: str | None = None


class RunMachine(Table, table=True):
    """Which machine has which place in a run."""

    __tablename__ = "run_machines"
    __table_args__ = (UniqueConstraint("run_id", "machine_id"),)

    run_id: str = Field(foreign_key="runs.run_id", primary_key=True)
    group_rank: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    machine_id: str = Field(foreign_key="machines.machine_id")
    address: str


class RunPhaseMark(Table, table=True):
    """The instant of one boundary in the life of a run; written once."""

    __tablename__ = "run_phases"

    run_id: str = Field(foreign_key="runs.run_id", primary_key=True)
    phase: str = Field(primary_key=True)
    at: datetime = Field(sa_type=UtcTime)
    step: int | None = Field(default=None, sa_type=BigInteger)


class Claim(Table, table=True):
    """A request to open a run and the answer it got, so that a repeat gets the same."""

    __tablename__ = "claims"

    id: int | None = _counted()
    request_key: str = Field(unique=True)
    job_id: str = Field(foreign_key="jobs.job_id", index=True)
    origin: str
    """The key without its number: the Temporal run that asked."""
    number: int
    answer: dict[str, Any] = Field(sa_type=CleanJson)
    asked_at: datetime = Field(sa_type=UtcTime)


# --- incidents ---------------------------------------------------------------------------------


class Incident(Table, table=True):
    """One symptom until training is stable again.

    Everything but the state may be missing for a moment: the job can close an incident before the
    round's own record of it has arrived.
    """

    __tablename__ = "incidents"
    __table_args__ = (
        UniqueConstraint("job_id", "number"),
        CheckConstraint("(job_id IS NULL) = (number IS NULL)", name="number_with_job"),
        CheckConstraint("(job_id IS NULL) = (symptom IS NULL)", name="symptom_with_job"),
        CheckConstraint("(job_id IS NULL) = (opened_at IS NULL)", name="opened_with_job"),
    )

    incident_id: str = Field(primary_key=True)
    job_id: str | None = Field(default=None, foreign_key="jobs.job_id")
    number: int | None = None
    state: str
    symptom: str | None = None
    summary: str = Field(default="", sa_type=CleanText)
    opened_at: datetime | None = Field(default=None, sa_type=UtcTime)
    closed_at: datetime | None = Field(default=None, sa_type=UtcTime)


class Round(Table, table=True):
    """One round of an incident: one rung, with the evidence it rests on."""

    __tablename__ = "rounds"

    incident_id: str = Field(foreign_key="incidents.incident_id", primary_key=True)
    round_number: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    run_id: str = Field(foreign_key="runs.run_id")
    symptom: str
    summary: str = Field(default="", sa_type=CleanText)
    detected_at: datetime | None = Field(default=None, sa_type=UtcTime)
    stopped_at: datetime | None = Field(default=None, sa_type=UtcTime)
    reports: list[dict[str, Any]] = Field(default_factory=list, sa_type=CleanJson)
    evidence: list[str] = Field(default_factory=list, sa_type=CleanJson)
    cut: str = ""
    """What was left out of the evidence to keep it bounded, or pruned since."""


class DecisionEntry(Table, table=True):
    """A decision of the ladder with all that is needed to explain it and to decide it again."""

    __tablename__ = "decisions"
    __table_args__ = (
        ForeignKeyConstraint(
            ["incident_id", "round_number"], ["rounds.incident_id", "rounds.round_number"]
        ),
        Index(None, "incident_id"),
    )

    decision_id: str = Field(primary_key=True)
    incident_id: str
    round_number: int
    rung: str
    finding: dict[str, Any] = Field(sa_type=CleanJson)
    state_before: dict[str, Any] = Field(sa_type=CleanJson)
    state_after: dict[str, Any] = Field(sa_type=CleanJson)
    decision: dict[str, Any] = Field(sa_type=CleanJson)
    policy_hash: str
    decided_at: datetime = Field(sa_type=UtcTime)
    approved_by: str | None = Field(default=None, sa_type=CleanText)


class Observation(Table, table=True):
    """What a probe or a watch saw, evidence of a round. Pruned by the policy's retention."""

    __tablename__ = "observations"
    __table_args__ = (
        ForeignKeyConstraint(
            ["incident_id", "round_number"], ["rounds.incident_id", "rounds.round_number"]
        ),
        UniqueConstraint("incident_id", "round_number", "position"),
    )

    id: int | None = _counted()
    incident_id: str
    round_number: int
    position: int
    kind: str
    verdict: str
    machine_id: str | None = None
    rank: int | None = None
    age_s: float = 0.0
    reason: str = Field(default="", sa_type=CleanText)
    data: dict[str, Any] = Field(default_factory=dict, sa_type=CleanJson)
    observed_at: datetime = Field(sa_type=UtcTime, index=True)
    """When the round was detected: the age of its evidence for the retention."""


class ActionEntry(Table, table=True):
    """A destructive action that was carried out (or found unneeded), once for each key."""

    __tablename__ = "actions"

    incident_id: str = Field(primary_key=True)
    step: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    target: str = Field(primary_key=True)
    generation: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    kind: str
    job_id: str = Field(foreign_key="jobs.job_id")
    result: dict[str, Any] = Field(sa_type=CleanJson)
    at: datetime = Field(sa_type=UtcTime)


# --- policy, code, people ----------------------------------------------------------------------


class PolicyEntry(Table, table=True):
    """A policy that was in force for some job, by its hash: what decisions refer to."""

    __tablename__ = "policy_snapshots"

    hash: str = Field(primary_key=True)
    policy: dict[str, Any] = Field(sa_type=CleanJson)
    source: str = Field(sa_type=CleanText)
    first_seen_at: datetime = Field(sa_type=UtcTime)


class PolicyApplication(Table, table=True):
    """A policy that a person applied to the fleet; the newest one is active."""

    __tablename__ = "policy_applications"
    __table_args__ = (_one_live("uq_policy_applications_active", "active", "active"),)

    id: int | None = _counted()
    hash: str = Field(foreign_key="policy_snapshots.hash")
    yaml_text: str = Field(sa_type=CleanText)
    author: str = Field(sa_type=CleanText)
    reason: str = Field(sa_type=CleanText)
    applied_at: datetime = Field(sa_type=UtcTime)
    active: bool = True


class CodeVersion(Table, table=True):
    """A code version of a job. Append-only: a trigger refuses changes."""

    __tablename__ = "code_versions"

    job_id: str = Field(foreign_key="jobs.job_id", primary_key=True)
    code_version: str = Field(primary_key=True)
    source: str | None = None
    path: str | None = None
    """Its folder on the machines."""
    author: str = Field(default="", sa_type=CleanText)
    reason: str = Field(default="", sa_type=CleanText)
    recorded_at: datetime = Field(sa_type=UtcTime)


class Notification(Table, table=True):
    """A message that people got, so that it is not sent twice."""

    __tablename__ = "notifications"

    key: str = Field(primary_key=True)
    at: datetime = Field(sa_type=UtcTime, index=True)
