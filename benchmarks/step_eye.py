"""When ranks made which step, read from what they print: the one clock for every launcher.

Both examples print ``step N loss X`` at the end of every step. The logs of all ranks of all runs
are followed here, so that no system's own bookkeeping decides about its own times. Not here: who
writes the logs, and where.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LOOK_EVERY_S = 0.02
_STEP = re.compile(rb"^step (\d+) loss ", re.MULTILINE)

Logs = Callable[[], Mapping[Path, int]]
"""The logs that are there now, each with the number of its run (rising)."""


class NotInTime(Exception):
    """What was waited for did not come within its limit."""


@dataclass(slots=True)
class StepEye:
    """Follows logs until it is cancelled (``run``)."""

    logs: Logs
    seen: dict[tuple[int, int], float] = field(default_factory=dict)
    """Run and step to the wall clock when any rank had made it."""
    _read: dict[Path, int] = field(default_factory=dict)

    async def run(self) -> None:
        """Look again and again."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Take in what is new in all logs."""
        for path, run in self.logs().items():
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    text = file.read()
            except OSError:
                continue
            whole = text.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            now = time.time()
            for match in _STEP.finditer(text[:whole]):
                self.seen.setdefault((run, int(match[1])), now)

    def newest(self) -> tuple[int, int]:
        """The newest run that has made a step, and its newest step; (0, -1) when none has."""
        return max(self.seen, default=(0, -1))

    def first_step(self, after: int) -> tuple[int, float] | None:
        """The first step of any run later than ``after``, and when it was made."""
        found = [(at, step) for (run, step), at in self.seen.items() if run > after]
        if not found:
            return None
        at, step = min(found)
        return step, at

    def reached(self, step: int, after: int) -> float | None:
        """When a run later than ``after`` had made ``step`` (or a later one)."""
        return min(
            (at for (run, made), at in self.seen.items() if run > after and made >= step),
            default=None,
        )

    async def until(self, what: str, found: Callable[[], bool], *, limit_s: float) -> None:
        """Wait for something that logs tell.

        Raises:
            NotInTime: it does not come within the limit.
        """
        deadline = time.monotonic() + limit_s
        while not found():
            if time.monotonic() > deadline:
                raise NotInTime(f"not within {limit_s:g} s: {what}")
            await asyncio.sleep(LOOK_EVERY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a fault cost."""

    first_step_s: float
    """From the fault to the first step of a new run."""
    back_s: float
    """From the fault until the job is where it was: repeated work counts."""
    steps_lost: int


async def recovery(
    eye: StepEye, *, at: float, run: int, last_step: int, limit_s: float
) -> Recovered:
    """Wait until the job is back at ``last_step``, which run ``run`` had made when it was broken.

    Raises:
        NotInTime: it is not within the limit.
    """
    await eye.until(
        f"step {last_step} again after run {run}",
        lambda: eye.reached(last_step, run) is not None,
        limit_s=limit_s,
    )
    first, back = eye.first_step(run), eye.reached(last_step, run)
    assert first is not None
    assert back is not None
    step, first_at = first
    return Recovered(
        first_step_s=first_at - at, back_s=back - at, steps_lost=max(0, last_step + 1 - step)
    )
