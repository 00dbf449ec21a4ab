"""Judging the progress of one run's local ranks against the job's own rhythm.

Pure: readings and the present instant come in, facts worth an event come out, so that hours are
tested in microseconds. All instants are nanoseconds of this machine's monotonic clock. A monitor
belongs to one run; nothing is carried over to the next.

In a collective all ranks stall together: each is reported, with the letter of its process state,
so that the stopped one (``T``) can be named. A script without the trainer library reports nothing;
then there is no first step and no hang rule here (a silent rank is not a hanging one).

Not here: reading (``progress``), exits and teardown (``run``), and what to do (the job's ladder).
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.machine.facts import Facts, Stall
from everstep.machine.progress import NO_ACTIVITY, Progress
from everstep.spec.agent_api import AgentRunPolicy, EventKind

NS = 1_000_000_000
_SAMPLES = 64
_SAMPLES_MIN = 3
_QUANTILE = 0.9
_LEARNED_CHANGE = 1.25
"""The learned step time is noted for the agent's successor when it has changed by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One fact worth an event."""

    kind: EventKind
    rank: int | None
    reason: str
    data: dict[str, Any] = field(default_factory=dict)
    at_ns: int | None = None


@dataclass(frozen=True, slots=True)
class _Limit:
    since_ns: int
    limit_s: float


class RunMonitor:
    """The rhythm of one run on one machine."""

    def __init__(
        self,
        *,
        policy: AgentRunPolicy,
        ranks: Sequence[int],
        started_ns: int,
        facts: Facts,
    ) -> None:
        self._policy = policy
        self._ranks = tuple(ranks)
        self._started_ns = started_ns
        self._facts = facts
        self._seen: dict[int, Progress] = {}
        self._finished_ns: dict[int, int] = {}
        self._intervals_s: deque[float] = deque(maxlen=_SAMPLES)
        self._with_sections_s: deque[float] = deque(maxlen=_SAMPLES)
        """The same, time in sections included: all there is of a job that saves at every step."""
        self.changed = False
        """Set when ``facts`` were changed and should be saved; the caller resets it."""

    @property
    def uses_library(self) -> bool:
        """Whether any local rank has attached to the trainer library."""
        return any(progress.attached for progress in self._seen.values())

    def progress(self, rank: int) -> Progress | None:
        """The rank's last known progress."""
        return self._seen.get(rank)

    def stalled_for_s(self, rank: int, now_ns: int) -> float | None:
        """Seconds without progress of a rank that is beyond its limit; None if it is moving."""
        stall = self._facts.stalls.get(rank)
        return None if stall is None else round((now_ns - stall.since_ns) / NS, 3)

    def observe(
        self,
        now_ns: int,
        readings: Mapping[int, Progress | None],
        live: Collection[int],
        process_state: Callable[[int], str | None],
    ) -> list[Observed]:
        """Take one reading of every rank; ``live`` are those whose process exists."""
        found: list[Observed] = []
        for rank in self._ranks:
            reading = readings.get(rank)
            if reading is not None:
                self._take(rank, reading, now_ns)
                found += self._reported_trouble(rank, reading)
        found += self._first_step(now_ns)
        for rank in sorted(live):
            found += self._rhythm(rank, now_ns, process_state)
        self._note_step_time()
        return found

    def _take(self, rank: int, reading: Progress, now_ns: int) -> None:
        before = self._seen.get(rank)
        if before is not None and rank not in self._facts.stalls:  # a hang is no step time
            self._learn(before, reading)
        if reading.finished:
            self._finished_ns.setdefault(rank, now_ns)
        self._seen[rank] = reading

    def _learn(self, before: Progress, after: Progress) -> None:
        steps = after.steps_reported - before.steps_reported
        in_section = before.section or after.section or after.section_left_ns > before.step_at_ns
        if steps <= 0 or before.steps_reported == 0:
            return
        elapsed_s = (after.step_at_ns - before.step_at_ns) / NS
        if elapsed_s > 0:
            self._with_sections_s.append(elapsed_s / steps)
            if not in_section:
                self._intervals_s.append(elapsed_s / steps)

    @property
    def step_time_s(self) -> float | None:
        """A high quantile of this run's recent step times; None before it is known."""
        for intervals_s in (self._intervals_s, self._with_sections_s):
            if len(intervals_s) >= _SAMPLES_MIN:
                ordered = sorted(intervals_s)
                return ordered[math.ceil(_QUANTILE * (len(ordered) - 1))]
        return self._facts.step_time_s

    def _note_step_time(self) -> None:
        now, noted = self.step_time_s, self._facts.step_time_s
        if now is None or now == noted:
            return
        if noted is None or not noted / _LEARNED_CHANGE <= now <= noted * _LEARNED_CHANGE:
            self._facts.step_time_s = now
            self.changed = True

    def _reported_trouble(self, rank: int, reading: Progress) -> list[Observed]:
        found = []
        if reading.nonfinite_step is not None and rank not in self._facts.nonfinite_reported:
            self._facts.nonfinite_reported.append(rank)
            self.changed = True
            found.append(
                Observed(
                    kind=EventKind.NONFINITE,
                    rank=rank,
                    reason=f"loss or gradient norm of step {reading.nonfinite_step} is not finite",
                    data={"step": reading.nonfinite_step},
                )
            )
        if reading.save_failed_step is not None or reading.save_error is not None:
            text = f"{reading.save_failed_step} {reading.save_error}"
            print_ = f"{zlib.crc32(text.encode()):08x}"
            if self._facts.save_failures.get(rank) != print_:
                self._facts.save_failures[rank] = print_
                self.changed = True
                error = reading.save_error or "no reason given"
                found.append(
                    Observed(
                        kind=EventKind.SAVE_FAILED,
                        rank=rank,
                        reason=f"save of step {reading.save_failed_step} failed: {error}",
                        data={"step": reading.save_failed_step, "error": error},
                    )
                )
        return found

    def _first_step(self, now_ns: int) -> list[Observed]:
        if self._facts.first_step:
            return []
        seen = [self.progress(rank) for rank in self._ranks]
        reported = [p for p in seen if p is not None and p.attached and p.steps_reported > 0]
        if len(reported) < len(self._ranks):
            return []
        self._facts.first_step = True
        self.changed = True
        single = all(p.steps_reported == 1 for p in reported)
        return [
            Observed(
                kind=EventKind.FIRST_STEP,
                rank=None,
                reason="every rank of this machine has reported a step",
                data={"step": min((p.step for p in reported if p.step is not None), default=None)},
                at_ns=min(max(p.step_at_ns for p in reported), now_ns) if single else None,
            )
        ]

    def _limit(self, rank: int) -> _Limit | None:
        """How long the rank may be silent, and since when; None: no rule applies to it."""
        policy = self._policy
        progress = self._seen.get(rank)
        if progress is None or not progress.attached:
            # Only a rank whose neighbours use the library is known to be late with attaching.
            if not self.uses_library:
                return None
            return _Limit(self._started_ns, policy.first_step_max_s)
        moved_ns = max(self._started_ns, progress.step_at_ns, progress.section_left_ns)
        if progress.section is not None:
            limit_s = progress.section_max_s or policy.section_max_s
            return _Limit(max(progress.section_entered_ns, moved_ns), limit_s)
        if progress.finished:
            return _Limit(self._finished_ns.get(rank, moved_ns), policy.section_max_s)
        if progress.steps_reported == 0:
            return _Limit(moved_ns, policy.first_step_max_s)
        if self.step_time_s is None:
            return _Limit(moved_ns, max(policy.hang_min_s, policy.first_step_max_s))
        return _Limit(moved_ns, max(policy.hang_min_s, policy.hang_factor * self.step_time_s))

    def _rhythm(
        self, rank: int, now_ns: int, process_state: Callable[[int], str | None]
    ) -> list[Observed]:
        progress = self._seen.get(rank)
        activity: list[int | str | bool] = list(
            progress.activity if progress is not None else NO_ACTIVITY
        )
        stall = self._facts.stalls.get(rank)
        if stall is not None:
            if stall.activity == activity:
                return []
            del self._facts.stalls[rank]
            self.changed = True
            step = progress.step if progress is not None else None
            return [
                Observed(
                    kind=EventKind.RANK_MOVING,
                    rank=rank,
                    reason=f"moving again after {(now_ns - stall.since_ns) / NS:.1f} s",
                    data={"step": step},
                )
            ]
        limit = self._limit(rank)
        if limit is None or now_ns - limit.since_ns <= limit.limit_s * NS:
            return []
        self._facts.stalls[rank] = Stall(activity=activity, since_ns=limit.since_ns)
        self.changed = True
        return [self._stalled(rank, now_ns, limit, process_state(rank))]

    def _stalled(self, rank: int, now_ns: int, limit: _Limit, state: str | None) -> Observed:
        progress = self.progress(rank)
        step = progress.step if progress is not None else None
        section = progress.section if progress is not None else None
        stalled_for_s = (now_ns - limit.since_ns) / NS
        where = f'in section "{section}"' if section else "without a step"
        return Observed(
            kind=EventKind.RANK_STALLED,
            rank=rank,
            reason=(
                f"{stalled_for_s:.1f} s {where}, limit {limit.limit_s:.1f} s, last step {step}, "
                f"process state {state or 'unknown'}"
            ),
            data={
                "step": step,
                "stalled_for_s": round(stalled_for_s, 3),
                "limit_s": round(limit.limit_s, 3),
                "process_state": state,
                "section": section,
            },
        )
