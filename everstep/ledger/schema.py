"""Bringing a ledger's schema up to this version, and refusing one that does not fit.

Migrations run in one transaction that excludes all other migrations, so two controllers that start
at once do the work once. They are Alembic scripts inside the package (``migrations/``), so an
installed wheel can run them. Downgrades do not exist: restore the backup that was made before.

Not here: the tables (``tables``) and how a new migration is made (``docs/ledger.md``).
"""

from __future__ import annotations

import threading

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect
from sqlmodel import Session

from everstep.ledger.database import Database
from everstep.ledger.errors import LedgerError

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
    config = Config()
    config.set_main_option("script_location", "everstep.ledger:migrations")
    config.set_main_option("path_separator", "os")
    return config


def scripts() -> ScriptDirectory:
    """The migrations of this version."""
    return ScriptDirectory.from_config(_config())


def _upgrade(database: Database, connection: Connection) -> str:
    head = _head()
    found = _revision(database, connection)
    if found != head:
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return head


def _check(database: Database, session: Session, *, thorough: bool) -> str:
    connection = session.connection()
    found, head = _revision(database, connection), _head()
    if found is None:
        raise LedgerError(f"ledger {database.where}: has no tables yet; the controller makes them")
    if found != head:
        raise LedgerError(
            f"ledger {database.where}: has schema {found}, this version needs {head}; "
            "start a controller of this version, which migrates it"
        )
    if thorough:
        _look_for_damage(database, connection)
    return head


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


def _head() -> str:
    head = scripts().get_current_head()
    if head is None:
        raise LedgerError("ledger: this installation has no migrations; install it again")
    return head


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
    found = MigrationContext.configure(connection).get_current_revision()
    if found is None:
        return None
    if found not in {script.revision for script in scripts().walk_revisions()}:
        raise LedgerError(
            f"ledger {database.where}: was written by a newer version of Everstep "
            f"(schema {found}, this one knows up to {_head()}); upgrade this installation"
        )
    return found
