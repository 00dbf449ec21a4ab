"""``everstep launch``, ``status``, ``jobs``, ``pause``, ``resume``, ``cancel``, ``adopt``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everstep.commands.common import (
    JobArgument,
    LedgerOption,
    NamespaceOption,
    Output,
    OutputOption,
    StateOption,
    TemporalOption,
    emit,
    places,
)

if TYPE_CHECKING:
    from everstep.client import Client, Launched
    from everstep.connect import Places
    from everstep.spec.messages import JobStatus, UpdateAnswer

ReasonOption = Annotated[str, typer.Option(help="Why, for whoever reads the job's page.")]
ByOption = Annotated[str | None, typer.Option(help="Who asks; default: your user name.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(launch)
    app.command()(status)
    app.command()(jobs)
    app.command()(pause)
    app.command()(resume)
    app.command()(cancel)
    app.command()(adopt)


def launch(
    spec: Annotated[Path, typer.Argument(help="Job spec, YAML or JSON.", metavar="FILE")],
    wait: WaitOption = False,
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
    temporal: TemporalOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Start a job. Launching the same spec again is an answer, not a second job."""
    from everstep.spec_input import to_spec

    job = to_spec(spec)  # before anything is asked of a server: a bad spec is bad without one

    async def start(client: Client) -> Launched:
        return await client.launch(job)

    _launch(places(state, temporal, namespace), start, wait=wait, output=output)


def adopt(
    job: JobArgument,
    wait: WaitOption = False,
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
    temporal: TemporalOption = None,
    namespace: NamespaceOption = None,
    ledger: LedgerOption = None,
) -> None:
    """Take up a job that the ledger knows and Temporal does not (its database was lost)."""

    async def start(client: Client) -> Launched:
        return await client.adopt(job)

    _launch(places(state, temporal, namespace, ledger), start, wait=wait, output=output)


def _launch(
    where: Places,
    start: Callable[[Client], Awaitable[Launched]],
    *,
    wait: bool,
    output: Output,
) -> None:
    from everstep.client import Client
    from everstep.commands.waiting import wait_and_show
    from everstep.render import json_ready, words
    from everstep.short_lived import run_short

    async def work() -> int:
        client = await Client.connect(where)
        launched = await start(client)
        if launched.already:
            phase = f", {words(launched.phase)}" if launched.phase else ""
            text = f"{launched.job_id} is there already{phase}; nothing was started"
        else:
            text = f"{launched.job_id} launched"
        if wait:
            return await wait_and_show(client, launched.job_id, output, first=text)
        emit(output, json_ready(launched), text)
        return 0

    raise typer.Exit(run_short(work))


def status(
    job: JobArgument,
    wait: WaitOption = False,
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
    temporal: TemporalOption = None,
    namespace: NamespaceOption = None,
    ledger: LedgerOption = None,
) -> None:
    """Show where a job is."""
    from everstep.client import Client
    from everstep.commands.waiting import wait_and_show
    from everstep.errors import JobNotFound
    from everstep.render import status_table
    from everstep.short_lived import run_short

    where = places(state, temporal, namespace, ledger)

    async def work() -> int:
        client = await Client.connect(where)
        note = ""
        try:
            if wait:
                return await wait_and_show(client, job, output)
            found = await client.status(job)
        except JobNotFound:
            found, note = _from_ledger(where, job)
        emit(output, found.model_dump(mode="json") | {"note": note}, status_table(found, note=note))
        return 0

    raise typer.Exit(run_short(work))


def _from_ledger(where: Places, job: str) -> tuple[JobStatus, str]:
    """What the ledger knows of a job whose workflow is not in Temporal."""
    from everstep.decide.words import FINAL_PHASES
    from everstep.errors import JobNotFound
    from everstep.ledger_reader import read_job_status

    if where.ledger is None:
        raise JobNotFound(job)
    found = read_job_status(where.ledger.value, job)
    if found.phase in FINAL_PHASES:
        return found, "from the ledger: Temporal keeps ended jobs only for a time (retention)"
    return found, f"from the ledger: Temporal does not know this job; `everstep adopt {job}`"


def jobs(
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
    ledger: LedgerOption = None,
) -> None:
    """List all jobs, newest first."""
    from everstep.ledger_reader import list_jobs
    from everstep.render import clock, json_ready, percent, phase_text, table

    found = list_jobs(places(state, ledger=ledger).require_ledger())
    rows = [
        (
            job.job_id,
            phase_text(job.phase),
            f"{job.spec.get('machines', 1)} x {job.spec.get('ranks_per_machine', 1)}",
            job.incidents_total,
            percent(job.ettr),
            clock(job.created_at),
            clock(job.ended_at),
        )
        for job in found
    ]
    columns = ("job", "phase", "machines x ranks", "incidents", "ETTR", "created", "ended")
    emit(output, json_ready(found), table(columns, rows, empty="no jobs yet"))


def pause(
    job: JobArgument,
    reason: ReasonOption = "",
    by: ByOption = None,
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
    temporal: TemporalOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Stop a job's ranks and keep its machines until `resume`."""
    who = _who(by)
    _update(
        places(state, temporal, namespace), lambda c: c.pause(job, reason=reason, by=who), output
    )


def resume(
    job: JobArgument,
    note: Annotated[str, typer.Option(help="What was done about it.")] = "",
    by: ByOption = None,
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
    temporal: TemporalOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Go on with a paused job, or one that waits for a person."""
    who = _who(by)
    _update(places(state, temporal, namespace), lambda c: c.resume(job, note=note, by=who), output)


def cancel(
    job: JobArgument,
    reason: ReasonOption = "",
    by: ByOption = None,
    output: OutputOption = Output.TABLE,
    state: StateOption = None,
    temporal: TemporalOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """End a job and give its machines back."""
    who = _who(by)
    _update(
        places(state, temporal, namespace), lambda c: c.cancel(job, reason=reason, by=who), output
    )


def _update(
    where: Places, ask: Callable[[Client], Awaitable[UpdateAnswer]], output: Output
) -> None:
    from everstep.client import Client
    from everstep.short_lived import run_short

    async def work() -> int:
        answer = await ask(await Client.connect(where))
        emit(output, answer.model_dump(mode="json"), answer.message or str(answer.phase))
        return 0 if answer.accepted else 1

    raise typer.Exit(run_short(work))


def _who(named: str | None) -> str:
    """Who asks, for the job's page."""
    import getpass

    if named is not None:
        return named
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
