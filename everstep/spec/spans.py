"""Counts and times as policies bound them; shared by the modules of the policy."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, Field

from everstep.spec.base import Duration

Count = Annotated[int, Field(ge=0, le=100_000)]
_SHORTEST = timedelta(milliseconds=1)
_LONGEST = timedelta(days=365)


def _not_for_ever(value: timedelta) -> timedelta:
    if value > _LONGEST:
        raise ValueError("it must be 8760h (a year) or less")
    return value


def _not_nothing(value: timedelta) -> timedelta:
    if value < _SHORTEST:
        raise ValueError("it must be 1ms or more")
    return value


Wait = Annotated[Duration, AfterValidator(_not_for_ever)]
"""A time that may be 0s: nothing is waited for then."""
Span = Annotated[Duration, AfterValidator(_not_for_ever), AfterValidator(_not_nothing)]
"""A time that cannot be nothing: an interval, or a limit that would always be passed."""
