"""Agents for tests: a real one as a process, and a machine that only remembers what it was told.

``FakeRuns`` has the interface of ``RunManager`` and starts nothing. ``AgentProcess`` is the agent
as it is installed, on a free loopback port, with its log in a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.decide.attribution import MachineReport
from everstep.decide.stack_report import StackReport
from everstep.machine.client import AgentClient
from everstep.machine.stacks import CaptureLimits
from everstep.secrets import Secrets
from everstep.spec.agent_api import AgentRunPolicy, RunPlan, RunState, RunSummary

WAIT_MAX_S = 30.0
POLICY = AgentRunPolicy(
    settle_window_s=0.3,
    first_step_max_s=600.0,
    hang_min_s=60.0,
    hang_factor=10.0,
    section_max_s=1800.0,
    exit_skew_max_s=30.0,
    failure_grace_s=0.5,
    kill_wait_s=5.0,
    runs_kept_max=5,
)


def make_plan(*command: str, run_id: str = "job-r1", ranks: int = 1, **changes: Any) -> RunPlan:
    """The plan of a run on one machine."""
    fields: dict[str, Any] = {
        "run_id": run_id,
        "command": command or ("sleep", "600"),
        "code_version": "none",
        "machines": 1,
        "ranks_per_machine": ranks,
        "group_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        "start_reason": "launch",
        "policy": POLICY,
    }
    return RunPlan.model_validate(fields | changes)


@dataclass
class FakeRuns:
    """Remembers calls in order; ``gate`` holds every effect until it is set."""

    calls: list[tuple[str, str, int]] = field(default_factory=list)
    states: dict[tuple[str, int], RunState] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    failure: Exception | None = None

    def effects(self, name: str) -> int:
        """How often something was done."""
        return sum(1 for call in self.calls if call[0] == name)

    async def _call(self, name: str, job_id: str, generation: int) -> None:
        self.calls.append((name, job_id, generation))
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure

    async def prepare(self, job_id: str, generation: int) -> int:
        await self._call("prepare", job_id, generation)
        return 29500 + self.effects("prepare")

    async def start(self, job_id: str, generation: int, plan: RunPlan) -> dict[int, int]:
        await self._call("start", job_id, generation)
        pids = {rank: 1000 + rank for rank in range(plan.ranks_per_machine)}
        self.states[job_id, generation] = RunState(
            run_id=plan.run_id,
            ended=False,
            succeeded=False,
            first_step_seen=False,
            report=MachineReport(machine_id="m1", reachable=True),
            pids=pids,
        )
        return pids

    async def stop(
        self,
        job_id: str,
        generation: int,
        *,
        reason: str,
        grace_s: float,
        kill_wait_s: float,
        planned: bool,
    ) -> MachineReport:
        del grace_s, kill_wait_s
        await self._call("stop", job_id, generation)
        self.states.pop((job_id, generation), None)
        return MachineReport(
            machine_id="m1", reachable=True, note=reason, planned_stop=reason if planned else None
        )

    async def stop_older(self, job_id: str, generation: int) -> None:
        for job, older in sorted(self.states):
            if job == job_id and older < generation:
                await self._call("stop_older", job, older)
                del self.states[job, older]

    def state(self, job_id: str, generation: int) -> RunState | None:
        return self.states.get((job_id, generation))

    def live_jobs(self) -> dict[str, int]:
        return dict(sorted(self.states))

    def summaries(self) -> tuple[RunSummary, ...]:
        return tuple(
            RunSummary(job_id=job, run_id=state.run_id, generation=generation, live_ranks=1)
            for (job, generation), state in self.states.items()
        )

    def log_path(self, job_id: str, generation: int, rank: int) -> Path | None:
        del job_id, generation, rank
        return None

    async def stacks(
        self, job_id: str, generation: int, limits: CaptureLimits
    ) -> StackReport | None:
        del job_id, generation, limits
        return None


@dataclass
class AgentProcess:
    """A running agent."""

    machine_id: str
    state: Path
    secrets: Secrets
    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        """Everything it has logged."""
        return self.log_path.read_text("utf-8", "replace")

    def client(self, **options: Any) -> AgentClient:
        """A client with the right token."""
        return AgentClient(self.url, self.secrets.controller, **options)

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.wait()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_MAX_S)


def everstep_program() -> str:
    """The console script of the environment that the tests run in."""
    return str(Path(sys.executable).parent / "everstep")


@contextlib.contextmanager
def running_agent(
    folder: Path,
    *flags: str,
    machine_id: str = "m1",
    controller: str = "http://127.0.0.1:9",
    **env: str,
) -> Iterator[AgentProcess]:
    """A real agent, ended by force at the end (its ranks too, whatever happened)."""
    secrets = Secrets.create(folder / "secrets")
    state = folder / machine_id
    address = state / "agent" / "address.json"
    address.unlink(missing_ok=True)
    log_path = folder / f"{machine_id}.log"
    with log_path.open("ab") as output:
        process = subprocess.Popen(
            [
                *(everstep_program(), "agent", "--machine-id", machine_id, "--state", str(state)),
                *("--controller", controller, "--listen", "127.0.0.1:0", "--slots", "4"),
                *("--secrets", str(secrets.directory), *flags),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **env},
            start_new_session=True,
        )
    try:
        wait_for(lambda: address.exists() or process.poll() is not None, "the agent to start")
        assert process.poll() is None, log_path.read_text()
        url = json.loads(address.read_text())["url"]
        yield AgentProcess(machine_id, state, secrets, url, process, log_path)
    finally:
        process.kill()
        process.wait()
        kill_ranks(state)


def kill_ranks(state: Path) -> None:
    """End every process whose run lies in ``state``; what a test started goes with it."""
    for _ in range(200):
        found = processes_of(state)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def processes_of(state: Path) -> list[int]:
    """Processes (shims and ranks) that name the state directory; no zombies."""
    mark = str(state).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            said = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            continue
        if alive and (mark + b"/runs/") in said:
            found.append(int(entry.name))
    return found


def wait_for(condition: Any, what: str, limit_s: float = WAIT_MAX_S) -> None:
    """Wait for a state of the world, with a limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit_s:g} s for {what}")
        time.sleep(0.01)


async def until(condition: Any, what: str, limit_s: float = WAIT_MAX_S) -> None:
    """``wait_for`` that lets the event loop run."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit_s:g} s for {what}")
        await asyncio.sleep(0.01)
