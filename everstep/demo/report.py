"""The demo's result: one row for each fault, two hashes, and whether all was as it had to be."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from everstep.errors import ConfigurationProblem
from everstep.render import words

WENT_ON = "training went on"
NO_SYMPTOM = "none"


@dataclass(slots=True, kw_only=True)
class Row:
    """What became of one fault."""

    name: str
    job: str
    incident_id: str | None = None
    symptom: str = NO_SYMPTOM
    action: str = WENT_ON
    detect_s: float | None = None
    """From the fault to its detection; None where there was nothing to detect."""
    decide_s: float | None = None
    """From the fault to the decision."""
    recover_s: float | None = None
    """From the fault to the first new step; None where the fault ends the job."""
    steps_lost: int | None = 0
    ends_job: bool = False
    problem: str = ""
    """Why this is not what had to happen; empty: it is."""

    def as_json(self) -> dict[str, Any]:
        """The row as the report file has it."""
        row: dict[str, Any] = {
            "name": self.name,
            "job": self.job,
            "incident_id": self.incident_id,
            "symptom": self.symptom,
            "action": self.action,
            "detect_s": _rounded(self.detect_s),
            "decide_s": _rounded(self.decide_s),
            "recover_s": _rounded(self.recover_s),
            "steps_lost": self.steps_lost,
        }
        if self.ends_job:
            row["ends_job"] = True
        return row


@dataclass(slots=True)
class Report:
    """The whole demo."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Faults that this machine cannot produce, and why."""
    baseline_sha256: str | None = None
    final_sha256: str | None = None
    ettr: float | None = None
    problems: list[str] = field(default_factory=list)
    """What went wrong beside single faults."""

    @property
    def weights_identical(self) -> bool:
        """Whether the broken job ended with exactly the weights of the untouched one."""
        return self.final_sha256 is not None and self.final_sha256 == self.baseline_sha256

    @property
    def passed(self) -> bool:
        """Whether everything was as it had to be."""
        good = not self.problems and all(not row.problem for row in self.rows)
        return good and bool(self.rows) and self.weights_identical

    def as_json(self) -> dict[str, Any]:
        """The report file's content."""
        data: dict[str, Any] = {
            "faults": [row.as_json() for row in self.rows],
            "baseline_sha256": self.baseline_sha256,
            "final_sha256": self.final_sha256,
            "weights_identical": self.weights_identical,
            "ettr": None if self.ettr is None else round(self.ettr, 4),
        }
        if self.skipped:
            data["skipped"] = self.skipped
        return data

    def write(self, path: Path) -> None:
        """Write the report file.

        Raises:
            ConfigurationProblem: it cannot be written.
        """
        try:
            path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigurationProblem(f"{path}: {error.strerror}") from None

    def table(self) -> Table:
        """The report for a person."""
        table = Table(box=None, pad_edge=False, header_style="bold", title="What was broken")
        for column in ("fault", "symptom named", "action taken"):
            table.add_column(column, overflow="fold")
        for column in ("detected", "decided", "first new step", "steps lost"):
            table.add_column(column, justify="right")
        for row in self.rows:
            last = "ends the job" if row.ends_job else _seconds(row.recover_s)
            table.add_row(
                Text(row.name, style="red" if row.problem else ""),
                words(row.symptom),
                words(row.action),
                _seconds(row.detect_s),
                _seconds(row.decide_s),
                last,
                "-" if row.steps_lost is None else str(row.steps_lost),
            )
        return table

    def verdict(self) -> list[str]:
        """The lines under the table."""
        lines = [f"skipped: {name}: {why}" for name, why in self.skipped.items()]
        lines += [
            f"not as it had to be: {row.name}: {row.problem}" for row in self.rows if row.problem
        ]
        lines += [f"not as it had to be: {problem}" for problem in self.problems]
        if self.ettr is not None:
            lines.append(f"ETTR: {self.ettr:.1%}")
        if self.weights_identical:
            lines.append("weights: identical to an uninterrupted run")
        else:
            lines.append(
                f"weights: NOT identical to an uninterrupted run "
                f"({self.final_sha256 or 'none'} instead of {self.baseline_sha256 or 'none'})"
            )
        return lines


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
