"""Starts ranks of a torch script by forking from a process that has imported torch already.

A fresh rank spends five seconds on imports and a forked one computes the same bits, so the tests
can afford many runs. One JSON line in, one out, until the input ends::

    {"script", "arguments", "ranks": [{"env", "log"}...], "limit_s"}  ->  {"statuses": [...]}

A status is the exit code, or minus the signal. Nothing is computed in this process: a child of a
process with more than one thread may hang.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

PREIMPORTED = (
    "numpy",
    "torch",
    "torch.distributed.device_mesh",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.optim",
)


def become_rank(order: dict[str, Any], rank: dict[str, Any]) -> NoReturn:
    """Run the script in this process, as if it had been started like that."""
    os.setpgid(0, 0)
    log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(rank["env"])
    script = Path(order["script"])
    sys.argv = [str(script), *order["arguments"]]
    sys.path[0] = str(script.parent)
    status = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - what an interpreter does at its outermost level
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(order: dict[str, Any]) -> list[int]:
    """Start all ranks, wait for them, and kill those that exceed the limit."""
    ranks = []
    for rank in order["ranks"]:
        pid = os.fork()
        if pid == 0:
            become_rank(order, rank)
        ranks.append(pid)
    give_up = time.monotonic() + order["limit_s"]
    statuses: dict[int, int] = {}
    while len(statuses) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > give_up:
            for left in set(ranks) - set(statuses):
                os.kill(left, signal.SIGKILL)
        else:
            time.sleep(0.02)
    return [statuses[pid] for pid in ranks]


if __name__ == "__main__":
    for name in PREIMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"statuses": run(json.loads(line))}), flush=True)
