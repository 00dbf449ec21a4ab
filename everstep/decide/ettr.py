"""ETTR: productive time / wall-clock time, cumulative and over a window (paper, section 10.1).

A run is productive from its first step until its trouble, less the time of steps that a later run
had to repeat because it was restored from an earlier point; that time is estimated from the run's
own rate of steps. So restarts, waiting and repeated work all count against it.

Not here: which class of the ledger every other second belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FROM_SCRATCH = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """The instants of one run (one clock, seconds) and the steps it went through."""

    opened_s: float
    first_step_s: float | None = None
    """When the first step of this run was seen; None: it never came."""
    trouble_s: float | None = None
    closed_s: float | None = None
    restored_step: int | None = None
    """Step of the checkpoint it started from; None: from scratch."""
    first_step: int | None = None
    """Number of the first step it finished; None: the one after ``restored_step``."""
    last_step: int | None = None
    stalled_s: float = 0.0
    """How long before ``trouble_s`` nothing had moved (a hang is noticed late)."""

    @property
    def begins_at(self) -> int:
        """Number of the first step of this run."""
        if self.first_step is not None:
            return self.first_step
        return FROM_SCRATCH + 1 if self.restored_step is None else self.restored_step + 1


def productive_intervals(runs: Sequence[RunTimes], now_s: float) -> tuple[tuple[float, float], ...]:
    """When training made progress that lasted, as intervals in the order of ``runs``.

    Args:
        runs: all runs of the job, oldest first.
        now_s: the present, for a run that has not ended.
    """
    out: list[tuple[float, float]] = []
    kept_until: int | None = None
    for run in reversed(runs):
        if run.first_step_s is not None:
            end = _end(run, now_s)
            length = max(0.0, end - run.first_step_s)
            out.append((run.first_step_s, run.first_step_s + length * _kept_share(run, kept_until)))
        restored = FROM_SCRATCH if run.restored_step is None else run.restored_step
        kept_until = restored if kept_until is None else min(kept_until, restored)
    return tuple(reversed(out))


def ettr(
    runs: Sequence[RunTimes], now_s: float, *, since_s: float, window_s: float | None = None
) -> float | None:
    """Productive share of the time since ``since_s``, or of the last ``window_s`` of it.

    Args:
        runs: all runs of the job, oldest first.
        now_s: the present, or the end of the job.
        since_s: when the job was created.
        window_s: length of the sliding window; None: cumulative.

    Returns:
        A number from 0 to 1, or None before any time has passed.
    """
    start = since_s if window_s is None else max(since_s, now_s - window_s)
    wall_s = now_s - start
    if wall_s <= 0:
        return None
    productive_s = sum(
        max(0.0, min(end, now_s) - max(begin, start))
        for begin, end in productive_intervals(runs, now_s)
    )
    return min(1.0, productive_s / wall_s)


def _end(run: RunTimes, now_s: float) -> float:
    if run.trouble_s is not None:
        return run.trouble_s - run.stalled_s
    return min(now_s, run.closed_s) if run.closed_s is not None else now_s


def _kept_share(run: RunTimes, kept_until: int | None) -> float:
    """Share of a run's steps that no later run repeats."""
    if kept_until is None or run.last_step is None:
        return 1.0
    steps = run.last_step - run.begins_at
    kept = min(run.last_step, kept_until) - run.begins_at
    if steps <= 0:
        return 1.0 if kept_until >= run.last_step else 0.0
    return max(0.0, min(1.0, kept / steps))
