"""What the trainer library costs a training step: one call to ``session.step``.

Measured in batches of calls, with the progress block mapped from a file as under an agent, beside
the least that such a call could cost: calling an empty function, and one ``struct.pack_into``.
Batches of all systems alternate. Goal: less than 2 microseconds.

The clock is the thread's own CPU time: a step report never waits, so on an idle box that is the
time that passes, and on a busy one it is still what the call costs. Time that passed is a row too.

    python benchmarks/bench_trainer_step.py
"""

from __future__ import annotations

import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from everstep_trainer import Session

from benchmarks import common

CALLS = 5_000
GOAL_US = 2.0
EVERYTHING = "step(n, loss, grad_norm)"
OURS = "everstep_trainer"


def main() -> int:
    """Measure; whether the goal is met is told, not punished."""
    options = common.arguments(__doc__, repetitions=200, at_least=5)
    load_before, samples = common.load(), common.Samples()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as directory:
        session = Session(environ(Path(directory)))
        batches: dict[tuple[str, str], Callable[[], None]] = {
            (OURS, EVERYTHING): everything(session.step),
            (OURS, "step(n, loss)"): step_and_loss(session),
            (OURS, "step(n)"): step_only(session),
            (OURS, "with section(name)"): section(session),
            ("everstep_trainer without Everstep", EVERYTHING): everything(Session({}).step),
            ("floor: an empty function", "f(n, loss, grad_norm)"): everything(nothing),
            ("floor: struct.pack_into a bytearray", "f(n, loss, grad_norm)"): everything(packer()),
        }
        for batch in batches.values():
            batch()  # caches and branch predictors get warm
        for _ in range(options.repetitions):
            for (system, metric), batch in batches.items():
                began, passed = time.thread_time_ns(), time.perf_counter_ns()
                batch()
                cost = time.thread_time_ns() - began
                passed = time.perf_counter_ns() - passed
                samples.add(system, metric, cost / CALLS / 1000, unit="µs")
                if (system, metric) == (OURS, EVERYTHING):
                    samples.add(system, f"{metric}, time passed", passed / CALLS / 1000, unit="µs")
    worst = samples.median(OURS, EVERYTHING)
    floor = samples.median("floor: struct.pack_into a bytearray", "f(n, loss, grad_norm)")
    assert worst is not None
    assert floor is not None
    notes = common.Notes(
        title="Cost of a step report",
        text=f"One call of the trainer library, CPU time of its thread, in batches of {CALLS:,} "
        f"calls. Goal: less than {GOAL_US:g} µs.",
        remarks=[verdict(worst, floor)],
    )
    common.publish("trainer_step", samples.rows(), notes, load_before=load_before)
    return 0


def verdict(cost: float, floor: float) -> str:
    """What the numbers say about the goal."""
    return (
        f"Goal {'met' if cost < GOAL_US else 'missed'}: `{EVERYTHING}` costs {cost:.2f} µs, "
        f"{cost / floor:.1f} times a bare `struct.pack_into` of the same three values."
    )


def environ(directory: Path) -> dict[str, str]:
    """What an agent sets, as far as reporting needs it."""
    return {
        "EVERSTEP_JOB_ID": "bench",
        "EVERSTEP_RUN_ID": "bench-1",
        "EVERSTEP_GENERATION": "1",
        "EVERSTEP_PROGRESS_FILE": str(directory / "progress.bin"),
    }


def nothing(step: int, loss: float | None = None, grad_norm: float | None = None) -> None:
    """The price of calling anything at all."""


def packer() -> Callable[..., None]:
    """The price of writing the same three values into memory."""
    pack_into, block = struct.Struct("<qdd").pack_into, bytearray(4096)

    def pack(step: int, loss: float = 0.0, grad_norm: float = 0.0) -> None:
        pack_into(block, 24, step, loss, grad_norm)

    return pack


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


def everything(step: Callable[..., None]) -> Callable[[], None]:
    """A batch."""

    def batch() -> None:
        for n in range(CALLS):
            step(n, loss=2.5, grad_norm=1.25)

    return batch


def section(session: Session) -> Callable[[], None]:
    """A batch."""

    def batch() -> None:
        for _ in range(CALLS):
            with session.section("eval", limit_s=60):
                pass

    return batch


if __name__ == "__main__":
    sys.exit(main())
