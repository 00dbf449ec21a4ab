"""The vocabulary of decisions: one word, one meaning.

Symptoms, sides and actions are the operator's words (``docs/words.md`` maps them to the symptoms of
the ByteRobust paper, Table 1). Everything here is a ``StrEnum`` with lower-case values because the
values stand in Temporal histories, logs, metrics and the ledger; renaming one is a migration.

Not here: models that cross a process border (``everstep.spec``), and rules (the other modules of
this package).
"""

from __future__ import annotations

from enum import StrEnum


class Symptom(StrEnum):
    """What an incident looks like; names the first failure, not the loudest one."""

    CUDA_ERROR = "cuda_error"
    GPU_MEMORY_ECC = "gpu_memory_ecc"
    GPU_UNAVAILABLE = "gpu_unavailable"
    NVLINK_PCIE = "nvlink_pcie"
    GPU_OOM = "gpu_oom"
    CPU_OOM = "cpu_oom"
    DISK_FULL = "disk_full"
    FILESYSTEM_IO = "filesystem_io"
    NETWORK_NCCL = "network_nccl"
    NETWORK_HOST = "network_host"
    HANG = "hang"
    MFU_DECLINE = "mfu_decline"
    NAN_VALUE = "nan_value"
    LOSS_SPIKE = "loss_spike"
    CHECKPOINT_ERROR = "checkpoint_error"
    DATA_ERROR = "data_error"
    USER_CODE = "user_code"
    CONFIG_ERROR = "config_error"
    ENVIRONMENT_MISMATCH = "environment_mismatch"
    PREEMPTION = "preemption"
    KERNEL_PANIC = "kernel_panic"
    UNKNOWN = "unknown"


class Side(StrEnum):
    """Whose fault an incident is."""

    INFRASTRUCTURE = "infrastructure"
    USER_CODE = "user_code"
    EXTERNAL = "external"
    UNCLEAR = "unclear"


class Action(StrEnum):
    """What to do about an incident, in the operator's words."""

    EVICT_MACHINE = "evict_machine"
    STOP_TIME_CHECK = "stop_time_check"
    OVER_EVICT_GROUP = "over_evict_group"
    RETRY_IN_PLACE = "retry_in_place"
    ROLLBACK_CODE = "rollback_code"
    FIX_CONFIG_GIVE_UP = "fix_config_give_up"
    WAIT_EXTERNAL = "wait_external"
    WARN_ONLY = "warn_only"


class Verdict(StrEnum):
    """What a probe saw. UNKNOWN ("could not observe") is never counted as either of the others."""

    HEALTHY = "healthy"
    FAULTY = "faulty"
    UNKNOWN = "unknown"


class Confidence(StrEnum):
    """How sure an attribution is."""

    HIGH = "high"
    LOW = "low"


class Rung(StrEnum):
    """A rung of the ladder (paper section 5). ``docs/ladder.md`` says when each is taken."""

    REATTEMPT = "reattempt"
    """Restart on the same machines with nothing changed."""
    EVICT = "evict"
    """Take the suspects out and block them, lease replacements, restart."""
    RESUME = "resume"
    """Restart after a planned stop: nothing is wrong and no budget is spent."""
    GIVE_UP = "give_up"
    """The owner's error does not go away: end the job and tell the owner."""
    ASK_PERSON = "ask_person"
    """Nothing the policy allows is left: the job waits for ``resume`` or ``cancel``."""


class Cause(StrEnum):
    """What a restart is charged to; each has a budget of its own."""

    INFRASTRUCTURE = "infrastructure"
    USER_CODE = "user_code"
    UNCLEAR = "unclear"
    PLANNED = "planned"


class JobPhase(StrEnum):
    """Where a job is. Also the value of the ``EverstepState`` search attribute."""

    VALIDATING = "validating"
    WAITING_FOR_MACHINES = "waiting_for_machines"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    PAUSED = "paused"
    WAITING_FOR_PERSON = "waiting_for_person"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL_PHASES = frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED})


class RunOutcome(StrEnum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    SUPERSEDED = "superseded"


class RunPhase(StrEnum):
    """A boundary in the life of one run, in the order in which they happen.

    The ledger stores one instant for each (the workflow's clock, so one clock for all of them).
    """

    OPENED = "opened"
    START_COMMANDED = "start_commanded"
    STARTED = "started"
    FIRST_STEP = "first_step"
    TROUBLE = "trouble"
    STOPPED = "stopped"
    DECIDED = "decided"
    CLOSED = "closed"


class IncidentState(StrEnum):
    """Where an incident is."""

    OPEN = "open"
    WAITING_FOR_PERSON = "waiting_for_person"
    STABLE = "stable"
    GAVE_UP = "gave_up"


class LogClass(StrEnum):
    """What the last lines of a rank's log say (see ``everstep.decide.logs``)."""

    SILENT = "silent"
    PYTHON_EXCEPTION = "python_exception"
    PEER_LOST = "peer_lost"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    PORT_TAKEN = "port_taken"
    CHECKPOINT_REFUSED = "checkpoint_refused"
    CHECKPOINT_UNREADABLE = "checkpoint_unreadable"
    IMPORT_FAILED = "import_failed"
    OTHER = "other"


class RankState(StrEnum):
    """What an agent knows about one rank."""

    RUNNING = "running"
    EXITED = "exited"
    NOT_STARTED = "not_started"
    UNKNOWN = "unknown"
