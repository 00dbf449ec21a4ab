"""``everstep diagnose``: what went wrong in a job, from its log files alone; nothing has to run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.commands.common import Output, OutputOption, emit

if TYPE_CHECKING:
    from rich.console import RenderableType

    from everstep.decide.diagnosis.types import Diagnosis, RankEnd

EVIDENCE_CHARS_MAX = 160


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("diagnose")(diagnose)


def diagnose(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Log files, or folders of them.", metavar="PATH...", show_default=False
        ),
    ] = None,
    exit_code: Annotated[
        int | None,
        typer.Option("--exit-code", help="How the job ended; 137 and -9 both mean SIGKILL."),
    ] = None,
    signal: Annotated[
        str | None,
        typer.Option("--signal", help="Signal that ended it: SIGKILL, KILL or 9.", metavar="S"),
    ] = None,
    kernel_log: Annotated[
        Path | None,
        typer.Option("--kernel-log", help="Kernel log of the machine (dmesg).", metavar="FILE"),
    ] = None,
    signatures: Annotated[
        Path | None,
        typer.Option("--signatures", help="Catalogue of log signatures.", metavar="FILE"),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what went wrong in a job, whose fault it is and what to do, from its logs alone."""
    from everstep.errors import ConfigurationProblem, UsageProblem

    if not paths and kernel_log is None:
        raise UsageProblem("name a log file or a folder, or --kernel-log FILE")
    machine = _kernel(kernel_log) if kernel_log is not None else None
    if not paths:
        machine = machine or {}
        emit(output, machine, _table(machine))
        return
    from everstep.logfiles.cache import cached_signatures
    from everstep.logfiles.whole import diagnose_files

    found = diagnose_files(paths, cached_signatures(signatures), [_end(exit_code, signal)])
    if not found.files and found.problems:
        raise ConfigurationProblem("; ".join(found.problems))
    for problem in found.problems:
        sys.stderr.write(f"warning: {problem}\n")
    if not found.files:
        raise ConfigurationProblem(f"{paths[0]}: nothing in it could be read as a log")
    data = as_data(found.verdict)
    if machine is not None:
        data = _joined(data, machine)
    emit(output, data, _table(data))


def as_data(verdict: Diagnosis) -> dict[str, Any]:
    """The verdict as programs get it; the form is stable."""
    return {
        "symptom": verdict.symptom.value,
        "side": verdict.side.value,
        "action": verdict.action.value,
        "first_failed_rank": verdict.first_failed_rank,
        "machines": list(verdict.machines),
        "confidence": verdict.confidence.value,
        "rule": verdict.rule,
        "evidence": [
            {"file": line.file, "line": line.line, "text": line.text} for line in verdict.evidence
        ],
        "why": verdict.why,
    }


def _end(exit_code: int | None, signal: str | None) -> RankEnd:
    from everstep.decide.diagnosis.types import RankEnd
    from everstep.errors import UsageProblem

    if exit_code is not None and not -64 <= exit_code <= 255:
        raise UsageProblem(f"--exit-code: got {exit_code}; -64 to 255 is accepted")
    return RankEnd(exit_code=exit_code, signal=_signal(signal) if signal else None)


def _signal(text: str) -> int:
    import signal

    from everstep.errors import UsageProblem

    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    known = {member.name: member.value for member in signal.Signals}
    if name in known:
        return known[name]
    if text.isdigit() and int(text) in known.values():
        return int(text)
    raise UsageProblem(f"--signal: got {text[:40]!r}; a name like SIGKILL or a number is needed")


def _kernel(path: Path) -> dict[str, Any]:
    """What the kernel log says about its machine, in the same form."""
    from everstep.decide.kernel import judge
    from everstep.errors import NotFound
    from everstep.spec.kernel_catalogue import load_kernel_catalogue

    rules = load_kernel_catalogue()
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            verdict = judge((line[:4_000].rstrip("\n") for line in lines), rules)
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror or error}") from None
    return {
        "symptom": verdict.symptom.value,
        "side": verdict.side.value,
        "action": verdict.action.value,
        "first_failed_rank": None,
        "machines": [],
        "confidence": verdict.confidence.value,
        "rule": verdict.rule or "nothing_found",
        "evidence": [
            {"file": str(path), "line": line.number, "text": line.text} for line in verdict.evidence
        ],
        "why": f"{verdict.target}: {verdict.why}" if verdict.target else verdict.why,
    }


def _joined(logs: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """Logs and kernel log of one machine together: what the machine says explains the job."""
    decisive = machine["action"] in ("evict_machine", "stop_time_check")
    if not decisive and logs["symptom"] != "unknown":
        return logs
    if not decisive and machine["symptom"] == "unknown":
        return logs
    return {
        **machine,
        "first_failed_rank": logs["first_failed_rank"],
        "machines": logs["machines"],
        "evidence": [*machine["evidence"], *logs["evidence"]],
        "why": f"{machine['why']} (the logs alone: {logs['symptom']}, {logs['why']})",
    }


def _table(data: dict[str, Any]) -> RenderableType:
    """The verdict for people: what it is, what shows it, why, and what to do."""
    from rich.console import Group
    from rich.text import Text

    from everstep.decide.catalogue import ACTIONS, SYMPTOMS
    from everstep.decide.words import Action, Symptom

    symptom, action = Symptom(data["symptom"]), Action(data["action"])
    rank = data["first_failed_rank"]
    where = f", first on rank {rank}" if rank is not None else ""
    machines = f", on {', '.join(data['machines'])}" if data["machines"] else ""
    lines = [
        Text.assemble((symptom.value, "bold"), f": {SYMPTOMS[symptom].meaning}{where}{machines}"),
        Text(f"side {data['side']}, confidence {data['confidence']}, rule {data['rule']}"),
        Text(""),
        *(
            Text(f"{line['file']}:{line['line']}: {line['text'][:EVIDENCE_CHARS_MAX]}")
            for line in data["evidence"]
        ),
        *([Text("")] if data["evidence"] else []),
        Text(f"why: {data['why']}"),
        Text.assemble("do:  ", (action.value, "bold"), f": {ACTIONS[action].meaning}"),
    ]
    return Group(*lines)
