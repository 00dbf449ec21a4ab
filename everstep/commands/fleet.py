"""``everstep machines`` and ``logs``: the fleet, and what ranks have written."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.commands.common import (
    JobArgument,
    LedgerOption,
    Output,
    OutputOption,
    SecretsOption,
    StateOption,
    emit,
    places,
)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(machines)
    app.command()(logs)


def machines(
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
    ledger: LedgerOption = None,
) -> None:
    """List all machines and who has them."""
    from everstep.ledger_reader import list_machines
    from everstep.render import clock, json_ready, table

    found = list_machines(places(state, ledger=ledger).require_ledger())
    rows = [
        (
            row.machine_id,
            row.state,
            row.job_id or "-",
            row.slots,
            row.address,
            clock(row.last_seen_at),
            f"{row.blocked_reason} ({row.blocked_by})" if row.blocked_reason else "",
        )
        for row in found
    ]
    columns = ("machine", "state", "job", "ranks", "address", "registered", "why evicted")
    emit(output, json_ready(found), table(columns, rows, empty="no machine has registered yet"))


def logs(
    job: JobArgument,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only this rank's; default: all ranks'.")
    ] = None,
    run: Annotated[int | None, typer.Option(min=1, help="Number of the run; default: newest.")] = (
        None
    ),
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show what is added.")] = False,
    kilobytes: Annotated[
        int, typer.Option("--kilobytes", min=1, max=1024, help="How much of each rank's end.")
    ] = 16,
    state: StateOption = None,
    ledger: LedgerOption = None,
    secrets: SecretsOption = None,
) -> None:
    """Show the end of what a job's ranks have written."""
    from everstep.log_reader import LogRequest, show_logs
    from everstep.short_lived import run_short

    where = places(state, ledger=ledger, secrets=secrets)
    request = LogRequest(
        job_id=job, rank=rank, generation=run, follow=follow, tail_bytes=kilobytes * 1024
    )
    run_short(lambda: show_logs(where, request))
