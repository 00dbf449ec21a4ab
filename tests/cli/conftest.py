"""Fixtures: an environment in which nothing names a server, and a real Temporal server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from everstep.client import Client
from everstep.connect import find_places
from everstep.spec import messages as m
from tests.cli.answering import Answering
from tests.support.server import dev_server

LIMIT_S = 60.0
NAMED = ("EVERSTEP_", "TEMPORAL_", "XDG_STATE_HOME", "NO_COLOR")


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """Its error, which has to be one line and no traceback."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: "), self.err
        return lines[0]


@dataclass(slots=True)
class Shell:
    """Runs ``everstep`` as a person would: a process of its own, nothing set that names a place."""

    home: Path

    def env(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(NAMED)}
        return {**kept, "HOME": str(self.home), **more}

    def run(self, *arguments: str, cwd: Path | None = None, **env: str) -> Ran:
        done = subprocess.run(
            [*command(), *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env=self.env(**env),
            cwd=cwd or self.home,
        )
        return Ran(done.returncode, done.stdout, done.stderr)


def command() -> list[str]:
    """The console script, without depending on where it was installed."""
    return [sys.executable, "-P", "-m", "everstep.cli"]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    home = tmp_path / "home"
    home.mkdir()
    return Shell(home)


@pytest.fixture
async def server() -> AsyncIterator[WorkflowEnvironment]:
    """A Temporal server with Everstep's search attributes and no controller."""
    environment = await dev_server()
    try:
        yield environment
    finally:
        await environment.shutdown()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, for whoever needs one to look at."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
async def client(server: WorkflowEnvironment) -> AsyncIterator[Client]:
    address = server.client.service_client.config.target_host
    async with await Client.connect(find_places(temporal=address, env={})) as connected:
        yield connected


@pytest.fixture
async def worker(client: Client) -> AsyncIterator[None]:
    async with Worker(
        client.temporal,
        task_queue=m.TASK_QUEUE,
        workflows=[Answering],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        yield
