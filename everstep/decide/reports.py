"""What is known about a failed run: the input and the output of attribution.

Plain records, because they cross process borders inside of pydantic models and stand in Temporal
histories. Not here: how one follows from the other (``everstep.decide.attribution``).
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decide.diagnosis.types import TailFinding
from everstep.decide.observation import Observation
from everstep.decide.stack_report import StackReport
from everstep.decide.words import Action, Cause, Confidence, LogClass, RankState, Side, Symptom


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one machine knows about one of its ranks after it was stopped."""

    rank: int
    machine_id: str
    state: RankState
    exit_code: int | None = None
    signal: int | None = None
    stopped_by_us: bool = False
    """True when the rank was alive until our teardown ended it: collateral, never a culprit."""
    step: int | None = None
    """Last step the trainer library reported, or None for an unmodified script."""
    nonfinite_step: int | None = None
    """First step whose reported loss or gradient norm was NaN or infinite."""
    stalled_for_s: float | None = None
    """Seconds without progress beyond the limit, by the machine's own clock; None if moving."""
    process_state: str | None = None
    """State letter of ``/proc/PID/stat`` when the rank was last seen alive (``T``: stopped)."""
    section: str | None = None
    """Section the rank had declared ("eval", "save", ...) when it was last seen."""
    save_error: str | None = None
    """The last failed checkpoint save, in one line."""
    log_class: LogClass = LogClass.SILENT
    log_lines: tuple[str, ...] = ()
    """Last meaningful lines of the rank's log, oldest first, each cut to 300 characters."""
    log_finding: TailFinding | None = None
    """What the catalogue of signatures says about its end, where it ended badly by itself."""
    exited_ago_s: float | None = None
    """Seconds from the rank's exit to this report, by the machine's own monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An observation that was not healthy, with its ages by the machine's own monotonic clock."""

    observation: Observation
    age_s: float = 0.0
    """Seconds since it was first seen like this."""
    cleared_ago_s: float | None = None
    """Seconds since the probe saw it gone; None: it still is so."""
    renewed_ago_s: float | None = None
    """Seconds since its figures last changed: an event that is held happened again then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """What is known about one machine of a run after the run was stopped."""

    machine_id: str
    reachable: bool
    lost: bool = False
    """Unreachable, while training had stopped, for the policy's ``machine_lost_after``."""
    planned_stop: str | None = None
    """Set when the agent itself stopped its ranks on request (shutdown, preemption notice)."""
    processes_vanished: bool = False
    """The shim and its ranks are gone without an exit record (machine rebooted, all killed)."""
    teardown_clean: bool = True
    """False when a process of the run could not be ended: the machine is then faulty."""
    note: str = ""
    ranks: tuple[RankReport, ...] = ()
    observations: tuple[Seen, ...] = ()
    """What the machine's probes saw and was not healthy, newest trouble first; bounded."""
    healthy_probes: tuple[str, ...] = ()
    """Probes that had looked and found everything well: what is ruled out about the machine."""
    stacks: StackReport | None = None
    """What its processes were doing when a run that made no progress was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The attribution of one trouble: input of the ladder, shown to people as it is."""

    symptom: Symptom
    side: Side
    cause: Cause
    confidence: Confidence
    rule: str
    """Name of the rule that matched; stable, so that tests and dashboards can use it."""
    reason: str
    """One sentence for a person."""
    first_failed_rank: int | None = None
    culprit_ranks: tuple[int, ...] = ()
    suspects: tuple[str, ...] = ()
    """Machines under suspicion; only these may ever be evicted."""
    witnesses: tuple[int, ...] = ()
    step: int | None = None
    """Highest step any rank reported before the trouble."""
    nonfinite_step: int | None = None
    """First step whose reported loss or gradient norm was not finite: what was saved at it or
    after it must not be restored, however finite later steps were."""
    action: Action | None = None
    """What the evidence alone calls for, where it says so; the ladder decides."""
    ruled_out: tuple[str, ...] = ()
    """What was looked at and is not the cause, one line each, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """An observation that made the run stop; fills in where a machine can say no more."""

    kind: str
    """A kind of the agents' events ("rank_exited", "rank_stalled", ...) or "unreachable"."""
    machine_id: str | None
    rank: int | None
    reason: str
    step: int | None = None
    """The step it is about, where it is about one ("nonfinite")."""
    observation: Observation | None = None
    """What the probe saw, where it is one of a probe."""
    cleared: bool = False
    """It had gone before the run stopped: for people; the machine's report has it with its ages."""
