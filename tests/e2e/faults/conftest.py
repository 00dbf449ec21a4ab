"""One running world for a module, shared by its tests; each test has a job of its own in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support import judge
from tests.support.world import World, running


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Two machines with two slots each, one controller."""
    async with running(tmp_path_factory.mktemp("w")) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="package")
async def world(shared: World) -> AsyncIterator[World]:
    """The shared world; no test of it may get a machine evicted, or leave a rank."""
    yield shared
    assert judge.blocked(shared.ledger_url) == []
    assert shared.ranks() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes that a test may fill."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount the small disk that this test fills")
    path = tmp_path / "small-disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "everstep-test", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no small disk to fill: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)
