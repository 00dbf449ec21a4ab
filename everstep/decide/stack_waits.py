"""What a stack is waiting for, by the names of the functions in it.

Names of libraries' own files decide first. Names in a user's own code are hints and count only
where they can mean nothing else. A stack that fits nothing *waits for nothing known*, which is said
only of ranks whose peers wait for them, never as a fault by itself.

Not here: what follows from it (``aggregation``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from everstep.decide.stack_report import ProcessRole, Wait
from everstep.decide.stacks import Frame

_PEERS_FILES = re.compile(
    r"^torch/distributed/(distributed_c10d|rendezvous|_functional_collectives|nn/functional)\.py$"
    r"|^torch/distributed/(fsdp/.*_collectives|_symmetric_memory/.*)\.py$"
    r"|(^|/)p2p_communication\.py$|^deepspeed/comm/|^horovod/|^mpi4py/"
)
_PEERS_FUNCTIONS = re.compile(
    r"^_*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier|"
    r"batch_isend_irecv|isend|irecv|recv_(forward|backward)|send_(forward|backward))"
)
_FSDP_WAITS = re.compile(r"^(wait_for_\w+|_wait_\w+)$")
_DEVICE = re.compile(
    r"^(_engine_run_backward|backward) \(torch/(autograd|_tensor)"
    r"|^(synchronize|wait) \(torch/(cuda|accelerator|xpu)/"
)
_DATA_FILES = re.compile(
    r"^(torch/utils/data|torchdata|webdataset|streaming|datasets|tensorflow/python/data)/"
    r"|(^|/)(data_?loader|data_?iterator|dataset)s?\.py$"
)
_DATA_FUNCTIONS = re.compile(r"^_*(next|get|fetch|read|load)_(batch|data|sample|example)s?$")
_CHECKPOINT_FILES = re.compile(
    r"^torch/distributed/checkpoint/|(^|/)dist_checkpointing/|(^|/)checkpoint_engine/"
    r"|(^|/)(async_ckpt|ckpt_saver|flash_checkpoint|filesystem_async|state_dict_saver)|^safetensors/"
    r"|^everstep_trainer/_store\.py$"
)
_CHECKPOINT_FUNCTIONS = re.compile(
    r"(save|write|upload|persist|flush|load|wait)\w*(checkpoint|ckpt|snapshot)"
    r"|(checkpoint|ckpt|snapshot)\w*(save|saver|write|writer|upload|persist|flush|load|wait)"
)
_CHECKPOINT_SAVE = re.compile(r"^_?save \((torch/serialization|everstep_trainer/_session)\.py")
_CHECKPOINT_NAMES = re.compile(r"checkpoint|ckpt|snapshot|\bdcp\b")
_ACTIVATIONS = re.compile(
    r"^torch/utils/checkpoint\.py$|(^|/)checkpoint_(activations|wrapper)\.py$"
)
"""Activation checkpointing, which saves nothing."""
_DATA_NAMES = re.compile(r"data_?(loader|worker|iterator)|loader_worker|prefetch")
_CHILD = re.compile(
    r"^(join|_?wait|poll) \(lib/(multiprocessing/(process|popen_\w+|pool)|subprocess)\.py"
    r"|^(_?communicate|_try_wait) \(lib/subprocess\.py"
    r"|^(get|recv|recv_bytes|_recv) \(lib/multiprocessing/"
    r"|^result \(lib/concurrent/futures/"
)
_STDLIB = "lib/"
_RECEIVES = frozenset(
    {"get", "recv", "recv_bytes", "_recv", "accept", "select", "poll", "wait", "acquire", "_poll"}
)


def _is_users(frame: Frame) -> bool:
    """Code of the job itself: it lies in no package, so only its file name was kept."""
    return "/" not in frame.path and not frame.path.startswith("<frozen ")


def _text(frame: Frame) -> str:
    return f"{frame.function} ({frame.path})"


def waits_for(frames: Sequence[Frame]) -> Wait:
    """What a rank's stack is waiting for; frames are innermost first."""
    if not frames:
        return Wait.NOTHING
    for each in frames:
        if _waits_for_peers(each):
            return Wait.PEERS
        if _DEVICE.search(_text(each)):
            return Wait.DEVICE
        if _is_users(each):
            break  # whatever called the job's own code is not what it waits in
    for each in frames:
        if _about_data(each):
            return Wait.DATA
        if _about_checkpoints(each):
            return Wait.CHECKPOINT
    if any(_CHILD.search(_text(each)) for each in frames[:6]):
        return Wait.CHILD
    return Wait.NOTHING


def _waits_for_peers(frame: Frame) -> bool:
    if _PEERS_FILES.search(frame.path) or _PEERS_FUNCTIONS.search(frame.function):
        return True
    return frame.path.startswith("torch/distributed/fsdp/") and bool(
        _FSDP_WAITS.search(frame.function)
    )


def _about_data(frame: Frame) -> bool:
    return bool(_DATA_FILES.search(frame.path) or _DATA_FUNCTIONS.search(frame.function))


def _about_checkpoints(frame: Frame) -> bool:
    if _ACTIVATIONS.search(frame.path):
        return False
    return bool(
        _CHECKPOINT_FILES.search(frame.path)
        or _CHECKPOINT_FUNCTIONS.search(frame.function)
        or _CHECKPOINT_SAVE.search(_text(frame))
    )


def helper_waits_for(frames: Sequence[Frame]) -> Wait:
    """What a helper's stack is waiting for: work, when its main loop reads a queue or a socket."""
    own = [f for f in frames if not f.path.startswith(_STDLIB)]
    innermost = frames[0] if frames else None
    if innermost is not None and len(own) <= 1 and _receives(frames):
        return Wait.WORK
    return Wait.NOTHING


def _receives(frames: Sequence[Frame]) -> bool:
    inner = []
    for each in frames:
        if not each.path.startswith(_STDLIB):
            break
        inner.append(each.function)
    return bool(_RECEIVES.intersection(inner))


def role_of_child(comm: str, command_line: str, frames: Sequence[Frame]) -> ProcessRole:
    """What a child of a rank is: by its thread name, its own frames, its command line.

    A forked child has its parent's command line, so that one speaks last, and only for a program
    of its own (``command_line`` is then empty).
    """
    if comm.startswith("pt_data"):
        return ProcessRole.DATA_LOADER
    for each in reversed(frames):
        if each.path.startswith("torch/utils/data/") or _DATA_NAMES.search(each.function):
            return ProcessRole.DATA_LOADER
        if _about_checkpoints(each) or _CHECKPOINT_NAMES.search(each.function):
            return ProcessRole.CHECKPOINT_HELPER
    for text in (comm, command_line):
        if _CHECKPOINT_NAMES.search(text):
            return ProcessRole.CHECKPOINT_HELPER
        if _DATA_NAMES.search(text):
            return ProcessRole.DATA_LOADER
    return ProcessRole.OTHER
