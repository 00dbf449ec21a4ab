"""What people do to a job: pause, resume, cancel, launch twice, launch with Temporal's own CLI."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from everstep.decide.words import JobPhase, RunOutcome
from everstep.errors import SameNameOtherSpec
from everstep.spec.messages import TASK_QUEUE, TRAINING_JOB, job_workflow_id
from tests.support.counting import Counter
from tests.support.world import World, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="package"),
]


async def program(name: str, *arguments: str, cwd: Path) -> str:
    """Run a program of this environment as a person would, elsewhere than in the checkout."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / name),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, (out.decode(), err.decode())
    return out.decode()


async def test_pause_and_resume(world: World) -> None:
    counter = Counter("pause", world.folder, steps=150)
    async with world.job(counter) as job:
        await job.at_step(5)
        await job.client.pause(counter.name, reason="lunch", by="test")
        status = await job.in_phase(JobPhase.PAUSED)
        assert "lunch" in status.reason
        assert world.ranks(counter.name) == []
        row = job.stage.ledger.job(counter.name)
        assert row is not None
        assert len(row.machines) == 2  # it keeps them
        paused_at = counter.reached()
        assert paused_at < counter.steps - 1
        await job.client.resume(counter.name, by="test")
        # A person's pause is no incident.
        assert await job.succeeded() == []
        first, second = await job.runs()
        assert (first.outcome, second.outcome) == (RunOutcome.STOPPED, RunOutcome.SUCCEEDED)
        assert second.start_reason == "resume"


async def test_cancel_ends_ranks_and_gives_machines_back(world: World) -> None:
    counter = Counter("cancel", world.folder, steps=2000)
    async with world.job(counter) as job:
        await job.at_step(5)
        await job.client.cancel(counter.name, reason="wrong data", by="test")
        result = await job.ended()
        assert result.phase is JobPhase.CANCELLED
        assert "wrong data" in result.reason
        assert [run.outcome for run in await job.judged()] == [RunOutcome.STOPPED]
        assert await job.incidents() == []
        assert counter.problems(await job.runs()) == []
        assert not counter.out.exists()


async def test_same_launch_twice_is_one_job(world: World) -> None:
    counter = Counter("twice", world.folder, steps=40)
    async with world.job(counter, launch=False) as job:
        answers = await asyncio.gather(*(job.client.launch(counter.spec()) for _ in range(3)))
        assert sorted(answer.already for answer in answers) == [False, True, True]
        with pytest.raises(SameNameOtherSpec):
            await job.client.launch(counter.spec() | {"ranks_per_machine": 1})
        await job.succeeded()
        assert len(await job.runs()) == 1
        assert (await job.client.launch(counter.spec())).already


async def test_raw_temporal_start_and_status(world: World) -> None:
    counter = Counter("raw", world.folder, steps=150)
    file = world.folder / "raw.json"
    file.write_text(json.dumps(counter.spec()))
    async with world.job(counter, launch=False) as job:
        await program(
            "temporal",
            *("workflow", "start", "--address", world.embedded.addresses.temporal),
            *("--type", TRAINING_JOB, "--task-queue", TASK_QUEUE),
            *("--workflow-id", job_workflow_id(counter.name), "--input-file", str(file)),
            cwd=world.folder,
        )

        async def shown() -> bool:
            arguments = ("status", counter.name, "-o", "json", "--state", str(world.state))
            status = json.loads(await program("everstep", *arguments, cwd=world.folder))
            assert status["job_id"] == counter.name
            # On a busy box the job may be over before a command has looked twice.
            return status["phase"] in ("running", "succeeded")

        await until("the job to run", shown)
        assert await job.succeeded() == []
        # Launching what was started raw is still one job.
        assert (await job.client.launch(counter.spec())).already
