"""A world of agents with a kernel log of their own each, and what a test writes into it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest_asyncio

from everstep.client import Client
from everstep.decide.words import JobPhase
from everstep.demo.stage import Stage
from everstep.errors import EverstepError
from everstep.ledger import IncidentDetail, Ledger, MachineState
from everstep.machine.client import AgentClient, AgentUnreachable
from everstep.secrets import Secrets
from tests.support import judge
from tests.support.counting import POLICY
from tests.support.world import END_LIMIT_S, World, running, until

MACHINES = 4
PROGRAM = Path(__file__).with_name("program.py")
FLEET = """
machines: {register_interval: 500ms}
detection: {heartbeat_interval: 500ms}
probes: {host_interval: 200ms, kernel_event_hold: 4s}
"""
"""Looks are frequent, and what a kernel log said is over soon: machines are used again."""


@dataclass
class Fleet:
    """A world whose machines can be made sick."""

    world: World
    logs: Mapping[str, Path]

    def kernel_says(self, machine_id: str, *lines: str) -> None:
        """Append lines to a machine's kernel log, as the kernel would."""
        with self.logs[machine_id].open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def check_says(self, machine_id: str, name: str, **observation: Any) -> Path:
        """Let a check of the site say something about a machine."""
        folder = self.world.embedded.site_checks(machine_id)
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(observation), encoding="utf-8")
        fresh.replace(path)
        return path

    async def looked(self, machine_id: str) -> None:
        """Wait until a machine's probes have looked once more: what follows is news to them."""
        check = self.check_says(machine_id, "looked", verdict="unknown", reason="once")
        up = self.world.embedded.addresses
        token = Secrets.load(up.secrets).controller
        async with contextlib.aclosing(
            AgentClient(up.agents[machine_id], token, machine_id=machine_id)
        ) as agent:
            for gone in (False, True):

                async def seen(gone: bool = gone) -> bool:
                    info = await agent.info()
                    return gone != any(
                        s.observation.target == "looked" and s.cleared_ago_s is None
                        for s in info.observations
                    )

                await until("a look of the probes", seen)
                check.unlink(missing_ok=True)

    async def well(self) -> None:
        """Wait until no probe of any machine sees anything any more."""
        up = self.world.embedded.addresses
        token = Secrets.load(up.secrets).controller

        async def nothing() -> bool:
            for machine_id, url in up.agents.items():
                async with contextlib.aclosing(
                    AgentClient(url, token, machine_id=machine_id)
                ) as agent:
                    try:
                        info = await agent.info()
                    except AgentUnreachable:
                        return False  # it is being started again
                if any(seen.cleared_ago_s is None for seen in info.observations):
                    return False
            return True

        await until("all machines are well again", nothing)

    async def release_all(self, ledger: Ledger) -> None:
        """What a person does once a machine is repaired; back when it can be leased again."""
        await self.well()
        for row in await asyncio.to_thread(ledger.machines):
            if row.blocked_at is not None:
                await asyncio.to_thread(
                    partial(
                        ledger.release,
                        row.machine_id,
                        reason="repaired",
                        by="test",
                        now=datetime.now(UTC),
                    )
                )

        async def idle() -> bool:
            rows = await asyncio.to_thread(ledger.machines)
            return all(row.state is MachineState.IDLE for row in rows)

        await until("all machines are idle again", idle)


class Told:
    """A job of ``program.py``: two machines with one rank each, ended when the test has seen it."""

    def __init__(self, world: World, name: str, client: Client, stage: Stage) -> None:
        self.world, self.name, self.client, self.stage = world, name, client, stage
        self.folder = world.folder / name
        self.folder.mkdir()

    def spec(self) -> dict[str, Any]:
        """What is launched."""
        return {
            "name": self.name,
            "command": [sys.executable, str(PROGRAM), str(self.folder)],
            "machines": 2,
            "ranks_per_machine": 1,
            "policy": POLICY,
        }

    def order(self, rank: int, **parts: Any) -> None:
        """Let a rank do something, once."""
        path = self.folder / f"rank-{rank}.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(parts), encoding="utf-8")
        fresh.replace(path)

    async def running(self, generation: int = 1) -> tuple[str, ...]:
        """Wait until all ranks of a run have begun; the machines of rank 0 and rank 1."""

        async def begun() -> bool:
            sight = await self.stage.sight()
            return sight is not None and sight.generation >= generation and len(sight.answered) == 2

        await until(f"ranks of {self.name}", begun)
        status = await self.client.status(self.name)
        return status.machines

    async def pids(self) -> dict[int, int]:
        """Processes of the ranks."""
        return await self.stage.pids()

    async def incident(self, decisions: int = 1) -> IncidentDetail:
        """Wait for the first incident with so many decisions."""
        seen: list[IncidentDetail] = []

        async def there() -> bool:
            seen[:] = await asyncio.to_thread(judge.details, self.stage.ledger, self.name)
            return bool(seen) and len(seen[0].decisions) >= decisions

        await until(f"an incident of {self.name}", there)
        return seen[0]

    async def finish(self) -> None:
        """Let all ranks end well, unless the job has ended."""
        (self.folder / "done").touch()
        status = await self.stage.status()
        if status is not None and status.phase is JobPhase.WAITING_FOR_PERSON:
            await self.client.cancel(self.name, reason="seen")
        await self.client.wait(self.name, timeout_s=END_LIMIT_S, poll_s=0.1)


@contextlib.asynccontextmanager
async def told(fleet: Fleet, name: str) -> AsyncIterator[Told]:
    """Launch a job of the program; nothing of it goes on afterwards, and all machines are well."""
    world = fleet.world
    client = await world.embedded.client()
    stage = Stage(world.embedded, client, name, world.folder)
    job = Told(world, name, client, stage)
    await client.launch(job.spec())
    try:
        yield job
        await job.finish()
    except BaseException:
        with contextlib.suppress(EverstepError, TimeoutError):
            await client.cancel(name, reason="the test is over")
            await client.wait(name, timeout_s=30, poll_s=0.1)
        raise
    finally:
        try:
            await fleet.release_all(stage.ledger)
        finally:
            await stage.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def fleet(tmp_path_factory: Any) -> AsyncIterator[Fleet]:
    """Four machines with two slots each, one controller."""
    folder = tmp_path_factory.mktemp("t")
    policy = folder / "fleet.yaml"
    policy.write_text(FLEET, encoding="utf-8")
    names = [f"machine-{n}" for n in range(1, MACHINES + 1)]
    logs = {name: folder / f"{name}.kernel.log" for name in names}
    for path in logs.values():
        path.touch()
    flags = {name: ("--kernel-log", str(path)) for name, path in logs.items()}
    async with running(
        folder, machines=MACHINES, policy=policy, probes="kernel_log,oom", agent_flags=flags
    ) as world:
        yield Fleet(world, logs)
