"""The agent's HTTP API, version 1: requests, answers and stream lines.

``docs/agent-api.md`` is the readable form. All bodies are JSON, bearer-token authenticated.

Every command carries the envelope ``(job_id, generation, command_id, agent_boot_id,
not_after_s)``: an older generation than the agent has seen for the job is refused, a repeated id
answers with its first result, and expiry counts on the agent's own monotonic clock, which ``GET
/v1/machine`` and the event stream report, so no two machines' clocks are ever compared.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from everstep.decide.reports import MachineReport, Seen
from everstep.decide.stack_report import StackReport
from everstep.spec.base import JobName, MachineId, Message, StrictModel
from everstep.spec.policy import ProbesPolicy

API_VERSION = 1

Token = Annotated[
    str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:/@+-]+$")
]
Generation = Annotated[int, Field(ge=1, le=2**31 - 1)]


class ErrorCode(StrEnum):
    """Why an agent refused; the ``code`` of every error body ``{"code", "message"}``."""

    UNAUTHORIZED = "unauthorized"
    BAD_REQUEST = "bad_request"
    TOO_LARGE = "too_large"
    NOT_FOUND = "not_found"
    OLDER_GENERATION = "older_generation"
    EXPIRED = "expired"
    WRONG_BOOT = "wrong_boot"
    API_VERSION = "api_version"
    BUSY = "busy"
    EVICTED = "evicted"
    FAILED = "failed"


class ErrorBody(Message):
    """Body of every refusal."""

    code: ErrorCode
    message: str


class Command(StrictModel):
    """The envelope that every command extends."""

    api_version: Literal[1] = 1
    job_id: JobName
    generation: Generation
    command_id: Token
    agent_boot_id: Token
    not_after_s: float
    """Instant on the agent's own monotonic clock after which the command must not take effect."""


class SignalPolicy(StrictModel):
    """When the numbers and the output of a run are worth an event (``docs/signals.md``)."""

    log_hang_min_s: float
    log_silent_after_s: float
    loss_spike_factor: float
    loss_spike_window: int
    loss_spike_sustained: int
    loss_spike_warmup: int
    step_time_factor: float
    step_time_window_s: float
    rdma_silent_after_s: float


class AgentRunPolicy(StrictModel):
    """What an agent decides by itself while it has a run, in seconds."""

    settle_window_s: float
    first_step_max_s: float
    hang_min_s: float
    hang_factor: float
    section_max_s: float
    exit_skew_max_s: float
    failure_grace_s: float
    kill_wait_s: float
    runs_kept_max: int
    signals: SignalPolicy | None = None
    """None in plans of before there were such rules: they do not apply then."""


class RestorePointPlan(StrictModel):
    """The checkpoint a run starts from."""

    step: int
    generation: int
    path: str


class RunPlan(StrictModel):
    """One machine's part of a run."""

    run_id: Token
    command: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    working_dir: str | None = None
    code_version: str
    code_path: str | None = None
    machines: int
    ranks_per_machine: int
    group_rank: int
    """Index of this machine in the run; its ranks are group_rank*ranks_per_machine + local."""
    master_addr: str
    master_port: int
    axes: tuple[tuple[str, int], ...] = ()
    """Parallel axes and their sizes, in the order of ranks; empty: all ranks are replicas."""
    start_reason: str
    """Why this run started ("launch", "reattempt", "evict", "resume"): EVERSTEP_START_REASON."""
    restore: RestorePointPlan | None = None
    checkpoint_dir: str | None = None
    checkpoint_keep: int = 3
    progress_pattern: str | None = None
    """The job's own regular expression for lines with a step."""
    policy: AgentRunPolicy


class PrepareRun(Command):
    """Reserve a fresh rendezvous port on this machine."""


class PreparedRun(Message):
    """Where ranks meet."""

    master_addr: str
    master_port: int


class StartRun(Command):
    """Start this machine's ranks."""

    run: RunPlan


class StartedRun(Message):
    """The ranks are running (their processes exist)."""

    machine_id: str
    pids: dict[int, int]
    """Global rank to process id."""


class StopRun(Command):
    """Capture evidence, end every process of the run, prove that none is left."""

    reason: str
    grace_s: float
    kill_wait_s: float


class StoppedRun(Message):
    """The verified end of a run on one machine."""

    report: MachineReport


class FenceJob(Command):
    """Refuse everything of the job older than ``generation`` from now on; stop older ranks."""


class MaterialiseCode(Command):
    """Copy a code version to this machine (``source`` is a directory reachable from it)."""

    code_version: Token
    source: str


class MaterialisedCode(Message):
    """Where the code version lies on this machine."""

    path: str


class Shutdown(Command):
    """Stop all runs as a planned stop and end the agent (the machine goes down for service)."""


class ShutdownDone(Message):
    """All runs are stopped and the agent is about to end."""

    stopped: dict[str, int] = Field(default_factory=dict)
    """Job to the generation that was live."""


class MachineInfo(Message):
    """``GET /v1/machine``."""

    machine_id: MachineId
    agent_boot_id: str
    api_version: int
    monotonic_s: float
    slots: int
    address: str
    version: str
    runs: tuple[RunSummary, ...] = ()
    observations: tuple[Seen, ...] = ()
    """What probes see now and is not healthy; so nothing depends on having seen an event."""
    healthy_probes: tuple[str, ...] = ()
    """Probes that have looked, and found everything well at their last look."""


class RunSummary(Message):
    """One run in a heartbeat line: small, since it is sent every two seconds."""

    job_id: str
    run_id: str
    generation: int
    live_ranks: int
    step: int | None = None
    """Lowest last step among this machine's ranks; the highest where it is from logs."""
    step_from_log: bool = False
    """The step was printed, not reported: one rank prints for the whole run."""
    loss: float | None = None
    grad_norm: float | None = None
    step_age_s: float | None = None
    """Seconds since the newest step report on this machine."""


class EventKind(StrEnum):
    """What an event line reports."""

    AGENT_STARTED = "agent_started"
    RUN_STARTED = "run_started"
    RUN_ADOPTED = "run_adopted"
    FIRST_STEP = "first_step"
    RANK_EXITED = "rank_exited"
    RANK_STALLED = "rank_stalled"
    RANK_MOVING = "rank_moving"
    NONFINITE = "nonfinite"
    SAVE_FAILED = "save_failed"
    EARLY_EXIT = "early_exit"
    PROCESSES_VANISHED = "processes_vanished"
    RUN_ENDED = "run_ended"
    RUN_STOPPED = "run_stopped"
    PLANNED_STOP = "planned_stop"
    PROBE = "probe"
    """What a probe sees of the machine has changed: it belongs to no job."""
    LOSS_SPIKE = "loss_spike"
    """Loss or gradient norm far above its rolling baseline."""
    STEP_TIME_DECLINE = "step_time_decline"
    """Steps take much longer than this run's own baseline."""
    LOG_SILENT = "log_silent"
    """A script that reports no steps has written nothing for longer than its own rhythm."""
    RDMA_SILENT = "rdma_silent"
    """No RDMA traffic although the run has had some."""
    SIGNAL_RECOVERED = "signal_recovered"
    """What one of the four above had reported is over; ``data`` says which (``kind``)."""


class HelloLine(Message):
    """First line of every stream."""

    type: Literal["hello"] = "hello"
    machine_id: str
    agent_boot_id: str
    api_version: int
    monotonic_s: float
    ring_id: str
    oldest_seq: int
    next_seq: int


class EventLine(Message):
    """One discrete fact, kept in the on-disk ring until it is overwritten."""

    type: Literal["event"] = "event"
    seq: int
    kind: EventKind
    job_id: str | None = None
    run_id: str | None = None
    generation: int | None = None
    rank: int | None = None
    age_s: float = 0.0
    """Seconds between the fact and the sending of this line, by the machine's own clock."""
    reason: str = ""
    data: dict[str, Any] = Field(default_factory=dict)


class HeartbeatLine(Message):
    """Sent every heartbeat interval, also when nothing happens."""

    type: Literal["heartbeat"] = "heartbeat"
    monotonic_s: float
    runs: tuple[RunSummary, ...] = ()


class GapLine(Message):
    """Events were overwritten, or the ring is not the one the cursor belongs to.

    Look at the current state (``GET /v1/runs/{job}/{generation}``) before reading on.
    """

    type: Literal["gap"] = "gap"
    ring_id: str
    oldest_seq: int


class RunState(Message):
    """``GET /v1/runs/{job_id}/{generation}``: the present state of a run on this machine."""

    run_id: str
    ended: bool
    """True when every rank has exited."""
    succeeded: bool
    """True when every rank has exited with 0 by itself."""
    first_step_seen: bool
    report: MachineReport
    pids: dict[int, int] = Field(default_factory=dict)


class RunStacks(Message):
    """``GET /v1/runs/{job_id}/{generation}/stacks``: what all processes of a run are doing now."""

    report: StackReport


class Registration(Message):
    """``POST /v1/agents/register`` on a controller, with the enrolment token."""

    api_version: int
    machine_id: MachineId
    agent_boot_id: str
    url: str
    address: str
    slots: int
    version: str
    labels: dict[str, str] = Field(default_factory=dict)
    jobs: dict[str, int] = Field(default_factory=dict)
    """Jobs with live ranks here, and their generation."""


class RegistrationAnswer(Message):
    """What the controller wants the machine to know."""

    accepted: bool
    message: str = ""
    register_interval_s: float
    heartbeat_interval_s: float
    fences: dict[str, int] = Field(default_factory=dict)
    """For each job in the registration: the lowest generation that may run on this machine.
    Older ranks are stopped before anything else."""
    evicted: bool = False
    probes: ProbesPolicy | None = None
    """How machines are looked at, by the fleet's policy."""


MachineInfo.model_rebuild()
