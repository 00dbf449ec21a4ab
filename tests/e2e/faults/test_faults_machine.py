"""What is lost: a machine, the power of all, Temporal's database, the room on a disk.

Worlds of their own: an evicted machine stays out, and a power failure takes everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from everstep.decide.words import JobPhase, Rung, RunOutcome, Symptom
from everstep.errors import EverstepError
from everstep.ledger import MachineState
from tests.support import judge
from tests.support.counting import Counter
from tests.support.world import Job, World, running, until
from workers.embedded import TEMPORAL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

QUICK = {"detection": {"machine_lost_after": "2s"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def own(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A world that is taken apart and put together again by the tests of this module."""
    async with running(tmp_path_factory.mktemp("o")) as world:
        yield world


async def states(world: World, job: Job) -> dict[str, MachineState]:
    """What the ledger says about every machine."""
    return {row.machine_id: row.state for row in await asyncio.to_thread(job.stage.ledger.machines)}


async def test_lost_machine_is_evicted_and_replaced_by_the_standby(tmp_path: Path) -> None:
    async with running(tmp_path, machines=3) as world:
        counter = Counter("lost", tmp_path, steps=150, policy=QUICK)
        async with world.job(counter) as job:
            used = set((await job.at_step(5)).answered)
            (standby,) = set(world.embedded.machine_ids) - used
            gone = max(used)
            # Agent, shim and two ranks at least.
            assert world.embedded.power_off(gone) >= 4
            await job.trains_in(2)
            world.embedded.power_on(gone)
            incidents = await job.succeeded()
            assert len(incidents) == 1, judge.story(incidents)
            (decision,) = incidents[0].decisions
            assert decision.finding.symptom is Symptom.KERNEL_PANIC
            assert decision.finding.suspects == (gone,)
            assert (decision.decision.rung, decision.decision.evict) == (Rung.EVICT, (gone,))
            second = (await job.runs())[1]
            assert {ref.machine_id for ref in second.machines} == used - {gone} | {standby}
            assert judge.blocked(world.ledger_url) == [gone]
        # It came back, and is told that it stays out; a job that needs three machines waits.
        await job.stage.back(gone)
        counter = Counter("three", tmp_path, steps=40, machines=3)
        async with world.job(counter) as waiting:
            status = await waiting.in_phase(JobPhase.WAITING_FOR_MACHINES)
            assert "1 of 3 machines" in status.reason
            assert (await states(world, waiting))[gone] is MachineState.EVICTED
            await waiting.client.cancel(counter.name)
            assert (await waiting.ended()).phase is JobPhase.CANCELLED


async def test_power_failure_of_everything_resumes_from_the_last_checkpoint(own: World) -> None:
    world = own
    counter = Counter("power", world.folder, steps=100)
    async with world.job(counter) as job:
        await job.at_step(20)
        for part in (*world.embedded.controller_names, TEMPORAL):
            world.embedded.hold(part)
            await job.stage.killed(part)
        # Ranks of the second machine may have died of the first one's death already.
        killed = sum(world.embedded.power_off(m) for m in world.embedded.machine_ids)
        assert killed >= 5
        assert world.ranks() == []
        reached = counter.reached()
        assert reached < counter.steps - 1
        for machine_id in world.embedded.machine_ids:
            world.embedded.power_on(machine_id)
        for part in (TEMPORAL, *world.embedded.controller_names):
            world.embedded.release(part)
        incidents = await job.succeeded()
        assert len(incidents) == 1, judge.story(incidents)
        # All lost their ranks alike: no machine is to blame.
        assert [d.decision.rung for d in incidents[0].decisions] == [Rung.REATTEMPT]
        assert judge.blocked(world.ledger_url) == []
        first, second = await job.runs()
        assert (first.outcome, second.outcome) == (RunOutcome.FAILED, RunOutcome.SUCCEEDED)
        assert second.restore is not None
        # Every step is saved; the last one may not have been complete everywhere.
        assert reached - 2 <= second.restore.step <= reached


async def test_lost_temporal_database_costs_no_step(own: World) -> None:
    world = own
    counter = Counter("adopted", world.folder, steps=300)
    async with world.job(counter) as job:
        await job.at_step(20)
        pids = await job.stage.pids()
        world.embedded.hold(TEMPORAL)
        await job.stage.killed(TEMPORAL)
        for path in world.state.glob("temporal.db*"):
            path.unlink()
        world.embedded.release(TEMPORAL)
        await job.stage.back(TEMPORAL)

        async def adopted() -> bool:
            try:
                return not (await job.client.adopt(counter.name)).already
            except EverstepError:
                return False  # the new server is still coming up

        await until("the job to be adopted", adopted)
        await job.more_steps()
        assert await job.stage.pids() == pids
        await job.undisturbed()
        assert (await job.runs())[0].start_reason == "launch"


async def test_disk_full_while_saving(own: World, small_disk: Path) -> None:
    counter = Counter(
        "disk", own.folder, steps=250, step_ms=40, checkpoint_dir=small_disk / "ckpt", keep=2
    )
    async with own.job(counter) as job:
        await job.at_step(5)
        ballast = small_disk / "ballast"
        await asyncio.to_thread(fill, ballast)

        async def warned() -> bool:
            return bool(await job.incidents())

        await until("the warning", warned)
        full_at = newest(counter.checkpoints)
        await job.more_steps()
        assert newest(counter.checkpoints) == full_at
        ballast.unlink()

        async def saved() -> bool:
            return newest(counter.checkpoints) > full_at

        await until("a checkpoint after the disk was emptied", saved)
        incidents = await job.succeeded()
        assert [incident.symptom for incident in incidents] == [Symptom.DISK_FULL]
        assert incidents[0].decisions == ()
        assert [run.outcome for run in await job.runs()] == [RunOutcome.SUCCEEDED]


def newest(folder: Path) -> int:
    """Step of the newest complete checkpoint."""
    found = [path.parent.name for path in folder.glob("step-*/COMPLETE.json")]
    return max((int(name.split("-")[1].split(".")[0]) for name in found), default=-1)


def fill(path: Path) -> None:
    """Write until not even a byte fits."""
    with path.open("wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(b"\0" * size)
            except OSError:
                size //= 2
