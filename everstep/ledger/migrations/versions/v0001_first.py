"""The first schema: machines, jobs, runs, incidents, policies, code versions.

Triggers guard what an index cannot: generations only rise, a machine is never both leased and
blocked, and code versions are append-only. SQLite and PostgreSQL write them differently.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from everstep.ledger.migrations.triggers import refuse

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Frozen here: a migration must not change when the code's own types do.
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
INSTANT = sa.DateTime(timezone=True)
COUNTED = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# name, table, events, condition for refusing, message
TRIGGERS = (
    (
        "runs_generation_rises",
        "runs",
        "INSERT",
        "EXISTS (SELECT 1 FROM runs WHERE job_id = NEW.job_id AND generation >= NEW.generation)",
        "the generation of a job's run has to rise",
    ),
    (
        "runs_generation_stays",
        "runs",
        "UPDATE",
        "NEW.generation <> OLD.generation OR NEW.job_id <> OLD.job_id",
        "the generation of a run never changes",
    ),
    (
        "leases_not_blocked",
        "leases",
        "INSERT",
        """NEW.ended_at IS NULL AND EXISTS (
            SELECT 1 FROM blocks WHERE machine_id = NEW.machine_id AND released_at IS NULL)""",
        "a blocked machine cannot be leased",
    ),
    (
        "leases_stay_ended",
        "leases",
        "UPDATE",
        "(OLD.ended_at IS NOT NULL AND NEW.ended_at IS NULL) OR NEW.machine_id <> OLD.machine_id",
        "a lease that has ended stays ended",
    ),
    (
        "blocks_not_leased",
        "blocks",
        "INSERT",
        """NEW.released_at IS NULL AND EXISTS (
            SELECT 1 FROM leases WHERE machine_id = NEW.machine_id AND ended_at IS NULL)""",
        "a leased machine cannot be blocked before its lease ends",
    ),
    (
        "blocks_stay_released",
        "blocks",
        "UPDATE",
        """(OLD.released_at IS NOT NULL AND NEW.released_at IS NULL)
            OR NEW.machine_id <> OLD.machine_id""",
        "a block that was released stays released",
    ),
    ("code_versions_stay", "code_versions", "UPDATE", "1 = 1", "code versions are append-only"),
    ("code_versions_kept", "code_versions", "DELETE", "1 = 1", "code versions are append-only"),
    ("actions_stay", "actions", "UPDATE", "1 = 1", "actions are append-only"),
    ("actions_kept", "actions", "DELETE", "1 = 1", "actions are append-only"),
)


def upgrade() -> None:
    """Create everything in an empty database."""
    _jobs()
    _machines()
    _notifications()
    _policy_snapshots()
    _actions()
    _blocks()
    _claims()
    _code_versions()
    _incidents()
    _policy_applications()
    _runs()
    _leases()
    _rounds()
    _run_machines()
    _run_phases()
    _decisions()
    _observations()
    for trigger in TRIGGERS:
        refuse(*trigger)


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("workflow_id", sa.String(), nullable=False),
        sa.Column("temporal_run_id", sa.String(), nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("policy_hash", sa.String(), nullable=False),
        sa.Column("phase", sa.String(), nullable=False),
        sa.Column("phase_at", INSTANT, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("code_version", sa.String(), nullable=True),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("ended_at", INSTANT, nullable=True),
        sa.Column("ettr", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_jobs")),
    )


def _machines() -> None:
    op.create_table(
        "machines",
        sa.Column("machine_id", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("labels", JSON, nullable=False),
        sa.Column("agent_boot_id", sa.String(), nullable=False),
        sa.Column("replaced_boot_id", sa.String(), nullable=True),
        sa.Column("first_seen_at", INSTANT, nullable=False),
        sa.Column("last_seen_at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("machine_id", name=op.f("pk_machines")),
    )


def _notifications() -> None:
    op.create_table(
        "notifications",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_notifications")),
    )
    op.create_index(op.f("ix_notifications_at"), "notifications", ["at"], unique=False)


def _policy_snapshots() -> None:
    op.create_table(
        "policy_snapshots",
        sa.Column("hash", sa.String(), nullable=False),
        sa.Column("policy", JSON, nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("first_seen_at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_policy_snapshots")),
    )


def _actions() -> None:
    op.create_table(
        "actions",
        sa.Column("incident_id", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("result", JSON, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_actions_job_id")),
        sa.PrimaryKeyConstraint(
            "incident_id", "step", "target", "generation", name=op.f("pk_actions")
        ),
    )


def _blocks() -> None:
    op.create_table(
        "blocks",
        sa.Column("id", COUNTED, autoincrement=True, nullable=False),
        sa.Column("machine_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("incident_id", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("blocked_at", INSTANT, nullable=False),
        sa.Column("released_at", INSTANT, nullable=True),
        sa.Column("released_by", sa.Text(), nullable=True),
        sa.Column("release_reason", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(released_at IS NULL) = (released_by IS NULL)", name=op.f("ck_blocks_released_whole")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_blocks_job_id")),
        sa.ForeignKeyConstraint(
            ["machine_id"], ["machines.machine_id"], name=op.f("fk_blocks_machine_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_blocks")),
    )
    op.create_index(
        "uq_blocks_live",
        "blocks",
        ["machine_id"],
        unique=True,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )


def _claims() -> None:
    op.create_table(
        "claims",
        sa.Column("id", COUNTED, autoincrement=True, nullable=False),
        sa.Column("request_key", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("origin", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("answer", JSON, nullable=False),
        sa.Column("asked_at", INSTANT, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_claims_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_claims")),
        sa.UniqueConstraint("request_key", name=op.f("uq_claims_request_key")),
    )
    op.create_index(op.f("ix_claims_job_id"), "claims", ["job_id"], unique=False)


def _code_versions() -> None:
    op.create_table(
        "code_versions",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("code_version", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=True),
        sa.Column("path", sa.String(), nullable=True),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("recorded_at", INSTANT, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_code_versions_job_id")),
        sa.PrimaryKeyConstraint("job_id", "code_version", name=op.f("pk_code_versions")),
    )


def _incidents() -> None:
    op.create_table(
        "incidents",
        sa.Column("incident_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("symptom", sa.String(), nullable=True),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("opened_at", INSTANT, nullable=True),
        sa.Column("closed_at", INSTANT, nullable=True),
        sa.CheckConstraint(
            "(job_id IS NULL) = (number IS NULL)", name=op.f("ck_incidents_number_with_job")
        ),
        sa.CheckConstraint(
            "(job_id IS NULL) = (opened_at IS NULL)", name=op.f("ck_incidents_opened_with_job")
        ),
        sa.CheckConstraint(
            "(job_id IS NULL) = (symptom IS NULL)", name=op.f("ck_incidents_symptom_with_job")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_incidents_job_id")),
        sa.PrimaryKeyConstraint("incident_id", name=op.f("pk_incidents")),
        sa.UniqueConstraint("job_id", "number", name=op.f("uq_incidents_job_id_number")),
    )


def _policy_applications() -> None:
    op.create_table(
        "policy_applications",
        sa.Column("id", COUNTED, autoincrement=True, nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.Column("yaml_text", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("applied_at", INSTANT, nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["hash"], ["policy_snapshots.hash"], name=op.f("fk_policy_applications_hash")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_applications")),
    )
    op.create_index(
        "uq_policy_applications_active",
        "policy_applications",
        ["active"],
        unique=True,
        sqlite_where=sa.text("active"),
        postgresql_where=sa.text("active"),
    )


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("start_reason", sa.Text(), nullable=False),
        sa.Column("code_version", sa.String(), nullable=False),
        sa.Column("incident_id", sa.String(), nullable=True),
        sa.Column("opened_at", INSTANT, nullable=False),
        sa.Column("closed_at", INSTANT, nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("restore_chosen", sa.Boolean(), nullable=False),
        sa.Column("restore_step", sa.BigInteger(), nullable=True),
        sa.Column("restore_generation", sa.Integer(), nullable=True),
        sa.Column("restore_path", sa.String(), nullable=True),
        sa.CheckConstraint(
            "(closed_at IS NULL) = (outcome IS NULL)", name=op.f("ck_runs_closed_whole")
        ),
        sa.CheckConstraint("generation >= 1", name=op.f("ck_runs_generation")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_runs_job_id")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_runs")),
        sa.UniqueConstraint("job_id", "generation", name=op.f("uq_runs_job_id_generation")),
    )
    op.create_index(
        "uq_runs_open",
        "runs",
        ["job_id"],
        unique=True,
        sqlite_where=sa.text("closed_at IS NULL"),
        postgresql_where=sa.text("closed_at IS NULL"),
    )


def _leases() -> None:
    op.create_table(
        "leases",
        sa.Column("id", COUNTED, autoincrement=True, nullable=False),
        sa.Column("machine_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("leased_at", INSTANT, nullable=False),
        sa.Column("ended_at", INSTANT, nullable=True),
        sa.Column("end_reason", sa.String(), nullable=True),
        sa.CheckConstraint(
            "(ended_at IS NULL) = (end_reason IS NULL)", name=op.f("ck_leases_ended_whole")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_leases_job_id")),
        sa.ForeignKeyConstraint(
            ["machine_id"], ["machines.machine_id"], name=op.f("fk_leases_machine_id")
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_leases_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leases")),
    )
    op.create_index(op.f("ix_leases_job_id"), "leases", ["job_id"], unique=False)
    op.create_index(
        "uq_leases_live",
        "leases",
        ["machine_id"],
        unique=True,
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )


def _rounds() -> None:
    op.create_table(
        "rounds",
        sa.Column("incident_id", sa.String(), nullable=False),
        sa.Column("round_number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("symptom", sa.String(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("detected_at", INSTANT, nullable=True),
        sa.Column("stopped_at", INSTANT, nullable=True),
        sa.Column("reports", JSON, nullable=False),
        sa.Column("evidence", JSON, nullable=False),
        sa.Column("cut", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["incident_id"], ["incidents.incident_id"], name=op.f("fk_rounds_incident_id")
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_rounds_run_id")),
        sa.PrimaryKeyConstraint("incident_id", "round_number", name=op.f("pk_rounds")),
    )


def _run_machines() -> None:
    op.create_table(
        "run_machines",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("group_rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("machine_id", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["machine_id"], ["machines.machine_id"], name=op.f("fk_run_machines_machine_id")
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_run_machines_run_id")),
        sa.PrimaryKeyConstraint("run_id", "group_rank", name=op.f("pk_run_machines")),
        sa.UniqueConstraint("run_id", "machine_id", name=op.f("uq_run_machines_run_id_machine_id")),
    )


def _run_phases() -> None:
    op.create_table(
        "run_phases",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("phase", sa.String(), nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_run_phases_run_id")),
        sa.PrimaryKeyConstraint("run_id", "phase", name=op.f("pk_run_phases")),
    )


def _decisions() -> None:
    op.create_table(
        "decisions",
        sa.Column("decision_id", sa.String(), nullable=False),
        sa.Column("incident_id", sa.String(), nullable=False),
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("rung", sa.String(), nullable=False),
        sa.Column("finding", JSON, nullable=False),
        sa.Column("state_before", JSON, nullable=False),
        sa.Column("state_after", JSON, nullable=False),
        sa.Column("decision", JSON, nullable=False),
        sa.Column("policy_hash", sa.String(), nullable=False),
        sa.Column("decided_at", INSTANT, nullable=False),
        sa.Column("approved_by", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["incident_id", "round_number"],
            ["rounds.incident_id", "rounds.round_number"],
            name=op.f("fk_decisions_incident_id_round_number"),
        ),
        sa.PrimaryKeyConstraint("decision_id", name=op.f("pk_decisions")),
    )
    op.create_index(op.f("ix_decisions_incident_id"), "decisions", ["incident_id"], unique=False)


def _observations() -> None:
    op.create_table(
        "observations",
        sa.Column("id", COUNTED, autoincrement=True, nullable=False),
        sa.Column("incident_id", sa.String(), nullable=False),
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("machine_id", sa.String(), nullable=True),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("age_s", sa.Float(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("data", JSON, nullable=False),
        sa.Column("observed_at", INSTANT, nullable=False),
        sa.ForeignKeyConstraint(
            ["incident_id", "round_number"],
            ["rounds.incident_id", "rounds.round_number"],
            name=op.f("fk_observations_incident_id_round_number"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_observations")),
        sa.UniqueConstraint(
            "incident_id",
            "round_number",
            "position",
            name=op.f("uq_observations_incident_id_round_number_position"),
        ),
    )
    op.create_index(
        op.f("ix_observations_observed_at"), "observations", ["observed_at"], unique=False
    )
