"""What all benchmarks share: samples to rows, the result file, and the table in the documentation.

Every benchmark measures Everstep beside something else in the same run, since the times of one box
say nothing about another: only the ratios do. Not here: what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks" / "results"
DOCUMENT = CHECKOUT / "docs" / "benchmarks.md"
MEASURED = ("activities", "config", "everstep", "examples", "trainer", "workers", "workflows")
"""What a result depends on; benchmarks themselves are not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a result: a metric of a system over ``n`` repetitions."""

    system: str
    metric: str
    unit: str
    median: float | None
    """None, like the two others: it did not come to that in any of the ``n`` tries."""
    min: float | None
    max: float | None
    n: int
    """0: it was not tried, since this box cannot do it."""

    def as_json(self) -> dict[str, Any]:
        """The row as the result file has it."""
        return {
            "system": self.system,
            "metric": self.metric,
            "unit": self.unit,
            "median": self.median,
            "min": self.min,
            "max": self.max,
            "n": self.n,
        }


@dataclass(slots=True)
class Samples:
    """Measured values by system and metric, in the order in which they came up first."""

    units: dict[tuple[str, str], str] = field(default_factory=dict)
    values: dict[tuple[str, str], list[float | None]] = field(default_factory=dict)

    def add(self, system: str, metric: str, value: float | None, *, unit: str) -> None:
        """Note one value; None: it did not come to that."""
        self.units.setdefault((system, metric), unit)
        self.values.setdefault((system, metric), []).append(value)

    def median(self, system: str, metric: str) -> float | None:
        """The median so far; None when there is no value."""
        found = [v for v in self.values.get((system, metric), []) if v is not None]
        return statistics.median(found) if found else None

    def rows(self) -> list[Row]:
        """One row for each system and metric.

        A metric that some tries did not come to counts the others only, so ``n`` says how many.
        """
        return [
            row_of(system, metric, self.units[system, metric], values)
            for (system, metric), values in self.values.items()
        ]


def row_of(system: str, metric: str, unit: str, values: Sequence[float | None]) -> Row:
    """Median, smallest and largest of some repetitions."""
    found = [value for value in values if value is not None]
    if not found:
        return Row(
            system=system, metric=metric, unit=unit, median=None, min=None, max=None, n=len(values)
        )
    return Row(
        system=system,
        metric=metric,
        unit=unit,
        median=_rounded(statistics.median(found)),
        min=_rounded(min(found)),
        max=_rounded(max(found)),
        n=len(found),
    )


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


# --- the result


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What the document says around a benchmark's table."""

    title: str
    text: str
    """What was measured, and how."""
    remarks: Sequence[str] = ()
    """What a reader of the numbers has to know, one line each."""


def publish(
    bench: str,
    rows: Iterable[Row],
    notes: Notes,
    *,
    load_before: float,
    results: Path = RESULTS,
    document: Path = DOCUMENT,
) -> None:
    """Print the table, write ``results/NAME.json`` and refresh the benchmark's own section."""
    content = {
        "bench": bench,
        "host": host(load_before),
        "commit": commit(),
        "rows": [row.as_json() for row in rows],
    }
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{bench}.json"
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    section = render(content, notes)
    print(section)
    old = document.read_text(encoding="utf-8") if document.exists() else ""
    document.write_text(with_section(old, bench, section), encoding="utf-8")


def load() -> float:
    """How many processes wanted a CPU during the last minute: ours and everybody else's."""
    return round(os.getloadavg()[0], 1)


def host(load_before: float) -> dict[str, Any]:
    """What it ran on, without anything that names the machine."""
    return {
        "cpus": os.cpu_count(),
        "cpu_model": _cpu_model(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "temporalio": _version("temporalio"),
        "load_before": load_before,
        "load_after": load(),
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit that was measured; ``-dirty`` when what was measured differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", *MEASURED)
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# --- the document


def with_section(document: str, bench: str, section: str) -> str:
    """The document with the benchmark's section in place of its old one, or added at the end."""
    begin, end = f"<!-- bench {bench} -->", f"<!-- end of bench {bench} -->"
    block = f"{begin}\n{section.rstrip()}\n{end}"
    before, marker, rest = document.partition(begin)
    if not marker:
        return f"{document.rstrip()}\n\n{block}\n".lstrip()
    _, closing, after = rest.partition(end)
    if not closing:
        raise ValueError(f"{begin} has no {end}")
    return f"{before}{block}{after}"


def render(content: Mapping[str, Any], notes: Notes) -> str:
    """The section of one result in Markdown."""
    lines = [
        f"## {notes.title}",
        "",
        notes.text,
        "",
        "| system | metric | median | min to max | n |",
        "| --- | --- | ---: | ---: | ---: |",
        *(_line(row) for row in content["rows"]),
        "",
        *(f"- {remark}" for remark in notes.remarks),
        *([""] if notes.remarks else []),
        _made(content),
    ]
    return "\n".join(lines) + "\n"


def _made(content: Mapping[str, Any]) -> str:
    """Where the numbers come from."""
    where, (sha, _, dirty) = content["host"], content["commit"].partition("-")
    return (
        f"`benchmarks/bench_{content['bench']}.py`, commit `{sha[:12]}`"
        f"{' and uncommitted changes' if dirty else ''}; {where['cpus']} CPUs "
        f"({where['cpu_model']}), {where['memory_gib']} GiB, Python {where['python']}, torch "
        f"{where['torch']}; load average {where['load_before']} before and {where['load_after']} "
        "after."
    )


def _line(row: Mapping[str, Any]) -> str:
    if row["median"] is None:
        values = "never | –" if row["n"] else "not run here | –"
    else:
        values = f"{_number(row['median'])} {row['unit']} | {_number(row['min'])} to " + _number(
            row["max"]
        )
    return f"| {row['system']} | {row['metric']} | {values} | {row['n']} |"


def _number(value: float) -> str:
    return f"{value:g}"


# --- command lines


def arguments(document: str | None, *, repetitions: int, at_least: int) -> argparse.Namespace:
    """The command line of a benchmark: ``--repetitions``, and what was measured as its help."""
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repetitions", type=int, default=repetitions, help=f"default {repetitions}"
    )
    options = parser.parse_args()
    if options.repetitions < at_least:
        parser.error(f"--repetitions {options.repetitions}: at least {at_least}")
    return options
