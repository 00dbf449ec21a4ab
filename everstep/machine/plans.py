"""What a run plan must be before any of it is tried: types are pydantic's business, sense is ours.

A controller checked the job's spec long before; here an agent checks what reached it, since it is
about to start processes because of it. Not here: fencing (``commands``), starting (``runs``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from pydantic import ValidationError

from everstep.spec.agent_api import AgentRunPolicy, RunPlan
from everstep.spec.job import ProgressSpec

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:%_-]{0,251}[A-Za-z0-9])?|::1?")
_LIMIT_MAX_S = 365 * 86_400.0
WAIT_MAX_S = 86_400.0
"""Longest grace or wait that a stop may ask for."""
RANKS_MAX = 1_000_000


def plan_problem(plan: RunPlan, slots: int) -> str | None:
    """The first thing that is wrong with a plan, in one line; None when it can be tried."""
    return next(_problems(plan, slots), None)


def wait_problem(name: str, value: float) -> str | None:
    """What is wrong with a time that a stop has to wait."""
    if not math.isfinite(value) or not 0 <= value <= WAIT_MAX_S:
        return f"{name}: must be between 0 and {WAIT_MAX_S:g} seconds"
    return None


def _problems(plan: RunPlan, slots: int) -> Iterator[str]:
    if not plan.command or not plan.command[0]:
        yield "run.command: must name a program"
    if any("\0" in part for part in plan.command):
        yield "run.command: must not hold a NUL character"
    for name, value in plan.env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            yield "run.env: holds a name or value that an environment cannot have"
    if not 1 <= plan.ranks_per_machine <= slots:
        yield f"run.ranks_per_machine: must be between 1 and {slots}, the slots of this machine"
    if not 1 <= plan.machines <= RANKS_MAX or plan.machines * plan.ranks_per_machine > RANKS_MAX:
        yield f"run.machines: must make between 1 and {RANKS_MAX} ranks"
    if not 0 <= plan.group_rank < plan.machines:
        yield "run.group_rank: must be between 0 and machines - 1"
    if not 1 <= plan.master_port <= 65_535:
        yield "run.master_port: must be between 1 and 65535"
    if not _HOST.fullmatch(plan.master_addr):
        yield "run.master_addr: must be a host name or address"
    if plan.checkpoint_keep < 1:
        yield "run.checkpoint_keep: must be at least 1"
    yield from _path_problems(plan)
    yield from _pattern_problems(plan.progress_pattern)
    yield from _policy_problems(plan.policy)


def _pattern_problems(pattern: str | None) -> Iterator[str]:
    try:
        ProgressSpec(pattern=pattern)
    except ValidationError:
        yield "run.progress_pattern: must be a regular expression with a group named step"


def _path_problems(plan: RunPlan) -> Iterator[str]:
    paths = {
        "working_dir": plan.working_dir,
        "code_path": plan.code_path,
        "checkpoint_dir": plan.checkpoint_dir,
        "restore.path": plan.restore.path if plan.restore else None,
    }
    for name, path in paths.items():
        if path is not None and ("\0" in path or not PurePosixPath(path).is_absolute()):
            yield f"run.{name}: must be an absolute path"
    texts = {"start_reason": plan.start_reason, "code_version": plan.code_version}
    for name, text in texts.items():
        if "\0" in text or len(text) > 1000:
            yield f"run.{name}: must be a short text without a NUL character"


def _policy_problems(policy: AgentRunPolicy) -> Iterator[str]:
    signals = policy.signals.model_dump() if policy.signals is not None else {}
    for name, value in {**policy.model_dump(exclude={"signals"}), **signals}.items():
        if not math.isfinite(value) or not 0 <= value <= _LIMIT_MAX_S:
            yield f"run.policy.{name}: must be between 0 and a year"
    if policy.runs_kept_max < 1:
        yield "run.policy.runs_kept_max: must be at least 1"
