"""How things look to a person in a terminal: tables, one-line summaries, the story of an incident.

Pure: models in, text or rich tables out; nothing is printed, read or asked here. Programs use
``-o json``, which shows the models themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from everstep.decide.words import JobPhase
from everstep.spec.messages import JobStatus

_GOOD = frozenset({JobPhase.RUNNING, JobPhase.SUCCEEDED})
_BAD = frozenset({JobPhase.FAILED, JobPhase.WAITING_FOR_PERSON})
NOTHING = "-"


def words(value: object) -> str:
    """``waiting_for_person`` as ``waiting for person``."""
    return str(value).replace("_", " ")


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return NOTHING if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    """A loss or a norm."""
    return NOTHING if value is None else f"{value:.4g}"


def seconds(value: float | None) -> str:
    """A span of time."""
    if value is None:
        return NOTHING
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def clock(at: datetime | None) -> str:
    """An instant in the reader's own time zone."""
    if at is None:
        return NOTHING
    aware = at if at.tzinfo else at.replace(tzinfo=UTC)
    return aware.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def phase_text(phase: JobPhase | str) -> Text:
    """A phase, coloured by whether a person should worry."""
    style = "green" if phase in _GOOD else "red" if phase in _BAD else "yellow"
    return Text(words(phase), style=style)


def progress_line(status: JobStatus) -> str:
    """A job in one line, for ``--wait``."""
    parts = [words(status.phase)]
    if status.progress.step is not None:
        parts.append(f"step {status.progress.step}")
    if status.progress.loss is not None:
        parts.append(f"loss {number(status.progress.loss)}")
    if status.generation:
        parts.append(f"run {status.generation}")
    if status.machines:
        parts.append(f"{len(status.machines)} machine{'s' if len(status.machines) > 1 else ''}")
    if status.ettr is not None:
        parts.append(f"ETTR {percent(status.ettr)}")
    if status.incidents_total:
        plural = "s" if status.incidents_total > 1 else ""
        parts.append(f"{status.incidents_total} incident{plural}")
    if status.unreachable:
        parts.append(f"not reachable now: {', '.join(status.unreachable[:3])}")
    return " · ".join(parts)


def pairs_table(rows: Iterable[tuple[str, object]]) -> Table:
    """Keys and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, value if isinstance(value, Text) else str(value))
    return table


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> Table | str:
    """A plain table, or a sentence where there is nothing to show."""
    built = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        built.add_column(column, overflow="fold")
    count = 0
    for row in rows:
        count += 1
        built.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return built if count else empty


def status_table(status: JobStatus, *, note: str = "") -> Table:
    """A job's page."""
    progress = status.progress
    restored = NOTHING if status.restored_step is None else str(status.restored_step)
    rows: list[tuple[str, object]] = [
        ("job", status.job_id),
        ("phase", phase_text(status.phase)),
        ("why", status.reason or NOTHING),
        ("run", f"{status.generation}" if status.generation else "none yet"),
        ("step", NOTHING if progress.step is None else progress.step),
        ("loss", number(progress.loss)),
        ("restored from step", restored),
        ("machines", ", ".join(status.machines) or NOTHING),
        ("ranks", status.world_size),
        ("code version", status.code_version or NOTHING),
        ("ETTR so far", percent(status.ettr)),
        ("incidents", status.incidents_total),
        ("created", clock(status.created_at)),
    ]
    if status.unreachable:
        rows.append(("not reachable now", ", ".join(status.unreachable) + " (unknown, not faulty)"))
    if note:
        rows.append(("note", note))
    rows.extend(
        (
            incident.incident_id,
            (
                f"{words(incident.symptom)} → {words(incident.action)} ({incident.state}): "
                f"{incident.reason}"
            ),
        )
        for incident in status.incidents[:5]
    )
    return pairs_table(rows)


def json_ready(value: Any) -> Any:
    """A model, dataclass or container of them as plain data."""
    from dataclasses import asdict, is_dataclass

    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return json_ready(asdict(value))
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_ready(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value
