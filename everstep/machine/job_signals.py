"""The anomaly rules of ``everstep.decide`` applied to one run: spikes, slow steps, silence.

Each kind is told once, and once more when it is over, however many ranks see it: all ranks of a
job see a loss spike at the same step. What was told is kept in the facts, so that the next agent
neither repeats it nor forgets to say that it is over. Baselines are not kept: they begin anew.

Not here: the rules themselves (``everstep.decide.anomaly``, ``rhythm``), hangs and NaN
(``monitor``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from everstep.decide.anomaly import (
    GRAD_NORM_FLOOR,
    LOSS_FLOOR,
    Change,
    PaceRule,
    SpikeRule,
    TrafficRule,
)
from everstep.decide.rhythm import OutputRhythm
from everstep.machine.facts import Facts, SignalTold
from everstep.machine.framework_log_reader import LogReading
from everstep.machine.observed import NS, Observed
from everstep.machine.progress import Progress
from everstep.spec.agent_api import EventKind, SignalPolicy

_FLOORS = {"loss": LOSS_FLOOR, "grad_norm": GRAD_NORM_FLOOR}
_NAMES = {"loss": "loss", "grad_norm": "gradient norm"}
_WHOLE = "whole_step_time"
_SERIES = ("mfu", "tflops", "tps", "step_time", _WHOLE)
"""How fast training is, best measure first: the first three do not depend on a batch's length. The
last one has the sections of each step in it: all there is of a job that saves at every step."""
_RANKS_NAMED_MAX = 32


class JobSignals:
    """The rules of one run on one machine."""

    def __init__(self, policy: SignalPolicy, facts: Facts, *, hang_factor: float) -> None:
        self._policy = policy
        self._facts = facts
        self._spikes: dict[tuple[str, int], SpikeRule] = {}
        self._paces: dict[str, PaceRule] = {}
        self._output = OutputRhythm(after_s=policy.log_silent_after_s, factor=hang_factor)
        self._traffic = TrafficRule(after_s=policy.rdma_silent_after_s)
        self._before: dict[int, Progress] = {}
        self._arrived: tuple[float, int] | None = None
        """When the leading rank's last step line came, and its step."""
        self._bytes: int | None = None
        self.changed = False
        """Set when ``facts`` were changed and should be saved."""
        self._restore()

    def _restore(self) -> None:
        for kind, told in self._facts.signals.items():
            if kind == EventKind.LOSS_SPIKE and told.rank is not None and told.series in _FLOORS:
                rule = self._spike(told.series, told.rank)
                rule.told, rule.limit = True, told.limit
            elif kind == EventKind.STEP_TIME_DECLINE and told.series in _SERIES:
                pace = self._pace(told.series)
                pace.told, pace.best = True, told.limit
            elif kind == EventKind.LOG_SILENT:
                self._output.told = True
            elif kind == EventKind.RDMA_SILENT:
                self._traffic.told = True

    def _spike(self, series: str, rank: int) -> SpikeRule:
        rule = self._spikes.get((series, rank))
        if rule is None:
            rule = self._spikes[series, rank] = SpikeRule(
                factor=self._policy.loss_spike_factor,
                window=self._policy.loss_spike_window,
                sustained=self._policy.loss_spike_sustained,
                warmup=self._policy.loss_spike_warmup,
                floor=_FLOORS[series],
            )
        return rule

    def _pace(self, series: str) -> PaceRule:
        rule = self._paces.get(series)
        if rule is None:
            rule = self._paces[series] = PaceRule(
                factor=self._policy.step_time_factor, window_s=self._policy.step_time_window_s
            )
        return rule

    # --- what comes in -------------------------------------------------------------------------

    def steps(
        self,
        now_ns: int,
        progress: Mapping[int, Progress],
        logs: Mapping[int, LogReading],
        *,
        in_phase: bool,
    ) -> list[Observed]:
        """Take the present progress of the ranks that report any, and what their logs told."""
        found: list[Observed] = []
        for rank, reading in progress.items():
            for values in _values(self._before.get(rank), reading, logs.get(rank)):
                found += self._judge_values(rank, reading.step, values)
        leader = min(progress, default=None)
        if leader is not None:
            found += self._judge_pace(
                now_ns, leader, progress[leader], logs.get(leader), in_phase=in_phase
            )
        self._before = dict(progress)
        return found

    def output(self, now_ns: int, logs: Mapping[int, LogReading], *, live: bool) -> list[Observed]:
        """Take what a script that reports no steps has written."""
        now_s, written = now_ns / NS, sum(reading.bytes_seen for reading in logs.values())
        if self._bytes is None:
            self._bytes = written  # what was there before this agent says nothing about now
            return []
        if written > self._bytes:
            self._bytes = written
            return self._over(EventKind.LOG_SILENT) if self._output.wrote(now_s) else []
        silence = self._output.silent(now_s) if live else None
        if silence is None:
            return []
        return self._begun(
            EventKind.LOG_SILENT,
            f"nothing written for {now_s - silence.since_s:.0f} s, "
            f"limit {silence.limit_s:.0f} s by its own rhythm",
            SignalTold(),
            silent_for_s=round(now_s - silence.since_s, 3),
            limit_s=round(silence.limit_s, 3),
        )

    def traffic(self, now_ns: int, total_bytes: int, *, excused: bool) -> list[Observed]:
        """Take the sum of the machine's RDMA counters; ``excused`` while no step is due."""
        if excused:
            self._traffic.excuse()
            return []
        now_s = now_ns / NS
        change = self._traffic.add(now_s, total_bytes)
        if change is Change.OVER:
            return self._over(EventKind.RDMA_SILENT)
        if change is None:
            return []
        idle_s = self._traffic.idle_s(now_s)
        return self._begun(
            EventKind.RDMA_SILENT,
            f"no RDMA traffic for {idle_s:.0f} s, after there had been some in this run",
            SignalTold(),
            silent_for_s=round(idle_s, 3),
            limit_s=self._policy.rdma_silent_after_s,
        )

    def excuse(self, seconds: float) -> None:
        """Nobody could look for so long."""
        self._output.excuse(seconds)
        self._traffic.excuse()
        self._interrupt(*self._paces)

    # --- judging -------------------------------------------------------------------------------

    def _judge_values(
        self, rank: int, step: int | None, values: Mapping[str, float | None]
    ) -> list[Observed]:
        found: list[Observed] = []
        for series, value in values.items():
            if value is None:
                continue
            rule = self._spike(series, rank)
            change = rule.add(value)
            if change is Change.BEGUN and EventKind.LOSS_SPIKE not in self._facts.signals:
                found += self._spiked(series, rank, step, value, rule)
            elif change is Change.OVER and not any(r.told for r in self._spikes.values()):
                found += self._over(EventKind.LOSS_SPIKE)
        return found

    def _spiked(
        self, series: str, rank: int, step: int | None, value: float, rule: SpikeRule
    ) -> list[Observed]:
        ranks = sorted(r for (s, r), other in self._spikes.items() if s == series and other.high)
        baseline = rule.baseline or 0.0
        factor = value / baseline if baseline > 0 else math.inf
        return self._begun(
            EventKind.LOSS_SPIKE,
            f"{_NAMES[series]} {value:.4g} at step {step}, {factor:.1f} times its baseline "
            f"{baseline:.4g}, for {self._policy.loss_spike_sustained} readings in a row",
            SignalTold(series=series, rank=rank, limit=rule.limit),
            rank=rank if ranks == [rank] and len(self._known(series)) > 1 else None,
            signal=series,
            step=step,
            value=value,
            baseline=baseline,
            ranks=ranks[:_RANKS_NAMED_MAX],
            ranks_total=len(ranks),
        )

    def _known(self, series: str) -> list[int]:
        return [rank for s, rank in self._spikes if s == series]

    def _judge_pace(
        self,
        now_ns: int,
        rank: int,
        reading: Progress,
        log: LogReading | None,
        *,
        in_phase: bool,
    ) -> list[Observed]:
        before = self._before.get(rank)
        if reading.source == "log" and log is not None:
            costs = self._log_costs(now_ns / NS, log)
        else:
            costs = _library_costs(before, reading)
        if in_phase or reading.section is not None:
            self._interrupt(*(series for series in self._paces if series != _WHOLE))
            costs = [cost for cost in costs if cost[0] == _WHOLE]
        best = min((_SERIES.index(s) for s in (*self._paces, *(c[0] for c in costs))), default=0)
        found: list[Observed] = []
        for series, cost, count in costs:
            if series == _SERIES[best]:
                change = self._pace(series).add(now_ns / NS, cost, count)
                found += self._pace_changed(series, change, reading.step)
        return found

    def _interrupt(self, *paces: str) -> None:
        self._arrived = None
        for series in paces:
            self._paces[series].interrupted()

    def _log_costs(self, now_s: float, log: LogReading) -> list[tuple[str, float, int]]:
        costs: list[tuple[str, float, int]] = []
        for step in log.fresh:
            if step.speed is not None and step.speed_kind is not None:
                costs.append((step.speed_kind, 1 / step.speed, 1))
            elif step.step_time_s is not None:
                costs.append(("step_time", step.step_time_s, 1))
        if log.fresh and log.step is not None:
            arrived, self._arrived = self._arrived, (now_s, log.step)
            if not costs and arrived is not None and log.step > arrived[1]:
                costs.append(("step_time", now_s - arrived[0], log.step - arrived[1]))
        return costs

    def _pace_changed(self, series: str, change: Change | None, step: int | None) -> list[Observed]:
        if change is None:
            return []
        if change is Change.OVER:
            return self._over(EventKind.STEP_TIME_DECLINE)
        rule = self._paces[series]
        best, now = rule.best or math.nan, rule.now or math.nan
        ratio = now / best
        if series in ("step_time", _WHOLE):
            figures = f"{now:.3g} s a step, {ratio:.2f} times the best sustained {best:.3g} s"
        else:
            best, now = 1 / best, 1 / now
            figures = f"{series} {now:.3g}, the best sustained was {best:.3g}"
        return self._begun(
            EventKind.STEP_TIME_DECLINE,
            f"{figures}, for {self._policy.step_time_window_s:.0f} s",
            SignalTold(series=series, limit=rule.best),
            signal=series,
            step=step,
            value=now,
            baseline=best,
            ratio=round(ratio, 3),
            window_s=self._policy.step_time_window_s,
        )

    # --- what goes out -------------------------------------------------------------------------

    def _begun(
        self, kind: EventKind, reason: str, told: SignalTold, rank: int | None = None, **data: Any
    ) -> list[Observed]:
        self._facts.signals[kind.value] = told
        self.changed = True
        return [Observed(kind=kind, rank=rank, reason=reason, data=data)]

    def _over(self, kind: EventKind) -> list[Observed]:
        if self._facts.signals.pop(kind.value, None) is None:
            return []
        self.changed = True
        return [
            Observed(
                kind=EventKind.SIGNAL_RECOVERED,
                rank=None,
                reason=f"{kind.value.replace('_', ' ')} is over",
                data={"kind": kind.value},
            )
        ]


def _values(
    before: Progress | None, reading: Progress, log: LogReading | None
) -> Iterator[Mapping[str, float | None]]:
    """Loss and gradient norm of every step that is new since ``before``."""
    if reading.source == "log":
        for step in log.fresh if log is not None else ():
            yield {"loss": step.loss, "grad_norm": step.grad_norm}
        return
    if before is not None and before.steps_reported == reading.steps_reported:
        return
    inside = reading.section is not None and reading.step_at_ns >= reading.section_entered_ns
    if reading.steps_reported > 0 and not inside:
        yield {"loss": reading.loss, "grad_norm": reading.grad_norm}


def _library_costs(before: Progress | None, after: Progress) -> list[tuple[str, float, int]]:
    if before is None or before.source != after.source or before.steps_reported == 0:
        return []
    steps = after.steps_reported - before.steps_reported
    in_section = before.section or after.section or after.section_left_ns > before.step_at_ns
    if steps <= 0:
        return []
    series = _WHOLE if in_section else "step_time"
    return [(series, (after.step_at_ns - before.step_at_ns) / NS, steps)]
