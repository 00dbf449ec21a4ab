"""The kernel's own state: reboots, an oops, records of a panic, and open files.

What it says line by line is in ``kernel_log``; this is what it remembers without a log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Confidence, Symptom
from everstep.machine.probes.host_read import (
    NOTHING,
    faulty,
    healthy,
    names_in,
    read_int,
    read_text,
    read_word,
    to_float,
    to_int,
    unknown,
)

# Bits of /proc/sys/kernel/tainted (admin-guide/tainted-kernels): what an operator has to know.
_TAINTS = {4: "a machine check", 5: "a bad memory page", 7: "an oops", 14: "a soft lockup"}
_OOPS = 7
REBOOT_IS_NEWS_S = 3600.0
"""Later it explains no failure any more."""
_BOOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class KernelStateProbe:
    """Reboots (by boot id), what has tainted the kernel, and records of a panic in pstore."""

    name = "kernel_state"
    interval = "host"

    def __init__(self, *, proc: Path, sys: Path, remembered: Path | None = None) -> None:
        """Nothing is read yet.

        Args:
            proc: where /proc is.
            sys: where /sys is.
            remembered: a file of ours that holds the boot id of our last life; None: no memory.
        """
        self._proc = proc
        self._sys = sys
        self._remembered = remembered
        self._boot: str | None = None
        self._taint: int | None = None
        self._rebooted = False

    def look(self, now_s: float) -> Sequence[Observation]:  # noqa: ARG002 - no rates here
        """Look at the boot id, the taint and pstore."""
        boot = read_word(self._proc / "sys" / "kernel" / "random" / "boot_id") or ""
        if not _BOOT_ID.fullmatch(boot):
            return [unknown(self.name, "the kernel names no boot id")]
        if self._boot is None and self._remembered is not None:
            self._rebooted = self._recall(boot)
        self._boot = boot
        up = to_float((read_text(self._proc / "uptime") or "").partition(" ")[0]) or 0.0
        taint = read_int(self._proc / "sys" / "kernel" / "tainted") or 0
        records = [n for n in names_in(self._sys / "fs" / "pstore") if n.startswith("dmesg")]
        values: dict[str, Value] = {
            "uptime_s": up,
            "boot_id": boot,
            "tainted": taint,
            "panic_records": len(records),
        }
        seen = []
        fresh = 0 if self._taint is None else taint & ~self._taint
        self._taint = taint
        if fresh >> _OOPS & 1:
            reason = "the kernel has gone through an oops while we looked"
            seen.append(self._bad("kernel_oops", Action.EVICT_MACHINE, reason, values))
        elif marks := [text for bit, text in _TAINTS.items() if taint >> bit & 1]:
            reason = f"since boot the kernel has gone through {' and '.join(marks)}"
            seen.append(self._bad("kernel_tainted", Action.WARN_ONLY, reason, values))
        if records:
            reason = f"{len(records)} records of a panic in pstore ({records[-1][:40]})"
            seen.append(self._bad("panic_record", Action.WARN_ONLY, reason, values))
        if self._rebooted and up < REBOOT_IS_NEWS_S:
            reason = f"it was booted anew {up:.0f} s ago, since the agent's last life"
            seen.append(self._bad("rebooted", Action.WARN_ONLY, reason, values))
        return seen or [healthy(self.name, f"up for {up / 3600:.1f} h", values=values)]

    def _recall(self, boot: str) -> bool:
        """Whether the boot id differs from that of our last life; remembers this one."""
        assert self._remembered is not None  # noqa: S101 - asked before
        before = read_word(self._remembered) or ""
        if before != boot:
            with suppress(OSError):
                fresh = self._remembered.with_name(f"{self._remembered.name}.{os.getpid()}")
                fresh.write_text(boot + "\n", encoding="ascii")
                fresh.replace(self._remembered)
        return bool(_BOOT_ID.fullmatch(before)) and before != boot

    def _bad(
        self, rule: str, action: Action, reason: str, values: Mapping[str, Value] = NOTHING
    ) -> Observation:
        sure = Confidence.HIGH if action is Action.EVICT_MACHINE else Confidence.LOW
        return faulty(
            self.name, rule, Symptom.KERNEL_PANIC, action, reason, confidence=sure, values=values
        )

    def close(self) -> None:
        """Holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptorSettings:
    """Thresholds of ``DescriptorProbe``."""

    used_max: float
    """Share of the limit of open files that may be used."""


class DescriptorProbe:
    """Open files of the whole machine, and of the processes that it is given."""

    name = "open_files"
    interval = "host"

    def __init__(
        self,
        settings: DescriptorSettings,
        *,
        proc: Path,
        pids: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """Nothing is read yet; ``pids`` is asked at each look: ranks come and go."""
        self._settings = settings
        self._proc = proc
        self._pids = pids

    def look(self, now_s: float) -> Sequence[Observation]:  # noqa: ARG002 - no rates here
        """Look at file-nr and at the descriptors of each process."""
        words = (read_text(self._proc / "sys" / "fs" / "file-nr") or "").split()
        numbers = [number for word in words if (number := to_int(word)) is not None]
        if len(numbers) < 3:
            return [unknown(self.name, "the kernel does not say how many files are open")]
        seen = [self._judge("", "open_files_machine", numbers[0] - numbers[1], numbers[2])]
        for pid in self._pids():
            folder = self._proc / str(pid)
            limit = self._limit(folder)
            used = len(names_in(folder / "fd"))
            if limit is not None and used:
                seen.append(self._judge(f"pid {pid}", "open_files_process", used, limit))
        return seen

    def _limit(self, folder: Path) -> int | None:
        found = re.search(
            r"^Max open files\s+([0-9]+)", read_text(folder / "limits") or "", re.MULTILINE
        )
        return to_int(found[1]) if found else None

    def _judge(self, target: str, rule: str, used: int, limit: int) -> Observation:
        values: dict[str, Value] = {"open_files": used, "open_files_max": limit}
        text = f"{used} of {limit} files open" if limit < 1 << 40 else f"{used} files open"
        if limit <= 0 or used <= self._settings.used_max * limit:
            return healthy(self.name, text, target, values=values)
        return faulty(
            self.name, rule, Symptom.CONFIG_ERROR, Action.WARN_ONLY, text, target, values=values
        )

    def close(self) -> None:
        """Holds nothing."""
