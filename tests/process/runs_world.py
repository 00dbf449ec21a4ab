"""A machine for tests: a real ``RunManager`` over a state directory of its own, and its events.

Whatever a test does to agents, shims and ranks, nothing of it outlives the test: every process that
was started below the state directory is found by its environment or command line and killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from everstep.decide.attribution import MachineReport, RankReport
from everstep.machine.runs import RunManager
from everstep.spec.agent_api import AgentRunPolicy, EventKind, RunPlan, RunState

EVENT_DATA_BYTES_MAX = 1500
LIMIT_S = 20.0

PRELUDE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])

def mark(name):
    open(name, "w").close()

def wait(name):
    while not os.path.exists(name):
        time.sleep(0.005)
"""


@dataclass(frozen=True)
class Event:
    """What the manager emitted."""

    kind: EventKind
    job_id: str
    run_id: str
    generation: int
    rank: int | None = None
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    at_monotonic: float | None = None


def policy(**changes: Any) -> AgentRunPolicy:
    """A policy with short times."""
    values: dict[str, Any] = {
        "settle_window_s": 0.3,
        "first_step_max_s": 30.0,
        "hang_min_s": 1.5,
        "hang_factor": 3.0,
        "section_max_s": 30.0,
        "exit_skew_max_s": 30.0,
        "failure_grace_s": 1.0,
        "kill_wait_s": 5.0,
        "runs_kept_max": 20,
    }
    return AgentRunPolicy(**(values | changes))


def plan(
    script: str,
    *,
    generation: int = 1,
    ranks: int = 1,
    command: tuple[str, ...] | None = None,
    limits: dict[str, Any] | None = None,
    **changes: Any,
) -> RunPlan:
    """A plan whose ranks run a Python script; it has ``rank``, ``mark(file)``, ``wait(file)``."""
    code = PRELUDE + textwrap.dedent(script)
    values: dict[str, Any] = {
        "run_id": f"job-{generation}",
        "command": command or (sys.executable, "-c", code),
        "code_version": "v1",
        "machines": 1,
        "ranks_per_machine": ranks,
        "group_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": 29999,
        "start_reason": "launch",
        "policy": policy(**(limits or {})),
    }
    return RunPlan(**(values | changes))


class Machine:
    """One machine: a state directory, the manager that is in charge of it, what it emitted."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.events: list[Event] = []
        self.manager = self.new_manager()

    def new_manager(self, **options: Any) -> RunManager:
        """Another agent's manager over the same state."""
        return RunManager(
            state_dir=self.state_dir, machine_id="m1", emit=self._keep_event, **options
        )

    def _keep_event(self, kind: EventKind, **fields: Any) -> None:
        self.events.append(Event(kind, **fields))

    async def restart(self) -> None:
        """A new agent takes over from the present one, which lets go in order."""
        await self.manager.close()
        self.manager = self.new_manager()
        await self.manager.adopt()

    async def start(self, script: str, *, generation: int = 1, **options: Any) -> dict[int, int]:
        """Start a run of job ``job``."""
        made = plan(script, generation=generation, **options)
        return await self.manager.start("job", generation, made)

    async def stop(self, generation: int = 1, **options: Any) -> MachineReport:
        """Stop a run of job ``job``."""
        values: dict[str, Any] = {
            "reason": "the test says so",
            "grace_s": 1.0,
            "kill_wait_s": 5.0,
            "planned": False,
        }
        return await self.manager.stop("job", generation, **(values | options))

    def folder(self, generation: int = 1) -> Path:
        """The run's folder."""
        return self.state_dir / "runs" / "job" / str(generation)

    def shim_pid(self, generation: int = 1) -> int:
        """Pid of the run's shim."""
        pid: int = json.loads((self.folder(generation) / "shim.json").read_text())["pid"]
        return pid

    def go(self, name: str, generation: int = 1) -> None:
        """Make the file that a script waits for."""
        (self.folder(generation) / "work" / name).touch()

    async def marked(self, name: str, generation: int = 1) -> None:
        """Wait for a file that a script makes."""
        path = self.folder(generation) / "work" / name
        await until(path.exists, f"the script makes {name}")

    def state(self, generation: int = 1) -> RunState:
        """State of the run; it must exist."""
        state = self.manager.state("job", generation)
        assert state is not None
        return state

    def of(self, kind: EventKind, rank: int | None = None) -> list[Event]:
        """Events of one kind (of one rank)."""
        return [e for e in self.events if e.kind is kind and rank in (None, e.rank)]

    async def event(self, kind: EventKind, rank: int | None = None) -> Event:
        """Wait for an event; it must then be the only one of its kind and rank."""
        await until(lambda: self.of(kind, rank), f"event {kind} of rank {rank}")
        (found,) = self.of(kind, rank)
        return found

    async def end(self) -> None:
        """Let go of everything and kill what is left."""
        await self.manager.close()
        kill_below(self.state_dir)
        for event in self.events:
            assert len(json.dumps(event.data)) < EVENT_DATA_BYTES_MAX, event


def rank_report(report: MachineReport, rank: int) -> RankReport:
    """One rank of a report."""
    (found,) = [r for r in report.ranks if r.rank == rank]
    return found


async def until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until a condition holds, within a limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {limit_s} s: {what}")
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def below(state_dir: Path) -> Iterator[int]:
    """Processes that were started from this state directory."""
    needle = os.fsencode(state_dir) + b"/"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            both = (entry / "environ").read_bytes() + b"\0" + (entry / "cmdline").read_bytes()
            if needle in both and is_alive(int(entry.name)):
                yield int(entry.name)


def kill_below(state_dir: Path) -> None:
    """Kill them, so that no test leaves anything behind."""
    deadline = time.monotonic() + LIMIT_S
    while left := list(below(state_dir)):
        assert time.monotonic() < deadline, f"cannot be killed: {left}"
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
