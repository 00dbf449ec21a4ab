"""Following the logs of a run's ranks as they grow, at a cost that does not depend on the ranks.

Each look reads what is new, up to a budget shared by all ranks; a rank that writes faster than it
can be read is caught up with at its end, since the newest step is what counts. Lines may end with
a carriage return (progress bars), hold anything, and be of any length: what is too long is dropped.

A job's own pattern may be one that takes for ever on the wrong line. Matching it is stopped after
``PATTERN_CPU_MAX_S`` of processor time by a timer of the kernel (Python's matcher looks for signals
while it works), and the pattern is not used on that rank's log again.

Not here: what lines mean (``framework_log``), and judging it (``monitor``).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from everstep.machine.framework_log import LineParser, LogPhase, LogStep, may_tell

LINE_BYTES_MAX = 8192
LOOK_BYTES_MAX = 512 * 1024
"""Read in one look by all ranks together: 5 MB a second at ten looks, 35,000 lines."""
SHARE_BYTES_MIN = 16 * 1024
BEHIND_MAX = 16
"""A rank that is behind by so many of its shares is read from near its end."""
LOOK_LINES_MAX = 300
"""Lines that are parsed in one look, the last ones of each rank: 3,000 a second, which takes a
tenth of a core at worst."""
SHARE_LINES_MIN = 20
ADOPT_BYTES = 512 * 1024
"""Where an agent that comes back begins to read: the step is in the last lines."""
PATTERN_CPU_MAX_S = 0.05
NORM_SUSTAINED = 3
"""A gradient norm that is not finite counts when it is printed so often in a row: loss scaling
and skipped updates make single ones. A loss counts at once."""

_ENDS = re.compile(rb"[\r\n]")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReading:
    """What one rank's log has told so far; counters only ever rise."""

    bytes_seen: int = 0
    """How much the log has grown: it rises whenever something is written."""
    position: int = 0
    """Where in the log the last step or phase stood; a later one has a higher value."""
    steps: int = 0
    """Lines with a step that this agent has read."""
    step: int | None = None
    loss: float | None = None
    """Of the last line that had one."""
    grad_norm: float | None = None
    nonfinite_step: int | None = None
    step_time_s: float | None = None
    speed_kind: str | None = None
    speed: float | None = None
    phase: str | None = None
    """What was announced since the last step."""
    fresh: tuple[LogStep, ...] = ()
    """The steps that this look has found, oldest first."""


class _PatternTooSlow(Exception):
    """The timer has run out."""


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise ``_PatternTooSlow`` in the body after so much processor time.

    Only the main thread can be interrupted; elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _PatternTooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)


class LogFollower:
    """One rank's log."""

    def __init__(self, path: Path, *, pattern: str | None = None, fresh: bool = True) -> None:
        self._path = path
        self._own = pattern is not None
        self._parser = LineParser(re.compile(pattern) if pattern is not None else None)
        self._from_start = fresh
        self._fd = -1
        self._offset = 0
        self._size = 0
        self._base = 0
        """Bytes read before the file was last truncated."""
        self._held = b""
        """The beginning of a line whose end has not been written yet."""
        self._dropping = False
        """Inside of a line that is too long."""
        self._bad_norms = 0
        self._useless = False
        self.reading = LogReading()
        self.skipped_bytes = 0

    def look(self, share: int, lines_max: int, *, final: bool = False) -> LogReading:
        """Read what is new, at most ``share`` bytes, and parse the last ``lines_max`` of it.

        With ``final`` nothing more will be written: a line without an end counts as a line.
        """
        raw, at = self._read(share)
        if raw or (final and self._held):
            self._take(self._lines(raw, at, final=final)[-lines_max:])
        elif self.reading.fresh:
            self.reading = replace(self.reading, fresh=())
        return self.reading

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, share: int) -> tuple[bytes, int]:
        try:
            if self._fd < 0:
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
                self._fd = os.open(self._path, flags)
                if not self._from_start:
                    self._jump(max(0, os.fstat(self._fd).st_size - ADOPT_BYTES))
            self._size = size = os.fstat(self._fd).st_size
            if size < self._offset:  # truncated: it begins anew
                self._base, self._offset, self._held = self._base + self._offset, 0, b""
            if size - self._offset > BEHIND_MAX * share:
                self._jump(size - share)
            raw = os.pread(self._fd, min(share, size - self._offset), self._offset)
        except OSError:
            return b"", self._offset  # deleted or unreadable: what was seen stands
        at, self._offset = self._offset, self._offset + len(raw)
        return raw, at

    def _jump(self, offset: int) -> None:
        self.skipped_bytes += offset - self._offset
        self._offset, self._held, self._dropping = offset, b"", offset > 0

    def _lines(self, raw: bytes, at: int, *, final: bool) -> list[tuple[int, bytes]]:
        """The telling lines that are whole, each with the position where it ends."""
        start = at - len(self._held)
        pieces = _ENDS.split(self._held + raw)
        too_long, self._dropping = self._dropping, self._dropping and len(pieces) == 1
        self._held = pieces.pop()
        if self._dropping or len(self._held) > LINE_BYTES_MAX:
            self._held, self._dropping = b"", True
        if final:
            pieces.append(self._held)
            self._held = b""
        telling = []
        for piece in pieces:
            end = start + len(piece)
            if len(piece) <= LINE_BYTES_MAX and not too_long and (self._own or may_tell(piece)):
                telling.append((end, piece))
            start, too_long = end + 1, False
        return telling

    def _take(self, lines: list[tuple[int, bytes]]) -> None:
        reading, steps, position = self.reading, [], self.reading.position
        phase = reading.phase
        for where, told in self._parsed(lines):
            position = max(position, self._base + where)
            if isinstance(told, LogPhase):
                phase = told.phase
            else:
                phase = None
                steps.append(told)
        self.reading = self._told(
            replace(
                reading,
                bytes_seen=self._base + self._size,
                position=position,
                phase=phase,
                fresh=tuple(steps),
                steps=reading.steps + len(steps),
            )
        )

    def _parsed(self, lines: list[tuple[int, bytes]]) -> list[tuple[int, LogStep | LogPhase]]:
        found: list[tuple[int, LogStep | LogPhase]] = []
        if self._useless or not lines:
            return found
        limit = _cpu_limit(PATTERN_CPU_MAX_S) if self._own else contextlib.nullcontext()
        try:
            with limit:
                for where, line in lines:
                    told = self._parser.feed(line.decode("utf-8", "replace"))
                    if told is not None:
                        found.append((where, told))
        except _PatternTooSlow:
            self._useless = True
            log.warning(
                "the job's progress pattern takes too long and is not used on this log again",
                path=str(self._path),
            )
        return found

    def _told(self, reading: LogReading) -> LogReading:
        """The newest values of each kind, and whether one of them is not finite."""
        for step in reading.fresh:
            changes: dict[str, Any] = {"step": step.step}
            for name in ("loss", "grad_norm", "step_time_s"):
                value = getattr(step, name)
                if value is not None:
                    changes[name] = value
            if step.speed is not None:
                changes |= {"speed_kind": step.speed_kind, "speed": step.speed}
            if self._is_spoilt(step) and reading.nonfinite_step is None:
                changes["nonfinite_step"] = step.step if step.step is not None else 0
            reading = replace(reading, **changes)
        return reading

    def _is_spoilt(self, step: LogStep) -> bool:
        if step.loss is not None and not math.isfinite(step.loss):
            return True
        if step.grad_norm is not None:
            bad = not math.isfinite(step.grad_norm) and not step.skipped
            self._bad_norms = self._bad_norms + 1 if bad else 0
        return self._bad_norms >= NORM_SUSTAINED


class RunLogs:
    """The logs of all local ranks of one run."""

    def __init__(
        self, paths: Mapping[int, Path], *, pattern: str | None = None, fresh: bool = True
    ) -> None:
        self._followers = {
            rank: LogFollower(path, pattern=pattern, fresh=fresh) for rank, path in paths.items()
        }

    def look(self, ended: frozenset[int] = frozenset()) -> dict[int, LogReading]:
        """What every rank's log tells now; ``ended`` are ranks that write no more."""
        ranks = max(1, len(self._followers))
        share = max(SHARE_BYTES_MIN, LOOK_BYTES_MAX // ranks)
        lines = max(SHARE_LINES_MIN, LOOK_LINES_MAX // ranks)
        return {
            rank: follower.look(share, lines, final=rank in ended)
            for rank, follower in self._followers.items()
        }

    def close(self) -> None:
        """Give the descriptors back."""
        for follower in self._followers.values():
            follower.close()
