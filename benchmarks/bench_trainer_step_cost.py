"""What the trainer library costs a training step: the call to ``session.step`` and its siblings.

Goal: less than 2 microseconds a step. Measured in batches, with the progress block mapped from a
file as under an agent; the median of the batches is the result, since other programs on the machine
only ever make a batch slower.

    python benchmarks/bench_trainer_step_cost.py
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep_trainer import Session

CHECKOUT = Path(__file__).resolve().parents[1]
RESULT = CHECKOUT / "benchmarks" / "results" / "trainer_step_cost.json"
BATCHES = 60
CALLS = 20_000
GOAL_US = 2.0


def main() -> int:
    """Measure, print the table, write the result; 1 if the goal is missed."""
    with tempfile.TemporaryDirectory() as directory:
        session = Session(environ(Path(directory)))
        bare = Session({})
        rows = [
            measure("everstep_trainer", "step(n)", step_only(session)),
            measure("everstep_trainer", "step(n, loss)", step_and_loss(session)),
            measure("everstep_trainer", "step(n, loss, grad_norm)", everything(session)),
            measure("without Everstep", "step(n, loss, grad_norm)", everything(bare)),
            measure("everstep_trainer", "with section(name)", section(session)),
            measure("an empty function", "f(n, loss, grad_norm)", everything(Nothing())),
        ]
    for row in rows:
        print(
            f"{row['system']:<18} {row['metric']:<26} median {row['median']:.3f} us, "
            f"{row['min']:.3f} to {row['max']:.3f} ({row['n']} batches of {CALLS} calls)"
        )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    ).stdout.strip()
    host = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": sys.version.split()[0]}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    content = {"bench": "trainer_step_cost", "host": host, "commit": commit, "rows": rows}
    RESULT.write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")
    worst = rows[2]["median"]
    print(f"goal: less than {GOAL_US} us; step with loss and gradient norm: {worst:.3f} us")
    return 0 if worst < GOAL_US else 1


def environ(directory: Path) -> dict[str, str]:
    """What an agent sets, as far as reporting needs it."""
    return {
        "EVERSTEP_JOB_ID": "bench",
        "EVERSTEP_RUN_ID": "bench-1",
        "EVERSTEP_GENERATION": "1",
        "EVERSTEP_PROGRESS_FILE": str(directory / "progress.bin"),
    }


class Nothing:
    """The price of calling anything at all."""

    def step(self, step: int, loss: float | None = None, grad_norm: float | None = None) -> None:
        """Do nothing."""


def step_only(session: Session) -> Callable[[], None]:
    """A batch."""

    def batch() -> None:
        for n in range(CALLS):
            session.step(n)

    return batch


def step_and_loss(session: Session) -> Callable[[], None]:
    """A batch."""

    def batch() -> None:
        for n in range(CALLS):
            session.step(n, loss=2.5)

    return batch


def everything(session: Session | Nothing) -> Callable[[], None]:
    """A batch."""

    def batch() -> None:
        for n in range(CALLS):
            session.step(n, loss=2.5, grad_norm=1.25)

    return batch


def section(session: Session) -> Callable[[], None]:
    """A batch."""

    def batch() -> None:
        for _ in range(CALLS):
            with session.section("eval", limit_s=60):
                pass

    return batch


def measure(system: str, metric: str, batch: Callable[[], None]) -> dict[str, Any]:
    """Microseconds per call."""
    batch()
    costs = []
    for _ in range(BATCHES):
        began = time.perf_counter_ns()
        batch()
        costs.append((time.perf_counter_ns() - began) / CALLS / 1000)
    return {
        "system": system,
        "metric": metric,
        "unit": "us",
        "median": round(statistics.median(costs), 4),
        "min": round(min(costs), 4),
        "max": round(max(costs), 4),
        "n": BATCHES,
    }


if __name__ == "__main__":
    sys.exit(main())
