"""What all commands share: flags that say where things are, the output format, and printing.

Not here: how things look (``everstep.render``) and what errors mean (``everstep.cli``).
"""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from everstep.connect import Places

PIPE_WIDTH = 200
"""Columns when the output is no terminal: tables must not be cut for a reader that is a program."""


class Output(StrEnum):
    """Formats of ``-o``."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="table for people, json for programs.")
]
StateOption = Annotated[
    str | None,
    typer.Option("--state", help="State directory of `everstep up`.", metavar="DIR"),
]
TemporalOption = Annotated[
    str | None,
    typer.Option("--temporal", help="Address of the Temporal server.", metavar="HOST:PORT"),
]
NamespaceOption = Annotated[str | None, typer.Option("--namespace", help="Temporal namespace.")]
LedgerOption = Annotated[
    str | None, typer.Option("--ledger", help="The ledger's database.", metavar="URL")
]
SecretsOption = Annotated[
    str | None, typer.Option("--secrets", help="Directory of token files.", metavar="DIR")
]
JobArgument = Annotated[str, typer.Argument(help="Name of the job.", metavar="JOB")]


def places(
    state: str | None = None,
    temporal: str | None = None,
    namespace: str | None = None,
    ledger: str | None = None,
    secrets: str | None = None,
) -> Places:
    """Where things are, by these flags and what else names them."""
    from everstep.connect import find_places

    return find_places(
        state=state, temporal=temporal, namespace=namespace, ledger=ledger, secrets=secrets
    )


def console(*, stderr: bool = False) -> Console:
    """A console without colour unless it is a terminal that wants it (``NO_COLOR``)."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    terminal = stream.isatty()
    return Console(
        file=stream,
        width=None if terminal else PIPE_WIDTH,
        force_terminal=terminal,
        no_color=True if not terminal or os.environ.get("NO_COLOR") else None,
        highlight=False,
        soft_wrap=False,
    )


def emit(output: Output, data: Any, table: RenderableType | str) -> None:
    """Print ``data`` as JSON, or ``table`` for people."""
    if output is Output.JSON:
        sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")
    elif isinstance(table, str):
        sys.stdout.write(table + "\n")
    else:
        console().print(table)
