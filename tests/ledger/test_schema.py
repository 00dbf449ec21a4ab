"""Migrations make exactly what the models say, and instants survive both databases."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import inspect, text
from sqlalchemy.exc import StatementError

from everstep.ledger import Ledger
from everstep.ledger.schema import HEAD, scripts
from everstep.ledger.tables import Table
from everstep.ledger.types import clean_json, clean_text
from everstep.spec.agent_api import Registration
from everstep.spec.policy import PolicySnapshot
from tests.ledger.support import Fleet, at, database


def test_migrating_from_empty_makes_what_the_models_say(empty_url: str) -> None:
    ledger = Ledger(empty_url)
    ledger.migrate()
    with database(ledger)._engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        difference = compare_metadata(context, Table.metadata)
        partial = {
            index["name"]
            for name in inspect(connection).get_table_names()
            for index in inspect(connection).get_indexes(name)
            if any(key.endswith("_where") for key in index.get("dialect_options", {}))
        }
    ledger.close()

    assert difference == []
    # The comparison does not look at conditions of indexes.
    assert partial == {
        "uq_blocks_live",
        "uq_leases_live",
        "uq_policy_applications_active",
        "uq_runs_open",
    }


def test_machines_that_are_evicted_when_the_ledger_is_migrated_count_as_told(
    empty_url: str, policy: PolicySnapshot
) -> None:
    ledger = Ledger(empty_url)
    ledger.migrate()
    fleet = Fleet(ledger, policy)
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    fleet.evict("m1")
    with database(ledger)._engine.begin() as connection:  # as the version before left it
        connection.execute(text("ALTER TABLE machines DROP COLUMN told_evicted"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))

    assert ledger.migrate() == HEAD
    ledger.release("m1", reason="repaired", by="ann", now=at(60))

    assert fleet.open(keep=("m1", "m2")).shortfall == 1
    fleet.machine("m1", seconds=1)
    assert fleet.open(keep=("m1", "m2")).shortfall == 0
    ledger.close()


def test_revisions_form_one_line() -> None:
    assert scripts().get_heads() == [HEAD]
    assert len(scripts().get_bases()) == 1


def test_instants_come_back_aware_and_the_same(fleet: Fleet) -> None:
    local = datetime(2030, 7, 1, 0, 30, 0, 1, tzinfo=timezone(timedelta(hours=-9, minutes=-30)))

    fleet.ledger.note_notification("k", now=local)
    fleet.ledger.register_machine(
        Registration(
            api_version=1,
            machine_id="m2",
            agent_boot_id="b",
            url="u",
            address="a",
            slots=1,
            version="v",
        ),
        now=local,
    )

    (row,) = fleet.ledger.machines()
    assert row.last_seen_at == local
    assert row.last_seen_at.tzinfo is UTC


def test_an_instant_without_a_zone_is_refused(ledger: Ledger) -> None:
    with pytest.raises(StatementError, match="has no time zone"):
        ledger.note_notification("k", now=datetime(2030, 1, 1))  # noqa: DTZ001


@given(st.text(st.characters(codec=None)))
def test_clean_text_can_be_stored_and_good_text_stays(text: str) -> None:
    cleaned = clean_text(text)

    assert "\0" not in cleaned
    cleaned.encode("utf-8")
    assert clean_text(cleaned) == cleaned


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_clean_json_holds_no_number_that_json_has_not(value: object) -> None:
    text = json.dumps(clean_json(value), allow_nan=False)

    assert "\\u0000" not in text.replace("\\\\", "")
