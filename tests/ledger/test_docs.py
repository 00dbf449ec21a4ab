"""``docs/ledger.md`` names every table and every guard of the schema."""

from __future__ import annotations

from pathlib import Path

from everstep.ledger.bounds import OBSERVATIONS_MAX, REPORTS_BYTES_MAX
from everstep.ledger.migrations.versions.v0001_first import TRIGGERS
from everstep.ledger.runs import REGISTRATIONS_MISSED_MAX
from everstep.ledger.tables import Table

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "ledger.md").read_text(encoding="utf-8")


def test_every_table_has_a_row() -> None:
    for name in Table.metadata.tables:
        assert f"\n| `{name}` |" in TEXT


def test_every_guard_is_explained() -> None:
    indexes = {
        str(index.name)
        for table in Table.metadata.sorted_tables
        for index in table.indexes
        if index.unique
    }

    for name in indexes | {row[0] for row in TRIGGERS}:
        assert f"`{name}`" in TEXT


def test_the_numbers_are_those_of_the_code() -> None:
    assert REGISTRATIONS_MISSED_MAX == 4
    assert "within four registration intervals" in TEXT
    assert f"at most {OBSERVATIONS_MAX} observations and {REPORTS_BYTES_MAX // 1024} KiB" in TEXT
