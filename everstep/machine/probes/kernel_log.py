"""The kernel's log as a probe: lines as they come, judged by the catalogue, kept as evidence.

Read from /dev/kmsg, from the journal, or from a file (``kernel_log_sources``). What a line means is
the judge's (``everstep.decide.kernel``), which says what is new; this probe holds it as a state
until it is over, or until nothing new has come for a time.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Verdict
from everstep.machine.probes.host_read import healthy, read_int, read_word, to_int, unknown
from everstep.machine.probes.kernel_log_sources import (
    FileSource,
    JournalSource,
    KmsgSource,
    LogLine,
    Source,
)

RECENT_LINES_MAX = 500
RETRY_S = 60.0
"""How long a source that could not be opened is left alone."""
HELD_MAX = 1000
PAST_BYTES_MAX = 16 << 20
_FILES = ("/var/log/kern.log", "/var/log/messages", "/var/log/syslog")
"""Where log daemons put the kernel's lines, by distribution."""


class Judge(Protocol):
    """What ``everstep.decide.kernel.KernelJudge`` offers."""

    def feed(self, line: str, at_s: float) -> list[Observation]:
        """Take one line; answers what is new."""
        ...

    def tick(self, at_s: float) -> list[Observation]:
        """Time has passed; answers what is new."""
        ...

    def name_gpus(self, gpu_names: Mapping[str, str]) -> Callable[[str], str]:
        """Call GPUs by these names, by PCI address; answers what renames a target of before."""
        ...

    def teardown(self, from_s: float, until_s: float) -> None:
        """Processes are ended on purpose in this time; may be said again with another end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLogSettings:
    """Where the log is, and how long what it says holds."""

    source: str
    """``auto``, ``kmsg``, ``journal``, or the path of a file."""
    hold_s: float
    """How long a finding stands without a new line about it."""
    look_every_s: float = 0.0
    """Time between two looks: so much later than it was printed a line may be read."""
    past_s: float = 0.0
    """Lines of the last so many seconds are judged too; 0: only what comes from now on."""
    remembered: Path | None = None
    """A file of ours with the number of the last record of /dev/kmsg that was judged, so that
    nothing is lost between two lives of an agent; None: nothing is remembered."""


@dataclass(slots=True)
class _Held:
    observation: Observation
    at_s: float


class KernelLogProbe:
    """The kernel's log, live."""

    name = "kernel_log"
    interval = "host"

    def __init__(
        self,
        settings: KernelLogSettings,
        judge: Judge,
        *,
        proc: Path,
        dev: Path,
        files: Sequence[str] = _FILES,
        teardowns: Callable[[], Iterable[tuple[float, float]]] = tuple,
        gpu_names: Callable[[], Mapping[str, str]] = dict,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is opened yet.

        Args:
            settings: where the log is.
            judge: says what lines mean; kept for the probe's life.
            proc: where /proc is, to say why /dev/kmsg may not be read.
            dev: where /dev is.
            files: what ``auto`` tries last.
            teardowns: from when until when processes are ended on purpose, in the looks' clock;
                infinity while that goes on. Asked for at each look.
            gpu_names: what GPUs are called, by PCI address, as far as that is known by now. Asked
                for at each look.
            steady: seconds since boot, the clock of /dev/kmsg.
        """
        self._settings = settings
        self._judge = judge
        self._proc = proc
        self._dev = dev
        self._files = files
        self._teardowns = teardowns
        self._gpu_names = gpu_names
        self._named: Mapping[str, str] = {}
        self._steady = steady
        self._source: Source | None = None
        self._after: int | None = None
        self._kept: int | None = None
        self._opened_before = False
        self._why_not = ""
        self._tried_s: float | None = None
        self._held: dict[tuple[str, str], _Held] = {}
        self._targets: dict[str, None] = {}
        self._recent: deque[LogLine] = deque(maxlen=RECENT_LINES_MAX)
        self._lines = self._lost = 0
        self._notes: tuple[str, ...] = ()

    @property
    def position(self) -> int | None:
        """Number of the last record of /dev/kmsg that was judged; None with other sources."""
        return self._after

    def recent(self) -> list[LogLine]:
        """The last lines, at most ``RECENT_LINES_MAX``, as evidence."""
        return list(self._recent)

    def look(self, now_s: float) -> Sequence[Observation]:
        """Judge what has come since the last look."""
        self._name_gpus()
        source = self._open(now_s)
        if source is None:
            return [*self._standing(now_s), unknown(self.name, self._why_not, rule="no_kernel_log")]
        try:
            batch = source.read()
        except FileNotFoundError:  # a log file that is not written yet, or is just being rotated
            self._why_not = f"{self._settings.source} is not there (yet)"
            return [*self._standing(now_s), unknown(self.name, self._why_not, rule="no_kernel_log")]
        except OSError as error:
            self._let_go()
            self._tried_s = now_s
            self._why_not = f"{source.name} can no longer be read: {_text(error)}"
            return [*self._standing(now_s), unknown(self.name, self._why_not, rule="no_kernel_log")]
        for from_s, until_s in self._teardowns():
            self._judge.teardown(from_s, until_s + self._settings.look_every_s)
        for line in batch.lines:
            self._recent.append(line)
            for one in self._judge.feed(line.text, now_s):
                self._note(one, now_s, line.age_s)
        for one in self._judge.tick(now_s):
            self._note(one, now_s, None)
        if isinstance(source, KmsgSource):
            self._after = source.position
            self._remember()
        self._lines += len(batch.lines)
        self._lost += batch.lost
        self._notes = tuple(batch.notes)
        return [*self._standing(now_s), self._itself(source)]

    def _itself(self, source: Source) -> Observation:
        """How the reading goes."""
        reason = f"{self._lines} lines read from {source.name}"
        if self._lost:
            reason += f", {self._lost} were overwritten before they could be"
        values: dict[str, Value] = {
            "source": source.name,
            "lines": self._lines,
            "lines_lost": self._lost,
        }
        if self._notes:
            reason += f"; {'; '.join(self._notes)}"
        return healthy(self.name, reason, values=values)

    # --- what stands

    def _name_gpus(self) -> None:
        """What was found of a GPU before its name was known goes on under its name."""
        names = self._gpu_names()
        if names == self._named:
            return
        self._named = dict(names)
        now = self._judge.name_gpus(self._named)
        held, self._held = self._held, {}
        for (target, rule), one in held.items():
            renamed = replace(one.observation, target=now(target))
            self._held[renamed.target, rule] = _Held(renamed, one.at_s)

    def _note(self, one: Observation, now_s: float, age_s: float | None) -> None:
        if one.verdict is not Verdict.FAULTY:
            over = str(one.values.get("cleared", "")).split(", ")
            for rule in over:
                self._held.pop((one.target, rule), None)
            self._targets[one.target] = None
            return
        if age_s is not None and age_s >= 1:
            one = replace(one, values={**one.values, "age_s": round(age_s)})
        key = (one.target, one.rule)
        self._held.pop(key, None)
        self._held[key] = _Held(one, now_s)
        if len(self._held) > HELD_MAX:
            del self._held[next(iter(self._held))]

    def _standing(self, now_s: float) -> list[Observation]:
        """What has been found and is not over; what has just become well, once."""
        hold_s = self._settings.hold_s
        gone = [key for key, held in self._held.items() if now_s - held.at_s >= hold_s]
        for key in gone:
            self._targets[key[0]] = None
            del self._held[key]
        standing = {target for target, _ in self._held}
        well = [
            healthy(self.name, "nothing in the kernel log stands against it", target)
            for target in self._targets
            if target and target not in standing
        ]
        self._targets = {}
        return [*(held.observation for held in self._held.values()), *well]

    # --- the source

    def _open(self, now_s: float) -> Source | None:
        if self._source is not None:
            return self._source
        if self._tried_s is not None and now_s - self._tried_s < RETRY_S:
            return None
        self._tried_s = now_s
        past_s = 0.0 if self._opened_before else self._settings.past_s
        reasons = []
        for name, make in self._ways(past_s):
            try:
                self._source = make()
            except OSError as error:
                reasons.append(f"{name}: {_text(error)}")
                continue
            self._opened_before = True
            return self._source
        needed = "run it as root or with CAP_SYSLOG, or name a file (policy: probes.kernel_log)"
        self._why_not = f"no kernel log ({'; '.join(reasons)}): {needed}"
        return None

    def _ways(self, past_s: float) -> Iterator[tuple[str, Callable[[], Source]]]:
        wanted = self._settings.source
        past_bytes = PAST_BYTES_MAX if past_s > 0 else 0
        if wanted.startswith("/"):
            yield wanted, lambda: FileSource(Path(wanted), past_bytes=past_bytes)
            return
        if wanted in ("auto", "kmsg"):
            yield "kmsg", lambda: self._kmsg(past_s)
        if wanted in ("auto", "journal"):
            yield "journal", lambda: JournalSource(past_s=past_s)
        if wanted == "auto":
            for file in self._files:
                path = Path(file)
                if path.exists():
                    yield file, partial(FileSource, path, past_bytes=past_bytes, must_exist=True)

    def _kmsg(self, past_s: float) -> Source:
        path = self._dev / "kmsg"
        if self._after is None:
            self._after = self._kept = self._recall()
        try:
            return KmsgSource(path, past_s=past_s, after=self._after, steady=self._steady)
        except PermissionError as error:
            if read_int(self._proc / "sys" / "kernel" / "dmesg_restrict"):
                text = "not allowed (kernel.dmesg_restrict is 1)"
                raise PermissionError(errno.EPERM, text, str(path)) from error
            raise

    # --- over two lives

    def _boot_id(self) -> str:
        return read_word(self._proc / "sys" / "kernel" / "random" / "boot_id") or ""

    def _recall(self) -> int | None:
        """The number of the last record that was judged in this boot."""
        if self._settings.remembered is None:
            return None
        boot_id, _, number = (read_word(self._settings.remembered) or "").partition(" ")
        return to_int(number) if boot_id and boot_id == self._boot_id() else None

    def _remember(self) -> None:
        file = self._settings.remembered
        if file is None or self._after is None or self._after == self._kept:
            return
        self._kept = self._after
        with suppress(OSError):  # a full disk: lines may be judged twice then
            fresh = file.with_name(f"{file.name}.new")
            fresh.write_text(f"{self._boot_id()} {self._after}\n", encoding="utf-8")
            fresh.replace(file)

    def _let_go(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def not_here(self) -> Mapping[str, str]:
        """Nothing: a machine without a readable log is unknown."""
        return {}

    def not_looked_at(self) -> Mapping[str, Sequence[str]]:
        """Nothing is left out."""
        return {}

    def close(self) -> None:
        """Close the source."""
        self._let_go()


def _text(error: OSError) -> str:
    return (error.strerror or os.strerror(error.errno or 0)).lower()[:200]
