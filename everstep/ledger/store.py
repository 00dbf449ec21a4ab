"""``Ledger``: the one door to the database of machines, runs, incidents and decisions.

Methods are synchronous and thread-safe; each is one transaction and idempotent, so that an activity
may repeat it after any failure. Call them through ``asyncio.to_thread``.
"""

from __future__ import annotations

from pathlib import Path

from everstep.ledger import schema
from everstep.ledger.database import PATIENCE_S, Database
from everstep.ledger.files import MOUNTINFO
from everstep.ledger.incidents import Incidents
from everstep.ledger.jobs import Jobs
from everstep.ledger.machines import Machines
from everstep.ledger.policies import Policies
from everstep.ledger.runs import Runs


class Ledger(Machines, Jobs, Runs, Incidents, Policies):
    """A ledger in a SQLite file or a PostgreSQL database."""

    def __init__(
        self, url: str, *, mountinfo: Path = MOUNTINFO, patience_s: float = PATIENCE_S
    ) -> None:
        """Name the database; nothing is opened before the first call.

        Args:
            url: ``sqlite:////absolute/path/ledger.db`` or ``postgresql://user@host/database``.
            mountinfo: where the system says what lies on which file system.
            patience_s: how long a call tries again while the database is busy or away.

        Raises:
            LedgerError: the URL is neither.
        """
        super().__init__(Database(url, mountinfo=mountinfo, patience_s=patience_s))

    @property
    def where(self) -> str:
        """The ledger's place, without credentials: for messages."""
        return self._database.where

    def migrate(self) -> str:
        """Create the schema or bring it up to this version; see ``schema.migrate``."""
        return schema.migrate(self._database)

    def check(self, *, thorough: bool = False) -> str:
        """Verify that the ledger is there and of this version; see ``schema.check``."""
        return schema.check(self._database, thorough=thorough)

    def close(self) -> None:
        """Give the database connections back."""
        self._database.close()
