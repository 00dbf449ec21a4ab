"""Who wrote a line: launchers and libraries put rank and machine in front of what ranks print.

``parse`` takes the prefixes off, so that signatures see the text as the program wrote it. A rank
that is only *mentioned* in the text is a second, weaker source.

Not here: folders and file names that tell the rank (``everstep.logfiles``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE_CHARS_MAX = 4_000
"""More of a line is not looked at: one record can be megabytes long."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)")
_PREFIXES = (
    re.compile(r"^\[(?:rank|default|Rank )(?P<rank>\d+)\]:?\s?"),
    re.compile(r"^\[\d+,(?P<rank>\d+)\](?:<std(?:err|out)>)?:\s?"),
    re.compile(r"^\[(?P<machine>[\w.-]*[a-zA-Z][\w.-]*):(?P<rank>\d+)\]:?\s?"),
    re.compile(r"^\[(?P<rank>\d+)\]:\s"),
    re.compile(r"^\s{0,4}(?P<rank>\d{1,5}):\s(?=\S|\s{2})"),
    re.compile(r"^\((?:\w+) pid=\d+(?:, ip=(?P<machine>[\w.:-]+))?\)\s?"),
    re.compile(r"^(?P<machine>[a-zA-Z][\w.-]*-?\d+): (?=\[rank|\s{2}File|Traceback|\S)"),
)
_BEGINS = frozenset("[( 0123456789")
_NAMED = _PREFIXES[-1:]
"""The only prefix that begins with a letter."""
_HOST_IN_NCCL = re.compile(r"^(?P<machine>[\w.-]+):\d+:\d+ \[-?\d+\]")
_HOST_IN_SYSLOG = re.compile(r"^[A-Z][a-z]{2}\s+\d+ \d\d:\d\d:\d\d (?P<machine>[\w.-]+) kernel:")
_MENTION = re.compile(
    r"\[(?:PG (?:ID )?\S+ (?:PG GUID \S+ )?)?Rank (\d+)\]|\brank[=:]\s?(\d+)\b|\bRank (\d+):"
    r"|\bglobal_rank[=:]\s?(\d+)|\bRANK[=:](\d+)|\bon rank (\d+)\b|\bpeer rank (\d+)\b"
)


@dataclass(frozen=True, slots=True)
class Parsed:
    """One line, and who wrote it as far as it says."""

    text: str
    rank: int | None = None
    machine: str | None = None
    mentioned: int | None = None
    """A rank that the text names; not a peer."""


def parse(raw: str) -> Parsed:
    """Take colours and prefixes off a line."""
    text = raw[: LINE_CHARS_MAX * 4]
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\r" in text:
        text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    text = text[:LINE_CHARS_MAX].rstrip()
    rank: int | None = None
    machine: str | None = None
    for _ in range(3):
        likely = _PREFIXES if text[:1] in _BEGINS else _NAMED
        found = next((m for p in likely if (m := p.match(text)) is not None), None)
        if found is None:
            break
        groups = found.groupdict()
        rank = int(groups["rank"]) if rank is None and groups.get("rank") else rank
        machine = machine or groups.get("machine")
        text = text[found.end() :]
    host = _HOST_IN_NCCL.match(text) or _HOST_IN_SYSLOG.match(text)
    if host is not None:
        machine = machine or host["machine"]
    return Parsed(text, rank, machine, _mentioned(text))


def printable(text: str) -> str:
    """The text without anything that a terminal would act on."""
    return "".join(c if c.isprintable() else " " for c in text).rstrip()


def _mentioned(text: str) -> int | None:
    if "ank" not in text and "RANK" not in text:
        return None
    found = _MENTION.search(text)
    if found is None:
        return None
    return next((int(group) for group in found.groups()[:-1] if group), None)
