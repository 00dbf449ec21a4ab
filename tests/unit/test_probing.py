"""An agent's probes from their looks to its events: with real threads and a real ring."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from everstep.decide.observation import Observation
from everstep.decide.words import Verdict
from everstep.machine.health import HealthBoard
from everstep.machine.probes.base import Probe
from everstep.machine.probes.site import SiteProbe
from everstep.machine.probing import Probing
from everstep.machine.ring import EventRing
from everstep.spec.load import load_policy
from everstep.spec.policy import ProbesPolicy

POLICY = load_policy(None, environ={}).policy.probes
SLOW = POLICY.model_copy(update={"host_interval": POLICY.network_interval * 100})
LIMIT_S = 20.0


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not found():
            await asyncio.sleep(0.01)


def put(folder: Path) -> None:
    data = {"verdict": "faulty", "reason": "broken", "action": "evict_machine", "rule": "r"}
    (folder / "disk.json").write_text(json.dumps(data))


class World:
    def __init__(self, folder: Path, policy: ProbesPolicy) -> None:
        self.checks = folder / "checks"
        self.checks.mkdir(exist_ok=True)
        self.ring = EventRing(folder / "ring")
        self.made: list[ProbesPolicy] = []
        self.probing = Probing(HealthBoard(folder / "health.json", self.ring.emit), self.make)
        self.policy = policy

    def make(self, policy: ProbesPolicy) -> Sequence[Probe]:
        self.made.append(policy)
        return [SiteProbe(self.checks)]

    @property
    def verdicts(self) -> list[str]:
        return [event.data["verdict"] for event in self.ring.read(0).events]


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Probes that look once and then hardly ever."""
    world = World(tmp_path, SLOW)
    await world.probing.use(SLOW)
    yield world
    await world.probing.close()
    world.ring.close()


@pytest.mark.asyncio
async def test_a_look_on_demand_finds_what_is_younger_than_the_last_one(world: World) -> None:
    await world.probing.look_again(LIMIT_S)
    put(world.checks)
    await world.probing.look_again(LIMIT_S)
    # The first look may have been under way: another one begins at once then.
    await until(lambda: bool(world.probing.seen()))
    assert world.verdicts == ["faulty"]
    (world.checks / "disk.json").unlink()
    await world.probing.look_again(LIMIT_S)
    await until(lambda: world.verdicts == ["faulty", "healthy"])


@pytest.mark.asyncio
async def test_a_new_agent_tells_the_end_of_what_another_one_saw(tmp_path: Path) -> None:
    first = World(tmp_path, SLOW)
    put(first.checks)
    await first.probing.use(SLOW)
    await until(lambda: first.verdicts == ["faulty"])
    await first.probing.close()
    first.ring.close()

    second = World(tmp_path, SLOW)
    await second.probing.use(SLOW)
    await second.probing.look_again(LIMIT_S)
    assert second.verdicts == ["faulty"]
    await second.probing.close()
    second.ring.close()

    (first.checks / "disk.json").unlink()
    third = World(tmp_path, POLICY)
    await third.probing.use(POLICY)
    await until(lambda: third.verdicts == ["faulty", "healthy"])
    await third.probing.close()
    third.ring.close()


@pytest.mark.asyncio
async def test_another_policy_makes_new_probes_and_the_same_one_does_not(world: World) -> None:
    await world.probing.use(SLOW)
    assert len(world.made) == 1
    await world.probing.use(POLICY)
    assert len(world.made) == 2
    put(world.checks)
    await until(lambda: world.verdicts == ["faulty"])


class Stuck:
    """A probe that never comes back."""

    name, interval = "stuck", "host"

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    def look(self, now_s: float) -> Sequence[Observation]:
        del now_s
        while not self.let_go.is_set():
            pass_time()
        return ()

    def close(self) -> None:
        """Nothing is held."""


def pass_time() -> None:
    import time

    time.sleep(0.05)  # in the probe's own thread: it stands for a driver that hangs


@pytest.mark.asyncio
async def test_a_probe_that_hangs_is_unknown_and_holds_nobody_up(tmp_path: Path) -> None:
    ring = EventRing(tmp_path / "ring")
    stuck = Stuck()
    probing = Probing(HealthBoard(tmp_path / "health.json", ring.emit), lambda _: [stuck])
    deadline = POLICY.gpu_pulse_interval / 20
    await probing.use(POLICY.model_copy(update={"look_deadline": deadline}))
    await probing.look_again(0.05)
    await until(lambda: bool(probing.seen()))
    (seen,) = probing.seen()
    assert seen.observation.verdict is Verdict.UNKNOWN
    assert probing.healthy_probes() == ()
    stuck.let_go.set()
    await probing.close()
    ring.close()
