"""Triggers that refuse a change as a broken constraint, on SQLite and on PostgreSQL.

Used by migrations, so what it writes for given arguments must never change.
"""

from __future__ import annotations

from alembic import op


def refuse(name: str, table: str, event: str, condition: str, message: str) -> None:
    """Refuse ``event`` (INSERT, UPDATE, DELETE) on a row of ``table`` where ``condition`` holds."""
    quoted = message.replace("'", "''")
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH ROW WHEN {condition} "
            f"BEGIN SELECT RAISE(ABORT, '{quoted}'); END"
        )
        return
    row = "OLD" if event == "DELETE" else "NEW"
    op.execute(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF {condition} THEN RAISE EXCEPTION '{quoted}' "
        f"USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN {row}; END $$"
    )
    op.execute(
        f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()"
    )
