"""The base of every model, and the few field types that several models share."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

import durationpy
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    StringConstraints,
)

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?$"
"""A DNS label (RFC 1123) of at most 62 characters: safe in workflow ids, paths and host names."""

JobName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
MachineId = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?$")
]
Line = Annotated[str, StringConstraints(max_length=600)]
"""One line of text for a person; bounded because it enters Temporal's history."""


class StrictModel(BaseModel):
    """What an operator or user writes: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Message(BaseModel):
    """What our own processes send each other: unknown keys are ignored, so versions can mix."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def _parse_duration(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("a duration is written like 30s, 5m or 1h30m")  # noqa: TRY004 - pydantic wants ValueError
    if isinstance(value, (int, float)):
        if value == 0:
            return timedelta(0)
        raise ValueError(f"a duration needs a unit: write {value}s, {value}m or {value}h")
    try:
        if any(sign in value[1:] for sign in "+-"):
            raise ValueError(value)
        parsed = durationpy.from_str(value)
    except Exception:  # noqa: BLE001 - the library raises several types, all mean the same
        raise ValueError("a duration is written like 500ms, 30s, 5m or 1h30m") from None
    if parsed < timedelta(0):
        raise ValueError("a duration cannot be negative")
    if parsed % timedelta(milliseconds=1):
        raise ValueError("a duration is a whole number of milliseconds")
    return parsed


Duration = Annotated[
    timedelta,
    BeforeValidator(_parse_duration),
    PlainSerializer(
        lambda d: durationpy.to_str(d) if d else "0s", return_type=str, when_used="json"
    ),
]
"""A span of time written as ``500ms``, ``30s``, ``5m`` or ``1h30m`` (units are required)."""


def _compilable(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"a regular expression is needed: {error}") from None
    return value


IS_REGEX = AfterValidator(_compilable)
"""For text that must be a regular expression of Python's ``re``; goes after limits of length."""
