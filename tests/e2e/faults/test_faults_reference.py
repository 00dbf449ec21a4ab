"""The yardstick of the other tests: what an uninterrupted job ends with, and the real PyTorch job.

The counter job's right end is computed in ``tests.support.counting``; here it is compared with a
real uninterrupted run, without which all other tests could be wrong together.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from everstep.decide.words import JobPhase
from tests.support.counting import Counter, final_sha256
from tests.support.world import World
from tests.sweep import arena

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="package"),
]


async def test_computed_end_is_that_of_a_real_uninterrupted_run(tmp_path: Path) -> None:
    assert await arena.uninterrupted(arena.counter(steps=30), tmp_path) == final_sha256(30)
    assert final_sha256(30) != final_sha256(31)


@pytest.mark.torch
async def test_weights_of_a_broken_torch_job_are_identical(world: World, tmp_path: Path) -> None:
    command = (sys.executable, "tiny_gpt/train.py", "--tiny", "--steps", "40")
    workload = dataclasses.replace(arena.tiny_gpt(), command=command)
    expected = await arena.uninterrupted(workload, tmp_path)
    counter = Counter("gpt", world.folder)
    order = counter.order("sigkill", rank=2, step=23)
    spec = counter.spec() | {
        "command": [*command, "--step-ms", "20", "--out", str(counter.out)],
        "env": {"JOB_FAULTS": str(counter.orders), "OMP_NUM_THREADS": "1"},
    }
    async with world.job(counter, launch=False) as job:
        await job.client.launch(spec)
        result = await job.ended()
        assert result.phase is JobPhase.SUCCEEDED
        first, second = await job.judged()
        assert [note["name"] for note in counter.fired()] == [order]
        assert first.restore is None
        assert second.restore is not None
        assert second.restore.step >= 9
        assert counter.sha256() == expected
