"""Stand-ins for agents and the ledger, scripted by the tests. They count what was asked of them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.decide.attribution import MachineReport, RankReport
from everstep.decide.stack_report import StackReport
from everstep.decide.words import RankState
from everstep.machine.client import AgentRefused, AgentUnreachable
from everstep.spec import agent_api as api
from everstep.spec import messages as m
from everstep.spec.load import load_policy, policy_from_text, snapshot_for_job
from everstep.spec.policy import PolicySnapshot

JOB, RUN, GENERATION, RING = "job", "job.3", 3, "0123456789abcdef"
Line = api.HelloLine | api.EventLine | api.HeartbeatLine | api.GapLine


def policy(**overrides: Any) -> PolicySnapshot:
    """The default policy with changes by section, the fleet's own keys included."""
    changed = policy_from_text(json.dumps(overrides), "the test's policy")
    return snapshot_for_job(changed, {})


def refs(*machine_ids: str) -> tuple[m.MachineRef, ...]:
    return tuple(
        m.MachineRef(machine_id=machine_id, address="127.0.0.1", group_rank=i)
        for i, machine_id in enumerate(machine_ids)
    )


def hello(machine_id: str = "m1", boot: str = "boot1", next_seq: int = 1) -> api.HelloLine:
    return api.HelloLine(
        machine_id=machine_id,
        agent_boot_id=boot,
        api_version=1,
        monotonic_s=1.0,
        ring_id=RING,
        oldest_seq=1,
        next_seq=next_seq,
    )


def event(kind: api.EventKind, seq: int = 1, **fields: Any) -> api.EventLine:
    defaults: dict[str, Any] = {"job_id": JOB, "run_id": RUN, "generation": GENERATION}
    return api.EventLine(kind=kind, seq=seq, **(defaults | fields))


def heartbeat(step: int | None = None, **fields: Any) -> api.HeartbeatLine:
    run = api.RunSummary(
        job_id=JOB, run_id=RUN, generation=GENERATION, live_ranks=2, step=step, **fields
    )
    return api.HeartbeatLine(monotonic_s=1.0, runs=(run,))


def state(machine_id: str = "m1", *ranks: RankReport, **fields: Any) -> api.RunState:
    defaults: dict[str, Any] = {
        "run_id": RUN,
        "ended": False,
        "succeeded": False,
        "first_step_seen": False,
        "report": MachineReport(machine_id=machine_id, reachable=True, ranks=ranks),
    }
    return api.RunState(**(defaults | fields))


def exited(rank: int, code: int | None = 1, machine_id: str = "m1", **fields: Any) -> RankReport:
    return RankReport(
        rank=rank, machine_id=machine_id, state=RankState.EXITED, exit_code=code, **fields
    )


def report(machine_id: str, *ranks: RankReport, **fields: Any) -> MachineReport:
    return MachineReport(machine_id=machine_id, reachable=True, ranks=ranks, **fields)


class Closed(Exception):
    """Put into a stream: the connection ends here."""


@dataclass
class FakeAgent:
    """One agent. ``lines`` is what its stream says; None in it waits for ever."""

    machine_id: str = "m1"
    down: bool = False
    frozen: bool = False
    state: api.RunState | None = None
    stopped: MachineReport | Exception | None = None
    started: Exception | None = None
    prepared: Exception | None = None
    logs: Mapping[int, str | Exception] = field(default_factory=dict)
    rounds: Sequence[StackReport | Exception] = ()
    """What is answered about the run's stacks, one look after another; the last one repeats."""
    connections: list[list[Line | Exception | None]] = field(default_factory=list)
    """What each connection in turn says; the last one repeats."""
    asked: Counter[str] = field(default_factory=Counter)
    cursors: list[str | None] = field(default_factory=list)
    commands: list[dict[str, Any]] = field(default_factory=list)

    async def _reach(self, what: str) -> None:
        self.asked[what] += 1
        if self.down:
            raise AgentUnreachable("connection refused")
        if self.frozen:
            await asyncio.Event().wait()

    async def info(self) -> api.MachineInfo:
        await self._reach("info")
        return api.MachineInfo(
            machine_id=self.machine_id,
            agent_boot_id="boot1",
            api_version=1,
            monotonic_s=1.0,
            slots=8,
            address="127.0.0.1",
            version="0",
        )

    async def run_state(self, job_id: str, generation: int) -> api.RunState:
        await self._reach("run_state")
        assert (job_id, generation) == (JOB, GENERATION)
        if self.state is None:
            raise AgentRefused(api.ErrorCode.NOT_FOUND, "there is no such run")
        return self.state

    async def log_tail(
        self, job_id: str, generation: int, rank: int, tail_bytes: int = 65536
    ) -> str:
        await self._reach("log_tail")
        content = self.logs[rank]
        if isinstance(content, Exception):
            raise content
        return content[-tail_bytes:]

    async def stacks(
        self, job_id: str, generation: int, *, looks: int = 2, lines: bool = True
    ) -> StackReport:
        await self._reach("stacks")
        assert (job_id, generation, looks, lines) == (JOB, GENERATION, 1, False)
        answer = self.rounds[min(self.asked["stacks"], len(self.rounds)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def stream(self, after: str | None = None) -> AsyncIterator[Line]:
        self.cursors.append(after)
        await self._reach("stream")
        lines = self.connections[min(len(self.cursors), len(self.connections)) - 1]
        for line in lines:
            if line is None:
                await asyncio.Event().wait()
            elif isinstance(line, Exception):
                raise line
            else:
                yield line
        await asyncio.Event().wait()

    async def prepare_run(self, **fields: Any) -> api.PreparedRun:
        await self._command("prepare_run", fields, self.prepared)
        return api.PreparedRun(master_addr="127.0.0.1", master_port=4242)

    async def start_run(self, **fields: Any) -> api.StartedRun:
        await self._command("start_run", fields, self.started)
        return api.StartedRun(machine_id=self.machine_id, pids={})

    async def stop_run(self, **fields: Any) -> api.StoppedRun:
        answer = self.stopped
        await self._command("stop_run", fields, answer if isinstance(answer, Exception) else None)
        assert isinstance(answer, MachineReport)
        return api.StoppedRun(report=answer)

    async def materialise_code(self, **fields: Any) -> api.MaterialisedCode:
        await self._command("materialise_code", fields, None)
        return api.MaterialisedCode(path=f"/state-of-{self.machine_id}/{fields['code_version']}")

    async def _command(self, name: str, fields: dict[str, Any], problem: Exception | None) -> None:
        await self._reach(name)
        self.commands.append({"name": name, **fields})
        if problem is not None:
            raise problem


class FakeAgents:
    """A pool of fakes. The URL names the machine, as the fake ledger says it does."""

    def __init__(self, *agents: FakeAgent) -> None:
        self.by_id = {agent.machine_id: agent for agent in agents}

    def client(self, base_url: str, machine_id: str | None = None) -> FakeAgent:
        assert base_url == f"http://{machine_id}"
        assert machine_id is not None
        return self.by_id[machine_id]


class FakeLocations:
    """A ledger that knows where everybody is; ``hook`` may raise instead."""

    def __init__(self, hook: Callable[[], None] = lambda: None) -> None:
        self.hook = hook
        self.unknown: set[str] = set()
        self.asked = 0

    def machine_locations(self, machine_ids: Sequence[str]) -> dict[str, str]:
        self.asked += 1
        self.hook()
        return {i: f"http://{i}" for i in machine_ids if i not in self.unknown}


class FixedPolicy:
    """A policy source without a ledger."""

    def snapshot(self, overrides: Mapping[str, Any], /) -> PolicySnapshot:
        return snapshot_for_job(load_policy(None), overrides)


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait for a state, with a limit."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)
