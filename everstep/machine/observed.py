"""One fact about a run that is worth an event, before it has become one.

Not here: finding facts (``monitor`` and its neighbours), and saying them (``reporter``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from everstep.spec.agent_api import EventKind

NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One fact worth an event."""

    kind: EventKind
    rank: int | None
    reason: str
    data: dict[str, Any] = field(default_factory=dict)
    at_ns: int | None = None
