"""The ladder: from a finding to the next rung, as a table of pure rows.

(state, finding, limits) -> (decision, state). The state survives continue-as-new and controller
crashes because the job carries it; it remembers *which* rung came before, because the paper's
procedure (section 5) depends on it. Every path ends in "stable" or in a person: each rung spends a
budget of its own cause, and failures that make no progress spend it at once.

``ROWS`` is the table, ``docs/ladder.md`` shows it. Not here: carrying out a decision
(``workflows``), and finding the culprit (``attribution``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from everstep.decide.reports import Finding
from everstep.decide.words import Action, Cause, Confidence, Rung


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderLimits:
    """The policy's ``ladder`` section as plain numbers (seconds, counts)."""

    budget_window_s: float
    infrastructure_restarts_max: int
    user_code_restarts_max: int
    unclear_restarts_max: int
    no_progress_restarts_max: int
    evictions_per_window_max: int
    user_code_gives_up: bool
    """True: a spent user-code budget ends the job; False: it waits for a person."""
    progress_without_steps_s: float = float("inf")
    """A run of a job that reports no steps counts as progress when it lasted this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RungRecord:
    """One rung that was taken: what the budgets and the next decision look back on."""

    rung: Rung
    cause: Cause
    at_s: float
    step: int | None
    machines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderState:
    """What the ladder remembers. Bounded: records older than the window are dropped."""

    records: tuple[RungRecord, ...] = ()
    no_progress_in_row: int = 0
    """Restarts in a row whose runs did not get past the highest step of any earlier run."""
    last_step: int | None = None
    """The highest step that any run had reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next rung, with everything needed to explain it."""

    rung: Rung
    action: Action
    row: str
    """Name of the table row that matched."""
    reason: str
    cause: Cause
    evict: tuple[str, ...] = ()
    """Machines to evict and block, sorted."""
    budget_left: int | None = None
    """Restarts left for this cause after this decision, None where the rung spends none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything a row may look at."""

    finding: Finding
    limits: LadderLimits
    records: tuple[RungRecord, ...]
    """Rungs within the window, oldest first."""
    no_progress_in_row: int
    """This failure included."""
    evictable: tuple[str, ...]
    """Suspects with high confidence that are machines of the run, sorted."""

    @property
    def cause(self) -> Cause:
        """What a restart would be charged to: evictions are infrastructure's."""
        return Cause.INFRASTRUCTURE if self.evictable else self.finding.cause

    @property
    def budget(self) -> int:
        """Restarts the policy allows for the cause within the window."""
        return {
            Cause.INFRASTRUCTURE: self.limits.infrastructure_restarts_max,
            Cause.USER_CODE: self.limits.user_code_restarts_max,
            Cause.UNCLEAR: self.limits.unclear_restarts_max,
            Cause.PLANNED: 0,
        }[self.cause]

    @property
    def spent(self) -> int:
        """Restarts charged to the cause within the window."""
        return sum(1 for r in self.records if r.cause is self.cause)

    @property
    def evicted(self) -> int:
        """Machines evicted within the window."""
        return sum(len(r.machines) for r in self.records if r.rung is Rung.EVICT)

    @property
    def in_vain(self) -> int:
        """Restarts for this cause among those in a row that made no progress."""
        row = self.records[-self.no_progress_in_row :] if self.no_progress_in_row else ()
        return sum(1 for r in row if r.cause is self.cause)

    @property
    def stuck(self) -> bool:
        """True when too many restarts in a row made no progress."""
        return self.in_vain >= max(1, self.limits.no_progress_restarts_max)

    @property
    def nothing_left(self) -> bool:
        """True when the cause's budget is spent, or counts as spent."""
        return self.stuck or self.spent >= self.budget

    @property
    def why_nothing_left(self) -> str:
        """The spent budget in words."""
        if self.stuck:
            step = self.finding.step
            past = f" past step {step}" if step is not None else ""
            return f"{self.in_vain} restarts in a row made no progress{past}"
        hours = self.limits.budget_window_s / 3600
        return f"{self.spent} of {self.budget} restarts for {self.cause} used within {hours:g} h"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the ladder: the first whose predicate fits is taken."""

    name: str
    when: str
    """When it fits, for people."""
    fits: Callable[[Situation], bool]
    rung: Rung
    action: Action
    then: Callable[[Situation], str]
    """What the row does about it, for people."""


def _user(s: Situation) -> bool:
    return s.cause is Cause.USER_CODE


ROWS: tuple[Row, ...] = (
    Row(
        "planned",
        "the stop was planned (machine shut down or preempted)",
        lambda s: s.finding.cause is Cause.PLANNED,
        Rung.RESUME,
        Action.WAIT_EXTERNAL,
        lambda _s: "resume; no budget is spent",
    ),
    Row(
        "evict_guard",
        "suspects with high confidence, but `evictions_per_window_max` would be passed",
        lambda s: (
            bool(s.evictable) and s.evicted + len(s.evictable) > s.limits.evictions_per_window_max
        ),
        Rung.ASK_PERSON,
        Action.STOP_TIME_CHECK,
        lambda s: (
            f"ask a person: {s.evicted} machines evicted already, {len(s.evictable)} more would "
            f"pass the limit of {s.limits.evictions_per_window_max}"
        ),
    ),
    Row(
        "evict_spent",
        "suspects with high confidence, but the infrastructure budget is spent",
        lambda s: bool(s.evictable) and s.nothing_left,
        Rung.ASK_PERSON,
        Action.STOP_TIME_CHECK,
        lambda s: f"ask a person: {s.why_nothing_left}",
    ),
    Row(
        "evict",
        "suspects with high confidence",
        lambda s: bool(s.evictable),
        Rung.EVICT,
        Action.EVICT_MACHINE,
        lambda s: f"evict {', '.join(s.evictable)} and restart on replacements",
    ),
    Row(
        "user_code",
        "an error of the owner's code, budget left",
        lambda s: _user(s) and not s.nothing_left,
        Rung.REATTEMPT,
        Action.RETRY_IN_PLACE,
        lambda _s: "reattempt on the same machines",
    ),
    Row(
        "user_code_give_up",
        "an error of the owner's code, budget spent, `user_code_gives_up: true`",
        lambda s: _user(s) and s.limits.user_code_gives_up,
        Rung.GIVE_UP,
        Action.FIX_CONFIG_GIVE_UP,
        lambda s: f"give up, the error does not go away: {s.why_nothing_left}",
    ),
    Row(
        "user_code_ask",
        "an error of the owner's code, budget spent, `user_code_gives_up: false`",
        _user,
        Rung.ASK_PERSON,
        Action.FIX_CONFIG_GIVE_UP,
        lambda s: f"ask a person, the error does not go away: {s.why_nothing_left}",
    ),
    Row(
        "reattempt",
        "infrastructure without a suspect, or an unclear cause; budget left",
        lambda s: not s.nothing_left,
        Rung.REATTEMPT,
        Action.RETRY_IN_PLACE,
        lambda _s: "reattempt on the same machines",
    ),
    Row(
        "ask_person",
        "infrastructure without a suspect, or an unclear cause; budget spent",
        lambda _s: True,
        Rung.ASK_PERSON,
        Action.STOP_TIME_CHECK,
        lambda s: f"ask a person: {s.why_nothing_left}",
    ),
)
"""In order: the first row that fits is the decision."""

_SPENDING = frozenset({Rung.REATTEMPT, Rung.EVICT})
REASON_CHARS_MAX = 560


def decide(
    finding: Finding,
    state: LadderState,
    *,
    limits: LadderLimits,
    now_s: float,
    run_machines: Sequence[str],
) -> tuple[Decision, LadderState]:
    """The next rung for a finding, and what the ladder remembers after it.

    Args:
        finding: who failed, and whose fault it is.
        state: what the ladder remembers of this job.
        limits: the policy as it is now.
        now_s: the workflow's clock, in seconds.
        run_machines: machines of the run that failed; only these can be evicted.
    """
    records = tuple(r for r in state.records if r.at_s > now_s - limits.budget_window_s)
    progressed = _progressed(finding, state, limits, now_s)
    sure = finding.confidence is Confidence.HIGH and finding.cause is not Cause.PLANNED
    situation = Situation(
        finding=finding,
        limits=limits,
        records=records,
        no_progress_in_row=0 if progressed or not records else state.no_progress_in_row + 1,
        evictable=tuple(sorted(set(finding.suspects) & set(run_machines))) if sure else (),
    )
    row = next(row for row in ROWS if row.fits(situation))
    spends = row.rung in _SPENDING
    evict = situation.evictable if row.rung is Rung.EVICT else ()
    decision = Decision(
        rung=row.rung,
        action=row.action,
        row=row.name,
        reason=f"{row.then(situation)} ({finding.reason})"[:REASON_CHARS_MAX],
        cause=situation.cause,
        evict=evict,
        budget_left=situation.budget - situation.spent - 1 if spends else None,
    )
    if spends:
        taken = RungRecord(
            rung=row.rung, cause=situation.cause, at_s=now_s, step=finding.step, machines=evict
        )
        records = (*records, taken)
    return decision, replace(
        state,
        records=records,
        no_progress_in_row=(
            state.no_progress_in_row
            if row.rung is Rung.RESUME and not progressed
            else situation.no_progress_in_row
        ),
        last_step=_highest(state.last_step, finding.step),
    )


def person_resumed(state: LadderState) -> LadderState:
    """The state after a person has looked at the job and said "go on": everything starts afresh."""
    del state  # nothing of it counts any more; the argument keeps the door open
    return LadderState()


def _progressed(finding: Finding, state: LadderState, limits: LadderLimits, now_s: float) -> bool:
    """True when the failed run got further than any run before it.

    Where no step is known (the run had no first step, or the script reports none) only time can
    tell: a run that lasted long did something.
    """
    if finding.step is not None:
        return state.last_step is None or finding.step > state.last_step
    if state.last_step is not None or not state.records:
        return False
    return now_s - state.records[-1].at_s > limits.progress_without_steps_s


def _highest(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return max(first, second)
