"""``everstep policy check`` and ``show``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from everstep.commands.common import Output, OutputOption, emit

group = typer.Typer(
    help="Look at policies and check edits.", no_args_is_help=True, rich_markup_mode=None
)


def add_to(app: typer.Typer) -> None:
    """Register the group."""
    app.add_typer(group, name="policy")


@group.command()
def check(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Policy, kernel catalogue or log signatures; default: all that is used here.",
            metavar="FILE",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say whether files that an operator edits would be accepted, and every problem in them."""
    from everstep.spec.checking import check_all, check_file

    results = check_all() if file is None else [check_file(file)]
    data = [result.as_data() for result in results]
    if output is Output.JSON:
        emit(output, data[0] if file is not None else data, "")
    for result in results:
        for problem in result.problems:
            sys.stderr.write(f"error: {problem}\n")
    if any(result.problems for result in results):
        raise typer.Exit(1)
    if output is not Output.JSON:
        emit(output, data, "\n".join(result.fine() for result in results))


@group.command()
def show(
    file: Annotated[
        Path | None,
        typer.Argument(help="Policy file; default: the one a controller here would use."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a whole policy as it would be used, and which file it came from."""
    from everstep.render import pairs_table
    from everstep.spec.load import load_policy

    loaded = load_policy(file)
    data = loaded.policy.model_dump(mode="json")
    rows = [
        (f"{section}.{key}", str(value).lower() if isinstance(value, bool) else value)
        for section, values in data.items()
        for key, value in values.items()
    ]
    table = pairs_table([("from", loaded.source), ("hash", loaded.hash), *rows])
    emit(output, {"source": loaded.source, "hash": loaded.hash, "policy": data}, table)
