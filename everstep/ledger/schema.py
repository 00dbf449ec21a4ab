"""Bringing a ledger's schema up to this version, and refusing one that does not fit.

Migrations run in one transaction that excludes all other migrations, so two controllers that start
at once do the work once. They are Alembic scripts inside the package (``migrations/``), so an
installed wheel can run them. Downgrades do not exist: restore the backup that was made before.

Not here: the tables (``tables``) and how a new migration is made (``docs/ledger.md``).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect
from sqlmodel import Session

from everstep.ledger.database import Database
from everstep.ledger.errors import LedgerError

if TYPE_CHECKING:
    # Imported only where a migration is at hand: it costs a controller that replaces a killed one
    # a quarter of its start.
    from alembic.config import Config
    from alembic.script import ScriptDirectory

HEAD = "0002"
"""The newest migration's revision; a test holds it against the scripts."""
_ALEMBIC = threading.Lock()
"""Alembic's context is a global of the process."""
VERSION_TABLE = "alembic_version"


def migrate(database: Database) -> str:
    """Create the schema or bring it up to this version; returns the revision it has then.

    Raises:
        LedgerError: the database is not ours, damaged, newer than this version, or in a place
            where a ledger must not be.
        LedgerUnavailable: it does not answer.
    """
    with _ALEMBIC:
        head = database.create(lambda connection: _upgrade(database, connection))
    database.read(lambda session: _look_for_damage(database, session.connection()))
    return head


def check(database: Database, *, thorough: bool = False) -> str:
    """Verify that the ledger is there and of this version's schema; returns its revision.

    Args:
        database: the ledger's.
        thorough: also read all of a SQLite file and look for damage (a second for each few
            hundred megabytes).

    Raises:
        LedgerError: with the reason in one line.
        LedgerUnavailable: it does not answer.
    """
    database.check_place()
    return database.read(lambda session: _check(database, session, thorough=thorough))


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "everstep.ledger:migrations")
    config.set_main_option("path_separator", "os")
    return config


def scripts() -> ScriptDirectory:
    """The migrations of this version."""
    from alembic.script import ScriptDirectory

    return ScriptDirectory.from_config(_config())


def _upgrade(database: Database, connection: Connection) -> str:
    found = _revision(database, connection)
    if found != HEAD:
        from alembic import command

        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return HEAD


def _check(database: Database, session: Session, *, thorough: bool) -> str:
    connection = session.connection()
    found = _revision(database, connection)
    if found is None:
        raise LedgerError(f"ledger {database.where}: has no tables yet; the controller makes them")
    if found != HEAD:
        raise LedgerError(
            f"ledger {database.where}: has schema {found}, this version needs {HEAD}; "
            "start a controller of this version, which migrates it"
        )
    if thorough:
        _look_for_damage(database, connection)
    return HEAD


def _look_for_damage(database: Database, connection: Connection) -> None:
    """PostgreSQL looks after its own files."""
    if database.path is None:
        return
    damage = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if damage != "ok":
        raise LedgerError(
            f"ledger {database.where}: is damaged ({' '.join(str(damage).split())[:200]}); "
            "restore it from a backup or name another file"
        )


def _revision(database: Database, connection: Connection) -> str | None:
    """The schema's revision, None for an empty database; refuses what is not ours or newer."""
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE not in tables:
        if tables:
            raise LedgerError(
                f"ledger {database.where}: holds tables of something else "
                f"({', '.join(sorted(tables)[:3])}); name an empty database"
            )
        return None
    row = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").first()  # noqa: S608 - a constant
    found = None if row is None else str(row[0])
    if found is None or found == HEAD:
        return found
    if found not in {script.revision for script in scripts().walk_revisions()}:
        raise LedgerError(
            f"ledger {database.where}: was written by a newer version of Everstep "
            f"(schema {found}, this one knows up to {HEAD}); upgrade this installation"
        )
    return found
