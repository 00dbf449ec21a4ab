"""The policy: every threshold of Everstep, as an operator edits it.

There are no defaults in code. ``config/policy.yaml`` of the installation is the default, each value
there tagged ``paper`` or ``ours: reason``; an operator's file and a job's ``policy`` block are laid
over it key by key. A key or section marked ``FleetOnly`` is the file's alone. Merging and refusing
are in ``everstep.spec.overlay``, loading is in ``everstep.spec.load``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from everstep.spec.base import Duration, Message, StrictModel
from everstep.spec.probe_policy import HOST_KEYS_SINCE_HISTORIES, HostProbesPolicy
from everstep.spec.spans import Count, Span, Wait


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


def _of_steps(value: timedelta) -> timedelta:
    if value > timedelta(minutes=1):
        raise ValueError("it must be 1m or less: what makes steps slow shows in every step")
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
    log_hang_min: Span
    """The same as ``hang_min`` for a script whose steps are read from its log: it cannot say that
    it evaluates or saves."""
    log_silent_after: Span
    """A script that reports no steps at all, but has written regularly, is silent when it has
    written nothing for this long (and for much longer than ever before in this run)."""
    loss_spike_factor: Annotated[float, Field(ge=1.5, le=1000)]
    """Loss or gradient norm of so many times its rolling baseline is a spike."""
    loss_spike_window: Annotated[int, Field(ge=10, le=1000)]
    """The baseline is the median of the last so many readings."""
    loss_spike_sustained: Annotated[int, Field(ge=1, le=100)]
    """So many readings in a row must be that high: single spikes recover by themselves."""
    loss_spike_warmup: Annotated[int, Field(ge=10, le=1000)]
    """Readings at the beginning of a run that are never judged."""
    step_time_factor: Annotated[float, Field(ge=1.05, le=1000)]
    """Steps that take so many times the best sustained pace of this run are slow."""
    step_time_window: Span
    """How long they must be slow, and how long a pace must have lasted to be the best."""
    slow_rounds: Annotated[int, Field(ge=2, le=100)]
    """How often the stacks of all ranks are looked at once steps have become slow: who is behind in
    most of these rounds makes the job slow."""
    slow_round_interval: Annotated[Span, AfterValidator(_of_steps)]
    """Time from one of these rounds to the next."""
    rdma_silent_after: Span
    """No RDMA traffic for this long, on a machine that had some in this run, is worth a look."""


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


class ProbesPolicy(HostProbesPolicy):
    """Real-time checks of machines, and what they make of what they see."""

    gpu_interval: Span
    """How often GPUs are looked at (NVML, and DCGM's exporter where one runs)."""
    host_interval: Span
    """How often the host is looked at: kernel log, memory, disks, clock."""
    network_interval: Span
    """How often network interfaces, RDMA ports and the gateway are looked at."""
    network_alerts_min: Annotated[int, Field(ge=1, le=1000)]
    """So many alerts about one network target within the window make it faulty."""
    network_alert_window: Span
    """The stretch of time in which network alerts are counted."""
    look_deadline: Span
    """A probe whose look takes longer than this is stuck; what it looks at is unknown then."""
    gpu_call_deadline: Span
    """A driver call that takes longer than this hangs: the GPU is faulty."""
    gpu_pulse_interval: Span
    """How often each GPU gets one cheap driver call between two looks, so that a hang or a lost
    device is seen sooner."""
    gpu_start_deadline: Span
    """How long the driver may take to answer at all after a helper process has been started."""
    gpu_retry_max: Span
    """Longest pause before a helper process that hung or died is replaced (pauses double)."""
    gpus_expected: Count
    """GPUs that every machine has; 0: as many as its agent has seen."""
    gpu_event_hold: Span
    """How long the GPU of an Xid, or of counters that rose, counts as faulty without a new one."""
    gpu_busy_percent_min: Annotated[int, Field(ge=1, le=100)]
    """From this utilisation on a GPU counts as busy: its PCIe link should be at full speed."""
    gpu_hot_margin_c: Annotated[int, Field(ge=0, le=50)]
    """A GPU is hot from so many degrees below its own slowdown threshold on (never faulty by
    temperature alone)."""
    gpu_hot_c: Annotated[int, Field(ge=40, le=120)]
    """A GPU that names no threshold of its own is hot from this temperature on."""
    gpu_slow_looks_min: Annotated[int, Field(ge=2, le=1000)]
    """A slowdown that is seen in so many looks in a row is no passing one."""
    pcie_replays_per_minute_max: Count
    """More PCIe replays in a minute than this make the link of a GPU faulty."""
    nvlink_errors_per_minute_max: Count
    """More NVLink replays and CRC errors of one GPU in a minute than this make it faulty."""
    ecc_aggregate_max: Count
    """More uncorrectable memory errors in the life of a GPU than this are worth a warning."""
    dcgm_url: Annotated[str, Field(pattern=r"^(https?://[^\s@]+)?$", max_length=500)]
    """Where DCGM's exporter answers on each machine; empty: it is not asked."""
    dcgm_timeout: Span
    """How long the exporter may take to answer."""
    dcgm_misses_min: Annotated[int, Field(ge=1, le=1000)]
    """So many misses in a row of an exporter that has answered before make its service faulty."""


class Policy(StrictModel):
    """Every threshold, in groups. See ``config/policy.yaml`` for values and reasons."""

    detection: DetectionPolicy
    ladder: LadderPolicy
    teardown: TeardownPolicy
    machines: MachinePolicy
    probes: Annotated[ProbesPolicy, FleetOnly("an agent has one set of probes for all jobs")]
    notify: Annotated[NotifyPolicy, FleetOnly("controllers have one webhook for all jobs")]
    retention: Annotated[RetentionPolicy, FleetOnly("disks and ledger are shared by all jobs")]


KEYS_SINCE_HISTORIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "detection": {
        "log_hang_min": "8m",
        "log_silent_after": "30m",
        "loss_spike_factor": 5.0,
        "loss_spike_window": 50,
        "loss_spike_sustained": 5,
        "loss_spike_warmup": 20,
        "step_time_factor": 1.2,
        "step_time_window": "10m",
        "slow_rounds": 5,
        "slow_round_interval": "10s",
        "rdma_silent_after": "10m",
    },
    "probes": {
        "gpu_interval": "10s",
        "host_interval": "2s",
        "network_interval": "30s",
        "network_alerts_min": 2,
        "network_alert_window": "5m",
        "look_deadline": "20s",
        "gpu_call_deadline": "5s",
        "gpu_pulse_interval": "2s",
        "gpu_start_deadline": "1m",
        "gpu_retry_max": "5m",
        "gpus_expected": 0,
        "gpu_event_hold": "10m",
        "gpu_busy_percent_min": 10,
        "gpu_hot_margin_c": 5,
        "gpu_hot_c": 85,
        "gpu_slow_looks_min": 6,
        "pcie_replays_per_minute_max": 60,
        "nvlink_errors_per_minute_max": 60,
        "ecc_aggregate_max": 10,
        "dcgm_url": "",
        "dcgm_timeout": "2s",
        "dcgm_misses_min": 3,
        **HOST_KEYS_SINCE_HISTORIES,
    },
}
"""Keys that came after the first recorded histories, and how a policy without them is read.

Not defaults: a policy of today comes from files that hold every key. A value here never changes,
even when the default does, so that an old history replays the same for ever.
"""


class PolicySnapshot(Message):
    """A policy as one job sees it, with the hash that decisions are recorded under."""

    policy: Policy
    hash: str
    """First 16 hex digits of the SHA-256 of the canonical JSON."""
    source: str
    """Where it came from, for people."""
    kind: Literal["policy"] = "policy"

    @model_validator(mode="before")
    @classmethod
    def _of_an_older_version(cls, data: Any) -> Any:
        """Complete what was recorded before a key existed, so that running jobs outlive it."""
        if not isinstance(data, Mapping) or not isinstance(data.get("policy"), Mapping):
            return data
        merged = dict(data["policy"])
        for section, keys in KEYS_SINCE_HISTORIES.items():
            held = merged.get(section, {})
            if isinstance(held, Mapping):  # else it is refused with its own reason
                merged[section] = {**keys, **held}
        return {**data, "policy": merged}
