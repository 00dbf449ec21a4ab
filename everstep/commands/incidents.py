"""``everstep incidents`` and ``explain``: what happened, and why Everstep did what it did."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.commands.common import (
    LedgerOption,
    Output,
    OutputOption,
    StateOption,
    emit,
    places,
)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(incidents)
    app.command()(explain)


def incidents(
    job: Annotated[str | None, typer.Argument(help="Only this job's.", metavar="[JOB]")] = None,
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
    ledger: LedgerOption = None,
) -> None:
    """List incidents, newest first."""
    from everstep.ledger_reader import list_incidents
    from everstep.render import clock, json_ready, table, words

    found = list_incidents(places(state, ledger=ledger).require_ledger(), job)
    rows = [
        (
            row.incident_id,
            clock(row.opened_at),
            words(row.symptom),
            row.state,
            row.rounds_total,
            row.summary,
        )
        for row in found
    ]
    columns = ("incident", "opened", "symptom", "state", "rounds", "what")
    emit(output, json_ready(found), table(columns, rows, empty="no incidents"))


def explain(
    incident: Annotated[str, typer.Argument(help="Id of the incident.", metavar="INCIDENT")],
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
    ledger: LedgerOption = None,
) -> None:
    """Tell an incident's story: evidence, rule, decision, policy, times."""
    from everstep.ledger_reader import read_story
    from everstep.render import json_ready
    from everstep.story import tell

    story = read_story(places(state, ledger=ledger).require_ledger(), incident)
    emit(output, json_ready(story), tell(story))
