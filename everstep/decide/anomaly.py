"""When the numbers of a run are wrong: spikes, slow steps, and traffic that has ceased.

Each rule belongs to one run and is fed one reading after the other, so nothing crosses a restart;
each tells its trouble once, and its end once. Seconds are of one clock of the caller. The paper
gives the factor of five and the ten minutes without traffic; windows and debounce are ours
(``docs/signals.md`` has the reasons and the rates of false alarms that were tested).

Not here: NaN, which needs no baseline, and hangs (``rhythm``).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from everstep.decide.rhythm import quantile

LOSS_FLOOR = 0.01
"""A baseline below this counts as this: five times nothing is still nothing."""
GRAD_NORM_FLOOR = 0.001
NOISE_FACTOR = 8
"""A spike is also so many (robust) standard deviations above the baseline."""
_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, for a normal distribution."""

BUCKETS = 20
"""A window of paces has so many values, however fast steps are."""
BUCKETS_SKIPPED = 2
"""The first ones of a run: compilation, caches and data loaders warm up."""

TRAFFIC_SHARE_MIN = 0.001
"""Less than this share of the usual traffic is none: links are never quite idle."""
BUSY_MIN = 5
"""Looks with traffic before its absence means anything."""


class Change(StrEnum):
    """What a reading has changed."""

    BEGUN = "begun"
    OVER = "over"


@dataclass(slots=True)
class SpikeRule:
    """A value that is many times the median of its own recent past, several readings in a row."""

    factor: float
    window: int
    sustained: int
    warmup: int
    floor: float
    told: bool = False
    baseline: float | None = None
    """The median that the last judged reading was compared with."""
    limit: float | None = None
    _past: deque[float] = field(init=False)
    _streak: int = 0

    def __post_init__(self) -> None:
        """Nothing has been seen yet."""
        self._past = deque(maxlen=self.window)

    @property
    def high(self) -> bool:
        """Whether the last reading was above the limit."""
        return self.told or self._streak > 0

    def add(self, value: float) -> Change | None:
        """Take one reading; values that are not finite are another rule's."""
        if not math.isfinite(value):
            return None
        if self.told:
            return self._while_told(value)
        self._judge()
        if self.limit is None or value < self.limit:
            self._streak = 0
            self._past.append(value)
            return None
        # High readings are no baseline: either they end soon, or they are told.
        self._streak += 1
        if self._streak < self.sustained:
            return None
        self._streak, self.told = 0, True
        return Change.BEGUN

    def _while_told(self, value: float) -> Change | None:
        self._streak = self._streak + 1 if self.limit is None or value < self.limit else 0
        if self._streak < self.sustained:
            return None
        self._streak, self.told, self.limit = 0, False, None
        self._past.clear()  # what comes after a spike is a new normal, with its own warm-up
        return Change.OVER

    def _judge(self) -> None:
        self.baseline = self.limit = None
        if not self._past or len(self._past) < min(self.warmup, self.window):
            return
        median = statistics.median(self._past)
        if median <= 0:
            return  # "five times" means nothing then
        noise = _SIGMA * statistics.median(abs(value - median) for value in self._past)
        self.baseline = median
        self.limit = max(self.factor * max(median, self.floor), median + NOISE_FACTOR * noise)


@dataclass(slots=True)
class PaceRule:
    """Steps that cost much more than in the best window of this run, for a whole window.

    Readings are averaged over buckets of a twentieth of the window. A window is slow when three
    quarters of its buckets are slower than ``factor`` times what three quarters of the best
    window's buckets kept, and by half of the usual spread more, so that single slow steps and
    noise make no difference.
    """

    factor: float
    window_s: float
    told: bool = False
    best: float | None = None
    """Three quarters of the best window's buckets cost no more than this."""
    now: float | None = None
    """Median of the present window."""
    _spread: float = 0.0
    """Mean distance between the quarters of a window, of windows that were not slow."""
    _windows: int = 0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=BUCKETS))
    _since_s: float | None = None
    _cost: float = 0.0
    _count: int = 0
    _closed: int = 0

    def add(self, now_s: float, cost: float, count: int = 1) -> Change | None:
        """Take ``count`` steps that cost ``cost`` together (seconds, or 1/MFU)."""
        if not (math.isfinite(cost) and cost > 0 and count > 0):
            return None
        if self._since_s is None:
            self._since_s = now_s
        self._cost += cost
        self._count += count
        if now_s - self._since_s < self.window_s / BUCKETS:
            return None
        value = self._cost / self._count
        self._since_s, self._cost, self._count = now_s, 0.0, 0
        return self._bucket(value)

    def interrupted(self) -> None:
        """Something else than training went on: the bucket that was open is given up."""
        self._since_s, self._cost, self._count = None, 0.0, 0

    def _bucket(self, value: float) -> Change | None:
        self._closed += 1
        if self._closed <= BUCKETS_SKIPPED:
            return None
        self._recent.append(value)
        if len(self._recent) < BUCKETS:
            return None
        recent = list(self._recent)
        self.now = statistics.median(recent)
        if self.told and self.best is not None:
            half = recent[BUCKETS // 2 :]
            self.told = quantile(half, 0.75) >= self.factor * self.best + self._spread / 2
            return None if self.told else Change.OVER
        fast, slow = quantile(recent, 0.25), quantile(recent, 0.75)
        if self.best is not None and fast >= self.factor * self.best + self._spread / 2:
            self.told = True
            return Change.BEGUN
        self._windows += 1
        self._spread += (slow - fast - self._spread) / self._windows
        self.best = slow if self.best is None else min(self.best, slow)
        return None


@dataclass(slots=True)
class TrafficRule:
    """A counter of bytes that rose, and rises no more."""

    after_s: float
    told: bool = False
    _last: tuple[float, int] | None = None
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=60))
    _idle_since_s: float | None = None

    def add(self, now_s: float, total_bytes: int) -> Change | None:
        """Take one reading of the counter; one that falls (a port was reset) begins anew."""
        last, self._last = self._last, (now_s, total_bytes)
        if last is None or now_s <= last[0] or total_bytes < last[1]:
            self._idle_since_s = None
            return None
        rate = (total_bytes - last[1]) / (now_s - last[0])
        usual = statistics.median(self._rates) if len(self._rates) >= BUSY_MIN else 0.0
        if rate > 0 and rate >= TRAFFIC_SHARE_MIN * usual:
            self._rates.append(rate)
            self._idle_since_s = None
            over, self.told = self.told, False
            return Change.OVER if over else None
        if self._idle_since_s is None:
            self._idle_since_s = last[0]
        armed = usual > 0 and not self.told
        if armed and now_s - self._idle_since_s >= self.after_s:
            self.told = True
            return Change.BEGUN
        return None

    def idle_s(self, now_s: float) -> float:
        """Seconds without traffic."""
        return 0.0 if self._idle_since_s is None else now_s - self._idle_since_s

    def excuse(self) -> None:
        """Something else than training goes on: silence begins after it."""
        self._idle_since_s = self._last = None
