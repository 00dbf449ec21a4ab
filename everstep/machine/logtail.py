"""The last lines of a rank's log, whatever the rank has written into it.

Reads a bounded tail, survives binary garbage, progress bars (carriage returns) and terminal
colours, and asks ``everstep.decide.logs`` what the lines mean. Not here: the classification itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from everstep.decide.diagnosis.types import TailFinding
from everstep.decide.words import LogClass
from everstep.machine.framework_log import ESCAPE
from everstep.machine.log_findings import finding_of

TAIL_BYTES = 64 * 1024
LINES_MAX = 400
"""Enough for the longest traceback; more would keep the agent busy when many ranks end at once."""
LINE_CHARACTERS_MAX = 300
FULL_BELOW_BYTES = 64 * 1024


def clean(line: str) -> str:
    """One line as a person would see it, cut to its limit."""
    line = line[: 8 * LINE_CHARACTERS_MAX]
    if not line.isprintable():
        line = ESCAPE.sub("", line)
        line = "".join(c if c.isprintable() else " " if c == "\t" else "\ufffd" for c in line)
    line = line.rstrip()
    return line if len(line) <= LINE_CHARACTERS_MAX else line[: LINE_CHARACTERS_MAX - 1] + "…"


def tail_bytes(path: Path, size: int) -> bytes:
    """The last ``size`` bytes of a file; empty when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        length = os.fstat(fd).st_size
        return os.pread(fd, size, max(0, length - size))
    except OSError:
        return b""
    finally:
        os.close(fd)


def tail_lines(path: Path) -> list[str]:
    """The last lines that are not blank, oldest first."""
    raw = tail_bytes(path, TAIL_BYTES)
    if len(raw) == TAIL_BYTES:
        raw = raw.partition(b"\n")[2] or raw  # the first line is most likely a torn one
    lines = []
    for line in raw.decode("utf-8", "replace").split("\n")[-2 * LINES_MAX :]:
        # A carriage return overwrites the line on a terminal: what came last is what one sees.
        shown = clean(line.rstrip("\r").rpartition("\r")[2])
        if shown.strip("\ufffd "):
            lines.append(shown)
    return lines[-LINES_MAX:]


def _error_file_lines(path: Path) -> list[str]:
    """Lines of the error file that ``torch.distributed.elastic``'s ``@record`` writes."""
    try:
        message = json.loads(tail_bytes(path, TAIL_BYTES))["message"]
    except (ValueError, TypeError, KeyError):
        return []
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        message = stack or message.get("message") or ""
    return [clean(line) for line in str(message).splitlines() if line.strip()][-LINES_MAX:]


def _is_full(folder: Path) -> bool:
    try:
        stats = os.statvfs(folder)
    except OSError:
        return False
    return stats.f_bavail * stats.f_frsize < FULL_BELOW_BYTES


def classify_log(log: Path, error_file: Path) -> tuple[LogClass, tuple[str, ...]]:
    """What the end of a rank's log says, and the lines that say it."""
    from everstep.decide.logs import classify_lines

    log_class, lines = classify_lines(tail_lines(log))
    if log_class in (LogClass.SILENT, LogClass.OTHER):
        recorded = _error_file_lines(error_file)
        if recorded:
            log_class, lines = classify_lines(recorded)
    if log_class in (LogClass.SILENT, LogClass.OTHER) and _is_full(log.parent):
        # The rank could not even write down what happened to it.
        log_class, lines = LogClass.DISK_FULL, (*lines, f"no space left in {log.parent}")
    return log_class, tuple(clean(line) for line in lines)


class RankLog:
    """What one rank's log says; read again only when it has changed."""

    def __init__(self, log: Path, error_file: Path) -> None:
        self._log = log
        self._error_file = error_file
        self._seen: object = None
        self._says: tuple[LogClass, tuple[str, ...]] = (LogClass.SILENT, ())
        self._found_for: object = None
        self._found: TailFinding | None = None

    def says(self) -> tuple[LogClass, tuple[str, ...]]:
        """Class and lines of the log's end."""
        now = [_fingerprint(path) for path in (self._log, self._error_file)]
        if now != self._seen:
            self._says = classify_log(self._log, self._error_file)
            self._seen = now
        return self._says

    def finding(self, rank: int, exit_code: int | None, signal: int | None) -> TailFinding | None:
        """What the catalogue of signatures says about a rank that ended by itself."""
        now = (_fingerprint(self._log), _fingerprint(self._error_file), exit_code, signal)
        if now != self._found_for:
            lines = [*_error_file_lines(self._error_file), *tail_lines(self._log)]
            self._found = finding_of(lines, rank=rank, exit_code=exit_code, signal=signal)
            self._found_for = now
        return self._found


def _fingerprint(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def within(lines: Sequence[str], budget: int) -> tuple[str, ...]:
    """The last of the lines that fit into ``budget`` bytes of JSON together."""
    kept: list[str] = []
    for line in reversed(lines):
        budget -= len(json.dumps(line)) + 2
        if budget < 0:
            break
        kept.append(line)
    return tuple(reversed(kept))
