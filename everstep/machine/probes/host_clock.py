"""The wall clock: whether it is synchronised, and whether it was set while we looked.

Everstep never compares the clocks of two machines, but users' logs and TLS do. So this only warns.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Symptom
from everstep.machine.probes.host_read import NOTHING, faulty, healthy, unknown

_TIME_ERROR = 5
_STA_UNSYNC = 0x0040
_STA_NANO = 0x2000


class _Timex(ctypes.Structure):
    """``struct timex`` of adjtimex(2), as far as it is read; the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_byte * 256),
    )


@dataclass(frozen=True, slots=True)
class Discipline:
    """What the kernel says about its clock."""

    synchronised: bool
    offset_s: float
    error_max_s: float


def read_discipline() -> Discipline:
    """Ask the kernel (adjtimex with nothing to adjust).

    Raises:
        OSError: it does not say.
    """
    timex = _Timex(modes=0)
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    unit = 1e-9 if timex.status & _STA_NANO else 1e-6
    synchronised = state != _TIME_ERROR and not timex.status & _STA_UNSYNC
    return Discipline(synchronised, timex.offset * unit, timex.maxerror * 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSettings:
    """Thresholds of ``ClockProbe``."""

    offset_max_s: float
    """How far the clock may be from the true time by the kernel's own estimate."""
    step_max_s: float
    """How far it may jump between two looks."""


class ClockProbe:
    """Synchronisation, offset and steps of the wall clock."""

    name = "clock"
    interval = "host"

    def __init__(
        self,
        settings: ClockSettings,
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        discipline: Callable[[], Discipline] = read_discipline,
    ) -> None:
        """Nothing is read yet; the clocks are in seconds, ``steady`` is never set."""
        self._settings = settings
        self._wall = wall
        self._steady = steady
        self._discipline = discipline
        self._before: float | None = None

    def look(self, now_s: float) -> Sequence[Observation]:  # noqa: ARG002 - it reads both clocks
        """Ask the kernel, and compare both clocks with the last look."""
        difference = self._wall() - self._steady()
        step = 0.0 if self._before is None else difference - self._before
        self._before = difference
        seen = []
        if abs(step) > self._settings.step_max_s:
            way = "forward" if step > 0 else "back"
            reason = f"the wall clock was set {way} by {abs(step):.3g} s"
            seen.append(self._warn("clock_step", reason, {"step_s": round(step, 3)}))
        try:
            found = self._discipline()
        except (OSError, AttributeError) as error:
            return seen or [unknown(self.name, f"the kernel does not say: {error}")]
        values: dict[str, Value] = {"offset_s": found.offset_s, "error_max_s": found.error_max_s}
        if not found.synchronised:
            reason = "no time service keeps the clock (none runs, or it has no source)"
            seen.append(self._warn("clock_unsynchronised", reason, values))
        elif abs(found.offset_s) > self._settings.offset_max_s:
            reason = f"the clock is {abs(found.offset_s):.3g} s off"
            seen.append(self._warn("clock_offset", reason, values))
        reason = f"synchronised, {abs(found.offset_s) * 1000:.3g} ms off"
        return seen or [healthy(self.name, reason, values=values)]

    def _warn(self, rule: str, reason: str, values: Mapping[str, Value] = NOTHING) -> Observation:
        return faulty(
            self.name, rule, Symptom.ENVIRONMENT_MISMATCH, Action.WARN_ONLY, reason, values=values
        )

    def close(self) -> None:
        """Holds nothing."""
