"""Column types that make SQLite and PostgreSQL give back the same values.

SQLite forgets time zones, PostgreSQL refuses NUL characters and non-finite numbers in JSON. Logs of
crashed processes hold NULs and a NaN incident holds NaN, so neither may stop a record.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator

RowId = BigInteger().with_variant(Integer(), "sqlite")
"""A counted primary key; SQLite counts only columns that are exactly INTEGER."""


def clean_text(text: str) -> str:
    """``text`` without what PostgreSQL cannot store: NUL and lone surrogates."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def clean_json(value: Any) -> Any:
    """``value`` with every part storable; non-finite numbers become "nan", "inf" or "-inf"."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {clean_text(str(key)): clean_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean_json(item) for item in value]
    return value


class UtcTime(TypeDecorator[datetime]):
    """An instant: aware in, aware in UTC out, on both databases. Naive values are refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """To the database: UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone; the ledger stores instants")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """From the database: aware (SQLite returns it naive, PostgreSQL in the session's zone)."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class CleanText(TypeDecorator[str]):
    """Text from outside: log lines, reasons, labels."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """To the database: storable everywhere."""
        return None if value is None else clean_text(value)


class CleanJson(TypeDecorator[Any]):
    """JSON from outside; JSONB on PostgreSQL."""

    impl = JSON().with_variant(JSONB(), "postgresql")
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002
        """To the database: storable everywhere."""
        return clean_json(value)
