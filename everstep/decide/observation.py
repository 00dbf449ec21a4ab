"""What a probe saw: the one verdict type of every real-time check.

Three-valued: *unknown* ("could not look") is never counted as either of the others. Times are not
in it: whoever keeps an observation adds its age by its own monotonic clock.

Not here: how it is seen (``everstep.machine.probes``), and what follows from it (``attribution``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.decide.words import Action, Confidence, Symptom, Verdict

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One verdict about one target on one machine.

    A probe yields one for each target it looked at, healthy ones too, so that "was looked at and is
    well" differs from "was not looked at".
    """

    probe: str
    """Which probe: ``gpu``, ``kernel_log``, ``disk``, ``link``, ...; stable."""
    verdict: Verdict
    reason: str
    """One sentence for a person, with the figures that matter."""
    target: str = ""
    """What of the machine: ``gpu 3``, ``eth0``, ``/scratch``; empty: the machine as a whole."""
    rule: str = ""
    """What decided: stable, so that tests, dashboards and sites can use it (``xid_79``)."""
    symptom: Symptom | None = None
    """Set when it is faulty."""
    action: Action | None = None
    """What to do about the machine on this evidence alone; None while it is healthy or unknown."""
    confidence: Confidence = Confidence.HIGH
    values: Mapping[str, Value] = field(default_factory=dict)
    """The evidence: quantities end in their unit (``temperature_c``)."""

    @property
    def calls_for_eviction(self) -> bool:
        """True when the machine has to go, on this evidence alone."""
        return (
            self.verdict is Verdict.FAULTY
            and self.action is Action.EVICT_MACHINE
            and self.confidence is Confidence.HIGH
        )

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is about: a later observation with the same key replaces it."""
        return (self.probe, self.target, self.rule if self.verdict is Verdict.FAULTY else "")
