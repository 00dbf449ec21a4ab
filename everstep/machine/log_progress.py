"""Progress of a run whose ranks do not use the trainer library, from what their logs tell.

Ranks of one job step together, so a step line in any rank's log is a step of the run, and only the
run as a whole can be silent too long: which rank is to blame does not show in who prints. That is
why a stall here is one event, with the rank whose log had the last step.

Not here: reading logs (``framework_log_reader``), and what the numbers mean (``job_signals``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from everstep.decide.rhythm import Patience, StepRhythm
from everstep.machine.facts import Facts, LogStall
from everstep.machine.framework_log_reader import LogReading
from everstep.machine.observed import NS, Observed
from everstep.machine.progress import Progress
from everstep.spec.agent_api import AgentRunPolicy, EventKind

_LEARNED_CHANGE = 1.25


class LogProgress:
    """What the logs of one run's local ranks tell together."""

    def __init__(self, policy: AgentRunPolicy, facts: Facts) -> None:
        self._facts = facts
        signals = policy.signals
        self._rhythm = StepRhythm(
            floor_s=signals.log_hang_min_s if signals is not None else policy.first_step_max_s,
            factor=policy.hang_factor,
            first_s=policy.first_step_max_s,
            phase_s=policy.section_max_s,
            gap_s=facts.log_gap_s,
            pause_s=facts.log_pause_s,
        )
        self._readings: dict[int, LogReading] = {}
        self._step_at_ns: dict[int, int] = {}
        self._highest: int | None = None
        self._teller: int | None = None
        self.steps_seen = 0
        """Looks that have found a step which no rank had printed before."""
        self.changed = False
        """Set when ``facts`` were changed and should be saved."""

    @property
    def in_phase(self) -> bool:
        """Whether something else than training was announced last."""
        return self._teller is not None and self._readings[self._teller].phase is not None

    def progress(self, rank: int) -> Progress | None:
        """A rank's progress as its log tells it; None: it has told no step."""
        reading = self._readings.get(rank)
        if reading is None or reading.steps == 0:
            return None
        return Progress(
            pid=0,
            step=reading.step,
            loss=reading.loss,
            grad_norm=reading.grad_norm,
            attached=False,
            finished=False,
            step_at_ns=self._step_at_ns.get(rank, 0),
            nonfinite_step=reading.nonfinite_step,
            steps_reported=reading.steps,
            section=None,  # a phase in a log is the run's, and tells nothing about the rank
            section_entered_ns=0,
            section_left_ns=0,
            section_max_s=None,
            committed_step=None,
            save_failed_step=None,
            save_error=None,
            source="log",
        )

    def stalled_since_ns(self, rank: int) -> int | None:
        """Since when no step line came, for the rank that printed the last one."""
        stall = self._facts.log_stall
        return stall.since_ns if stall is not None and stall.rank == rank else None

    def excuse(self, seconds: float) -> None:
        """Nobody could look for so long."""
        self._rhythm.excuse(seconds)

    def take(self, now_ns: int, readings: Mapping[int, LogReading]) -> None:
        """One look at all logs."""
        stepped = announced = False
        for rank, reading in readings.items():
            before = self._readings.get(rank, LogReading())
            self._readings[rank] = reading
            if reading.position == before.position:
                continue
            if reading.fresh:
                self._step_at_ns[rank] = now_ns
                stepped |= self._is_new(rank, before, reading)
            announced |= reading.phase is not None
        if stepped:
            self.steps_seen += 1
            self._rhythm.stepped(now_ns / NS)
        if announced:
            self._rhythm.announced(now_ns / NS)
        self._note_rhythm()

    def _is_new(self, rank: int, before: LogReading, reading: LogReading) -> bool:
        """Whether this is a step that no rank has printed yet."""
        steps = [step.step for step in reading.fresh if step.step is not None]
        back = before.step is not None and bool(steps) and steps[0] < before.step
        if steps and not back and self._highest is not None and max(steps) <= self._highest:
            return False
        self._teller = rank
        if steps:
            self._highest = max(steps) if not back else steps[-1]
        return True

    def _note_rhythm(self) -> None:
        rhythm, facts = self._rhythm, self._facts
        noted = facts.log_gap_s
        if rhythm.gap_s is not None and (
            noted is None or not noted / _LEARNED_CHANGE <= rhythm.gap_s <= noted * _LEARNED_CHANGE
        ):
            facts.log_gap_s, self.changed = rhythm.gap_s, True
        if rhythm.pause_s > facts.log_pause_s * _LEARNED_CHANGE:
            facts.log_pause_s, self.changed = rhythm.pause_s, True

    # --- silence -------------------------------------------------------------------------------

    def judge(
        self, now_ns: int, live: Collection[int], process_state: Callable[[int], str | None]
    ) -> list[Observed]:
        """Whether the run has been without a step line for too long, or moves again."""
        stall, patience = self._facts.log_stall, self._rhythm.patience()
        if stall is not None:
            return self._moving(now_ns, stall)
        if patience is None or self._teller is None or self._teller not in live:
            return []
        silent_s = now_ns / NS - patience.since_s
        if silent_s <= patience.limit_s:
            return []
        since_ns = now_ns - round(silent_s * NS)
        positions = {rank: reading.position for rank, reading in self._readings.items()}
        self._facts.log_stall = LogStall(rank=self._teller, positions=positions, since_ns=since_ns)
        self.changed = True
        return [self._stalled(self._teller, silent_s, patience, process_state(self._teller))]

    def _moving(self, now_ns: int, stall: LogStall) -> list[Observed]:
        if all(r.position <= stall.positions.get(i, 0) for i, r in self._readings.items()):
            return []
        self._facts.log_stall, self.changed = None, True
        return [
            Observed(
                kind=EventKind.RANK_MOVING,
                rank=stall.rank,
                reason=f"its log goes on after {(now_ns - stall.since_ns) / NS:.1f} s",
                data={"step": self._highest, "source": "log"},
            )
        ]

    def _stalled(
        self, rank: int, silent_s: float, patience: Patience, state: str | None
    ) -> Observed:
        phase = self._readings[rank].phase
        return Observed(
            kind=EventKind.RANK_STALLED,
            rank=rank,
            reason=(
                f"no step line for {silent_s:.1f} s"
                + (f' since its log announced "{phase}"' if phase else "")
                + f", limit {patience.limit_s:.1f} s, last step {self._highest}, "
                f"process state {state or 'unknown'}"
            ),
            data={
                "step": self._highest,
                "stalled_for_s": round(silent_s, 3),
                "limit_s": round(patience.limit_s, 3),
                "process_state": state,
                "section": phase,
                "source": "log",
            },
        )
