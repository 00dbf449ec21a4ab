"""The policy: every threshold of Everstep, as an operator edits it.

There are no defaults in code. ``config/policy.yaml`` of the installation is the default, each value
there tagged ``paper`` or ``ours: reason``; an operator's file and a job's ``policy`` block are laid
over it key by key. Loading, merging and error lines are in ``everstep.spec.load``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from everstep.spec.base import Duration, Message, StrictModel

Count = Annotated[int, Field(ge=0, le=100_000)]


class DetectionPolicy(StrictModel):
    """How trouble is noticed."""

    heartbeat_interval: Duration
    """How often an agent's event stream carries a heartbeat line."""
    watch_lost_after: Duration
    """How long a watch may be silent before another controller takes it over (Temporal's
    heartbeat timeout of the watch activity)."""
    settle_window: Duration
    """How long a machine waits after the first failed rank before it stops the others, so that
    the others can fail by themselves and leave their evidence."""
    machine_lost_after: Duration
    """How long a machine must be unreachable while training has stopped before it is lost."""
    first_step_max: Duration
    """Longest time from the start of a rank to its first reported step."""
    hang_min: Duration
    """No hang is declared before this long without progress, however fast the steps were."""
    hang_factor: Annotated[float, Field(ge=2, le=1000)]
    """A hang is this many times the job's own learned step time without progress."""
    section_max: Duration
    """Longest time in a declared section ("eval", "save", ...) that names no limit of its own."""
    exit_skew_max: Duration
    """Longest time between the first rank that exits with 0 and the last one."""
    blind_job_after: Duration
    """No machine of a running job reachable for this long: tell a person (training goes on)."""
    progress_report_interval: Duration
    """How often the step and loss shown in the Temporal UI are refreshed."""


class LadderPolicy(StrictModel):
    """Budgets and order of the ladder."""

    stable_after: Duration
    """An incident is over when the job has trained this long after its restart."""
    budget_window: Duration
    """Budgets count what happened in the last stretch of this length."""
    infrastructure_restarts_max: Count
    user_code_restarts_max: Count
    unclear_restarts_max: Count
    no_progress_restarts_max: Count
    """Consecutive failures that never got past the same step before the budget counts as spent."""
    evictions_per_window_max: Count
    """Machines this job may have evicted within the window."""
    user_code_gives_up: bool
    """True: an owner's error that outlives its budget ends the job; False: it waits for a person."""


class TeardownPolicy(StrictModel):
    """How ranks are ended."""

    stop_grace: Duration
    """Time between SIGTERM and SIGKILL when a job is paused, cancelled or resumed elsewhere."""
    failure_grace: Duration
    """The same when the run has failed already: survivors have nothing left to save."""
    kill_wait: Duration
    """Time after SIGKILL before processes that are still there make the machine faulty."""


class MachinePolicy(StrictModel):
    """Claiming machines and talking to them."""

    wait_poll_interval: Duration
    """How often a job that waits for machines looks again."""
    command_validity: Duration
    """How long a command to an agent may be carried out after it was made."""
    command_timeout: Duration
    """How long a controller waits for an agent's answer to a command, without the teardown's own
    time."""
    register_interval: Duration
    """How often an agent repeats its registration (it learns of fences and of its eviction so)."""


class NotifyPolicy(StrictModel):
    """Telling people."""

    webhook_url_env: str
    """Name of the controller's environment variable that holds the webhook's URL; empty: none.
    The URL itself is a secret and never enters the policy, Temporal or the ledger."""


class RetentionPolicy(StrictModel):
    """How long things that grow are kept."""

    runs_on_machine_max: Annotated[int, Field(ge=1, le=10_000)]
    """Run folders (logs, progress, exit records) kept on a machine for each job."""
    observations: Duration
    """Observations in the ledger; incidents and decisions are kept for ever."""


class Policy(StrictModel):
    """Every threshold, in groups. See ``config/policy.yaml`` for values and reasons."""

    detection: DetectionPolicy
    ladder: LadderPolicy
    teardown: TeardownPolicy
    machines: MachinePolicy
    notify: NotifyPolicy
    retention: RetentionPolicy


class PolicySnapshot(Message):
    """A policy as one job sees it, with the hash that decisions are recorded under."""

    policy: Policy
    hash: str
    """First 16 hex digits of the SHA-256 of the canonical JSON."""
    source: str
    """Where it came from, for people."""
    kind: Literal["policy"] = "policy"
