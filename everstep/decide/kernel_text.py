"""One kernel log line: what printed it, when, and what it says, whatever tool wrote it down.

Understood: dmesg (``[  12.345678]``, ``-T``, ``-x``, ``--time-format iso``, raw ``<4>``), syslog
and journal in their short formats, records of ``/dev/kmsg``, and bare messages. A line that a
program other than the kernel wrote is not the kernel's word, even when it quotes one.

Not here: what a message means (``kernel``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

LINE_CHARS_MAX = 1_200
"""Longer lines are cut before they are looked at: a message has at most about 1,000."""


class Clock(StrEnum):
    """Which clock a line's time is of. Times of two clocks are never compared."""

    BOOT = "boot"
    WALL = "wall"


@dataclass(frozen=True, slots=True)
class KernelLine:
    """A line taken apart."""

    message: str
    at_s: float | None
    """Seconds of its clock; only differences mean something. None: it has no time."""
    clock: Clock | None
    from_kernel: bool
    """False: another program's line, or a part that belongs to the line before."""


_MONTHS = {
    name: number
    for number, name in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1
    )
}
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_KMSG = re.compile(r"(\d{1,4}),(\d+),(\d+),[^;]{0,80};(.*)$", re.DOTALL)
_KMSG_PART = re.compile(r" [A-Z][A-Z0-9_]*=")
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")
_LEVEL = re.compile(r"<(\d{1,3})>")
_FACILITY = re.compile(r"(kern|user|daemon|syslog|auth|authpriv|cron|local\d)\s*:\s*[a-z]+\s*:\s*")
_BOOT = re.compile(r"\[\s*(\d{1,10}\.\d{1,9})\]\s?")
_CALLER = re.compile(r"\[\s*[TC]\d+\]\s?")
_CTIME = re.compile(
    r"\[(?:\w{3}) (\w{3})\s+(\d{1,2}) (\d{2}):(\d{2}):(\d{2})(?:\.\d+)? (\d{4})\]\s?"
)
_SYSLOG = re.compile(r"(\w{3})\s+(\d{1,2}) (\d{2}):(\d{2}):(\d{2})(?:[.,](\d{1,9}))?\s+")
_ISO = re.compile(
    r"(?:\w{3} )?(\d{4})-(\d{2})-(\d{2})[T ](\d{2}):(\d{2}):(\d{2})"
    r"(?:\.(\d{1,9})|(?P<comma>,\d{1,9}))?\s*(?P<zone>Z|UTC|[+-]\d{2}:?\d{2})?[\s:]+"
)
_UNIX = re.compile(r"(\d{9,10}\.\d{1,9})\s+")
_KERNEL_TAG = re.compile(r"(?:[\w./-]+ )?kernel(?:\[\d+\])?: ?")
_PROGRAM_TAG = re.compile(r"(?P<host>[\w.-]+) [A-Za-z][\w./@-]*(?:\[\d+\])?: |[\w./@-]+\[\d+\]: ")
_FIRST_WORDS = frozenset(
    (
        "bug",
        "block",
        "nvme",
        "pci",
        "pcieport",
        "scsi",
        "sd",
        "ata",
        "usb",
        "md",
        "edac",
        "memory",
        "warning",
        "rcu",
        "thermal",
        "nvidia",
        "nvidia-peermem",
        "infiniband",
        "ib_core",
        "kernel",
        "tg3",
        "ena",
        "hardware",
    )
)
"""Words that a kernel message may begin with where a date and a host name could stand."""


class _Style(StrEnum):
    """Who writes dates so."""

    DMESG = "dmesg"
    """Then the message stands there bare: everything in it is the kernel's."""
    SYSLOG = "syslog"
    """Then a host and the name of the program follow."""
    EITHER = "either"


def parse(line: str) -> KernelLine:
    """Take one line apart; never raises."""
    text = _ANSI.sub("", line[:LINE_CHARS_MAX]).rstrip("\r\n\0 ")
    record = _KMSG.match(text)
    if record is not None:
        # A record of several lines is one message: nothing may pose as the start of another.
        message = " ".join(_ESCAPE.sub(lambda m: chr(int(m[1], 16)), record[4]).split())
        at_s = int(record[3][:18]) / 1e6
        return KernelLine(message, at_s, Clock.BOOT, int(record[1]) >> 3 == 0)
    if _KMSG_PART.match(text):
        return KernelLine(text, None, None, from_kernel=False)
    return _printed(text)


def _printed(text: str) -> KernelLine:
    level = _LEVEL.match(text)
    if level is not None:
        if int(level[1]) >> 3:
            return KernelLine(text, None, None, from_kernel=False)
        text = text[level.end() :]
    facility = _FACILITY.match(text)
    if facility is not None:
        if facility[1] != "kern":
            return KernelLine(text, None, None, from_kernel=False)
        text = text[facility.end() :]
    wall, style, text = _wall_time(text)
    boot, text = _boot_time(text)
    ours, text = _tag(text, style)
    if not ours:
        return KernelLine(text, None, None, from_kernel=False)
    if boot is None:
        boot, text = _boot_time(text)
    caller = _CALLER.match(text)
    text = (text[caller.end() :] if caller is not None else text).lstrip()
    # The kernel's own clock is finer than what syslog writes beside it, and never set back.
    if boot is not None:
        return KernelLine(text, boot, Clock.BOOT, from_kernel=True)
    clock = Clock.WALL if wall is not None else None
    return KernelLine(text, wall, clock, from_kernel=True)


def _tag(text: str, style: _Style) -> tuple[bool, str]:
    """Whether the kernel wrote it, and the message without host and tag."""
    kernel = _KERNEL_TAG.match(text)
    if kernel is not None:
        return True, text[kernel.end() :]
    if style is _Style.DMESG:
        return True, text
    if style is _Style.SYSLOG:
        return False, text
    program = _PROGRAM_TAG.match(text)
    first = (program["host"] or "").lower() if program is not None else ""
    return program is None or first in _FIRST_WORDS, text


def _boot_time(text: str) -> tuple[float | None, str]:
    found = _BOOT.match(text)
    return (float(found[1]), text[found.end() :]) if found is not None else (None, text)


def _wall_time(text: str) -> tuple[float | None, _Style, str]:
    for pattern, order in ((_CTIME, "ctime"), (_ISO, "iso"), (_SYSLOG, "syslog"), (_UNIX, "unix")):
        found = pattern.match(text)
        at_s = _seconds(found, order) if found is not None else None
        if found is None or at_s is None:
            continue
        style = _Style.SYSLOG
        if order == "ctime" or (order == "iso" and found["comma"]):
            style = _Style.DMESG
        elif order == "iso":
            style = _Style.EITHER
        return at_s, style, text[found.end() :]
    return None, _Style.DMESG, text


def _seconds(found: re.Match[str], order: str) -> float | None:
    """Seconds since some instant; a year that is not printed does not matter for differences."""
    if order == "unix":
        return float(found[1])
    fraction = 0.0
    offset_s = 0
    if order == "iso":
        year, month, day = int(found[1]), int(found[2]), int(found[3])
        hour, minute, second = (int(found[i]) for i in (4, 5, 6))
        digits = found[7] or (found["comma"] or "")[1:]
        fraction = float(f"0.{digits}") if digits else 0.0
        offset_s = _offset(found["zone"])
    else:
        month = _MONTHS.get(found[1].lower(), 0)
        day, hour, minute, second = (int(found[i]) for i in (2, 3, 4, 5))
        year = int(found[6]) if order == "ctime" else 2000
        if order == "syslog" and found[6]:
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

    def at(self, line: KernelLine) -> float:
        """The time of a line; moves on to it."""
        if line.at_s is None or line.clock is None:
            return self.now_s
        self.timed = True
        base = self._base.get(line.clock)
        if base is None:
            base = self._base[line.clock] = self.now_s - line.at_s
        at_s = line.at_s + base
        if at_s < self.now_s:
            self._base[line.clock] = self.now_s - line.at_s
            at_s = self.now_s
        self.now_s = at_s
        return at_s

    def advance(self, seconds: float) -> None:
        """Time that passed without a line that has one."""
        self.now_s += max(0.0, seconds)
