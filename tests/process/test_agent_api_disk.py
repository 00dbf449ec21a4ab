"""A full disk under the agent's state: nothing is started, everything can be stopped."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.machine.client import AgentRefused
from everstep.spec.agent_api import ErrorCode, EventKind, EventLine
from tests.agents import AgentProcess, make_plan, processes_of, running_agent, until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a small file system is mounted"),
]
VALID: dict[str, Any] = {"job_id": "job", "validity_s": 30.0}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 24 MiB; secrets and the agent's log lie outside it."""
    disk = tmp_path / "m1"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("needs to be allowed to mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Take the last byte."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1024 * 1024, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017 - it has to happen three times
    return path


async def refused(agent: AgentProcess, command_id: str, generation: int) -> AgentRefused:
    async with agent.client() as client:
        with pytest.raises(AgentRefused) as caught:
            await client.start_run(
                **VALID,
                generation=generation,
                command_id=command_id,
                run=make_plan(run_id=f"job-r{generation}"),
            )
    return caught.value


async def test_a_full_disk_starts_nothing_and_stops_everything(
    tmp_path: Path, small_disk: Path
) -> None:
    with running_agent(tmp_path) as agent:
        async with agent.client() as client:
            await client.start_run(**VALID, generation=1, command_id="c1", run=make_plan())
            filler = fill(small_disk)

            for number in range(3):
                refusal = await refused(agent, f"full-{number}", 2)
                assert refusal.code is ErrorCode.FAILED
                assert "\n" not in refusal.message
            assert (await client.run_state("job", 1)).ended is False
            stopped = await client.stop_run(
                **VALID, generation=1, command_id="c2", reason="test", grace_s=0, kill_wait_s=5
            )
            assert stopped.report.teardown_clean
            assert processes_of(agent.state) == []
            await client.fence_job(**VALID, generation=2, command_id="c3")
            seen = []
            async for line in client.stream():
                if isinstance(line, EventLine):
                    seen.append(line.kind)
                if EventKind.RUN_STOPPED in seen:
                    break

            filler.unlink()
            # Refused, not failed: with room again the same command is carried out.
            await client.start_run(
                **VALID, generation=2, command_id="full-0", run=make_plan(run_id="job-r2")
            )
    assert "Traceback" not in agent.log


async def test_an_agent_that_is_restarted_on_a_full_disk_still_stops(
    tmp_path: Path, small_disk: Path
) -> None:
    with running_agent(tmp_path) as first:
        async with first.client() as client:
            await client.start_run(**VALID, generation=1, command_id="c1", run=make_plan())
        fill(small_disk)
        first.kill()
        with running_agent(tmp_path) as second:
            async with second.client() as client:
                assert (await client.run_state("job", 1)).ended is False
                assert (await refused(second, "full", 2)).code is ErrorCode.FAILED
                await client.fence_job(**VALID, generation=2, command_id="c2")
                await until(lambda: not processes_of(second.state), "the fenced ranks to end")
        assert "Traceback" not in second.log
