"""What an exit code or a signal says when no line names a cause: frameworks have protocols.

Not here: ends that are only reported in lines (``launchers``).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from everstep.decide.diagnosis.hits import Item
from everstep.decide.diagnosis.types import Role, Signature, Weight
from everstep.decide.words import Action, Confidence, Side, Symptom

_LOADING = re.compile(
    r"loading (checkpoint|model|weights|state|shards|dataset|pipeline)|load_state_dict"
    r"|checkpoint shards|gathering .{0,30}(state|weights)|tokeniz|(running|map)[^|]{0,40} tokenizer"
    r"|\bcpu[_ ]offload|CPU Virtual Memory|optimizer states|consolidat|from_pretrained"
    r"|reading .{0,20}into memory|preprocessing",
    re.IGNORECASE,
)
LOADING_LINES_BACK = 15


def _end(
    name: str,
    symptom: Symptom,
    side: Side,
    action: Action,
    why: str,
    *,
    confidence: Confidence = Confidence.LOW,
    machine_specific: bool = False,
    role: Role = Role.ROOT,
) -> Signature:
    return Signature(
        name=name,
        pattern="",
        symptom=symptom,
        side=side,
        action=action,
        role=role,
        weight=Weight.WEAK,
        confidence=confidence,
        machine_specific=machine_specific,
        why=why,
    )


KILLED_UNDER_MEMORY_PRESSURE = _end(
    "killed_while_loading",
    Symptom.CPU_OOM,
    Side.USER_CODE,
    Action.FIX_CONFIG_GIVE_UP,
    "killed (SIGKILL) while it loaded much data into memory: the machine has too little for that, "
    "and it repeats at each start",
)

CODES: dict[int, Signature] = {
    16: _end(
        "megatron_exit_16",
        Symptom.NAN_VALUE,
        Side.UNCLEAR,
        Action.STOP_TIME_CHECK,
        "Megatron-LM's exit code 16: a result was suspect and it wants to be resumed on another "
        "GPU to tell a broken GPU from bad numbers",
    ),
    17: _end(
        "megatron_exit_17",
        Symptom.NAN_VALUE,
        Side.UNCLEAR,
        Action.STOP_TIME_CHECK,
        "Megatron-LM's exit code 17: the validation of a result failed",
    ),
    93: _end(
        "nvrx_exit_93",
        Symptom.UNKNOWN,
        Side.USER_CODE,
        Action.FIX_CONFIG_GIVE_UP,
        "NVRx's exit code 93: it has decided that another restart cannot help",
    ),
    201: _end(
        "dlrover_exit_201",
        Symptom.GPU_UNAVAILABLE,
        Side.INFRASTRUCTURE,
        Action.EVICT_MACHINE,
        "DLRover's exit code 201: the GPU driver of the machine does not work",
        machine_specific=True,
    ),
    202: _end(
        "dlrover_exit_202",
        Symptom.GPU_UNAVAILABLE,
        Side.INFRASTRUCTURE,
        Action.EVICT_MACHINE,
        "DLRover's exit code 202: something is left on the machine's GPUs",
        machine_specific=True,
    ),
    247: _end(
        "exit_247",
        Symptom.CPU_OOM,
        Side.USER_CODE,
        Action.FIX_CONFIG_GIVE_UP,
        "exit code 247, which DLRover and Kubernetes setups use for a process that ran out of "
        "memory",
    ),
    126: _end(
        "command_not_executable",
        Symptom.CONFIG_ERROR,
        Side.USER_CODE,
        Action.FIX_CONFIG_GIVE_UP,
        "exit code 126: the command is there but cannot be executed",
    ),
    127: _end(
        "command_not_found",
        Symptom.CONFIG_ERROR,
        Side.USER_CODE,
        Action.FIX_CONFIG_GIVE_UP,
        "exit code 127: the command or a library that it needs was not found",
    ),
}
"""By exit code."""

SIGNALS: dict[int, Signature] = {
    signal.SIGKILL.value: _end(
        "killed",
        Symptom.UNKNOWN,
        Side.UNCLEAR,
        Action.RETRY_IN_PLACE,
        "killed (SIGKILL) without any sign of memory pressure: who did it is not in the log",
    ),
    signal.SIGSEGV.value: _end(
        "segfault",
        Symptom.UNKNOWN,
        Side.UNCLEAR,
        Action.RETRY_IN_PLACE,
        "a segmentation fault names no cause; if it repeats on one machine, check that machine",
    ),
    signal.SIGBUS.value: _end(
        "bus_error",
        Symptom.CONFIG_ERROR,
        Side.USER_CODE,
        Action.FIX_CONFIG_GIVE_UP,
        "a bus error (SIGBUS): most often the shared memory of the container is too small",
    ),
    signal.SIGILL.value: _end(
        "illegal_instruction",
        Symptom.ENVIRONMENT_MISMATCH,
        Side.USER_CODE,
        Action.FIX_CONFIG_GIVE_UP,
        "an instruction that this CPU does not have: a binary built for another machine",
    ),
    signal.SIGFPE.value: _end(
        "floating_point_exception",
        Symptom.USER_CODE,
        Side.USER_CODE,
        Action.ROLLBACK_CODE,
        "an arithmetic fault (SIGFPE) in native code",
    ),
    signal.SIGABRT.value: _end(
        "aborted",
        Symptom.UNKNOWN,
        Side.UNCLEAR,
        Action.RETRY_IN_PLACE,
        "aborted itself (SIGABRT), most often because it waited for others in vain",
        role=Role.WITNESS,
    ),
    signal.SIGINT.value: _end(
        "interrupted",
        Symptom.UNKNOWN,
        Side.USER_CODE,
        Action.WARN_ONLY,
        "interrupted (SIGINT, Ctrl-C): a person stopped it, nothing failed",
        role=Role.TEARDOWN,
    ),
    signal.SIGTERM.value: _end(
        "terminated",
        Symptom.UNKNOWN,
        Side.UNCLEAR,
        Action.RETRY_IN_PLACE,
        "told to stop (SIGTERM): whoever did that knows why",
        role=Role.TEARDOWN,
    ),
}
"""By signal."""

FAILED = _end(
    "exit_without_cause",
    Symptom.UNKNOWN,
    Side.UNCLEAR,
    Action.RETRY_IN_PLACE,
    "it failed, and nothing in the log says why",
)

HEALTHY = _end(
    "nothing_found",
    Symptom.UNKNOWN,
    Side.UNCLEAR,
    Action.WARN_ONLY,
    "nothing in the log names a failure",
    role=Role.NOTE,
)


def meaning(exit_code: int | None, number: int | None, items: Sequence[Item]) -> Signature | None:
    """What an end says; None: nothing (success, or not known)."""
    if number == signal.SIGKILL.value and _was_loading(items):
        return KILLED_UNDER_MEMORY_PRESSURE
    if number is not None:
        return SIGNALS.get(number, FAILED)
    if exit_code in (None, 0):
        return None
    return CODES.get(exit_code or 0, FAILED)


def _was_loading(items: Sequence[Item]) -> bool:
    """The last lines before the end tell of loading, not of training."""
    return any(_LOADING.search(item.text) for item in items[-LOADING_LINES_BACK:])
