"""Fixtures of the tests with real processes. The machine itself is in ``runs_world``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.process.runs_world import Machine


@pytest_asyncio.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    """A machine whose manager has adopted nothing yet."""
    state_dir = tmp_path / "state"
    made = Machine(state_dir)
    await made.manager.adopt()
    try:
        yield made
    finally:
        await made.end()
