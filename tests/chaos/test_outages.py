"""Outages of seconds; those of ten minutes are ``python -m tests.sweep --outages``.

Two worlds at once, since both mostly wait.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.ledger.postgres import NoPostgres
from tests.sweep.outages import play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def test_server_is_away_for_twenty_seconds_and_the_database_for_three(tmp_path: Path) -> None:
    folders = [tmp_path / "server", tmp_path / "database"]
    for folder in folders:
        folder.mkdir()
    server, database = await asyncio.gather(
        play("server", ["training"], folders[0], 20),
        play("database", ["training", "recovery"], folders[1], 3),
        return_exceptions=True,
    )
    if isinstance(server, BaseException):
        raise server
    if isinstance(database, NoPostgres):
        pytest.skip(f"the server's outage passed, but no PostgreSQL can run here: {database}")
    if isinstance(database, BaseException):
        raise database
