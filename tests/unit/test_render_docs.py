"""Generated documents are fresh, and the catalogue behind them covers every word."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.decide.catalogue import ACTIONS, PAPER_TABLE_1, SYMPTOMS
from everstep.decide.ladder import ROWS
from everstep.decide.words import Action, Rung, Symptom
from scripts.render_docs import BLOCKS, DOCS, main, render

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", DOCS)
def test_a_document_is_not_stale(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()

    assert render(text) == text, "run scripts/render_docs.py"
    assert "<!-- generated:" in text


def test_the_check_of_all_documents_passes() -> None:
    assert main(["--check"]) == 0


def test_a_stale_part_would_be_seen() -> None:
    stale = "before\n<!-- generated: rows -->\nold\n<!-- end -->\nafter\n"
    fresh = render(stale)

    assert fresh != stale
    assert fresh.startswith("before\n<!-- generated: rows -->\n|  | row |")
    assert fresh.endswith("<!-- end -->\nafter\n")


def test_every_block_is_used() -> None:
    pages = "".join((ROOT / "docs" / name).read_text() for name in DOCS)

    assert set(BLOCKS) == {name for name in BLOCKS if f"<!-- generated: {name} -->" in pages}


def test_the_catalogue_covers_every_word() -> None:
    assert set(Symptom) == set(SYMPTOMS)
    assert set(Action) == set(ACTIONS)


def test_the_papers_names_are_all_mapped_but_one() -> None:
    mapped = {name for entry in SYMPTOMS.values() for name in entry.paper}

    assert {"CPU overload"} == set(PAPER_TABLE_1) - mapped
    assert mapped <= set(PAPER_TABLE_1)


def test_actions_and_rungs_agree_with_the_ladder() -> None:
    taken = {(row.action, row.rung) for row in ROWS}

    assert taken == {(action, rung) for action, entry in ACTIONS.items() for rung in entry.rungs}
    assert set(Rung) == {row.rung for row in ROWS}
