"""What the words of ``everstep.decide.words`` mean, and which words of the paper they stand for.

Symptoms are mapped to the names of the ByteRobust paper's Table 1, actions to the rungs of the
ladder. ``docs/words.md`` shows both; a test holds the tables to the enums. Operators' rows (log
signatures, Xids) will be columns of the same catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decide.words import Action, Rung, Symptom


@dataclass(frozen=True, slots=True)
class SymptomEntry:
    """One symptom, for people."""

    meaning: str
    paper: tuple[str, ...] = ()
    """Names of Table 1; empty where the paper has none."""


@dataclass(frozen=True, slots=True)
class ActionEntry:
    """One action, for people."""

    meaning: str
    rungs: tuple[Rung, ...] = ()
    """Rungs that take it; empty where no rung of this version does."""


SYMPTOMS: dict[Symptom, SymptomEntry] = {
    Symptom.CUDA_ERROR: SymptomEntry(
        "the GPU refused an operation of the program", ("CUDA error",)
    ),
    Symptom.GPU_MEMORY_ECC: SymptomEntry("uncorrectable GPU memory error", ("GPU memory error",)),
    Symptom.GPU_UNAVAILABLE: SymptomEntry("a GPU is gone or cannot be used", ("GPU unavailable",)),
    Symptom.NVLINK_PCIE: SymptomEntry("error on the links between GPUs or to the host"),
    Symptom.GPU_OOM: SymptomEntry("GPU memory did not suffice", ("CUDA error",)),
    Symptom.CPU_OOM: SymptomEntry("host memory did not suffice", ("CPU OOM",)),
    Symptom.DISK_FULL: SymptomEntry(
        "no space or quota left on a disk", ("insufficient disk space",)
    ),
    Symptom.FILESYSTEM_IO: SymptomEntry(
        "a file system or storage service failed", ("filesystem mount", "HDFS error", "disk fault")
    ),
    Symptom.NETWORK_NCCL: SymptomEntry(
        "ranks lost connections to each other", ("InfiniBand error",)
    ),
    Symptom.NETWORK_HOST: SymptomEntry("names, ports or routes of a host"),
    Symptom.HANG: SymptomEntry("no progress and no error", ("job hang",)),
    Symptom.MFU_DECLINE: SymptomEntry("training goes on, but slower", ("MFU decline",)),
    Symptom.NAN_VALUE: SymptomEntry("a loss or gradient norm that is not finite", ("NaN value",)),
    Symptom.LOSS_SPIKE: SymptomEntry("a jump of the loss or gradient norm"),
    Symptom.CHECKPOINT_ERROR: SymptomEntry("a checkpoint could not be written or read"),
    Symptom.DATA_ERROR: SymptomEntry("training data that cannot be read"),
    Symptom.USER_CODE: SymptomEntry("an error of the owner's program", ("code/data adjustment",)),
    Symptom.CONFIG_ERROR: SymptomEntry("settings that cannot work", ("container error",)),
    Symptom.ENVIRONMENT_MISMATCH: SymptomEntry(
        "libraries or drivers that do not fit together", ("container error",)
    ),
    Symptom.PREEMPTION: SymptomEntry("a planned stop of a machine", ("external service error",)),
    Symptom.KERNEL_PANIC: SymptomEntry("a machine is gone", ("OS kernel panic",)),
    Symptom.UNKNOWN: SymptomEntry("nothing that was seen names the failure"),
}

ACTIONS: dict[Action, ActionEntry] = {
    Action.EVICT_MACHINE: ActionEntry(
        "take the machine out and block it, restart on another one", (Rung.EVICT,)
    ),
    Action.STOP_TIME_CHECK: ActionEntry(
        "examine the machines while the job is stopped; until Everstep can, a person does",
        (Rung.ASK_PERSON,),
    ),
    Action.OVER_EVICT_GROUP: ActionEntry("replace a whole parallel group on purpose"),
    Action.RETRY_IN_PLACE: ActionEntry("restart with nothing changed", (Rung.REATTEMPT,)),
    Action.ROLLBACK_CODE: ActionEntry("go back to code or a checkpoint that worked"),
    Action.FIX_CONFIG_GIVE_UP: ActionEntry(
        "stop and tell the owner: a restart cannot help", (Rung.GIVE_UP, Rung.ASK_PERSON)
    ),
    Action.WAIT_EXTERNAL: ActionEntry("wait for what is outside, then resume", (Rung.RESUME,)),
    Action.WARN_ONLY: ActionEntry("keep training and record it"),
}

PAPER_TABLE_1 = (
    "CUDA error",
    "CPU overload",
    "CPU OOM",
    "insufficient disk space",
    "InfiniBand error",
    "filesystem mount",
    "HDFS error",
    "container error",
    "OS kernel panic",
    "GPU memory error",
    "external service error",
    "GPU unavailable",
    "disk fault",
    "job hang",
    "MFU decline",
    "NaN value",
    "code/data adjustment",
)
"""Names of symptoms in the paper's Table 1. "CPU overload" has no symptom here yet: it needs host
probes."""
