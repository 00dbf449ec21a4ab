"""Where the kernel's log is read, line by line and live: /dev/kmsg, the journal, or a file.

Every source is read without waiting, a bounded amount at a time, and says what it missed. Not here:
what a line means (``everstep.decide.kernel``), and which source is taken (``kernel_log``).
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from everstep.machine.probes.host_read import to_int

RECORD_BYTES_MAX = 8192
"""The kernel refuses to read a record of /dev/kmsg into less than it needs (EINVAL)."""
LINES_PER_LOOK_MAX = 20_000
LINE_CHARS_MAX = 2000
_KMSG_DEVICE = os.makedev(1, 11)
_PART_BYTES = 1 << 16
_BYTES_PER_LOOK_MAX = 16 << 20
_TRY_MAX_S = 3.0


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the kernel's log."""

    text: str
    """As ``dmesg`` shows it, or as the file has it."""
    age_s: float | None = None
    """How old it is; None where the source does not say."""
    sequence: int | None = None
    """Number of the record since boot; only /dev/kmsg has it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one look has read."""

    lines: Sequence[LogLine] = ()
    lost: int = 0
    """Records that were overwritten before they were read; at least so many."""
    notes: Sequence[str] = ()
    """What happened to the source itself: rotated, cut off, started anew."""


class Source(Protocol):
    """One place to read from."""

    name: str

    def read(self) -> Batch:
        """What has come since the last call; does not wait.

        Raises:
            OSError: it cannot be read (any more).
        """
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")


@dataclass(frozen=True, slots=True)
class Record:
    """A record of /dev/kmsg."""

    facility: int
    number: int
    since_boot_s: float
    text: str


_FACILITIES = (0, 1)
"""The kernel's own; and what root writes into /dev/kmsg, which the kernel marks as a user's."""


def parse_record(raw: bytes) -> Record | None:
    """A record of /dev/kmsg; None: it is not one.

    ``6,1234,5678901,-;text`` and lines of ``KEY=value`` after it
    (Documentation/ABI/testing/dev-kmsg).
    """
    head, separator, rest = raw.decode("utf-8", "replace").partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 4:
        return None
    level, number, micros = (to_int(field) for field in fields[:3])
    if level is None or number is None or micros is None or min(level, number, micros) < 0:
        return None
    text = rest.partition("\n")[0]
    plain = _ESCAPE.sub(lambda match: _unescaped(int(match[1], 16)), text)
    return Record(level >> 3, number, micros / 1e6, plain[:LINE_CHARS_MAX])


def _unescaped(code: int) -> str:
    return chr(code) if 32 <= code < 127 else " "


class KmsgSource:
    """/dev/kmsg: the kernel's own ring, with numbered records."""

    name = "kmsg"

    def __init__(
        self,
        path: Path,
        *,
        past_s: float = 0.0,
        after: int | None = None,
        steady: Callable[[], float] = time.monotonic,
        read: Callable[[int, int], bytes] = os.read,
    ) -> None:
        """Open it.

        Args:
            path: /dev/kmsg.
            past_s: records of the last so many seconds are read too; 0: only what comes.
            after: number of the last record that was read before; those after it are read.
            steady: seconds since boot.
            read: as ``os.read``.

        Raises:
            OSError: it is not there, or this user may not read it.
        """
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._steady = steady
        self._read = read
        self._after = after
        # Only for the past: the kernel's stamps drift from the monotonic clock by seconds in weeks.
        self._skip_until_s = steady() - past_s if past_s > 0 and after is None else -math.inf
        found = os.fstat(self._fd)
        if stat.S_ISCHR(found.st_mode) and found.st_rdev != _KMSG_DEVICE:
            self.close()  # containers put /dev/null or a console in its place
            raise OSError(errno.ENODEV, "it is not the kernel's log", str(path))
        try:
            # SEEK_DATA is "after the last clear"; SEEK_SET the oldest that is there.
            whole = past_s > 0 or after is not None
            os.lseek(self._fd, 0, os.SEEK_SET if whole else os.SEEK_END)
        except OSError as error:
            if error.errno != errno.ESPIPE:  # a pipe has no past
                self.close()
                raise

    @property
    def position(self) -> int | None:
        """Number of the last record that was read."""
        return self._after

    def read(self) -> Batch:
        """See ``Source``. An overrun is noted and reading goes on behind the gap."""
        lines: list[LogLine] = []
        lost, overrun = 0, False
        for _ in range(LINES_PER_LOOK_MAX):
            try:
                raw = self._read(self._fd, RECORD_BYTES_MAX)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EINVAL):
                    raise
                overrun = True  # records were overwritten; the next one's number tells how many
                continue
            if not raw:
                break
            # A real device gives one record at a time; a pipe may hold several.
            for record in _records(raw):
                if self._after is not None and record.number <= self._after:
                    continue
                if overrun:
                    lost += 1 if self._after is None else max(1, record.number - self._after - 1)
                    overrun = False
                self._after = record.number
                if record.facility in _FACILITIES and record.since_boot_s >= self._skip_until_s:
                    age_s = max(0.0, self._steady() - record.since_boot_s)
                    text = f"[{record.since_boot_s:12.6f}] {record.text}"
                    lines.append(LogLine(text, age_s, record.number))
        return Batch(lines, lost + overrun)

    def close(self) -> None:
        """Close it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _records(raw: bytes) -> list[Record]:
    parsed = (parse_record(line) for line in raw.split(b"\n") if not line.startswith(b" "))
    return [one for one in parsed if one is not None]


class Splitter:
    """Bytes as they come into lines of text; a line without an end is bounded too."""

    def __init__(self) -> None:
        self._rest = b""
        self._too_long = False

    def feed(self, part: bytes) -> list[str]:
        """The lines that are whole now."""
        *whole, rest = (self._rest + part).split(b"\n")
        if self._too_long and whole:
            del whole[0]  # the end of a line of which the beginning was given already
            self._too_long = False
        lines = [_decoded(line) for line in whole]
        if len(rest) > _PART_BYTES:
            if not self._too_long:
                lines.append(_decoded(rest))
            self._too_long, rest = True, b""
        self._rest = b"" if self._too_long else rest
        return [line for line in lines if line.strip()]

    def end(self) -> list[str]:
        """What is left: nothing more will come."""
        rest, self._rest, self._too_long = self._rest, b"", False
        return [_decoded(rest)] if rest.strip() else []


def _decoded(line: bytes) -> str:
    return line[: 4 * LINE_CHARS_MAX].decode("utf-8", "replace").rstrip("\r")[:LINE_CHARS_MAX]


class FileSource:
    """A file that a log daemon writes (``/var/log/kern.log``): rotation and cutting are followed.

    It may appear later. A FIFO works too.
    """

    name = "file"

    def __init__(self, path: Path, *, past_bytes: int = 0, must_exist: bool = False) -> None:
        """Open it at its end, or so many bytes before it.

        Raises:
            OSError: it is there and cannot be read.
        """
        self._path = path
        self._fd = -1
        self._inode: tuple[int, int] | None = None
        self._offset = 0
        self._splitter = Splitter()
        try:
            self._open()
            self._to_end(past_bytes)
        except FileNotFoundError:
            if must_exist:
                raise

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        self._inode, self._offset = (found.st_dev, found.st_ino), 0

    def _to_end(self, past_bytes: int) -> None:
        size = os.fstat(self._fd).st_size
        try:
            self._offset = os.lseek(self._fd, max(0, size - past_bytes), os.SEEK_SET)
        except OSError as error:
            if error.errno != errno.ESPIPE:  # a pipe has no past
                raise

    def read(self) -> Batch:
        """See ``Source``."""
        notes: list[str] = []
        lines: list[str] = []
        if self._fd >= 0:
            if os.fstat(self._fd).st_size < self._offset:
                os.lseek(self._fd, 0, os.SEEK_SET)
                self._offset, self._splitter = 0, Splitter()
                notes.append(f"{self._path} was cut off and is read from its start")
            lines += self._rest_of()
        try:
            named = os.stat(self._path)  # noqa: PTH116 - beside fstat
        except FileNotFoundError:
            if self._fd < 0:
                raise
            named = None  # moved away; the new one comes soon
        if named is not None and (named.st_dev, named.st_ino) != self._inode:
            if self._fd >= 0:
                lines += self._splitter.end()
                os.close(self._fd)
                self._fd = -1
                notes.append(f"{self._path} was replaced")
            self._open()
            lines += self._rest_of()
        return Batch([LogLine(line) for line in lines], notes=notes)

    def _rest_of(self) -> list[str]:
        lines: list[str] = []
        room = _BYTES_PER_LOOK_MAX
        while room > 0:
            try:
                part = os.read(self._fd, _PART_BYTES)
            except BlockingIOError:
                break
            if not part:
                break
            room -= len(part)
            self._offset += len(part)
            lines += self._splitter.feed(part)
        return lines

    def close(self) -> None:
        """Close it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


JOURNAL = ("journalctl", "-k", "-o", "short-monotonic", "--no-pager", "-q")


class JournalSource:
    """``journalctl -k -f``: for users of the ``systemd-journal`` group."""

    name = "journal"

    def __init__(self, *, past_s: float = 0.0, program: Sequence[str] = JOURNAL) -> None:
        """Start it, after one try: a journal without a single kernel line is none to follow.

        Raises:
            OSError: there is no such program, or this user sees nothing.
        """
        if shutil.which(program[0]) is None:
            raise FileNotFoundError(errno.ENOENT, "no such program", program[0])
        try:
            tried = subprocess.run(
                (*program, "-n", "1"),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TRY_MAX_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise OSError(errno.ETIMEDOUT, "the journal does not answer", program[0]) from None
        if not tried.stdout.strip():
            said = _decoded(tried.stderr.strip()) or "no kernel line in it"
            raise OSError(errno.EACCES, said[:200], program[0])
        since = ("-f", "-n", "0") if past_s <= 0 else ("-f", "--since", f"-{int(past_s) + 1}s")
        self._process = subprocess.Popen(
            (*program, *since),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._splitter = Splitter()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

    def read(self) -> Batch:
        """See ``Source``."""
        raw, ended = _drain(self._process.stdout)
        if ended and not raw:
            try:
                code = self._process.wait(_TRY_MAX_S)
            except subprocess.TimeoutExpired:
                raise OSError(errno.EPIPE, "it has closed its output", "journalctl") from None
            said = _decoded(_drain(self._process.stderr)[0]).strip() or "it says nothing"
            raise OSError(errno.EPIPE, f"it has ended ({code}): {said[:200]}", "journalctl")
        return Batch([LogLine(line) for line in self._splitter.feed(raw)])

    def close(self) -> None:
        """End the program."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _drain(pipe: IO[bytes] | None) -> tuple[bytes, bool]:
    """What is in a pipe now, and whether its other end is closed."""
    parts: list[bytes] = []
    room = _BYTES_PER_LOOK_MAX
    while pipe is not None and room > 0:
        try:
            part = os.read(pipe.fileno(), _PART_BYTES)
        except BlockingIOError:
            return b"".join(parts), False
        if not part:
            return b"".join(parts), True
        parts.append(part)
        room -= len(part)
    return b"".join(parts), pipe is None
