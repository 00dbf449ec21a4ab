"""What a rank is started with: torchrun's variables, Everstep's, and nothing else of ours.

Not here: starting (``shim``), and what the variables mean to a training script (``docs/``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.machine.folder import RankUser, RunFolder, RunRecord
from everstep.machine.proc import MARK_VARIABLE
from everstep.machine.stacks import STACK_SIGNAL

_OURS = ("EVERSTEP_", "TORCHELASTIC_", "TEMPORAL_")
_AGENTS_ONLY = frozenset(
    (
        *("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH"),
        *("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "INVOCATION_ID", "JOURNAL_STREAM"),
        *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"),
    )
)
_RESTARTS_MAX = "1000000"
"""``TORCHELASTIC_MAX_RESTARTS``: the ladder bounds restarts by cause, not by number; scripts that
compare the two must never conclude that this is the last one."""


def inherited_environment(environ: Mapping[str, str], agent_bin: Path) -> dict[str, str]:
    """The part of the agent's environment that ranks see.

    The agent's own program folder comes last on the path: it offers ``python`` where the machine
    has none, and never hides the one of the training image.
    """
    env = {
        key: value
        for key, value in environ.items()
        if not key.startswith(_OURS) and key not in _AGENTS_ONLY
    }
    path = env.get("PATH") or os.defpath
    if str(agent_bin) not in path.split(os.pathsep):
        path = f"{path}{os.pathsep}{agent_bin}"
    env["PATH"] = path
    return env


def _restore_environment(record: RunRecord) -> dict[str, str]:
    restore = record.plan.restore
    if restore is None:
        return {}
    return {
        "EVERSTEP_RESTORE_STEP": str(restore.step),
        "EVERSTEP_RESTORE_GENERATION": str(restore.generation),
        "EVERSTEP_RESTORE_PATH": restore.path,
    }


def run_environment(
    record: RunRecord, inherited: Mapping[str, str], trainer: Path | None, user: RankUser | None
) -> dict[str, str]:
    """What all ranks of the run on this machine have in common."""
    plan = record.plan
    world_size = str(plan.machines * plan.ranks_per_machine)
    env = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **inherited}
    if user is not None:
        env |= {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}
    env |= plan.env
    if trainer is not None:
        env["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(trainer), env.get("PYTHONPATH", "")) if part
        )
    env |= {
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(plan.master_port),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(plan.ranks_per_machine),
        "GROUP_RANK": str(plan.group_rank),
        "GROUP_WORLD_SIZE": str(plan.machines),
        "NODE_RANK": str(plan.group_rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RESTART_COUNT": str(record.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": _RESTARTS_MAX,
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "EVERSTEP_JOB_ID": record.job_id,
        "EVERSTEP_RUN_ID": plan.run_id,
        "EVERSTEP_GENERATION": str(record.generation),
        "EVERSTEP_START_REASON": plan.start_reason,
        "EVERSTEP_CODE_VERSION": plan.code_version,
        "EVERSTEP_CHECKPOINT_KEEP": str(plan.checkpoint_keep),
        "EVERSTEP_MACHINE_ID": record.machine_id,
        MARK_VARIABLE: record.mark,
        **_restore_environment(record),
    }
    if plan.checkpoint_dir is not None:
        env["EVERSTEP_CHECKPOINT_DIR"] = plan.checkpoint_dir
    return env


def launch_description(
    record: RunRecord, folder: RunFolder, env: Mapping[str, str], user: RankUser | None
) -> dict[str, Any]:
    """``launch.json``: all that the shim has to know."""
    plan = record.plan
    cwd = plan.working_dir or plan.code_path or str(folder.work)
    ranks = []
    for local_rank, rank in enumerate(record.ranks):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "ROLE_RANK": str(rank),
            "TORCHELASTIC_ERROR_FILE": str(folder.error(rank)),
            "EVERSTEP_PROGRESS_FILE": str(folder.progress(rank)),
            "EVERSTEP_STACK_FILE": str(folder.stack(rank)),
            "EVERSTEP_STACK_SIGNAL": str(STACK_SIGNAL),
        }
        ranks.append(
            {
                "rank": rank,
                "argv": list(plan.command),
                "env": own,
                "cwd": cwd,
                "log": folder.log(rank).name,
            }
        )
    account = None if user is None else {"name": user.name, "uid": user.uid, "gid": user.gid}
    return {"mark": record.mark, "env": dict(env), "user": account, "ranks": ranks}
