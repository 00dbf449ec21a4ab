"""Which processes a local machine consists of, and how to end all of them at once.

A machine's ranks are children of shims that outlive the agent, so neither a process group nor a
session holds them all. They are found the way an agent finds strays: by the run folder that the
machine's own state directory names, and by the progress file in a process's environment, which lies
in that folder too.

Used for a machine that loses power (the demo, tests) and for what is left when ``up`` ends by
force. Not here: an orderly stop; agents do that themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from everstep.machine import shim

_MARK = b"EVERSTEP_PROGRESS_FILE="
_GONE_LIMIT_S = 5.0


def shims(state: Path) -> Iterator[psutil.Process]:
    """The live shims of a machine's runs, told from strangers by boot and start time."""
    for path in state.glob(f"runs/*/*/{shim.SHIM_FILE}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
            record = json.loads(path.read_text(encoding="utf-8"))
            pid = int(record["pid"])
            same_boot = record["boot_id"] == shim.boot_id()
            if same_boot and record["start_ticks"] == shim.start_ticks(pid):
                process = psutil.Process(pid)
                # Shims belong to PID 1, which in a container may collect them late or never.
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def ranks(state: Path) -> Iterator[psutil.Process]:
    """Every process that was started as a part of one of the machine's runs."""
    mark = _MARK + os.fsencode(state) + b"/"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if environment.startswith(mark) or b"\0" + mark in environment:
            with contextlib.suppress(psutil.Error):
                yield psutil.Process(int(entry.name))


def kill_machine(state: Path, *, agent: int | None) -> int:
    """SIGKILL agent, shims and ranks; answers how many processes were ended.

    The agent goes first, so that it cannot report, and shims before ranks, so that nobody writes
    down how they ended: that is what losing a machine looks like.
    """
    count = 0
    if agent is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGKILL)
            count += 1
    return count + kill_runs(state)


def kill_runs(state: Path) -> int:
    """SIGKILL everything that runs left on a machine; answers how many processes."""
    count = 0
    deadline = time.monotonic() + _GONE_LIMIT_S
    while True:
        found = [*shims(state), *ranks(state)]
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
                count += 1
        # A rank may have forked between the listing and the kill: look again until none is left.
        psutil.wait_procs(found, timeout=1.0)
        if not found or time.monotonic() > deadline:
            return count
