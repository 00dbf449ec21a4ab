"""A world of agents with a kernel log of their own each, and what a test writes into it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest_asyncio

from everstep.ledger import Ledger, MachineState
from tests.support.world import World, running, until

MACHINES = 4
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

    async def release_all(self, ledger: Ledger) -> None:
        """What a person does once a machine is repaired; back when it can be leased again."""
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
        folder, machines=MACHINES, policy=policy, probes="kernel_log", agent_flags=flags
    ) as world:
        yield Fleet(world, logs)
