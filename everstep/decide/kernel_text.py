"""One kernel log line: what printed it, when, and what it says, whatever tool wrote it down.

Understood: dmesg (``[  12.345678]``, ``-T``, ``-H``, ``-d``, ``-x``, ``--time-format iso``, raw
``<4>``, ``--json``), syslog of both kinds (RFC 3164 and 5424), the journal in its short formats and
in JSON, records of ``/dev/kmsg``, bare messages; and what tools put before a line of these: a host
(pdsh, clush, Talos), a file (grep), the time and labels of a log collector. A line that a program
other than the kernel wrote is not the kernel's word, even when it quotes one.

Not here: stamps (``kernel_times``), records in JSON (``kernel_json``), and what a message means
(``kernel``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everstep.decide.kernel_times import Clock, LineTime, Stamp, Style, boot_time, wall_time

LINE_CHARS_MAX = 1_200
"""Longer lines are cut before they are looked at: a message has at most about 1,000."""
LAYERS_MAX = 4
"""So many tools may have put something before a line."""

__all__ = ["FIRST_WORDS", "ORIGIN", "Clock", "KernelLine", "LineTime", "parse", "parse_text"]


@dataclass(frozen=True, slots=True)
class KernelLine:
    """A line taken apart."""

    message: str
    time: Stamp
    from_kernel: bool
    """False: another program's line, or a part that belongs to the line before."""
    sure: bool = False
    """A stamp, a tag or a record says that the kernel wrote it, not its words alone."""


_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_QUOTE = re.compile(r"(?:\s{0,20}> ?){1,8}")  # as in a ticket or a mail
_KMSG = re.compile(r"(\d{1,4}),(\d+),(\d+),[^;]{0,80};(.*)$", re.DOTALL)
_KMSG_PART = re.compile(r" [A-Z][A-Z0-9_]*=")
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")
_LEVEL = re.compile(r"<(\d{1,3})>")
_FACILITY = re.compile(r"(kern|user|daemon|syslog|auth|authpriv|cron|local\d)\s*:\s*[a-z]+\s*:\s*")
_CALLER = re.compile(r"\[\s*[TC]\d+\]\s?")
_TAG = r"(?:[\w./:-]{0,200}[\w./-] )?(?:kern\.[a-z]+ )?kernel(?:\[\d+\])?: ?"
_KERNEL_TAG = re.compile(_TAG)
_PROGRAM_TAG = re.compile(r"(?P<host>[\w.-]+) [A-Za-z][\w./@-]*(?:\[\d+\])?: |[\w./@-]+\[\d+\]: ")
_RFC5424 = re.compile(
    r"1 (?P<time>\d{4}-\S+|-) \S+ (?P<program>\S+) \S+ \S+ (?:-|(?:\[[^\]]{1,400}\]){1,8})"
    r"(?: \ufeff?(?P<message>.*))?$"
)
_BEGINS = re.compile(
    r"<\d{1,3}>|\d{1,4},\d+,\d+,[^;]{0,80};"
    r"|\[\s*(?:\d{1,10}\.\d|\+-?\d|<\s|[A-Z][a-z]{2}\s?\d|[A-Z][a-z]{2} [A-Z][a-z]{2} |\d{4}-\d\d-)"
    r"|(?:[A-Z][a-z]{2} )?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:|1 \d{4}-\d\d-\d\dT"
    r"|[A-Z][a-z]{2}\s{1,3}\d{1,2} \d\d:\d\d:\d\d"
    r"|" + _FACILITY.pattern + "|" + _TAG
)
"""What the kernel's own line begins with, so that what stands before it is another tool's."""
ORIGIN = re.compile(r"(?:\[pod/[^\]]{1,200}\]|[\w.@%+/-]{1,200}(?::\d+){0,2}(?:\s?[:|]|(?=\t)))\s*")
"""Where a line is from, as tools that gather lines write it: a pod, a host, a file."""
_LABELS = re.compile(r"(?:(?:stdout|stderr) [FP] |\{\w+=\"[^}]{0,600}\}\s*)")
"""What log collectors write before a line, or between their time and the line."""
_LABEL_KERNEL = re.compile(r'="kern(el)?"')
FIRST_WORDS = frozenset(
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


def parse(line: str) -> KernelLine:
    """Take one line apart; never raises."""
    text = _ANSI.sub("", line[:LINE_CHARS_MAX]).rstrip("\r\n\0 ").removeprefix("\ufeff")
    if _KMSG_PART.match(text):
        return _not_ours(text)
    quote = _QUOTE.match(text)
    return parse_text((text[quote.end() :] if quote is not None else text).lstrip())


def parse_text(text: str, layers: int = LAYERS_MAX) -> KernelLine:
    """Take a line apart from which other tools' prefixes may have been taken."""
    record = _KMSG.match(text)
    if record is not None:
        # A record of several lines is one message: nothing may pose as the start of another.
        message = " ".join(_ESCAPE.sub(lambda m: chr(int(m[1], 16)), record[4]).split())
        time = Stamp(int(record[3][:18]) / 1e6, Clock.BOOT)
        return KernelLine(message, time, int(record[1]) >> 3 == 0, sure=True)
    labels = _LABELS.match(text)
    if layers and labels is not None:
        return _labelled(labels, text[labels.end() :], layers)
    origin = ORIGIN.match(text)
    if layers and origin is not None and _BEGINS.match(text, origin.end()):
        # A program's relayed line may look the same: only the kernel's own mark is believed.
        inner = parse_text(text[origin.end() :], layers - 1)
        if inner.sure or not inner.from_kernel:
            return inner
    return _printed(text, layers)


def _printed(text: str, layers: int) -> KernelLine:
    level = _LEVEL.match(text)
    if level is not None:
        if int(level[1]) >> 3:
            return _not_ours(text)
        text = text[level.end() :]
    structured = _RFC5424.match(text)
    if structured is not None:
        return _structured(structured)
    facility = _FACILITY.match(text)
    if facility is not None:
        if facility[1] != "kern":
            return _not_ours(text)
        text = text[facility.end() :]
    wall, style, text = wall_time(text)
    if facility is not None:
        style = Style.DMESG
    if wall is not None and layers and (_BEGINS.match(text) or _LABELS.match(text)):
        # A collector's time, and then the line.
        return _timed(parse_text(text, layers - 1), wall)
    boot, text = boot_time(text)
    tagged = _KERNEL_TAG.match(text)
    if tagged is not None:
        text = text[tagged.end() :]
        boot, text = boot_time(text) if boot is None else (boot, text)
    elif style is Style.SYSLOG or (style is Style.EITHER and _of_program(text)):
        return _not_ours(text)
    caller = _CALLER.match(text)
    text = (text[caller.end() :] if caller is not None else text).lstrip()
    marks = (level, facility, boot, tagged)
    sure = any(mark is not None for mark in marks) or (wall is not None and style is Style.DMESG)
    return _timed(KernelLine(text, boot or Stamp(), from_kernel=True, sure=sure), wall)


def _labelled(labels: re.Match[str], text: str, layers: int) -> KernelLine:
    """The line behind a collector's labels: they, or the line itself, have to say whose it is."""
    inner = parse_text(text, layers - 1)
    ours = inner.from_kernel and (inner.sure or _LABEL_KERNEL.search(labels[0]) is not None)
    return KernelLine(inner.message, inner.time, from_kernel=ours, sure=ours)


def _structured(found: re.Match[str]) -> KernelLine:
    """A line of RFC 5424, which names the program."""
    message = found["message"] or ""
    if found["program"] != "kernel":
        return _not_ours(message)
    inner = _printed(message, 0)
    wall, _, _ = wall_time(found["time"])
    line = KernelLine(inner.message, inner.time, inner.from_kernel, sure=True)
    return _timed(line, wall)


def _timed(line: KernelLine, wall: Stamp | None) -> KernelLine:
    """The line, with the date beside it where it has no time of its own."""
    # The kernel's own clock is finer than what syslog writes beside it, and never set back.
    if wall is None or line.time.at_s is not None:
        return line
    return KernelLine(line.message, wall, line.from_kernel, line.sure)


def _of_program(text: str) -> bool:
    program = _PROGRAM_TAG.match(text)
    return program is not None and (program["host"] or "").lower() not in FIRST_WORDS


def _not_ours(text: str) -> KernelLine:
    return KernelLine(text, Stamp(), from_kernel=False)
