"""When kernel lines were printed: every stamp that tools write before a message, and one time line.

Only differences of times mean something. Not here: whose words follow a stamp (``kernel_text``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum


class Clock(StrEnum):
    """Which clock a line's time is of. Times of two clocks are never compared."""

    BOOT = "boot"
    WALL = "wall"


class Style(StrEnum):
    """Who writes dates so."""

    DMESG = "dmesg"
    """Then the message stands there bare: everything in it is the kernel's."""
    SYSLOG = "syslog"
    """Then a host and the name of the program follow."""
    EITHER = "either"


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a line says about its time."""

    at_s: float | None = None
    """Seconds of its clock."""
    clock: Clock | None = None
    since_s: float | None = None
    """Seconds since the line before, where that is all that is printed (``dmesg -H``, ``-d``)."""


_MONTHS = {
    name: number
    for number, name in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1
    )
}
_DELTA = r"(?:\s*<\s*[+-]?\d+\.\d+\s*>)?"  # since the line before, beside a time (dmesg -d)
_BOOT = re.compile(rf"\[\s*(\d{{1,10}}\.\d{{1,9}}){_DELTA}\]\s?")
_SINCE = re.compile(r"\[(?:\s*\+-?(\d{1,10}\.\d{1,9})|<\s*-?(\d{1,10}\.\d{1,9})\s*>)\]\s?")
_MINUTE = re.compile(r"\[([A-Za-z]{3})\s*(\d{1,2}) (\d{2}):(\d{2})\]\s?")
_CTIME = re.compile(
    r"\[(?:\w{3}) (\w{3})\s+(\d{1,2}) (\d{2}):(\d{2}):(\d{2})(?:\.\d+)? (\d{4})" + _DELTA + r"\]\s?"
)
_SYSLOG = re.compile(r"(\w{3})\s+(\d{1,2}) (\d{2}):(\d{2}):(\d{2})(?:[.,](\d{1,9}))?\s+")
_ISO = re.compile(
    r"(?P<open>\[)?(?:\w{3} )?(\d{4})[-/](\d{2})[-/](\d{2})[T ](\d{2}):(\d{2}):(\d{2})"
    r"(?:\.(?P<point>\d{1,9})|,(?P<comma>\d{1,9}))?\s*(?P<zone>Z|UTC|[+-]\d{2}:?\d{2})?"
    r"(?(open)\]:?)(?:[\s:]+|$)"
)
_UNIX = re.compile(r"(\d{9,10}\.\d{1,9})\s+")


def boot_time(text: str) -> tuple[Stamp | None, str]:
    """The kernel's own stamp at the start of a text, if there is one, and what follows it."""
    found = _BOOT.match(text)
    if found is not None:
        return Stamp(float(found[1]), Clock.BOOT), text[found.end() :]
    found = _SINCE.match(text)
    if found is not None:
        return Stamp(since_s=float(found[1] or found[2])), text[found.end() :]
    return None, text


def wall_time(text: str) -> tuple[Stamp | None, Style, str]:
    """The date at the start of a text, if there is one, who writes it so, and what follows it."""
    for pattern, order in (
        (_CTIME, "ctime"),
        (_MINUTE, "minute"),
        (_ISO, "iso"),
        (_SYSLOG, "syslog"),
        (_UNIX, "unix"),
    ):
        found = pattern.match(text)
        at_s = _seconds(found, order) if found is not None else None
        if found is None or at_s is None:
            continue
        style = Style.SYSLOG
        if order in ("ctime", "minute") or (order == "iso" and found["comma"]):
            style = Style.DMESG
        elif order == "iso":
            style = Style.EITHER
        return Stamp(at_s, Clock.WALL), style, text[found.end() :]
    return None, Style.DMESG, text


def _seconds(found: re.Match[str], order: str) -> float | None:
    """Seconds since some instant; a year that is not printed does not matter for differences."""
    if order == "unix":
        return float(found[1])
    fraction, offset_s, second, year = 0.0, 0, 0, 2000
    if order == "iso":
        year, month, day = int(found[2]), int(found[3]), int(found[4])
        hour, minute, second = (int(found[i]) for i in (5, 6, 7))
        digits = found["point"] or found["comma"]
        fraction = float(f"0.{digits}") if digits else 0.0
        offset_s = _offset(found["zone"])
    else:
        month = _MONTHS.get(found[1].lower(), 0)
        day, hour, minute = (int(found[i]) for i in (2, 3, 4))
        if order != "minute":
            second = int(found[5])
        if order == "ctime":
            year = int(found[6])
        elif order == "syslog" and found[6]:
            fraction = float(f"0.{found[6]}")
    try:
        instant = datetime(year, month, day, hour, minute, min(second, 59), tzinfo=UTC)
    except ValueError:
        return None
    return instant.timestamp() + fraction - offset_s


def _offset(text: str | None) -> int:
    if not text or text in ("Z", "UTC"):
        return 0
    sign = -1 if text[0] == "-" else 1
    digits = text[1:].replace(":", "")
    return sign * (int(digits[:2]) * 3600 + int(digits[2:4]) * 60)


class LineTime:
    """One time line for lines of several clocks: it only ever goes forward.

    A clock that is seen for the first time goes on from where the last one was; one that is set
    back stands still. Lines without a time are as old as the line before.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timed = False
        """Whether any line had a time of its own."""
        self._base: dict[Clock, float] = {}

    def at(self, stamp: Stamp) -> float:
        """The time of a line; moves on to it."""
        if stamp.since_s is not None:
            self.timed = True
            self.now_s += stamp.since_s
            return self.now_s
        if stamp.at_s is None or stamp.clock is None:
            return self.now_s
        self.timed = True
        base = self._base.get(stamp.clock)
        if base is None:
            base = self._base[stamp.clock] = self.now_s - stamp.at_s
        at_s = stamp.at_s + base
        if at_s < self.now_s:
            self._base[stamp.clock] = self.now_s - stamp.at_s
            at_s = self.now_s
        self.now_s = at_s
        return at_s

    def advance(self, seconds: float) -> None:
        """Time that passed without a line that has one."""
        self.now_s += max(0.0, seconds)
