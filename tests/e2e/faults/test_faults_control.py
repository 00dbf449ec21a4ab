"""Faults of Everstep itself: training goes on, or a recovery under way is finished by others.

Not here: long outages (``tests/sweep/outages.py``) and cut networks (``tests/chaos``).
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from everstep.decide.words import JobPhase, RunOutcome
from tests.support.counting import Counter
from tests.support.world import World
from workers.embedded import TEMPORAL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="package"),
]


async def test_agent_killed_and_back_adopts_its_ranks(world: World) -> None:
    async with world.job(Counter("agent", world.folder, steps=150)) as job:
        sight = await job.at_step(5)
        for machine_id in sight.answered:
            await job.stage.killed(machine_id)
        await job.more_steps()
        for machine_id in sight.answered:
            await job.stage.back(machine_id)
        await job.undisturbed()


async def test_agent_is_away_while_its_ranks_finish(world: World) -> None:
    counter = Counter("agent-away", world.folder, steps=100)
    async with world.job(counter) as job:
        machine_id = (await job.at_step(5)).answered[-1]
        world.embedded.hold(machine_id)
        await job.stage.killed(machine_id)
        while not counter.out.exists():
            await asyncio.sleep(0.05)
        world.embedded.release(machine_id)
        # How its ranks ended is in the shim's record.
        await job.undisturbed()


async def test_server_killed_for_a_second(world: World) -> None:
    async with world.job(Counter("server", world.folder, steps=150)) as job:
        await job.at_step(5)
        outage = asyncio.create_task(job.stage.outage(TEMPORAL, 1.0))
        await job.more_steps()
        await outage
        await job.stage.back(TEMPORAL)
        await job.undisturbed()


async def test_controller_killed_while_training(world: World) -> None:
    async with world.job(Counter("controller", world.folder, steps=150)) as job:
        await job.at_step(5)
        await job.stage.killed("controller-1")
        await job.more_steps()
        await job.stage.back("controller-1")
        await job.undisturbed()


async def test_controller_killed_in_the_middle_of_a_recovery(world: World) -> None:
    # A survivor that is stopped by a signal outlives SIGTERM: the recovery takes the whole grace,
    # and the controller is killed well inside it.
    counter = Counter(
        "recovery",
        world.folder,
        policy={"teardown": {"failure_grace": "3s", "stop_grace": "3s"}},
    )
    async with world.job(counter) as job:
        await job.at_step(5)
        await job.stage.signal_rank(3, signal.SIGSTOP)
        await job.stage.signal_rank(1, signal.SIGKILL)
        await job.in_phase(JobPhase.RECOVERING)
        await job.stage.killed("controller-1")
        # Nothing has been decided yet by the one that is dead.
        assert [run.outcome for run in await job.runs()] == [None]
        await job.stage.back("controller-1")
        incidents = await job.succeeded()
        assert [incident.rounds_total for incident in incidents] == [1]
        assert len(incidents[0].decisions) == 1
        outcomes = [run.outcome for run in await job.runs()]
        assert outcomes == [RunOutcome.FAILED, RunOutcome.SUCCEEDED]


async def test_server_killed_in_the_middle_of_a_recovery(world: World) -> None:
    counter = Counter(
        "server-recovery",
        world.folder,
        policy={"teardown": {"failure_grace": "3s", "stop_grace": "3s"}},
    )
    async with world.job(counter) as job:
        await job.at_step(5)
        await job.stage.signal_rank(3, signal.SIGSTOP)
        await job.stage.signal_rank(1, signal.SIGKILL)
        await job.in_phase(JobPhase.RECOVERING)
        await job.stage.outage(TEMPORAL, 1.0)
        await job.stage.back(TEMPORAL)
        incidents = await job.succeeded()
        assert [incident.rounds_total for incident in incidents] == [1]
        assert len(await job.runs()) == 2
