"""Starting a run's ranks: folder first, then the shim; nothing is left of a start that failed.

Not here: whether the run may start (``runs``), and what ranks see (``ranks``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from everstep.machine import proc, shim
from everstep.machine.folder import RankUser, RunFolder, RunRecord
from everstep.machine.guard import Refusal
from everstep.machine.ranks import (
    inherited_environment,
    launch_description,
    run_environment,
)
from everstep.machine.reporter import Emit
from everstep.machine.run import Run
from everstep.machine.trainer_copy import trainer_folder
from everstep.spec.agent_api import ErrorCode, RunPlan

_SHIM_START_MAX_S = 30.0


class StateUnusable(Exception):
    """The state directory, or the account for ranks, cannot be used; one line says why."""


def find_user(name: str | None) -> RankUser | None:
    """The account for ranks; None: the agent's own.

    Raises:
        StateUnusable: there is no such account, or the agent may not switch to it.
    """
    if name is None:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise StateUnusable(f"rank user {name!r}: this machine has no such account") from None
    if os.geteuid() == entry.pw_uid:
        return None
    if os.geteuid() != 0:
        raise StateUnusable(f"rank user {name!r}: only an agent that runs as root can change users")
    return RankUser(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir)


class Launcher:
    """Starts runs on this machine."""

    def __init__(
        self, runs_dir: Path, *, machine_id: str, emit: Emit, user: RankUser | None
    ) -> None:
        self._runs_dir = runs_dir
        self._machine_id = machine_id
        self._emit = emit
        self._user = user
        if user is not None:
            for folder in (runs_dir.parent, runs_dir):
                folder.chmod(folder.stat().st_mode | 0o111)  # ranks reach their own files

    async def launch(self, job_id: str, generation: int, plan: RunPlan) -> Run:
        """Start the ranks and follow them.

        Raises:
            Refusal: they cannot be started; nothing of the run is left.
        """
        folder = RunFolder(self._runs_dir / job_id / str(generation))
        record = RunRecord(
            job_id=job_id,
            generation=generation,
            machine_id=self._machine_id,
            mark=f"{job_id}.{generation}.{secrets.token_hex(8)}",
            boot_id=proc.boot_id(),
            created_ns=time.monotonic_ns(),
            plan=plan,
        )
        inherited = inherited_environment(os.environ, Path(sys.executable).parent)
        try:
            trainer = await asyncio.to_thread(trainer_folder, self._runs_dir.parent)
            env = run_environment(record, inherited, trainer, self._user)
            if folder.path.exists():
                await asyncio.to_thread(folder.remove)  # unreadable, or its making was interrupted
            folder.create(record, launch_description(record, folder, env, self._user), self._user)
            await _start_shim(folder)
            run = Run(folder, record, self._emit)
            run.attach(fresh=True)
        except OSError as error:
            await self._undo(folder, record)
            raise Refusal(
                ErrorCode.FAILED,
                f"run of job {job_id} cannot start on machine {self._machine_id}: "
                f"{error.strerror or error}: {error.filename or folder.path}",
            ) from None
        except Refusal:
            await self._undo(folder, record)
            raise
        return run

    @staticmethod
    async def _undo(folder: RunFolder, record: RunRecord) -> None:
        """Leave nothing of a run that could not be started."""
        with contextlib.suppress(OSError):
            run = Run(folder, record, lambda *_, **__: None)
            run.attach(fresh=True)
            kill_wait_s = record.plan.policy.kill_wait_s
            await run.stop(
                reason="could not be started", grace_s=0.0, kill_wait_s=kill_wait_s, planned=False
            )
            run.detach()
        await asyncio.to_thread(folder.remove)


async def _start_shim(folder: RunFolder) -> None:
    """Start the shim and wait until it has started the ranks.

    Raises:
        Refusal: it could not.
    """
    starter = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",  # nothing of the agent's environment or of the working directory
        "-S",  # no site-packages: the shim needs none, and starts in a third of the time
        shim.__file__,
        str(folder.path),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PATH": os.defpath},
        cwd="/",
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(starter.communicate(), _SHIM_START_MAX_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            starter.kill()
        raise Refusal(
            ErrorCode.FAILED, f"the shim did not start within {_SHIM_START_MAX_S:.0f} s"
        ) from None
    answer: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        answer = json.loads(output)
    if "ranks" not in answer:
        raise Refusal(
            ErrorCode.FAILED, str(answer.get("error", "the shim ended without an answer"))
        )
