"""The policy: every threshold of Everstep, as an operator edits it.

There are no defaults in code. ``config/policy.yaml`` of the installation is the default, each value
there tagged ``paper`` or ``ours: reason``; an operator's file and a job's ``policy`` block are laid
over it key by key. A key or section marked ``FleetOnly`` is the file's alone. Merging and refusing
are in ``everstep.spec.overlay``, loading is in ``everstep.spec.load``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from everstep.spec.base import Duration, Message, StrictModel

Count = Annotated[int, Field(ge=0, le=100_000)]
_SHORTEST = timedelta(milliseconds=1)
_LONGEST = timedelta(days=365)


def _not_for_ever(value: timedelta) -> timedelta:
    if value > _LONGEST:
        raise ValueError("it must be 8760h (a year) or less")
    return value


def _not_nothing(value: timedelta) -> timedelta:
    if value < _SHORTEST:
        raise ValueError("it must be 1ms or more")
    return value


Wait = Annotated[Duration, AfterValidator(_not_for_ever)]
"""A time that may be 0s: nothing is waited for then."""
Span = Annotated[Duration, AfterValidator(_not_for_ever), AfterValidator(_not_nothing)]
"""A time that cannot be nothing: an interval, or a limit that would always be passed."""


def _longer_than_a_heartbeat(value: timedelta) -> timedelta:
    if value < timedelta(seconds=1):
        raise ValueError("it must be 1s or more: a watch heartbeats every 400ms")
    return value


def _before_silence(value: timedelta) -> timedelta:
    if value > timedelta(seconds=5):
        raise ValueError("it must be 5s or less: a stream that is silent for 7s counts as broken")
    return value


def _within_a_day(value: timedelta) -> timedelta:
    if value > timedelta(days=1):
        raise ValueError("it must be 24h or less: agents wait no longer")
    return value


def _within_a_minute(value: timedelta) -> timedelta:
    if value > timedelta(minutes=1):
        raise ValueError("it must be 1m or less: a start is tried three times within ten minutes")
    return value


Grace = Annotated[Duration, AfterValidator(_within_a_day)]
"""A time that a teardown may take; may be 0s."""


@dataclass(frozen=True, slots=True)
class FleetOnly:
    """Marks a key, or a section with all its keys, that a job's ``policy`` block cannot override.

    It belongs on what agents and controllers do once for all jobs, where a value of one job's own
    would change what that job believes and not what happens; and on room that all jobs share.
    """

    why: str
    """What is shared, for the line that refuses it."""


class DetectionPolicy(StrictModel):
    """How trouble is noticed."""

    heartbeat_interval: Annotated[
        Span, AfterValidator(_before_silence), FleetOnly("an agent has one rhythm for all jobs")
    ]
    """How often an agent's event stream carries a heartbeat line."""
    watch_lost_after: Annotated[Span, AfterValidator(_longer_than_a_heartbeat)]
    """How long a watch may be silent before another controller takes it over (Temporal's
    heartbeat timeout of the watch activity)."""
    settle_window: Wait
    """How long a machine waits after the first failed rank before it stops the others, so that
    the others can fail by themselves and leave their evidence."""
    machine_lost_after: Span
    """How long a machine must be unreachable while training has stopped before it is lost."""
    first_step_max: Span
    """Longest time from the start of a rank to its first reported step."""
    hang_min: Span
    """No hang is declared before this long without progress, however fast the steps were."""
    hang_factor: Annotated[float, Field(ge=2, le=1000)]
    """A hang is this many times the job's own learned step time without progress."""
    section_max: Span
    """Longest time in a declared section ("eval", "save", ...) that names no limit of its own."""
    exit_skew_max: Wait
    """Longest time between the first rank that exits with 0 and the last one."""
    blind_job_after: Span
    """No machine of a running job reachable for this long: tell a person (training goes on)."""
    progress_report_interval: Span
    """How often the step and loss shown in the Temporal UI are refreshed."""


class LadderPolicy(StrictModel):
    """Budgets and order of the ladder."""

    stable_after: Wait
    """An incident is over when the job has trained this long after its restart."""
    budget_window: Span
    """Budgets count what happened in the last stretch of this length."""
    infrastructure_restarts_max: Count
    """Restarts and evictions within the window that are charged to machines and network."""
    user_code_restarts_max: Count
    """Reattempts within the window that are charged to the owner's code."""
    unclear_restarts_max: Count
    """Reattempts within the window of failures whose cause is not clear."""
    no_progress_restarts_max: Count
    """Restarts in a row that never got past the same step before their budget counts as spent."""
    evictions_per_window_max: Count
    """Machines this job may have evicted within the window."""
    user_code_gives_up: bool
    """Whether an owner's error that outlives its budget ends the job (else it waits for a
    person)."""


class TeardownPolicy(StrictModel):
    """How ranks are ended."""

    stop_grace: Grace
    """Time between SIGTERM and SIGKILL when a job is paused, cancelled or resumed elsewhere."""
    failure_grace: Grace
    """The same when the run has failed already: survivors have nothing left to save."""
    kill_wait: Grace
    """Time after SIGKILL before processes that are still there make the machine faulty."""


class MachinePolicy(StrictModel):
    """Claiming machines and talking to them."""

    wait_poll_interval: Span
    """How often a job that waits for machines looks again."""
    command_validity: Span
    """How long a command to an agent may be carried out after it was made."""
    command_timeout: Annotated[Span, AfterValidator(_within_a_minute)]
    """How long a controller waits for an agent's answer to a command, without the teardown's own
    time."""
    register_interval: Annotated[Span, FleetOnly("an agent registers once for all jobs")]
    """How often an agent repeats its registration (it learns of fences and of its eviction so)."""


class NotifyPolicy(StrictModel):
    """Telling people."""

    webhook_url_env: Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$", max_length=200)]
    """Name of the controller's environment variable that holds the webhook's URL; empty: none.
    The URL itself is a secret and never enters the policy, Temporal or the ledger."""


class RetentionPolicy(StrictModel):
    """How long things that grow are kept."""

    runs_on_machine_max: Annotated[int, Field(ge=1, le=10_000)]
    """Run folders (logs, progress, exit records) kept on a machine for each job."""
    observations: Span
    """Observations in the ledger; incidents and decisions are kept for ever."""


class Policy(StrictModel):
    """Every threshold, in groups. See ``config/policy.yaml`` for values and reasons."""

    detection: DetectionPolicy
    ladder: LadderPolicy
    teardown: TeardownPolicy
    machines: MachinePolicy
    notify: Annotated[NotifyPolicy, FleetOnly("controllers have one webhook for all jobs")]
    retention: Annotated[RetentionPolicy, FleetOnly("disks and ledger are shared by all jobs")]


class PolicySnapshot(Message):
    """A policy as one job sees it, with the hash that decisions are recorded under."""

    policy: Policy
    hash: str
    """First 16 hex digits of the SHA-256 of the canonical JSON."""
    source: str
    """Where it came from, for people."""
    kind: Literal["policy"] = "policy"
