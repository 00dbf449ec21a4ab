"""Alerts that count only when they come again within a window: what heals by itself may pass.

The paper tolerates a network fault until its second alert within five minutes (section 3.4).
Not here: which probe uses it, and with which numbers (the policy's).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

KEYS_MAX = 10_000
"""More keys than a machine has targets; beyond, those that are longest silent are forgotten."""


class AlertWindow:
    """Counts alerts by key within the last stretch of time. Not for several threads."""

    def __init__(self, alerts_min: int, window_s: float) -> None:
        """Begin with no alerts.

        Args:
            alerts_min: so many within the window are enough.
            window_s: length of the window, in seconds of the caller's monotonic clock.
        """
        self._enough = alerts_min
        self._window_s = window_s
        self._alerts: dict[Hashable, deque[float]] = {}

    def add(self, key: Hashable, now_s: float) -> bool:
        """Note an alert; True when there are enough of them now."""
        times = self._alerts.pop(key, None) or deque(maxlen=self._enough)
        times.append(now_s)
        self._alerts[key] = times  # the youngest key is the last one
        if len(self._alerts) > KEYS_MAX:
            del self._alerts[next(iter(self._alerts))]
        return self.reached(key, now_s)

    def count(self, key: Hashable, now_s: float) -> int:
        """Alerts within the window, at most as many as are enough."""
        times = self._alerts.get(key)
        if times is None:
            return 0
        while times and now_s - times[0] > self._window_s:
            times.popleft()
        if not times:
            del self._alerts[key]
        return len(times)

    def reached(self, key: Hashable, now_s: float) -> bool:
        """Whether there are enough alerts within the window."""
        return self.count(key, now_s) >= self._enough

    def forget(self, key: Hashable) -> None:
        """Begin anew: what it was about was repaired or replaced."""
        self._alerts.pop(key, None)
