"""What a watch knows of one shard, and when that is something to return.

A fold: stream lines, run states and lost connections go in, at instants of the receiver's own
monotonic clock; at most one ``WatchResult`` comes out. Three rules carry it:

- A machine that cannot be reached is *unknown*. It is listed, and never trouble by itself.
- Trouble is returned only after a short settle window, so that the first failed rank and the
  witnesses it caused arrive together.
- What events may have told before this watch began (or while the ring overflowed) is read from the
  machine's present state, so nothing depends on having seen every event.

Not here: connections, Temporal and time itself (``activities.detection``), and whose fault it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from activities.failures import one_line
from activities.troubles import Troubles
from activities.watch_probes import Beside
from activities.watch_views import MachineView, cursor_at, observed
from everstep.decide.attribution import RankReport
from everstep.decide.warning import SIGNALS
from everstep.decide.words import RankState, Verdict
from everstep.spec import agent_api as api
from everstep.spec import messages as m

OBSERVATIONS_MAX = 64
"""Observations in one result: it enters Temporal's history. The reports that follow have all."""
WARN_INTERVAL_MIN_S = 5.0
"""A save that fails at every step must not become a result, and history, at every step."""
NOT_KNOWN_CONFIRM_S = 1.0
"""An agent must say twice, this far apart, that it does not know the run."""

STEP_MAX = 2**53
"""Beyond this, JSON readers in other languages lose digits."""

_TROUBLE = frozenset(
    {
        api.EventKind.NONFINITE,
        api.EventKind.RANK_STALLED,
        api.EventKind.EARLY_EXIT,
        api.EventKind.PROCESSES_VANISHED,
        api.EventKind.PLANNED_STOP,
        api.EventKind.RUN_STOPPED,
    }
)


@dataclass(slots=True)
class Shard:
    """The fold over one shard. All ``now`` are of one monotonic clock."""

    request: m.WatchRun
    started_at: float
    blind_since: float | None = None
    machines: dict[str, MachineView] = field(default_factory=dict)
    _troubles: Troubles = field(default_factory=Troubles)
    _warnings: list[m.ObservationRecord] = field(default_factory=list)
    _beside: Beside = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is known of any machine yet."""
        for ref in self.request.machines:
            self.machines[ref.machine_id] = MachineView(
                ref=ref, cursor=self.request.cursors.get(ref.machine_id)
            )
        if self.blind_since is None:
            self.blind_since = self.started_at
        self._beside = Beside(
            self._troubles, self._warn, self.request.generation, frozenset(self.request.told)
        )

    # --- what comes in ---------------------------------------------------------------------

    def take(
        self,
        view: MachineView,
        line: api.HelloLine | api.EventLine | api.HeartbeatLine | api.GapLine,
        now: float,
    ) -> bool:
        """One line of a machine's stream.

        Returns:
            True when ``result`` may answer differently now.
        """
        match line:
            case api.HelloLine():
                if view.boot_id not in (None, line.agent_boot_id):
                    view.needs_state = True
                view.boot_id, view.ring_id = line.agent_boot_id, line.ring_id
                view.reachable, view.lost_reason = True, ""
                self.blind_since = None
                return True
            case api.GapLine():
                view.ring_id = line.ring_id
                view.cursor = cursor_at(line.ring_id, line.oldest_seq - 1)
                view.needs_state = True
                return False
            case api.EventLine():
                view.cursor = cursor_at(view.ring_id, line.seq)
                if line.kind is api.EventKind.PROBE and line.job_id is None:
                    return self._beside.event(view, line, now)
                if not self._is_ours(line.job_id, line.run_id, line.generation):
                    return False
                self._event(view, line, now)
                return True
            case api.HeartbeatLine():
                for summary in line.runs:
                    if self._is_ours(summary.job_id, summary.run_id, summary.generation):
                        view.summary = summary
                        view.prints_steps |= summary.step_from_log
                        if summary.step is not None and not view.first_step:
                            view.first_step = True
                            return True
        return False

    def lost(self, view: MachineView, reason: str, now: float) -> None:
        """The connection ended or could not be made: the machine is unknown."""
        view.reachable, view.lost_reason = False, one_line(reason, 200)
        # Once it is back, its present state comes first: its ranks may have ended meanwhile.
        view.needs_state = True
        if self.blind_since is None and not any(v.reachable for v in self.machines.values()):
            self.blind_since = now

    def state(self, view: MachineView, state: api.RunState, now: float) -> None:
        """The present state of the run on a machine: fills in what events did not tell."""
        view.needs_state, view.not_known_since = False, None
        self._beside.state(view, state.report.observations, now)
        if state.run_id != self.request.run_id:
            self._not_known(view, "the agent has another run under this generation", now)
            return
        view.first_step |= state.first_step_seen
        report = state.report
        if report.planned_stop:
            self._troubles.add(
                view, api.EventKind.PLANNED_STOP, None, report.planned_stop, {}, 0.0, now
            )
        if report.processes_vanished:
            self._not_known(view, "its processes are gone without an exit record", now)
        for rank in report.ranks:
            self._rank_state(view, rank, now)
        steps = [rank.step for rank in report.ranks if rank.step is not None]
        if steps and len(steps) == len(report.ranks):
            view.told_step = max(min(steps), view.told_step or 0)
        if state.ended and state.succeeded:
            view.succeeded = True
        elif state.ended and not self._troubles:
            reason = "every rank has ended, not all by themselves with 0"
            self._troubles.add(view, api.EventKind.RUN_ENDED, None, reason, {}, 0.0, now)

    def not_known(self, view: MachineView, now: float) -> None:
        """The agent answered that it has no such run."""
        if view.not_known_since is None:
            view.not_known_since = now
        elif now - view.not_known_since >= NOT_KNOWN_CONFIRM_S:
            view.needs_state = False
            self._not_known(view, "the agent does not know this run", now)

    # --- what goes out ---------------------------------------------------------------------

    def result(self, now: float) -> m.WatchResult | None:
        """Why the watch should return now, or None to watch on."""
        policy, until = self.request.policy.policy.detection, self.request.until
        self._notice_exit_skew(now)
        if self._troubles.at is not None:
            if now < self._troubles.at + policy.settle_window.total_seconds():
                return None
            return self._answer("trouble", self._evidence(now))
        if all(view.succeeded for view in self.machines.values()):
            return self._answer("succeeded")
        if self._warnings and now >= self.started_at + WARN_INTERVAL_MIN_S:
            return self._answer("tick", self._warnings)
        if until.first_step and self._first_step_made():
            return self._answer("first_step", self._warnings)
        if until.after_s is not None and now >= self.started_at + until.after_s:
            return self._answer("tick", self._warnings)
        blind_after = policy.blind_job_after.total_seconds()
        if self.blind_since is not None and now >= self.blind_since + blind_after:
            return self._answer("blind", self._unreachable_records())
        return None

    def _first_step_made(self) -> bool:
        views = self.machines.values()
        printed = any(view.first_step and view.prints_steps for view in views)
        return printed or all(view.first_step for view in views)

    def next_instant(self, now: float) -> float:
        """When ``result`` may answer differently although nothing comes in."""
        policy, until = self.request.policy.policy.detection, self.request.until
        instants = [now + policy.blind_job_after.total_seconds()]
        if self._troubles.at is not None:
            instants.append(self._troubles.at + policy.settle_window.total_seconds())
        if until.after_s is not None:
            instants.append(self.started_at + until.after_s)
        if self._warnings:
            instants.append(self.started_at + WARN_INTERVAL_MIN_S)
        if (first := self._first_zero_exit()) is not None:
            limits = {self._exit_skew_max_s(view) for view in self.machines.values()}
            instants += [first + limit for limit in limits if first + limit > now]
        return min(instants)

    def cancelled(self, now: float) -> m.WatchResult:
        """What to return when the workflow has asked the watch to end."""
        kind, found = "cancelled", list(self._warnings)
        if self._troubles:
            found = self._evidence(now) + found
        return self._answer(kind, found)

    def progress(self) -> m.Progress:
        """Newest progress of the run that any machine told."""
        views = self.machines.values()
        told = [v.summary for v in views if v.summary is not None and v.summary.step is not None]
        told.sort(key=lambda summary: -(summary.step or 0))
        steps = [s.step for s in told] + [v.told_step for v in views]
        return m.Progress(
            step=max((step for step in steps if step is not None), default=None),
            # Events tell steps sooner than heartbeats, and heartbeats alone tell values.
            loss=next((s.loss for s in told if s.loss is not None), None),
            grad_norm=next((s.grad_norm for s in told if s.grad_norm is not None), None),
            from_log=any(view.prints_steps for view in views),
        )

    def cursors(self) -> dict[str, str]:
        """Where each machine's stream goes on."""
        return {i: v.cursor for i, v in self.machines.items() if v.cursor is not None}

    # --- how -------------------------------------------------------------------------------

    def _answer(
        self, kind: Any, observations: list[m.ObservationRecord] | None = None
    ) -> m.WatchResult:
        return m.WatchResult(
            kind=kind,
            observations=tuple((observations or [])[:OBSERVATIONS_MAX]),
            cursors=self.cursors(),
            progress=self.progress(),
            unreachable=tuple(i for i, v in self.machines.items() if not v.reachable),
        )

    def _evidence(self, now: float) -> list[m.ObservationRecord]:
        first, rest = self._troubles.records()
        return first + self._unreachable_records() + rest + self._beside.records(now)

    def _unreachable_records(self) -> list[m.ObservationRecord]:
        return [
            m.ObservationRecord(
                kind="unreachable",
                verdict=Verdict.UNKNOWN,
                machine_id=machine_id,
                reason=f"cannot be reached: {view.lost_reason or 'no connection yet'}",
            )
            for machine_id, view in self.machines.items()
            if not view.reachable
        ]

    def _is_ours(self, job_id: str | None, run_id: str | None, generation: int | None) -> bool:
        request = self.request
        return (
            job_id == request.job_id
            and generation == request.generation
            and run_id in (None, request.run_id)
        )

    def _event(self, view: MachineView, line: api.EventLine, now: float) -> None:
        kind = line.kind
        if kind is api.EventKind.FIRST_STEP:
            view.first_step = True
            view.prints_steps |= line.data.get("source") == "log"
            step = line.data.get("step")
            if isinstance(step, int) and 0 <= step < STEP_MAX:
                view.told_step = max(step, view.told_step or 0)
        elif kind is api.EventKind.RANK_EXITED:
            self._rank_exited(view, line, now)
        elif kind is api.EventKind.RUN_ENDED:
            # Whether it succeeded is in the state, which is also there when this line is lost.
            view.needs_state = True
        elif kind is api.EventKind.RANK_MOVING:
            self._forgive(view, line.rank)
        elif kind is api.EventKind.SAVE_FAILED:
            self._warn(observed(view, kind, line.rank, line.reason, line.data, line.age_s))
        elif kind in _TROUBLE or (kind in SIGNALS and self._beside.signal(view, line)):
            self._troubles.add(view, kind, line.rank, line.reason, line.data, line.age_s, now)

    def _rank_exited(self, view: MachineView, line: api.EventLine, now: float) -> None:
        code, signal = line.data.get("exit_code"), line.data.get("signal")
        if code is None and signal is None:
            view.needs_state = True
        elif code == 0 and signal is None:
            if view.exited_zero_at is None:
                view.exited_zero_at = now - max(0.0, line.age_s)
        else:
            self._troubles.add(view, line.kind, line.rank, line.reason, line.data, line.age_s, now)

    def _rank_state(self, view: MachineView, rank: RankReport, now: float) -> None:
        age = rank.exited_ago_s or 0.0
        if rank.nonfinite_step is not None:
            reason = f"rank {rank.rank} reported a value not finite at step {rank.nonfinite_step}"
            data: dict[str, Any] = {"step": rank.nonfinite_step}
            self._troubles.add(view, api.EventKind.NONFINITE, rank.rank, reason, data, age, now)
        if rank.state is RankState.EXITED:
            if rank.exit_code == 0 and rank.signal is None:
                if view.exited_zero_at is None:
                    view.exited_zero_at = now - age
            else:
                how = (
                    f"signal {rank.signal}" if rank.signal is not None else f"code {rank.exit_code}"
                )
                data = {"exit_code": rank.exit_code, "signal": rank.signal}
                reason = f"rank {rank.rank} ended with {how}"
                self._troubles.add(
                    view, api.EventKind.RANK_EXITED, rank.rank, reason, data, age, now
                )
        elif rank.stalled_for_s is not None:
            reason = (
                f"rank {rank.rank} has made no progress for {rank.stalled_for_s:.1f} s too long"
            )
            self._troubles.add(view, api.EventKind.RANK_STALLED, rank.rank, reason, {}, 0.0, now)

    def _not_known(self, view: MachineView, reason: str, now: float) -> None:
        self._troubles.add(view, api.EventKind.PROCESSES_VANISHED, None, reason, {}, 0.0, now)

    def _forgive(self, view: MachineView, rank: int | None) -> None:
        """A stalled rank moves again before the trouble was reported."""
        self._troubles.drop((api.EventKind.RANK_STALLED.value, view.ref.machine_id, rank, ""))

    def _warn(self, record: m.ObservationRecord) -> None:
        if len(self._warnings) < OBSERVATIONS_MAX:
            self._warnings.append(record)

    def _first_zero_exit(self) -> float | None:
        instants = [
            v.exited_zero_at for v in self.machines.values() if v.exited_zero_at is not None
        ]
        return min(instants, default=None)

    def _exit_skew_max_s(self, view: MachineView) -> float:
        """How long after the first rank that ended with 0 a machine's ranks are late.

        Ranks that nobody can ask may have ended well too: their machine gets the time after which
        it would be lost on top, and what it says when it is back counts first.
        """
        policy = self.request.policy.policy.detection
        limit = policy.exit_skew_max.total_seconds()
        if view.reachable and not view.needs_state:
            return limit
        return limit + policy.machine_lost_after.total_seconds()

    def _notice_exit_skew(self, now: float) -> None:
        first = self._first_zero_exit()
        if first is None or self._troubles:
            return
        late = [
            i
            for i, v in self.machines.items()
            if not v.succeeded and now >= first + self._exit_skew_max_s(v)
        ]
        if late:
            view = next(v for v in self.machines.values() if v.exited_zero_at == first)
            reason = (
                f"a rank ended with 0 {now - first:.1f} s ago, but ranks of {len(late)} machines "
                f"({', '.join(late[:5])}{', ...' if len(late) > 5 else ''}) have not"
            )
            self._troubles.add(view, api.EventKind.EARLY_EXIT, None, reason, {}, now - first, now)
            # They have had their window.
            settle = self.request.policy.policy.detection.settle_window.total_seconds()
            self._troubles.at = now - settle
