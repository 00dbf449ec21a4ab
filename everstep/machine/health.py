"""What this machine's probes see: said once when it changes, and there to be asked at any time.

A fault has a beginning and an end, and both are events; what a probe says again and again in
between only refreshes figures. *Unknown* ends no fault: a probe that cannot look any more has not
seen it go. What was seen outlives the agent, so that its successor neither repeats an event nor
forgets how long a fault has lasted.

Not here: looking (``everstep.machine.probes``), and what follows (``everstep.decide``).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import structlog

from everstep.decide.observation import Observation
from everstep.decide.reports import Seen
from everstep.decide.words import Action, Verdict
from everstep.machine.proc import boot_id
from everstep.spec.agent_api import EventKind
from everstep.spec.probe_events import bounded, event_data, observation_of

SEEN_MAX = 8
"""Observations in one answer: a report of 256 machines has to fit into one payload."""
KEPT_MAX = 64
"""Observations that are kept: a probe with ever new targets or rules must not fill the memory."""
CLEARED_KEPT_S = 600.0
"""How long what has gone is still told: it may explain a failure that follows."""
EVENTS_MAX, EVENTS_WINDOW_S = 10, 600.0
"""Events about one thing within a window; what flaps more often is only kept as state."""

Key = tuple[str, str, str]
log = structlog.get_logger(__name__)


class Health(Protocol):
    """What others ask of a ``HealthBoard``."""

    def seen(self) -> tuple[Seen, ...]:
        """What is not healthy, or was not until lately."""

    def healthy_probes(self) -> tuple[str, ...]:
        """Probes that found everything well."""

    async def look_again(self, limit_s: float) -> None:
        """Let all probes look now, for no longer than the limit."""


class NoProbes:
    """The health of a machine that nobody looks at: nothing is known."""

    def seen(self) -> tuple[Seen, ...]:
        """Nothing."""
        return ()

    def healthy_probes(self) -> tuple[str, ...]:
        """None."""
        return ()

    async def look_again(self, limit_s: float) -> None:
        """Nobody looks."""


@dataclass(slots=True)
class _Entry:
    observation: Observation
    since_s: float
    cleared_s: float | None = None
    renewed_s: float | None = None
    told_s: list[float] = field(default_factory=list)
    """When events about it were emitted."""

    @property
    def importance(self) -> tuple[bool, bool, bool]:
        """How much it matters."""
        here = self.cleared_s is None
        evict = self.observation.action is Action.EVICT_MACHINE
        return (here, evict, self.observation.verdict is Verdict.FAULTY)

    @property
    def weight(self) -> tuple[tuple[bool, bool, bool], float]:
        """What is told first when there is not room for all: the newest of what matters most."""
        return (self.importance, self.since_s)


class HealthBoard:
    """The newest of every observation. ``take`` may be called from any thread."""

    def __init__(
        self,
        path: Path,
        emit: Callable[..., None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[Key, _Entry] = {}
        self._looked: dict[str, bool] = {}
        """Probes that have looked since this agent started, and whether all was well."""
        self._recall()

    # --- what comes in -------------------------------------------------------------------------

    def take(self, probe: str, observations: Sequence[Observation]) -> None:
        """All that one look of a probe has yielded: it replaces what the probe saw before."""
        now_s = self._clock()
        with self._lock:
            found = {o.key: bounded(o) for o in observations}
            bad = [key for key, o in found.items() if o.verdict is not Verdict.HEALTHY]
            changed = False
            for key in bad:
                changed |= self._enter(key, found[key], now_s)
            blind = {o.target for o in found.values() if o.verdict is Verdict.UNKNOWN}
            # A probe that does not come back says so about no target: it has looked at none.
            all_blind = "" in blind and len(found) == len(bad)
            well = {o.target: o.reason for o in found.values() if o.verdict is Verdict.HEALTHY}
            for key, entry in self._entries.items():
                if key[0] != probe or key in bad or entry.cleared_s is not None:
                    continue
                faulty = entry.observation.verdict is Verdict.FAULTY
                if faulty and (all_blind or key[1] in blind):
                    continue
                changed |= self._clear(entry, well.get(key[1], "not seen any more"), now_s)
            self._looked[probe] = bool(found) and all(
                o.verdict is Verdict.HEALTHY for o in found.values()
            )
            if self._drop(now_s) or changed:
                self._remember()

    def _enter(self, key: Key, observation: Observation, now_s: float) -> bool:
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(observation, now_s)
            if not self._has_room_for(entry):
                return False
            self._entries[key] = entry
            self._tell(entry, observation, now_s)
            return True
        before, entry.observation = entry.observation, observation
        if observation.values != before.values:
            entry.renewed_s = now_s
        back = entry.cleared_s is not None
        if back:
            entry.since_s, entry.cleared_s = now_s, None
        if back or _weightier(observation, before):
            self._tell(entry, observation, now_s)
            return True
        return False

    def _has_room_for(self, new: _Entry) -> bool:
        """Whether it is kept: what matters less gives way, and equals do not.

        They would push each other out, and be news again at every look.
        """
        if len(self._entries) < KEPT_MAX:
            return True
        key, lightest = min(self._entries.items(), key=lambda item: item[1].weight)
        if lightest.importance >= new.importance:
            return False
        del self._entries[key]
        return True

    def _clear(self, entry: _Entry, reason: str, now_s: float) -> bool:
        entry.cleared_s = now_s
        self._tell(entry, replace(entry.observation, verdict=Verdict.HEALTHY, reason=reason), now_s)
        return True

    def _tell(self, entry: _Entry, observation: Observation, now_s: float) -> None:
        entry.told_s = [at for at in entry.told_s if at > now_s - EVENTS_WINDOW_S]
        urgent = observation.action is Action.EVICT_MACHINE
        if len(entry.told_s) >= EVENTS_MAX and not (urgent and len(entry.told_s) < 4 * EVENTS_MAX):
            return
        entry.told_s.append(now_s)
        self._emit(
            EventKind.PROBE,
            reason=observation.reason,
            data=event_data(observation),
            at_monotonic=now_s,
        )

    def _drop(self, now_s: float) -> bool:
        gone = [
            key
            for key, entry in self._entries.items()
            if entry.cleared_s is not None and entry.cleared_s < now_s - CLEARED_KEPT_S
        ]
        for key in gone:
            del self._entries[key]
        return bool(gone)

    # --- what goes out -------------------------------------------------------------------------

    def seen(self) -> tuple[Seen, ...]:
        """What is not healthy now, or was not until lately: the weightiest first, bounded."""
        now_s = self._clock()
        with self._lock:
            entries = sorted(self._entries.values(), key=lambda e: e.weight, reverse=True)
            return tuple(
                Seen(
                    observation=entry.observation,
                    age_s=round(max(0.0, now_s - entry.since_s), 3),
                    cleared_ago_s=(
                        None
                        if entry.cleared_s is None
                        else round(max(0.0, now_s - entry.cleared_s), 3)
                    ),
                    renewed_ago_s=(
                        None
                        if entry.renewed_s is None
                        else round(max(0.0, now_s - entry.renewed_s), 3)
                    ),
                )
                for entry in entries[:SEEN_MAX]
            )

    def healthy_probes(self) -> tuple[str, ...]:
        """Probes whose last look found everything well, by name."""
        with self._lock:
            return tuple(sorted(probe for probe, well in self._looked.items() if well))[:KEPT_MAX]

    # --- over a restart of the agent -----------------------------------------------------------

    def _remember(self) -> None:
        kept = [
            {
                "reason": entry.observation.reason,
                "data": event_data(entry.observation),
                "since_s": entry.since_s,
                "cleared_s": entry.cleared_s,
            }
            for entry in self._entries.values()
        ]
        text = json.dumps({"boot_id": boot_id(), "seen": kept})
        temporary = self._path.with_suffix(".tmp")
        # A disk that does not want it costs a repeated event after a restart, no more.
        with contextlib.suppress(OSError):
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)

    def _recall(self) -> None:
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["boot_id"] != boot_id():
                return  # instants of another clock, and a machine that has begun anew
            for one in kept["seen"]:
                self._recall_one(one)
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("what probes saw before cannot be read", problem=repr(error))

    def _recall_one(self, one: dict[str, Any]) -> None:
        observation = observation_of(str(one["reason"]), one["data"])
        if observation is not None:
            cleared_s = one["cleared_s"]
            self._entries[observation.key] = _Entry(
                observation,
                float(one["since_s"]),
                None if cleared_s is None else float(cleared_s),
            )


def _weightier(new: Observation, old: Observation) -> bool:
    """True when what should be done about it has changed, not only its figures."""
    return (new.action, new.confidence, new.symptom) != (old.action, old.confidence, old.symptom)
