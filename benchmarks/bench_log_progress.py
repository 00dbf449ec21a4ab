"""What it costs the agent to read steps from the logs of an unmodified script.

A log grows by 1,000 lines between two looks, as at 10,000 lines a second, and the agent's follower
looks at it. The clock is the thread's own CPU time; the result is the share of one core. Beside it
stands the least there is: a Python loop that splits the same bytes into lines. Goal: 10 %, also
when every line looks as if it told a step.

    python benchmarks/bench_log_progress.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import common
from everstep.machine.framework_log_reader import RunLogs

LINES = 1_000
LOOKS_PER_S = 10
GOAL_SHARE = 0.10
METRIC = "share of a core at 10,000 lines/s"
NOISE = "2026-12-01 10:00:00,123 - worker - INFO - fetched shard {n} of bucket a-b-c in 0.123 s\n"
MEGATRON = (
    " iteration {n:8d}/  500000 | consumed samples: 1024 | elapsed time per iteration (ms): 100.5 |"
    " learning rate: 9.150E-06 | global batch size:  1024 | lm loss: 2.504220E+00 | loss scale: 1.0"
    " | grad norm: 0.231 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
BAR = "\r  2%|#         | {n}/500000 [00:10<08:20,  1.02it/s, loss=2.5]"
LOOKALIKE = "the step iterator of epoch three has seen loss scaling events; nothing here is one\n"
PATTERN = r"update (?P<step>\d+) .*objective=(?P<loss>\S+)"


def main() -> int:
    """Measure; whether the goal is met is told, not punished."""
    options = common.arguments(__doc__, repetitions=40, at_least=5)
    load_before, samples = common.load(), common.Samples()
    one_in_a_hundred = [MEGATRON if n % 100 == 0 else NOISE for n in range(LINES)]
    kinds: dict[str, tuple[list[str], str | None]] = {
        "a Megatron line in a hundred": (one_in_a_hundred, None),
        "nothing but Megatron lines": ([MEGATRON] * LINES, None),
        "nothing but a progress bar": ([BAR] * LINES, None),
        "nothing but lookalikes": ([LOOKALIKE] * LINES, None),
        "a job's own pattern": (one_in_a_hundred, PATTERN),
    }
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as directory:
        logs = {kind: Growing(Path(directory) / kind, *made) for kind, made in kinds.items()}
        for _ in range(options.repetitions):
            for kind, log in logs.items():
                raw = log.grow()
                for system, work in (
                    ("agent", log.look),
                    ("floor: splitting into lines", raw.splitlines),
                ):
                    samples.add(
                        f"{system}, {kind}", METRIC, cost_s(work) * LOOKS_PER_S, unit="core"
                    )
    worst = max(samples.median(f"agent, {kind}", METRIC) or 0.0 for kind in kinds)
    notes = common.Notes(
        title="Cost of reading steps from a log",
        text=f"One rank's log that grows by {LINES * LOOKS_PER_S:,} lines a second, CPU time of "
        f"the agent's thread as a share of one core. Goal: {GOAL_SHARE:.0%}, whatever the lines.",
        remarks=[f"Goal {'met' if worst <= GOAL_SHARE else 'missed'}: at worst {worst:.1%}."],
    )
    common.publish("log_progress", samples.rows(), notes, load_before=load_before)
    return 0


def cost_s(work: Callable[[], object]) -> float:
    """CPU time of one call."""
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e9


class Growing:
    """A log, its writer and the agent's follower."""

    def __init__(self, path: Path, lines: list[str], pattern: str | None) -> None:
        path.touch()
        self._path, self._lines, self._written = path, lines, 0
        self._logs = RunLogs({0: path}, pattern=pattern)

    def grow(self) -> bytes:
        """Write the next thousand lines."""
        raw = "".join(line.format(n=self._written + i) for i, line in enumerate(self._lines))
        self._written += len(self._lines)
        with self._path.open("ab") as file:
            file.write(raw.encode())
        return raw.encode()

    def look(self) -> None:
        """As the agent does ten times a second."""
        self._logs.look()


if __name__ == "__main__":
    sys.exit(main())
