"""Judging the progress of one run's local ranks against the job's own rhythm.

Pure: readings and the present instant come in, facts worth an event come out, so that hours are
tested in microseconds. All instants are nanoseconds of this machine's monotonic clock. A monitor
belongs to one run; nothing is carried over to the next.

In a collective all ranks stall together: each is reported, with the letter of its process state,
so that the stopped one (``T``) can be named. For ranks that report no steps, those in their logs
are taken (``log_progress``); where there are none either, there is no first step and no hang rule
(a silent rank is not a hanging one).

Not here: reading (``progress``, ``framework_log_reader``), the rules for losses, pace and output
(``job_signals``), exits and teardown (``run``), and what to do (the job's ladder).
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.machine.facts import Facts, Stall
from everstep.machine.framework_log_reader import LogReading
from everstep.machine.job_signals import JobSignals
from everstep.machine.log_progress import LogProgress
from everstep.machine.observed import NS, Observed
from everstep.machine.progress import NO_ACTIVITY, Progress
from everstep.spec.agent_api import AgentRunPolicy, EventKind

__all__ = ["NS", "Observed", "RunMonitor"]

_UNSEEN_S = 5.0
"""A pause between two looks that is longer than this was not the ranks' doing alone: the machine
was frozen, or the agent starved. It is not held against them."""
_STEPS_BESIDE_LIBRARY = 10
"""A rank that has attached usually reports its first step when it has printed it; one that has
printed so many and reported none uses the library for checkpoints only."""
_SAMPLES = 64
_SAMPLES_MIN = 3
_QUANTILE = 0.9
_LEARNED_CHANGE = 1.25
"""The learned step time is noted for the agent's successor when it has changed by this factor."""


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
        self.uses_library = False
        """Whether any local rank has attached to the trainer library."""
        self.library_steps = False
        """Whether any local rank reports steps through the trainer library: logs count no more."""
        self._logs = LogProgress(policy, facts)
        self._signals = (
            JobSignals(policy.signals, facts, hang_factor=policy.hang_factor)
            if policy.signals is not None
            else None
        )
        self._looked_ns: int | None = None
        self._unseen: tuple[int, int] | None = None
        """Begin and end of the last pause in which nobody looked."""

    @property
    def log_steps(self) -> bool:
        """Whether steps are read from logs."""
        needed = _STEPS_BESIDE_LIBRARY if self.uses_library else 1
        return not self.library_steps and self._logs.steps_seen >= needed

    def progress(self, rank: int) -> Progress | None:
        """The rank's last known progress, as it reported it or as its log shows it."""
        seen = self._seen.get(rank)
        if not self.log_steps:
            return seen
        shown = self._logs.progress(rank)
        if seen is None or shown is None:
            return seen or shown
        return replace(
            seen,
            step=shown.step,
            loss=shown.loss,
            grad_norm=shown.grad_norm,
            step_at_ns=shown.step_at_ns,
            steps_reported=shown.steps_reported,
            nonfinite_step=shown.nonfinite_step,
            source=shown.source,
        )

    def stalled_for_s(self, rank: int, now_ns: int) -> float | None:
        """Seconds without progress of a rank that is beyond its limit; None if it is moving."""
        stall = self._facts.stalls.get(rank)
        since_ns = stall.since_ns if stall is not None else self._logs.stalled_since_ns(rank)
        return None if since_ns is None else round((now_ns - since_ns) / NS, 3)

    def observe(
        self,
        now_ns: int,
        readings: Mapping[int, Progress | None],
        live: Collection[int],
        process_state: Callable[[int], str | None],
        logs: Mapping[int, LogReading] | None = None,
    ) -> list[Observed]:
        """Take one reading of every rank; ``live`` are those whose process exists.

        ``logs`` is what ranks' logs tell; None: they were not looked at.
        """
        self._note_absence(now_ns)
        for rank in self._ranks:
            reading = readings.get(rank)
            if reading is not None:
                self._take(rank, reading, now_ns)
        if logs is not None:
            self._logs.take(now_ns, logs)
        found: list[Observed] = []
        for rank in self._ranks:
            progress = self.progress(rank)
            if progress is not None:
                found += self._reported_trouble(rank, progress)
        found += self._first_step(now_ns)
        for rank in sorted(live):
            found += self._rhythm(rank, now_ns, process_state)
        if self.log_steps:
            found += self._logs.judge(now_ns, live, process_state)
        found += self._job_signals(now_ns, logs or {}, live)
        self._note_step_time()
        self.changed |= self._logs.changed
        self._logs.changed = False
        return found

    def _job_signals(
        self, now_ns: int, logs: Mapping[int, LogReading], live: Collection[int]
    ) -> list[Observed]:
        if self._signals is None:
            return []
        stepping = {
            rank: progress
            for rank in self._ranks
            if (progress := self.progress(rank)) is not None and progress.steps_reported > 0
        }
        if stepping:
            found = self._signals.steps(now_ns, stepping, logs, in_phase=self._logs.in_phase)
        elif not self.uses_library:
            found = self._signals.output(now_ns, logs, live=bool(live))
        else:
            found = []
        self.changed |= self._signals.changed
        self._signals.changed = False
        return found

    def traffic(self, now_ns: int, total_bytes: int) -> list[Observed]:
        """Take the sum of the machine's RDMA counters; called about every half minute."""
        if self._signals is None:
            return []
        seen = self._seen.values()
        excused = (
            not self._facts.first_step
            or any(progress.section is not None for progress in seen)
            or self._logs.in_phase
        )
        found = self._signals.traffic(now_ns, total_bytes, excused=excused)
        self.changed |= self._signals.changed
        self._signals.changed = False
        return found

    def _note_absence(self, now_ns: int) -> None:
        before, self._looked_ns = self._looked_ns, now_ns
        if before is None or now_ns - before <= _UNSEEN_S * NS:
            return
        self._unseen = (before, now_ns)
        self._logs.excuse((now_ns - before) / NS)
        if self._signals is not None:
            self._signals.excuse((now_ns - before) / NS)

    def _take(self, rank: int, reading: Progress, now_ns: int) -> None:
        before = self._seen.get(rank)
        if before is not None and rank not in self._facts.stalls:  # a hang is no step time
            self._learn(before, reading)
        if reading.finished:
            self._finished_ns.setdefault(rank, now_ns)
        self._seen[rank] = reading
        self.uses_library |= reading.attached
        self.library_steps |= reading.attached and reading.steps_reported > 0

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
        reported = [p for p in seen if p is not None and p.steps_reported > 0]
        # One rank prints for all; but each reports for itself.
        if len(reported) < (1 if self.log_steps else len(self._ranks)):
            return []
        self._facts.first_step = True
        self.changed = True
        single = all(p.steps_reported == 1 for p in reported)
        source = reported[0].source
        return [
            Observed(
                kind=EventKind.FIRST_STEP,
                rank=None,
                reason=(
                    "every rank of this machine has reported a step"
                    if source == "library"
                    else "a rank of this machine has printed a step"
                ),
                data={
                    "step": min((p.step for p in reported if p.step is not None), default=None),
                    "source": source,
                },
                at_ns=min(max(p.step_at_ns for p in reported), now_ns) if single else None,
            )
        ]

    def _limit(self, rank: int) -> _Limit | None:
        """How long the rank may be silent, and since when; None: no rule applies to it."""
        limit = self._plain_limit(rank)
        if limit is None or self._unseen is None:
            return limit
        begin_ns, end_ns = self._unseen
        unseen_ns = max(0, end_ns - max(begin_ns, limit.since_ns))
        return _Limit(limit.since_ns + unseen_ns, limit.limit_s)

    def _plain_limit(self, rank: int) -> _Limit | None:
        policy = self._policy
        progress = self._seen.get(rank)
        if progress is None or not progress.attached:
            # Only a rank whose neighbours use the library is known to be late with attaching.
            if not self.uses_library or self.log_steps:
                return None
            return _Limit(self._started_ns, policy.first_step_max_s)
        moved_ns = max(self._started_ns, progress.step_at_ns, progress.section_left_ns)
        if progress.section is not None:
            limit_s = progress.section_max_s or policy.section_max_s
            return _Limit(max(progress.section_entered_ns, moved_ns), limit_s)
        if progress.finished:
            return _Limit(self._finished_ns.get(rank, moved_ns), policy.section_max_s)
        if progress.steps_reported == 0:
            # It may use the library for checkpoints only; its log shows that it trains then.
            return None if self.log_steps else _Limit(moved_ns, policy.first_step_max_s)
        return _Limit(moved_ns, self._step_limit_s(progress))

    def _step_limit_s(self, progress: Progress) -> float:
        policy = self._policy
        if self.step_time_s is None:
            return max(policy.hang_min_s, policy.first_step_max_s)
        limit_s = max(policy.hang_min_s, policy.hang_factor * self.step_time_s)
        # After a long section the next step is a first one again: data loaders start their
        # processes, and what was compiled for training may be compiled once more.
        away_s = (progress.section_left_ns - progress.step_at_ns) / NS
        return max(limit_s, policy.first_step_max_s) if away_s > policy.hang_min_s else limit_s

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
