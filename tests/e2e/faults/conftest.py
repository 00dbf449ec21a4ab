"""One running world for a module, shared by its tests; each test has a job of its own in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

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
