"""What a watch makes of the machines' probes: trouble, a warning, or evidence for later.

A fault of the machine itself that is sure and calls for its eviction is trouble at once. Everything
else goes on: it is told once, kept beside, and joins the evidence of whatever happens to the run
later. Unknown is neither.

Not here: the fold of the run's own events (``activities.watching``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from activities.troubles import Troubles
from activities.watch_views import MachineView, bounded_data, observed
from everstep.decide.machine_faults import only_slowed
from everstep.decide.observation import Observation
from everstep.decide.reports import Seen
from everstep.decide.words import Verdict
from everstep.spec import agent_api as api
from everstep.spec import messages as m
from everstep.spec.probe_events import event_data, observation_of

BESIDE_MAX = 48
"""Observations kept beside, of a whole shard: faults before the rest, newer before older."""
BESIDE_KEPT_S = 600.0
"""How long they are evidence of what follows."""

Effect = Literal["trouble", "gone", "warning", "beside"]
Key = tuple[str, str, str, str]


def key_of(machine_id: str, observation: Observation) -> Key:
    """What an observation is about: the same for its beginning and its end."""
    rule = "" if observation.verdict is Verdict.UNKNOWN else observation.rule
    return (machine_id, observation.probe, observation.target, rule)


@dataclass(slots=True)
class _Kept:
    record: m.ObservationRecord
    observation: Observation
    at: float
    """When it was received, by the receiver's clock."""
    cleared_at: float | None = None

    @property
    def gone(self) -> bool:
        return self.cleared_at is not None


@dataclass(slots=True)
class Beside:
    """Observations of one shard that were no reason to stop."""

    troubles: Troubles
    warn: Callable[[m.ObservationRecord], None]
    generation: int
    told: Collection[str] = ()
    """What the job has recorded already, in the words of ``ObservationRecord.told_as``."""
    _kept: dict[Key, _Kept] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    def event(self, view: MachineView, line: api.EventLine, now: float) -> bool:
        """A word about the machine itself, unless the state that was asked for since says more.

        Returns:
            True when it was trouble, the end of one, or a warning.
        """
        observation = observation_of(line.reason, line.data)
        outdated = view.known_at is not None and now - line.age_s < view.known_at
        return (
            observation is not None
            and not outdated
            and self._probe(view, observation, line.age_s, now)
        )

    def state(self, view: MachineView, seen: Sequence[Seen], now: float) -> None:
        """What probes see at present: begins what was not told, ends what is not there."""
        view.known_at = now if view.asked_at is None else view.asked_at
        here = [one for one in seen if one.cleared_ago_s is None]
        for one in here:
            self._probe(view, one.observation, one.age_s, now)
        still = {_what(one.observation) for one in here}
        for key in self.troubles:
            kind, machine_id, _, what = key
            mine = kind == api.EventKind.PROBE and machine_id == view.ref.machine_id
            if mine and what not in still:
                self.troubles.drop(key)
        for (machine_id, *names), kept in self._kept.items():
            mine = machine_id == view.ref.machine_id
            if mine and not kept.gone and "/".join(names) not in still:
                kept.cleared_at = now

    def _probe(self, view: MachineView, observation: Observation, age_s: float, now: float) -> bool:
        effect, record = self._take(view, observation, age_s, now)
        kind, what = api.EventKind.PROBE, _what(observation)
        if effect == "trouble":
            data = event_data(observation)
            self.troubles.add(view, kind, None, observation.reason, data, age_s, now, what)
        else:
            self.troubles.drop((kind.value, view.ref.machine_id, None, what))
            if effect == "warning":
                self.warn(record)
        return effect != "beside"

    def _take(
        self, view: MachineView, observation: Observation, age_s: float, now: float
    ) -> tuple[Effect, m.ObservationRecord]:
        """One observation: what it is, and how it is written down."""
        key = key_of(view.ref.machine_id, observation)
        record = written(view.ref.machine_id, observation, age_s)
        if observation.verdict is Verdict.HEALTHY:
            if (kept := self._kept.get(key)) is not None:
                kept.cleared_at = now - age_s if kept.cleared_at is None else kept.cleared_at
            return "gone", record
        if observation.calls_for_eviction:
            self._kept.pop(key, None)
            return "trouble", record
        self._keep(key, _Kept(record, observation, now), now)
        if observation.verdict is Verdict.UNKNOWN or not self._is_news(record):
            return "beside", record
        return "warning", record

    def signal(self, view: MachineView, line: api.EventLine) -> bool:
        """A signal of the job itself: on record once a run.

        Returns:
            True when it is trouble instead: steps take longer, and one machine is slowed down.
        """
        if line.kind is api.EventKind.STEP_TIME_DECLINE:
            here = [(key[0], kept.observation) for key, kept in self._kept.items() if not kept.gone]
            if only_slowed(here) is not None:
                return True
        record = observed(view, line.kind, line.rank, line.reason, line.data, line.age_s)
        if self._is_news(record):
            self.warn(record)
        return False

    def _is_news(self, record: m.ObservationRecord) -> bool:
        """True once for each thing that a warning can be about."""
        word = record.told_as(self.generation)
        if word in self.told or word in self._warned:
            return False
        self._warned.add(word)
        return True

    def _keep(self, key: Key, new: _Kept, now: float) -> None:
        self._kept[key] = new
        for old in [k for k, kept in self._kept.items() if now - kept.at > BESIDE_KEPT_S]:
            if self._kept[old].gone:
                del self._kept[old]
        while len(self._kept) > BESIDE_MAX:
            del self._kept[min(self._kept, key=lambda k: _weight(self._kept[k]))]

    def records(self, now: float) -> list[m.ObservationRecord]:
        """All that is kept, with present ages, and what has gone as such; the weightiest first."""
        return [_aged(one, now) for one in sorted(self._kept.values(), key=_weight, reverse=True)]


def _weight(kept: _Kept) -> tuple[bool, bool, float]:
    return (kept.observation.verdict is Verdict.FAULTY, not kept.gone, kept.at)


def _aged(kept: _Kept, now: float) -> m.ObservationRecord:
    data = kept.record.data
    if kept.cleared_at is not None:
        data = data | {m.CLEARED_AGO_S: round(max(0.0, now - kept.cleared_at), 3)}
    age_s = round(kept.record.age_s + now - kept.at, 3)
    return kept.record.model_copy(update={"age_s": age_s, "data": data})


def written(machine_id: str, observation: Observation, age_s: float) -> m.ObservationRecord:
    """An observation as it is recorded."""
    return m.ObservationRecord(
        kind=api.EventKind.PROBE,
        verdict=observation.verdict,
        machine_id=machine_id,
        age_s=max(0.0, age_s),
        reason=observation.reason,
        data=bounded_data(event_data(observation)),
    )


def _what(observation: Observation) -> str:
    return "/".join(key_of("", observation)[1:])
