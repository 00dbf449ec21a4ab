"""Commands that start PyTorch's launcher: take the launcher away, keep what it was asked for.

Everstep starts the ranks itself, with torchrun's environment variables, so a command that is
``torchrun ...`` or ``python -m torch.distributed.run ...`` must not run once per rank. Its options
are read the way the launcher reads them: sizes are taken over, options about rendezvous, restarts
and logs are dropped because Everstep does that work, and options whose loss would change what the
script sees are refused with the reason. ``OPTIONS`` is the table; ``docs/job-spec.md`` shows it.

Not here: launchers of other projects (``accelerate``, ``deepspeed``, ``srun``): they are commands
like any other, except where they visibly wrap torchrun.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, NoReturn

from everstep.spec.errors import KeyedValueError, Problem, quote


class Treatment(StrEnum):
    """What becomes of a launcher option."""

    TAKEN = "taken over"
    DROPPED = "dropped"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class LauncherOption:
    """One option of the launcher, and what Everstep makes of it."""

    names: tuple[str, ...]
    treatment: Treatment
    why: str
    has_value: bool = True
    unless: str | None = None
    """A value with which a refused option changes nothing."""


def _option(names: str, treatment: Treatment, why: str, **more: Any) -> LauncherOption:
    spelled: list[str] = []
    for name in names.split():
        spelled.append(name)
        if name.startswith("--") and "-" in name[2:]:
            spelled.append("--" + name[2:].replace("-", "_"))
    return LauncherOption(tuple(spelled), treatment, why, **more)


_RENDEZVOUS = "every run meets at a fresh address and port that Everstep chooses"
_LOGS = "the output of every rank is kept on its machine: `everstep logs`"

OPTIONS: tuple[LauncherOption, ...] = (
    _option(
        "--nnodes",
        Treatment.TAKEN,
        "`machines`; a range like 2:4 is refused: a job runs on a fixed "
        "number of machines, and those that fail are replaced",
    ),
    _option(
        "--nproc-per-node",
        Treatment.TAKEN,
        "`ranks_per_machine`; auto, cpu, gpu and xpu are refused: "
        "they mean whatever one machine happens to have",
    ),
    _option("--standalone", Treatment.TAKEN, "`machines: 1`", has_value=False),
    _option(
        "-m --module", Treatment.TAKEN, "the command becomes `python -m MODULE`", has_value=False
    ),
    _option(
        "--no-python", Treatment.TAKEN, "the program is started without `python`", has_value=False
    ),
    _option(
        "--use-env",
        Treatment.TAKEN,
        "only of torch.distributed.launch: ranks read LOCAL_RANK",
        has_value=False,
    ),
    _option("--run-path", Treatment.DROPPED, "same effect as `python SCRIPT`", has_value=False),
    _option("--rdzv-backend", Treatment.DROPPED, _RENDEZVOUS),
    _option("--rdzv-endpoint", Treatment.DROPPED, _RENDEZVOUS),
    _option("--rdzv-id", Treatment.DROPPED, "TORCHELASTIC_RUN_ID is the id of the run"),
    _option("--rdzv-conf", Treatment.DROPPED, _RENDEZVOUS),
    _option("--node-rank", Treatment.DROPPED, "every machine of a run gets its own GROUP_RANK"),
    _option("--master-addr", Treatment.DROPPED, _RENDEZVOUS),
    _option("--master-port", Treatment.DROPPED, _RENDEZVOUS),
    _option(
        "--local-addr",
        Treatment.DROPPED,
        "an agent is told its address: `everstep agent --address`",
    ),
    _option(
        "--max-restarts", Treatment.DROPPED, "budgets are in the policy: `ladder.*_restarts_max`"
    ),
    _option("--monitor-interval", Treatment.DROPPED, "exits are seen at once, without polling"),
    _option("--start-method", Treatment.DROPPED, "ranks are always fresh processes"),
    _option(
        "--event-log-handler", Treatment.DROPPED, "events are in the ledger and in the Temporal UI"
    ),
    _option(
        "--signals-to-handle", Treatment.DROPPED, "ranks are stopped with SIGTERM, then SIGKILL"
    ),
    _option(
        "--shutdown-timeout", Treatment.DROPPED, "the grace is in the policy: `teardown.stop_grace`"
    ),
    _option("--log-dir", Treatment.DROPPED, _LOGS),
    _option("-r --redirects", Treatment.DROPPED, _LOGS),
    _option("-t --tee", Treatment.DROPPED, _LOGS),
    _option("--local-ranks-filter", Treatment.DROPPED, _LOGS),
    _option("--duplicate-stdout-filters", Treatment.DROPPED, _LOGS),
    _option("--duplicate-stderr-filters", Treatment.DROPPED, _LOGS),
    _option(
        "--logs-specs",
        Treatment.REFUSED,
        "it names a plug-in of torchrun, which is not running: remove it",
    ),
    _option(
        "--role",
        Treatment.REFUSED,
        "ROLE_NAME is `default` in every run: remove it",
        unless="default",
    ),
    _option(
        "--numa-binding",
        Treatment.REFUSED,
        "ranks are not bound to CPUs: remove it, and bind in the script "
        "or with `torchrun --no-python numactl ...`",
    ),
    _option(
        "--virtual-local-rank",
        Treatment.REFUSED,
        "LOCAL_RANK is the rank's number on its machine: remove it",
        has_value=False,
    ),
)
"""Every option of torchrun (PyTorch 2.13) and of torch.distributed.launch."""

_NOT_A_COUNT = frozenset({"auto", "cpu", "gpu", "xpu"})
_LAUNCHER_MODULES = {"torch.distributed.run": False, "torch.distributed.launch": True}
"""Module to whether it hands ``--local-rank`` to the script."""
_LAUNCHER_FILES = {"torch/distributed/run.py": False, "torch/distributed/launch.py": True}
_INTERPRETER = re.compile(r"^(python|pypy)(\d+(\.\d+)*)?$")
_INTERPRETER_FLAG = re.compile(r"^-(?P<flags>[bBdEhiIOPqsSuvVx]*)(?P<last>[mcWX]?)(?P<value>.*)$")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_WRAPPERS = frozenset(
    [
        "env",
        "nohup",
        "nice",
        "ionice",
        "numactl",
        "taskset",
        "time",
        "timeout",
        "stdbuf",
        "setsid",
        "sudo",
        "exec",
        "srun",
        "mpirun",
        "mpiexec",
        "uv",
        "poetry",
        "pipenv",
        "pdm",
        "hatch",
        "conda",
        "mamba",
        "micromamba",
        "nsys",
        "ncu",
        "strace",
        "catchsegv",
    ]
)
_MENTIONS_LAUNCHER = re.compile(r"(^|[\s;&|/'\"(])(torchrun\b|torch\.distributed\.(run|launch)\b)")


class _Refused(Exception):
    """Internal: what is wrong with a launcher's command line."""

    def __init__(self, got: str, accepted: str) -> None:
        super().__init__(got, accepted)
        self.problem = Problem("command", got, accepted)


@dataclass(frozen=True, slots=True)
class _Launcher:
    """A command that starts a launcher, split at the launcher's own arguments."""

    python: str
    arguments: tuple[str, ...]
    passes_local_rank: bool


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing a usage text and ending the process."""

    def error(self, message: str) -> NoReturn:
        if "training_script" in message:
            raise _Refused("torchrun without a program", "write it like `torchrun ... train.py`")
        raise _Refused("a torchrun command that cannot be read", message)


def unwrap_launcher(data: Any) -> Any:
    """The job spec with a launcher in its command replaced by what the launcher would start.

    Anything else comes back as it was; what is wrong with it is found by the model.

    Args:
        data: a job spec as plain data, before validation.

    Raises:
        KeyedValueError: the launcher part cannot be replaced, or contradicts the spec.
    """
    if not isinstance(data, Mapping):
        return data
    words = _words(data.get("command"))
    if not words:
        return data
    try:
        _refuse_wrapped(words)
        launcher = _find_launcher(words)
        return data if launcher is None else _replace_launcher(data, launcher)
    except _Refused as refused:
        raise KeyedValueError(refused.problem) from None


def _words(command: Any) -> tuple[str, ...]:
    if isinstance(command, str):
        try:
            return tuple(shlex.split(command))
        except ValueError:
            return ()  # the model's own validator says so
    if isinstance(command, (list, tuple)) and all(isinstance(word, str) for word in command):
        return tuple(command)
    return ()


def _find_launcher(words: Sequence[str]) -> _Launcher | None:
    program = PurePosixPath(words[0])
    if program.name == "torchrun":
        python = "python" if words[0] == "torchrun" else str(program.with_name("python"))
        return _Launcher(python, tuple(words[1:]), passes_local_rank=False)
    if not _INTERPRETER.match(program.name):
        return None
    position = 1
    while position < len(words):
        flag = _INTERPRETER_FLAG.match(words[position])
        if flag is None:
            return _launcher_file(words, position)
        position += 1
        if not flag["last"]:
            if flag["value"]:
                return None
            continue
        value = flag["value"]
        if not value and position < len(words):
            value = words[position]
            position += 1
        if flag["last"] == "m" and value in _LAUNCHER_MODULES:
            return _Launcher(words[0], tuple(words[position:]), _LAUNCHER_MODULES[value])
        if flag["last"] in "mc":
            return None
    return None


def _launcher_file(words: Sequence[str], position: int) -> _Launcher | None:
    script = words[position]
    rest = tuple(words[position + 1 :])
    if PurePosixPath(script).name == "torchrun":
        return _Launcher(words[0], rest, passes_local_rank=False)
    for ending, passes_local_rank in _LAUNCHER_FILES.items():
        if script == ending or script.endswith(f"/{ending}"):
            return _Launcher(words[0], rest, passes_local_rank)
    return None


def _refuse_wrapped(words: Sequence[str]) -> None:
    name = PurePosixPath(words[0]).name
    if name in _SHELLS:
        wrapped = any(_MENTIONS_LAUNCHER.search(word) for word in words[1:])
        how = "write the torchrun command itself as `command` (variables under `env`)"
    elif name in _WRAPPERS:
        wrapped = any(
            PurePosixPath(word).name == "torchrun" or word in _LAUNCHER_MODULES
            for word in words[1:]
        )
        how = "write `command: torchrun ...` without it (variables under `env`)"
    else:
        return
    if wrapped:
        raise _Refused(
            f"torchrun inside {quote(name)}",
            f"it would start a launcher for every rank: {how}",
        )


def _parser() -> _Parser:
    parser = _Parser(prog="torchrun", add_help=False, usage=argparse.SUPPRESS)
    for option in OPTIONS:
        if option.has_value:
            parser.add_argument(*option.names, dest=option.names[-1], default=None)
        else:
            parser.add_argument(
                *option.names, dest=option.names[-1], action="store_const", const="", default=None
            )
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def _given(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The launcher's options by their first name, and the program with its own arguments."""
    parsed, unknown = _parser().parse_known_args(list(arguments))
    if unknown:
        name = unknown[0].partition("=")[0]
        raise _Refused(f"the torchrun option {quote(name)}", _known_option(name))
    values = vars(parsed)
    options = {
        option.names[0]: values[option.names[-1]]
        for option in OPTIONS
        if values[option.names[-1]] is not None
    }
    return options, [parsed.training_script, *parsed.training_script_args]


def _known_option(wrong: str) -> str:
    known = [name for option in OPTIONS for name in option.names if "_" not in name]
    close = difflib.get_close_matches(wrong.replace("_", "-"), known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}options of torchrun 2.13 are understood, before the program's name"


def _replace_launcher(data: Mapping[Any, Any], launcher: _Launcher) -> dict[Any, Any]:
    options, program = _given(launcher.arguments)
    for option in OPTIONS:
        value = options.get(option.names[0])
        if option.treatment is Treatment.REFUSED and value is not None and value != option.unless:
            raise _Refused(f"the torchrun option {option.names[0]}", option.why)
    if launcher.passes_local_rank and "--use-env" not in options:
        raise _Refused(
            "torch.distributed.launch without --use-env",
            "it hands --local-rank to the script: read LOCAL_RANK there and write `torchrun`",
        )
    for word in program[1:]:
        if "${local_rank}" in word:
            raise _Refused(
                quote(word), "read LOCAL_RANK in the script: arguments are the same for all"
            )
    result = dict(data)
    result["command"] = _command(launcher.python, options, program)
    _take(result, "machines", _machines(options))
    _take(result, "ranks_per_machine", _ranks_per_machine(options))
    return result


def _command(python: str, options: Mapping[str, str], program: list[str]) -> tuple[str, ...]:
    if "-m" in options and "--no-python" in options:
        raise _Refused("both --module and --no-python", "a module needs python: give only one")
    if "--no-python" in options:
        return tuple(program)
    return (python, "-m", *program) if "-m" in options else (python, *program)


def _machines(options: Mapping[str, str]) -> tuple[str, int] | None:
    value = options.get("--nnodes")
    if value is None:
        return ("--standalone", 1) if "--standalone" in options else None
    low, colon, high = value.partition(":")
    if colon and low != high:
        raise _Refused(
            f"--nnodes {value}",
            "one number, like --nnodes 2: a job runs on a fixed number of machines, and those that "
            "fail are replaced",
        )
    return f"--nnodes {value}", _count("--nnodes", low)


def _ranks_per_machine(options: Mapping[str, str]) -> tuple[str, int] | None:
    value = options.get("--nproc-per-node")
    if value is None:
        return None
    if value in _NOT_A_COUNT:
        raise _Refused(
            f"--nproc-per-node {value}",
            "a number, like --nproc-per-node 8: the size of a job must not depend on what one "
            "machine has",
        )
    return f"--nproc-per-node {value}", _count("--nproc-per-node", value)


def _count(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 9 or int(value) < 1:
        hint = " (shell variables are not expanded)" if "$" in value else ""
        raise _Refused(f"{name} {quote(value)}", f"a whole number of 1 or more is needed{hint}")
    return int(value)


def _take(result: dict[Any, Any], key: str, taken: tuple[str, int] | None) -> None:
    """Set ``key`` from the launcher's option; two different answers are refused."""
    if taken is None:
        return
    said, value = taken
    present = result.get(key)
    if present is None or str(present) == str(value):
        result[key] = value
        return
    raise _Refused(
        f"{said} in the command, and {key}: {present}",
        f"give the number once, or twice the same (the command means {key}: {value})",
    )
