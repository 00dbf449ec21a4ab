"""The troubles of one shard that a watch has seen: each once, the first of every kind in front.

Not here: what is trouble (``activities.watching``, ``activities.watch_probes``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from activities.watch_views import MachineView, observed
from everstep.spec import agent_api as api
from everstep.spec import messages as m

Key = tuple[str, str, int | None, str]
"""Kind, machine, rank, and what of the machine."""


@dataclass(slots=True)
class Troubles:
    """What makes the watch return, and since when."""

    at: float | None = None
    """When the first of them came in; None: there is none."""
    _found: dict[Key, m.ObservationRecord] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._found))

    def add(
        self,
        view: MachineView,
        kind: api.EventKind,
        rank: int | None,
        reason: str,
        data: dict[str, Any],
        age_s: float,
        now: float,
        what: str = "",
    ) -> None:
        """A trouble; the same one again changes nothing."""
        key = (kind.value, view.ref.machine_id, rank, what)
        if key in self._found:
            return
        self._found[key] = observed(view, kind, rank, reason, data, age_s)
        if self.at is None:
            self.at = now

    def drop(self, key: Key) -> None:
        """It went before it was reported."""
        if self._found.pop(key, None) is not None and not self._found:
            self.at = None

    def records(self) -> tuple[list[m.ObservationRecord], list[m.ObservationRecord]]:
        """The first of each machine and kind, so that a cut hides no machine; and the others."""
        seen: set[tuple[str, str]] = set()
        first: list[m.ObservationRecord] = []
        rest: list[m.ObservationRecord] = []
        for (kind, machine, *_), record in self._found.items():
            (rest if (kind, machine) in seen else first).append(record)
            seen.add((kind, machine))
        return first, rest
