"""Kills a rank with SIGKILL at every point of a save, and judges what it leaves behind.

Run by ``test_kill.py`` as a process of its own, because it forks: a point is the n-th call that can
change a file system (open, write, fsync, rename, unlink...), whoever makes it during the save, and
for each point a fresh child is killed right before that call. What is left is read by the
controller's reader, and a next run resumes from it. Prints one JSON line: how many points there
were and what went wrong.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from everstep_trainer import Session

from everstep.machine import checkpoints
from tests.trainer.kit import Job, same

BLOB_BYTES = (2 << 20) + 1000
"""More than two of the pieces in which a part is written, so that it can be torn."""


CHANGING = {
    *("open", "write", "writelines", "flush", "close", "__exit__", "fsync", "fdatasync"),
    *("truncate", "ftruncate", "mkdir", "rmdir", "rename", "replace", "unlink", "remove", "link"),
}


def state(rank: int, step: int) -> dict[str, Any]:
    """What a rank saves; rank 1's of step 3 is large."""
    size = BLOB_BYTES if (rank, step) == (1, 3) else 10
    return {"rank": rank, "step": step, "blob": bytes([step]) * size}


def killed_at(point: int, work: Callable[[], object]) -> bool:
    """Do ``work`` in a child that dies at that point; False when the work ended before."""
    child = os.fork()
    if child == 0:
        left = point

        def tick(frame: FrameType, event: str, what: Any) -> None:
            nonlocal left
            if event == "c_call" and what.__name__ in CHANGING:
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.setprofile(tick)
        work()
        sys.setprofile(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def wrong_with(job: Job, older: int, newest: int) -> str | None:
    """What is wrong after a kill, if anything: the older checkpoint must be there, or a newer."""
    found = checkpoints.scan(job.checkpoints, job_id="tests").complete
    best = max(found, key=lambda checkpoint: checkpoint.id, default=None)
    if best is None or not older <= best.id.step <= newest:
        return f"the best checkpoint left is {best}"
    for checkpoint in found:
        for rank in (0, 1):
            folder = checkpoints.folder_name(checkpoint.id)
            loaded = job.session(rank, generation=2, restore=folder).load()
            if loaded is None or not same(loaded[1], state(rank, checkpoint.id.step)):
                return f"{folder}: rank {rank} loads something else"
    # The next run resumes, saves, and cleans up (rank 0 does, so it saves last).
    restore = checkpoints.folder_name(best.id)
    for session in job.sessions(generation=2, restore=restore)[::-1]:
        if not session.save(newest + 1, state(session.rank, newest + 1)):
            return "the next run cannot save"
    left = checkpoints.scan(job.checkpoints, job_id="tests")
    torn = [name for name in job.files() if name.endswith(".tmp")]
    if torn or left.skipped or len(left.complete) > job.keep:
        return f"not cleaned up: {torn}, {left.skipped}, {len(left.complete)} complete"
    return None


def save(session: Session, step: int) -> None:
    """What is interrupted."""
    session.save(step, state(session.rank, step))


def sweep(root: Path, *, killed_rank: int, keep: int) -> dict[str, Any]:
    """All points of the save of step 3, on one rank of two."""
    prepared = Job(root / "prepared", world_size=2, keep=keep)
    for step in (1, 2):
        for rank in (0, 1):
            prepared.session(rank).save(step, state(rank, step))
    prepared.session(1 - killed_rank).save(3, state(1 - killed_rank, 3))
    wrong, points = [], 0
    while True:
        job = Job(root / "job", world_size=2, keep=keep)
        shutil.copytree(prepared.checkpoints, job.checkpoints)

        hit = killed_at(points, functools.partial(save, job.session(killed_rank), 3))
        problem = wrong_with(job, older=2, newest=3)
        if problem:
            wrong.append(f"killed at point {points}: {problem}")
        shutil.rmtree(job.root)
        if not hit:
            return {"points": points, "wrong": wrong}
        points += 1


if __name__ == "__main__":
    where, rank_text, keep_text = sys.argv[1:]
    print(json.dumps(sweep(Path(where), killed_rank=int(rank_text), keep=int(keep_text))))
