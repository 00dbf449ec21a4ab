"""The database itself refuses what must never be, whatever code writes to it.

Every constraint, unique index and trigger of the schema is broken once by a raw statement. A
constraint that is added without a case here fails, and so does one that is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import (
    CheckConstraint,
    Connection,
    ForeignKeyConstraint,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    inspect,
    text,
)
from sqlalchemy.exc import IntegrityError

from everstep.ledger import Ledger
from everstep.ledger.migrations.versions.v0001_first import TRIGGERS
from everstep.ledger.tables import Table as Base
from tests.ledger.support import at, database

TABLES = {table.name: table for table in Base.metadata.sorted_tables}
_JOB = {
    "workflow_id": "w",
    "temporal_run_id": "r",
    "spec": {},
    "policy_hash": "h1",
    "phase": "running",
    "phase_at": at(0),
    "reason": "",
    "created_at": at(0),
}
_MACHINE = {
    "url": "u",
    "address": "a",
    "slots": 1,
    "version": "v",
    "labels": {},
    "agent_boot_id": "b",
    "told_evicted": False,
    "first_seen_at": at(0),
    "last_seen_at": at(0),
}
_RUN = {
    "start_reason": "",
    "code_version": "none",
    "opened_at": at(0),
    "restore_chosen": False,
    "generation": 1,
}
_LEASE = {"leased_at": at(0)}
_BLOCK = {"incident_id": "i1", "reason": "r", "blocked_at": at(0)}
_POLICY = {"policy": {}, "source": "s", "first_seen_at": at(0)}
_APPLIED = {"yaml_text": "", "author": "", "reason": "", "applied_at": at(0)}
_INCIDENT = {"state": "open", "symptom": "hang", "summary": "", "opened_at": at(0), "number": 1}
_ROUND = {"symptom": "hang", "summary": "", "reports": [], "evidence": [], "cut": ""}
_DECISION = {
    "rung": "evict",
    "finding": {},
    "state_before": {},
    "state_after": {},
    "decision": {},
    "policy_hash": "h1",
    "decided_at": at(0),
}
_SEEN = {"kind": "probe", "verdict": "faulty", "age_s": 0.0, "reason": "", "data": {}}
_ACTION = {"kind": "evict", "result": {}, "at": at(0)}

ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # table: (a row that is there, another row that may be added)
    "jobs": ({"job_id": "j1", **_JOB}, {"job_id": "j3", **_JOB}),
    "machines": ({"machine_id": "m1", **_MACHINE}, {"machine_id": "m9", **_MACHINE}),
    "notifications": ({"key": "k1", "at": at(0)}, {"key": "k2", "at": at(0)}),
    "policy_snapshots": ({"hash": "h1", **_POLICY}, {"hash": "h2", **_POLICY}),
    "policy_applications": (
        {"id": 1, "hash": "h1", "active": True, **_APPLIED},
        {"id": 2, "hash": "h1", "active": False, **_APPLIED},
    ),
    "runs": (
        {"run_id": "j1.1", "job_id": "j1", **_RUN},
        {"run_id": "j2.1", "job_id": "j2", **_RUN},
    ),
    "leases": (
        {"id": 1, "machine_id": "m1", "job_id": "j1", "run_id": "j1.1", **_LEASE},
        {"id": 2, "machine_id": "m2", "job_id": "j1", "run_id": "j1.1", **_LEASE},
    ),
    "blocks": (
        {"id": 1, "machine_id": "m3", "job_id": "j1", **_BLOCK},
        {"id": 2, "machine_id": "m4", "job_id": "j1", **_BLOCK},
    ),
    "run_machines": (
        {"run_id": "j1.1", "group_rank": 0, "machine_id": "m1", "address": "a"},
        {"run_id": "j1.1", "group_rank": 1, "machine_id": "m2", "address": "a"},
    ),
    "run_phases": (
        {"run_id": "j1.1", "phase": "opened", "at": at(0)},
        {"run_id": "j1.1", "phase": "started", "at": at(0)},
    ),
    "claims": (
        {"id": 1, "request_key": "w/1", "job_id": "j1", "origin": "w", "number": 1,
         "answer": {}, "asked_at": at(0)},
        {"id": 2, "request_key": "w/2", "job_id": "j1", "origin": "w", "number": 2,
         "answer": {}, "asked_at": at(0)},
    ),
    "incidents": (
        {"incident_id": "i1", "job_id": "j1", **_INCIDENT},
        {"incident_id": "i2", "job_id": "j2", **_INCIDENT},
    ),
    "rounds": (
        {"incident_id": "i1", "round_number": 1, "run_id": "j1.1", **_ROUND},
        {"incident_id": "i1", "round_number": 2, "run_id": "j1.1", **_ROUND},
    ),
    "decisions": (
        {"decision_id": "d1", "incident_id": "i1", "round_number": 1, **_DECISION},
        {"decision_id": "d2", "incident_id": "i1", "round_number": 1, **_DECISION},
    ),
    "observations": (
        {"id": 1, "incident_id": "i1", "round_number": 1, "position": 0, "observed_at": at(0),
         **_SEEN},
        {"id": 2, "incident_id": "i1", "round_number": 1, "position": 1, "observed_at": at(0),
         **_SEEN},
    ),
    "actions": (
        {"incident_id": "i1", "step": 1, "target": "m1", "generation": 1, "job_id": "j1",
         **_ACTION},
        {"incident_id": "i1", "step": 2, "target": "m1", "generation": 1, "job_id": "j1",
         **_ACTION},
    ),
    "code_versions": (
        {"job_id": "j1", "code_version": "c1", "author": "", "reason": "", "recorded_at": at(0)},
        {"job_id": "j1", "code_version": "c2", "author": "", "reason": "", "recorded_at": at(0)},
    ),
}  # fmt: skip
ALSO_THERE = (
    ("jobs", {"job_id": "j2", **_JOB}),
    *(("machines", {"machine_id": name, **_MACHINE}) for name in ("m2", "m3", "m4")),
)
CHECKS: dict[str, dict[str, Any]] = {
    "ck_blocks_released_whole": {"released_at": at(1)},
    "ck_leases_ended_whole": {"ended_at": at(1)},
    "ck_runs_generation": {"generation": 0},
    "ck_runs_closed_whole": {"closed_at": at(1)},
    "ck_incidents_number_with_job": {"number": None},
    "ck_incidents_symptom_with_job": {"symptom": None},
    "ck_incidents_opened_with_job": {"opened_at": None},
}
BROKEN_BY: dict[str, str] = {
    # trigger: a statement that it refuses
    "runs_generation_rises": (
        "INSERT INTO runs (run_id, job_id, generation, start_reason, code_version, opened_at, "
        "closed_at, outcome, restore_chosen) SELECT 'j1.0', job_id, generation, start_reason, "
        "code_version, opened_at, opened_at, 'failed', restore_chosen FROM runs"
    ),
    "runs_generation_stays": "UPDATE runs SET generation = 2",
    "leases_not_blocked": (
        "INSERT INTO leases (id, machine_id, job_id, run_id, leased_at) "
        "SELECT 7, 'm3', job_id, run_id, leased_at FROM leases"
    ),
    "leases_stay_ended": "UPDATE leases SET machine_id = 'm2'",
    "blocks_not_leased": (
        "INSERT INTO blocks (id, machine_id, job_id, incident_id, reason, blocked_at) "
        "SELECT 7, 'm1', job_id, incident_id, reason, blocked_at FROM blocks"
    ),
    "blocks_stay_released": "UPDATE blocks SET machine_id = 'm4'",
    "code_versions_stay": "UPDATE code_versions SET path = 'elsewhere'",
    "code_versions_kept": "DELETE FROM code_versions",
    "actions_stay": "UPDATE actions SET at = at",
    "actions_kept": "DELETE FROM actions",
}

# Written out, so that a constraint which disappears from the models and migrations is missed.
CONSTRAINTS = """
    ck_blocks_released_whole ck_incidents_number_with_job ck_incidents_opened_with_job
    ck_incidents_symptom_with_job ck_leases_ended_whole ck_runs_closed_whole ck_runs_generation
    fk_actions_job_id fk_blocks_job_id fk_blocks_machine_id fk_claims_job_id
    fk_code_versions_job_id fk_decisions_incident_id_round_number fk_incidents_job_id
    fk_leases_job_id fk_leases_machine_id fk_leases_run_id
    fk_observations_incident_id_round_number fk_policy_applications_hash fk_rounds_incident_id
    fk_rounds_run_id fk_run_machines_machine_id fk_run_machines_run_id fk_run_phases_run_id
    fk_runs_job_id pk_actions pk_blocks pk_claims pk_code_versions pk_decisions pk_incidents
    pk_jobs pk_leases pk_machines pk_notifications pk_observations pk_policy_applications
    pk_policy_snapshots pk_rounds pk_run_machines pk_run_phases pk_runs uq_blocks_live
    uq_claims_request_key uq_incidents_job_id_number uq_leases_live
    uq_observations_incident_id_round_number_position uq_policy_applications_active
    uq_run_machines_run_id_machine_id uq_runs_job_id_generation uq_runs_open
"""


@pytest.fixture
def connection(ledger: Ledger) -> Iterator[Connection]:
    """A transaction with one row in every table, rolled back at the end."""
    with database(ledger)._engine.connect() as opened:
        for name, row in ALSO_THERE:
            opened.execute(TABLES[name].insert().values(row))
        for name, table in TABLES.items():
            opened.execute(table.insert().values(ROWS[name][0]))
        yield opened
        opened.rollback()


def without_triggers(connection: Connection) -> None:
    """Leave only the constraints, so that a trigger does not hide that one is missing."""
    for name, table, *_ in TRIGGERS:
        on = "" if connection.dialect.name == "sqlite" else f" ON {table}"
        connection.execute(text(f"DROP TRIGGER {name}{on}"))


def refused(connection: Connection, table: Table, row: dict[str, Any], name: str | None) -> None:
    """The row must be refused; PostgreSQL also says by which constraint."""
    with pytest.raises(IntegrityError) as caught, connection.begin_nested():
        connection.execute(table.insert().values(row))
    if name is not None and connection.dialect.name == "postgresql":
        assert caught.value.orig is not None
        assert caught.value.orig.diag.constraint_name == name  # type: ignore[attr-defined]


def unique_sets(table: Table) -> Iterator[tuple[str, list[str]]]:
    for constraint in table.constraints:
        if isinstance(constraint, PrimaryKeyConstraint | UniqueConstraint):
            yield str(constraint.name), [column.name for column in constraint.columns]
    for index in table.indexes:
        if index.unique:
            yield str(index.name), [column.name for column in index.columns]


def test_a_second_row_is_accepted(connection: Connection) -> None:
    """So that what the other tests see refused is refused for what they changed."""
    for name, table in TABLES.items():
        with connection.begin_nested() as savepoint:
            connection.execute(table.insert().values(ROWS[name][1]))
            savepoint.rollback()


def test_nothing_that_is_unique_can_be_there_twice(connection: Connection) -> None:
    without_triggers(connection)

    for name, table in TABLES.items():
        there, other = ROWS[name]
        for constraint, columns in unique_sets(table):
            same = {column: there[column] for column in columns}
            if constraint == "uq_runs_job_id_generation":
                same |= {"closed_at": at(1), "outcome": "failed"}  # not the index on open runs
            if constraint == "uq_runs_open":
                same |= {"generation": 2}  # not the one above
            refused(connection, table, other | same, constraint)


def test_nothing_refers_to_what_is_not_there(connection: Connection) -> None:
    without_triggers(connection)

    for name, table in TABLES.items():
        for constraint in table.constraints:
            if isinstance(constraint, ForeignKeyConstraint):
                row = ROWS[name][1] | {constraint.column_keys[0]: "missing"}
                refused(connection, table, row, str(constraint.name))


def test_what_must_be_there_is_there(connection: Connection) -> None:
    without_triggers(connection)

    for name, table in TABLES.items():
        for column in table.columns:
            if not column.nullable and column.name != "id":
                refused(connection, table, ROWS[name][1] | {column.name: text("NULL")}, None)


def test_rows_are_whole(connection: Connection) -> None:
    without_triggers(connection)

    for name, table in TABLES.items():
        for constraint in table.constraints:
            if isinstance(constraint, CheckConstraint):
                row = ROWS[name][1] | CHECKS[str(constraint.name)]
                refused(connection, table, row, str(constraint.name))


def test_triggers_guard_what_an_index_cannot(connection: Connection) -> None:
    messages = {row[0]: row[4] for row in TRIGGERS}
    for name, statement in BROKEN_BY.items():
        with pytest.raises(IntegrityError, match=messages[name]), connection.begin_nested():
            connection.execute(text(statement))


@pytest.mark.parametrize(
    ("table", "end", "start"),
    [
        ("leases", "ended_at = leased_at, end_reason = 'x'", "ended_at = NULL, end_reason = NULL"),
        (
            "blocks",
            "released_at = blocked_at, released_by = 'x'",
            "released_at = NULL, released_by = NULL",
        ),
    ],
)
def test_what_has_ended_stays_ended(
    connection: Connection, table: str, end: str, start: str
) -> None:
    connection.execute(text(f"UPDATE {table} SET {end}"))

    with pytest.raises(IntegrityError, match="stays"), connection.begin_nested():
        connection.execute(text(f"UPDATE {table} SET {start}"))


def test_no_constraint_has_disappeared(connection: Connection) -> None:
    query = (
        "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        if connection.dialect.name == "sqlite"
        else "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal"
    )
    assert set(connection.execute(text(query)).scalars()) == set(BROKEN_BY)

    inspector = inspect(connection)
    found: set[str | None] = set()
    for name in TABLES:
        found |= {inspector.get_pk_constraint(name)["name"]}
        found |= {one["name"] for one in inspector.get_unique_constraints(name)}
        found |= {one["name"] for one in inspector.get_foreign_keys(name)}
        found |= {one["name"] for one in inspector.get_check_constraints(name)}
        found |= {one["name"] for one in inspector.get_indexes(name) if one["unique"]}
    assert found == set(CONSTRAINTS.split())
