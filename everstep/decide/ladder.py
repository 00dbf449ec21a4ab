"""The ladder: from a finding to the next rung, as a table of pure rows.

(state, finding, limits) -> (decision, state). The state survives continue-as-new and controller
crashes because the job carries it; it remembers *which* rung came before, because the paper's
procedure (section 5) depends on it. Every path ends in "stable" or in a person: each rung spends a
budget of its own cause, and a failure that made no progress spends it faster.

Not here: carrying out a decision (``workflows``), and finding the culprit (``attribution``).
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decide.words import Action, Cause, Rung


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
    """Consecutive failures that did not get past the step of the failure before."""
    last_step: int | None = None


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
