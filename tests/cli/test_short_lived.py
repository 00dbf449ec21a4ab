"""Commands that end right after they have talked to a server must not be aborted by its SDK."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import partial

import pytest
from temporalio.testing import WorkflowEnvironment

from tests.cli.conftest import Shell


def counts(
    shell: Shell, server: WorkflowEnvironment, *arguments: str, times: int
) -> dict[int, int]:
    """How often a command ended with which code."""
    address = server.client.service_client.config.target_host
    seen: dict[int, int] = {}
    for _ in range(times):
        code = shell.run(*arguments, EVERSTEP_TEMPORAL_ADDRESS=address).code
        seen[code] = seen.get(code, 0) + 1
    return seen


async def test_a_short_command_ends_as_it_says(shell: Shell, server: WorkflowEnvironment) -> None:
    assert counts(shell, server, "status", "nobody", times=10) == {4: 10}


@pytest.mark.slow
async def test_many_launches_end_with_0(
    shell: Shell, server: WorkflowEnvironment, worker: None
) -> None:
    path = shell.home / "job.yaml"
    path.write_text("name: job\ncommand: 'true'\n")
    launch = partial(counts, shell, server, "launch", str(path), times=15)
    assert await asyncio.to_thread(launch) == {0: 15}


def test_leaving_writes_everything_and_skips_the_teardown() -> None:
    code = (
        "import atexit, sys; from everstep.short_lived import leave;"
        "atexit.register(print, 'teardown'); sys.stdout.write('whole'); leave(7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (done.returncode, done.stdout) == (7, "whole")
