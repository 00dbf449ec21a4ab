"""``everstep doctor``: every probe once, on this machine, now.

Needs no server, no agent and no job. Not here: probes (``everstep.machine.probes``) and what a
person can do about each finding (``doctor_advice``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.commands.common import Output, OutputOption, emit

if TYPE_CHECKING:
    from rich.console import RenderableType

    from everstep.decide.observation import Observation
    from everstep.machine.probes.once import Look

EXIT_FAULTY = 1
PAST_S = 24 * 3600.0
"""How far back the kernel's log is read."""
LINE_CHARS_MAX = 160

PathOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--path", help="A folder whose disk matters, such as a checkpoint directory (repeatable)."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(doctor)


def doctor(
    path: PathOption = None,
    kernel_log: Annotated[
        Path | None, typer.Option(help="Read this file, not the kernel's log.", metavar="FILE")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Policy file with the thresholds.", metavar="FILE")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Look at this machine with every probe once. Ends with 1 when something has to be done."""
    import socket
    import tempfile
    import time

    from everstep.errors import ConfigurationProblem
    from everstep.machine.probes.catalogue import Surroundings, probes_of_machine
    from everstep.machine.probes.once import run_once
    from everstep.spec.load import load_policy

    thresholds = load_policy(policy).policy.probes
    if kernel_log is not None:
        if not kernel_log.exists():
            raise ConfigurationProblem(f"--kernel-log {kernel_log}: there is no such file")
        thresholds = thresholds.model_copy(update={"kernel_log": str(kernel_log.absolute())})
    paths = [p.absolute() for p in path or ()] + [Path(tempfile.gettempdir())]
    began = time.monotonic()
    deadline_s = thresholds.look_deadline.total_seconds()
    around = Surroundings(
        paths=lambda: paths, kernel_log_past_s=PAST_S, gpu_names_wait_s=deadline_s / 2
    )
    looks = run_once(probes_of_machine(thresholds, around), deadline_s)
    took_s = time.monotonic() - began
    data = summary(looks) | {"machine": socket.gethostname(), "took_s": round(took_s, 3)}
    emit(output, data, _page(looks, data))
    raise typer.Exit(int(data["exit_code"]))


def summary(looks: Sequence[Look]) -> dict[str, Any]:
    """All that was seen, as plain data; ``docs/doctor.md`` describes it."""
    from everstep.commands.doctor_advice import advice

    seen = [one for look in looks for one in look.observations]
    grades = [grade(one) for one in seen]
    worst = next((g for g in ("faulty", "warning") if g in grades), "healthy")
    return {
        "verdict": worst,
        "exit_code": EXIT_FAULTY if worst == "faulty" else 0,
        "counts": {g: grades.count(g) for g in ("faulty", "warning", "unknown", "healthy")},
        "observations": [
            {
                "probe": one.probe,
                "target": one.target,
                "verdict": one.verdict.value,
                "grade": grade(one),
                "reason": one.reason,
                "rule": one.rule,
                "symptom": one.symptom.value if one.symptom else None,
                "action": one.action.value if one.action else None,
                "confidence": one.confidence.value,
                "values": dict(one.values),
                "what_to_do": advice(one),
            }
            for one in seen
        ],
        "not_here": [
            {"probe": look.probe, "what": what, "why": why}
            for look in looks
            for what, why in look.not_here.items()
        ],
        "not_looked_at": [
            {"probe": look.probe, "target": target, "what": list(what)}
            for look in looks
            for target, what in look.not_looked_at.items()
        ],
    }


def grade(one: Observation) -> str:
    """The verdict, with faults that only call for a note as ``warning``."""
    from everstep.decide.words import Action

    return "warning" if one.action is Action.WARN_ONLY else one.verdict.value


def _seen(row: dict[str, Any]) -> str:
    """The reason, with the line that says it and how old that is."""
    text: str = row["reason"]
    values = row["values"]
    if row["verdict"] == "faulty" and isinstance(values.get("line"), str):
        text += f': "{values["line"][:LINE_CHARS_MAX]}"'
    age_s = values.get("age_s")
    if isinstance(age_s, int | float):
        text += f", {_ago(age_s)} ago"
    return text


def _ago(age_s: float) -> str:
    for unit, length_s in (("h", 3600), ("min", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{age_s:.0f} s"


_STYLES = {"faulty": "bold red", "warning": "yellow", "unknown": "cyan", "healthy": "green"}


def _page(looks: Sequence[Look], data: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("probe", "target", "verdict", "what was seen", "what to do"):
        table.add_column(heading, overflow="fold")
    for row in data["observations"]:
        shown = Text(row["grade"], style=_STYLES[row["grade"]])
        cells = (row["probe"], row["target"] or "machine", _seen(row), row["what_to_do"])
        probe, target, reason, todo = (Text(cell) for cell in cells)
        table.add_row(probe, target, shown, reason, todo)
    for row in data["not_here"]:
        shown = Text("not here", style="dim")
        table.add_row(Text(row["probe"]), Text(row["what"]), shown, Text(row["why"]), "")
    for row in data["not_looked_at"]:
        shown = Text("not looked at", style="dim")
        left_out = Text(", ".join(row["what"]))
        table.add_row(Text(row["probe"]), Text(row["target"] or "machine"), shown, left_out, "")
    counts = data["counts"]
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    line = f"{data['machine']}: {data['verdict']} ({words}); {len(looks)} probes"
    return Group(table, Text(""), Text(line, style=_STYLES[data["verdict"]]))
