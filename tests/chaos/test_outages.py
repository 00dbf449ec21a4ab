"""Outages of seconds; those of ten minutes are ``python -m tests.sweep --outages``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ledger.postgres import NoPostgres
from tests.sweep.outages import play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def test_server_is_away_for_twenty_seconds(tmp_path: Path) -> None:
    await play("server", ["training"], tmp_path, 20)


@pytest.mark.postgres
async def test_database_is_away(tmp_path: Path) -> None:
    try:
        await play("database", ["training", "recovery"], tmp_path, 3)
    except NoPostgres as reason:
        pytest.skip(f"no PostgreSQL can run here: {reason}")
