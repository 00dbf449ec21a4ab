"""Alembic's entry: runs migrations on the connection, and in the transaction, that it is given.

There is no ``alembic.ini`` and no offline mode: ``everstep.ledger.schema`` is the only caller, so
that a migration always holds the lock that keeps other migrations out.
"""

from __future__ import annotations

from alembic import context

from everstep.ledger.tables import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the caller's transaction, not one of Alembic's
)
context.run_migrations()
