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
    file: Annotated[Path, typer.Argument(help="Policy file.", metavar="FILE")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Say whether a policy file would be accepted, and every problem in it."""
    from everstep.spec.load import SpecError, load_policy

    try:
        loaded = load_policy(file)
    except SpecError as error:
        if not file.exists():
            raise
        problems = list(error.lines)
        if output is Output.JSON:
            emit(output, {"file": str(file), "ok": False, "problems": problems}, "")
        for problem in problems:
            sys.stderr.write(f"error: {problem}\n")
        raise typer.Exit(1) from None
    data = {"file": str(file), "ok": True, "hash": loaded.hash, "problems": []}
    emit(output, data, f"{file}: fine (policy {loaded.hash})")


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
