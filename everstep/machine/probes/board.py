"""What the probes of a machine have seen so far, and what is new in what they see now.

Pure bookkeeping in the caller's time. For each target of each probe it holds the faults of the last
look, and whether the last try could look at all: "could not look" clears no fault and makes none,
the faults only grow older. Not here: threads, clocks, intervals (``runner``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from everstep.decide.observation import Observation
from everstep.decide.words import Verdict

RULE_FAILED = "probe_failed"
RULE_STUCK = "probe_stuck"


class ChangeKind(StrEnum):
    """What is new about a target."""

    FAULTY = "faulty"
    """A fault that was not there in the last look."""
    CHANGED = "changed"
    """A fault that is judged otherwise now: symptom, action or confidence."""
    CLEARED = "cleared"
    """A fault is over, or what could not be looked at can be again."""
    UNKNOWN = "unknown"
    """It cannot be looked at now, and could before."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is new."""

    kind: ChangeKind
    observation: Observation
    """What is seen now. When it is CLEARED: healthy, with the rule of what is over."""
    before: Observation | None = None
    """What it replaces; None when nothing was held about this."""


@dataclass(slots=True)
class _Entry:
    observation: Observation
    seen_s: float


@dataclass(slots=True)
class _Target:
    faults: dict[str, _Entry] = field(default_factory=dict)
    """By rule; several may hold at once."""
    plain: _Entry | None = None
    """The last healthy or unknown observation."""


class ProbeBoard:
    """The present state by probe and target."""

    def __init__(self) -> None:
        self._targets: dict[str, dict[str, _Target]] = {}

    def landed(self, probe: str, seen: Sequence[Observation], now_s: float) -> list[Change]:
        """A look has come back; it speaks for all targets of the probe.

        Targets that it does not name no longer exist on this machine.
        """
        targets = self._targets.setdefault(probe, {})
        by_target: dict[str, list[Observation]] = {}
        for observation in seen:
            by_target.setdefault(observation.target, []).append(observation)
        changes: list[Change] = []
        for name in [name for name in targets if name not in by_target]:
            changes += _over(targets.pop(name), "is not there any more")
        for name, found in by_target.items():
            changes += _replace(targets.setdefault(name, _Target()), found, now_s)
        return changes

    def failed(self, probe: str, reason: str, now_s: float) -> list[Change]:
        """A look ended with an error: unknown, and all that was held stays and grows older."""
        return self._could_not_look(probe, RULE_FAILED, reason, now_s)

    def stuck(self, probe: str, reason: str, now_s: float) -> list[Change]:
        """A look does not come back: unknown, as above."""
        return self._could_not_look(probe, RULE_STUCK, reason, now_s)

    def state(self, now_s: float) -> list[tuple[Observation, float]]:
        """All that is held, with the age in seconds of each: since it was last seen."""
        return [
            (entry.observation, max(0.0, now_s - entry.seen_s))
            for targets in self._targets.values()
            for target in targets.values()
            for entry in (*target.faults.values(), *([target.plain] if target.plain else []))
        ]

    def _could_not_look(self, probe: str, rule: str, reason: str, now_s: float) -> list[Change]:
        unknown = Observation(probe=probe, verdict=Verdict.UNKNOWN, rule=rule, reason=reason)
        target = self._targets.setdefault(probe, {}).setdefault("", _Target())
        return _replace(target, [unknown], now_s)


def _replace(target: _Target, found: Sequence[Observation], now_s: float) -> list[Change]:
    faults = {o.rule: o for o in found if o.verdict is Verdict.FAULTY}
    plain = next((o for o in found if o.verdict is not Verdict.FAULTY), None)
    changes: list[Change] = []
    before = target.plain.observation if target.plain else None
    was_unknown = before is not None and before.verdict is Verdict.UNKNOWN
    if plain is not None and plain.verdict is Verdict.UNKNOWN:
        if not was_unknown or (before is not None and before.rule != plain.rule):
            changes.append(Change(ChangeKind.UNKNOWN, plain, before))
        kept = target.faults
    else:
        healthy = plain or _healthy(found[0], "it is looked at again")
        if before is not None and was_unknown:
            changes.append(Change(ChangeKind.CLEARED, replace(healthy, rule=before.rule), before))
        kept = {}
        for rule, entry in target.faults.items():
            if rule not in faults:
                changes.append(_cleared(entry.observation, plain))
    for rule, fault in faults.items():
        old = target.faults.get(rule)
        if old is None:
            changes.append(Change(ChangeKind.FAULTY, fault))
        elif _judgement(old.observation) != _judgement(fault):
            changes.append(Change(ChangeKind.CHANGED, fault, old.observation))
    target.faults = {**kept, **{rule: _Entry(o, now_s) for rule, o in faults.items()}}
    target.plain = _Entry(plain, now_s) if plain is not None else None
    return changes


def _over(target: _Target, why: str) -> Iterable[Change]:
    for entry in target.faults.values():
        yield _cleared(entry.observation, _healthy(entry.observation, why))
    if target.plain is not None and target.plain.observation.verdict is Verdict.UNKNOWN:
        unknown = target.plain.observation
        yield _cleared(unknown, _healthy(unknown, "it is over"))


def _cleared(before: Observation, healthy: Observation | None) -> Change:
    now = healthy or _healthy(before, f"it is over: {before.reason}")
    return Change(ChangeKind.CLEARED, replace(now, rule=before.rule), before)


def _healthy(of: Observation, reason: str) -> Observation:
    return Observation(
        probe=of.probe,
        target=of.target,
        verdict=Verdict.HEALTHY,
        rule=of.rule,
        reason=f"{of.target or of.probe}: {reason}",
    )


def _judgement(observation: Observation) -> tuple[object, ...]:
    return (observation.symptom, observation.action, observation.confidence)
