"""Fixtures of the end-to-end tests: one running Everstep for each module that asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.world import World, running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A server, a controller and two machines, shared by the jobs of one module."""
    async with running(tmp_path_factory.mktemp("w")) as made:
        yield made
