"""The ledger's tests run on a SQLite file and on a real PostgreSQL server, one after the other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.ledger import Ledger
from everstep.ledger.tables import Table
from everstep.spec.load import load_policy, snapshot_for_job
from everstep.spec.policy import PolicySnapshot
from tests.ledger.postgres import NoPostgres, PostgresServer, postgres_server
from tests.ledger.support import Fleet

MIGRATED = "everstep_migrated"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One PostgreSQL server for the session, with one migrated database."""
    try:
        with postgres_server() as server:
            server.admin(f"CREATE DATABASE {MIGRATED}")
            ledger = Ledger(server.url(MIGRATED))
            ledger.migrate()
            ledger.close()
            yield server
    except NoPostgres as reason:
        pytest.skip(
            f"NO POSTGRESQL CAN BE STARTED HERE, its half of the tests is skipped: {reason}"
        )


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy."""
    path = tmp_path_factory.mktemp("ledger") / "migrated.db"
    ledger = Ledger(f"sqlite:///{path}")
    ledger.migrate()
    ledger.close()
    return path


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty ledger."""
    if request.param == "sqlite":
        path = tmp_path / "ledger.db"
        shutil.copyfile(request.getfixturevalue("migrated_file"), path)
        return f"sqlite:///{path}"
    server: PostgresServer = request.getfixturevalue("postgres")
    # Much quicker than a database for each test.
    server.empty(MIGRATED, [table.name for table in Table.metadata.sorted_tables])
    return server.url(MIGRATED)


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """An empty ledger."""
    opened = Ledger(url)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def policy() -> PolicySnapshot:
    """The installation's default policy."""
    return snapshot_for_job(load_policy(None), {})


@pytest.fixture
def fleet(ledger: Ledger, policy: PolicySnapshot) -> Fleet:
    """A ledger with the verbs that tests need most."""
    return Fleet(ledger, policy)
