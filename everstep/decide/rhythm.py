"""How long a script that says little may be silent, judged by how it has been so far.

For scripts without the trainer library, whose steps and phases are only known from what they
print, and which cannot declare that they evaluate. Everything is in seconds of one clock of the
caller, and belongs to one run: a restart begins anew.

Not here: the rhythm of library users, who declare their sections (``everstep.machine.monitor``).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

GAPS = 64
GAPS_MIN = 3
QUANTILE = 0.9
PAUSE_FACTOR = 2
"""A run that came back from a pause may pause for twice as long: evaluation recurs."""

BURSTS_MIN = 20
STEADY_S = 600.0
"""Output counts as regular after so many bursts over so long: start-up is chatty everywhere."""
SILENCE_FACTOR = 3
"""Silence is also so many times the longest gap ever: rare output is regular in its own way."""


def quantile(values: deque[float] | list[float], share: float) -> float:
    """A value of the list, so that ``share`` of them are not above it."""
    ordered = sorted(values)
    return ordered[math.ceil(share * (len(ordered) - 1))]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long, and since when."""

    since_s: float
    limit_s: float


@dataclass(slots=True)
class StepRhythm:
    """The gaps between step lines, as they become visible.

    Frameworks print every so many steps and output may be buffered, so what counts is the time
    between *arrivals*, not the time of a step.
    """

    floor_s: float
    """No hang below this."""
    factor: float
    """A hang is so many usual gaps."""
    first_s: float
    """As long as the rhythm is not known."""
    phase_s: float
    """For a phase that was announced ("eval", "save"), and the most that pauses may teach."""
    gap_s: float | None = None
    """Usual gap that an agent before this one has learned."""
    pause_s: float = 0.0
    """Longest gap, likewise."""
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS))
    _last_s: float | None = None
    _moved_s: float | None = None
    _in_phase: bool = False

    def stepped(self, now_s: float) -> None:
        """A line with a new step is there."""
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            self.pause_s = max(self.pause_s, gap_s)
            if not self._in_phase:
                self._gaps.append(gap_s)
                if len(self._gaps) >= GAPS_MIN:
                    self.gap_s = quantile(self._gaps, QUANTILE)
        self._last_s = self._moved_s = now_s
        self._in_phase = False

    def announced(self, now_s: float) -> None:
        """A line that says that something else goes on now."""
        self._moved_s, self._in_phase = now_s, True

    def excuse(self, seconds: float) -> None:
        """Nobody could look for so long: that time does not count."""
        if self._moved_s is not None:
            self._moved_s += seconds
        if self._last_s is not None:
            self._last_s += seconds

    def patience(self) -> Patience | None:
        """What may go by without a step; None before the first one."""
        if self._moved_s is None:
            return None
        limit_s = max(self.floor_s, min(PAUSE_FACTOR * self.pause_s, self.phase_s))
        if self.gap_s is None:
            limit_s = max(limit_s, self.first_s)
        else:
            limit_s = max(limit_s, self.factor * self.gap_s)
        return Patience(self._moved_s, max(limit_s, self.phase_s) if self._in_phase else limit_s)


@dataclass(slots=True)
class OutputRhythm:
    """The gaps between bursts of output of a script that prints no steps."""

    after_s: float
    factor: float
    told: bool = False
    _bursts: int = 0
    _first_s: float | None = None
    _last_s: float | None = None
    _longest_s: float = 0.0
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS))

    def wrote(self, now_s: float) -> bool:
        """Something was written.

        Returns:
            True when a silence that was told is over.
        """
        over, self.told = self.told, False
        if self._first_s is None:
            self._first_s = now_s
        if self._last_s is not None:
            self._gaps.append(now_s - self._last_s)
            self._longest_s = max(self._longest_s, now_s - self._last_s)
        self._last_s = now_s
        self._bursts += 1
        return over

    def excuse(self, seconds: float) -> None:
        """Nobody could look for so long: that time does not count."""
        if self._last_s is not None:
            self._last_s += seconds

    def patience(self) -> Patience | None:
        """What may go by in silence; None while the output is not known to be regular."""
        if self._first_s is None or self._last_s is None or self._bursts < BURSTS_MIN:
            return None
        if self._last_s - self._first_s < STEADY_S:
            return None
        usual_s = self.factor * quantile(self._gaps, QUANTILE)
        return Patience(self._last_s, max(self.after_s, usual_s, SILENCE_FACTOR * self._longest_s))

    def silent(self, now_s: float) -> Patience | None:
        """The limit that has been passed, once for each silence."""
        patience = self.patience()
        if self.told or patience is None or now_s - patience.since_s <= patience.limit_s:
            return None
        self.told = True
        return patience
