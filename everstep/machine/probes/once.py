"""One look of every probe, side by side, for a person (``everstep doctor``).

Loads little, because a command that starts in a moment uses it. Not here: looking again and again
(``runner``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from everstep.decide.observation import Observation
from everstep.decide.words import Verdict
from everstep.machine.probes.base import Probe
from everstep.machine.probes.board import RULE_FAILED, RULE_STUCK

ERROR_CHARS_MAX = 200


@runtime_checkable
class Explains(Protocol):
    """A probe that says what it did not look at; for ``doctor``, after a look."""

    def not_here(self) -> Mapping[str, str]:
        """What does not exist on this machine, and how that was seen."""
        ...

    def not_looked_at(self) -> Mapping[str, Sequence[str]]:
        """By target: what its driver or kernel does not offer."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """One look of one probe, for a person."""

    probe: str
    observations: Sequence[Observation]
    """Also when it raised or did not come back: one that is unknown."""
    took_s: float
    not_here: Mapping[str, str] = field(default_factory=dict)
    not_looked_at: Mapping[str, Sequence[str]] = field(default_factory=dict)


def run_once(
    probes: Sequence[Probe], deadline_s: float, *, clock: Callable[[], float] = time.monotonic
) -> list[Look]:
    """Let every probe look once, side by side, and close it; for ``doctor``.

    Blocks for at most ``deadline_s``; a probe that is not back then is unknown.
    """
    results: dict[str, Look] = {}
    began = time.monotonic()

    def look(probe: Probe) -> None:
        found = look_at(probe, clock())
        took_s = time.monotonic() - began
        seen = [unknown_probe(probe.name, RULE_FAILED, found)] if isinstance(found, str) else found
        explains = probe if isinstance(probe, Explains) else None
        results[probe.name] = Look(
            probe=probe.name,
            observations=seen,
            took_s=took_s,
            not_here=dict(explains.not_here()) if explains else {},
            not_looked_at=dict(explains.not_looked_at()) if explains else {},
        )
        close_probe(probe)

    threads = [threading.Thread(target=look, args=(probe,), daemon=True) for probe in probes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + deadline_s - time.monotonic()))
    done = dict(results)  # a late one must not slip in between
    took_s = time.monotonic() - began
    return [
        done.get(probe.name)
        or Look(probe.name, [unknown_probe(probe.name, RULE_STUCK, stuck_reason(took_s))], took_s)
        for probe in probes
    ]


def look_at(probe: Probe, now_s: float) -> list[Observation] | str:
    """What it sees, or why it could not look: a probe that raises is an observation."""
    try:
        return list(probe.look(now_s))
    except Exception as error:  # noqa: BLE001 - a probe that fails is an observation
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return f"the look failed: {text[:ERROR_CHARS_MAX]}"


def close_probe(probe: Probe) -> None:
    """Let it go, whatever it says to that."""
    try:
        probe.close()
    except Exception:  # noqa: BLE001 - whatever it says, it is closed
        import structlog

        structlog.get_logger(__name__).exception("a probe could not be closed", probe=probe.name)


def stuck_reason(since_s: float) -> str:
    """For a person."""
    return f"the look has not come back for {since_s:.0f} s"


def unknown_probe(probe: str, rule: str, reason: str) -> Observation:
    """A probe that could not look at anything."""
    return Observation(probe=probe, verdict=Verdict.UNKNOWN, rule=rule, reason=reason)
