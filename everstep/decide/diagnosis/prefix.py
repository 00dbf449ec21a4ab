"""Who wrote a line: launchers and libraries put rank and machine in front of what ranks print.

``parse`` takes the prefixes off, so that signatures see the text as the program wrote it. A rank
that is only *mentioned* in the text is a second, weaker source.

Not here: folders and file names that tell the rank (``everstep.logfiles``).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

LINE_RANK_DIGITS_MAX = 7
LINE_CHARS_MAX = 4_000
"""More of a line is not looked at: one record can be megabytes long."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)")
_PREFIXES = (
    re.compile(r"^\[(?:rank|Rank )(?P<rank>\d+)\]:?\s?"),
    re.compile(r"^\[default(?P<local>\d+)\]:?\s?"),
    re.compile(r"^(?:\(rank |\|\s?rank )(?P<rank>\d+)\s?[)|]:?\s?", re.IGNORECASE),
    re.compile(
        r"^\[(?P<rank>\d+)\]\s(?=(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b|Traceback|\s+File \")"
    ),
    re.compile(r"^\[\d+,(?P<rank>\d+)\](?:<std(?:err|out)>)?:\s?"),
    re.compile(r"^\[(?P<machine>[\w.-]*[a-zA-Z][\w.-]*):(?P<rank>\d+)\]:?\s?"),
    re.compile(r"^\[(?P<rank>\d+)\]:\s"),
    re.compile(r"^\s{0,4}(?P<rank>\d{1,5}):\s(?=\S|\s{2})"),
    re.compile(r"^\((?:\w+) pid=\d+(?:, ip=(?P<machine>[\w.:-]+))?\)\s?"),
    re.compile(r"^(?:rank ?(?P<rank>\d+)|Rank\[(?P<rank2>\d+)\]): "),
    re.compile(r"^(?P<machine>[a-zA-Z][\w.-]*-?\d+): (?=\[rank|\s{2}File|Traceback|\S)"),
)
_BEGINS = frozenset("[(| 0123456789")
_NAMED = _PREFIXES[-2:]
"""The only prefixes that begin with a letter."""
_COLLECTED = re.compile(
    r"^[^\[\]\"'{]{0,100}?(?:(?<=\s)(?P<machine>[a-zA-Z][\w.-]*\d)\s+)?(?:std(?:err|out) [FP] )?"
    r"(?=\[(?:rank|default)\d+\]:?)"
)
"""What collectors of logs put before the rank: a time, a machine, the name of the run."""
_MESSAGE_KEYS = ("message", "msg", "log", "text", "event")
_SRUN = re.compile(
    r"^srun: error: (?P<machine>[\w.-]+): (?:task (?P<rank>\d+)|tasks [\d,\[\]-]+): "
)
_HOST_IN_NCCL = re.compile(r"^(?P<machine>[\w.-]+):\d+:\d+ \[-?\d+\]")
_HOST_IN_SYSLOG = re.compile(r"^[A-Z][a-z]{2}\s+\d+ \d\d:\d\d:\d\d (?P<machine>[\w.-]+) kernel:")
_MENTION = re.compile(
    r"\[(?:PG (?:ID )?\S+ (?:PG GUID \S+ )?)?Rank (\d+)\]|\brank[=:]\s?(\d+)\b|\bRank (\d+):"
    r"|^.{0,80}?\(rank (\d+)\)|^.{0,80}?\|\s?rank (\d+)\s?\||\bRank\[(\d+)\]|\brank(\d+):\s"
    r"|\(RANK (\d+)\)|\bglobal_rank[=:]\s?(\d+)|\bRANK[=:](\d+)|\bon rank (\d+)\b"
    r"|\bpeer rank (\d+)\b"
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
    if text.startswith('{"'):
        record = _record(text)
        if record is not None:
            return record
    rank: int | None = None
    local: int | None = None
    machine: str | None = None
    if "[rank" in text[:160] or "[default" in text[:160]:
        collected = _COLLECTED.match(text)
        if collected is not None:
            machine, text = collected["machine"], text[collected.end() :]
    for _ in range(3):
        likely = _PREFIXES if text[:1] in _BEGINS else _NAMED
        found = next((m for p in likely if (m := p.match(text)) is not None), None)
        if found is None:
            break
        groups = found.groupdict()
        own = groups.get("rank") or groups.get("rank2")
        rank = int(own) if rank is None and own else rank
        local = int(groups["local"]) if local is None and groups.get("local") else local
        machine = machine or groups.get("machine")
        text = text[found.end() :]
    host = _HOST_IN_NCCL.match(text) or _HOST_IN_SYSLOG.match(text)
    if host is not None:
        machine = machine or host["machine"]
    task = _SRUN.match(text) if text.startswith("srun") else None
    if task is not None:
        mentioned = int(task["rank"]) if task["rank"] else None
        return Parsed(text, rank, task["machine"], mentioned)
    return Parsed(text, local if rank is None else rank, machine, _mentioned(text))


def _record(text: str) -> Parsed | None:
    """A line of JSON: its message, with its level in front where that is below an error."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    message = next((data[k] for k in _MESSAGE_KEYS if isinstance(data.get(k), str)), None)
    if message is None:
        return None
    lines = [line for line in message.splitlines() if line.strip()]
    said = (lines[-1] if "Traceback (most recent" in message else " ".join(lines)) if lines else ""
    inner = parse(said)
    level = str(data.get("level") or data.get("levelname") or data.get("severity") or "").upper()
    mild = level in ("INFO", "WARN", "WARNING", "DEBUG", "NOTICE")
    rank = data.get("rank", data.get("global_rank"))
    if isinstance(rank, str) and rank.isdigit() and len(rank) < LINE_RANK_DIGITS_MAX:
        rank = int(rank)
    own = rank if isinstance(rank, int) and not isinstance(rank, bool) else inner.rank
    host = data.get("host") or data.get("hostname") or data.get("node")
    machine = host if isinstance(host, str) else inner.machine
    return Parsed(f"{level}: {inner.text}" if mild else inner.text, own, machine, inner.mentioned)


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
