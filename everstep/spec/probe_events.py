"""A probe's observation as the data of an event, and back: small, and never an error.

Agents of another version, or sick ones, may send anything; what cannot be read is no observation.
Not here: the event itself (``agent_api``), and what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypeVar

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Confidence, Symptom, Verdict

REASON_CHARS_MAX = 300
NAME_CHARS_MAX = 64
VALUES_CHARS_MAX = 400
VALUE_CHARS_MAX = 120
VALUES_MAX = 16

W = TypeVar("W", bound=StrEnum)


def bounded(observation: Observation) -> Observation:
    """The observation cut to what an event, a report and a history can carry."""
    return replace(
        observation,
        probe=observation.probe[:NAME_CHARS_MAX],
        target=observation.target[:NAME_CHARS_MAX],
        rule=observation.rule[:NAME_CHARS_MAX],
        reason=" ".join(observation.reason.split())[:REASON_CHARS_MAX],
        values=_bounded_values(observation.values),
    )


def _bounded_values(values: Mapping[str, Value]) -> dict[str, Value]:
    kept: dict[str, Value] = {}
    room = VALUES_CHARS_MAX
    for name, value in list(values.items())[:VALUES_MAX]:
        plain = value
        if isinstance(value, str):
            plain = value[:VALUE_CHARS_MAX]
        elif isinstance(value, float) and not math.isfinite(value):
            plain = repr(value)
        room -= len(name) + len(str(plain)) + 6
        if room < 0:
            break
        kept[name[:NAME_CHARS_MAX]] = plain
    return kept


def event_data(observation: Observation) -> dict[str, Any]:
    """The ``data`` of a PROBE event; its ``reason`` is the observation's own."""
    small = bounded(observation)
    return {
        "probe": small.probe,
        "target": small.target,
        "verdict": small.verdict.value,
        "symptom": small.symptom.value if small.symptom else None,
        "action": small.action.value if small.action else None,
        "confidence": small.confidence.value,
        "rule": small.rule,
        "values": dict(small.values),
    }


def observation_of(reason: str, data: Mapping[str, Any]) -> Observation | None:
    """The observation in a PROBE event's reason and data; None where there is none."""
    probe = data.get("probe")
    verdict = _word(Verdict, data.get("verdict"))
    if not isinstance(probe, str) or not probe or verdict is None:
        return None
    values = data.get("values")
    return bounded(
        Observation(
            probe=probe,
            verdict=verdict,
            reason=reason,
            target=_text(data.get("target")),
            rule=_text(data.get("rule")),
            symptom=_word(Symptom, data.get("symptom")),
            action=_word(Action, data.get("action")),
            # Whoever does not say how sure it is, is not.
            confidence=_word(Confidence, data.get("confidence")) or Confidence.LOW,
            values=_plain(values) if isinstance(values, Mapping) else {},
        )
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _word(words: type[W], value: Any) -> W | None:
    try:
        return words(value)
    except ValueError:
        return None


def _plain(values: Mapping[Any, Any]) -> dict[str, Value]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(name, str) and (value is None or isinstance(value, (str, int, float, bool)))
    }
