"""Errors that hardware has counted: memory controllers (EDAC), machine checks, disks.

Counters live since boot. What they say at the first look may be old news of a machine that was
looked after since; it warns. What rises while we look acts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Confidence, Symptom
from everstep.machine.probes.host_read import (
    NOTHING,
    children,
    faulty,
    healthy,
    read_int,
    read_text,
    read_word,
    to_int,
)


@dataclass(slots=True)
class _Counted:
    """One counter that should not rise."""

    first: int
    last: int
    since_s: float

    def rise(self, value: int) -> int:
        """How much it has risen since the last look; a reset counter has not."""
        rise = max(0, value - self.last)
        self.last = value
        return rise


@dataclass(frozen=True, slots=True, kw_only=True)
class EdacSettings:
    """Thresholds of ``EdacProbe``."""

    corrected_per_hour_max: float
    """Corrected errors of one memory controller."""


class EdacProbe:
    """Memory errors that EDAC counts, and machine check exceptions."""

    name = "edac"
    interval = "host"

    def __init__(self, settings: EdacSettings, *, proc: Path, sys: Path) -> None:
        """Nothing is read yet; ``proc`` and ``sys`` are where /proc and /sys are."""
        self._settings = settings
        self._proc = proc
        self._controllers = sys / "devices" / "system" / "edac" / "mc"
        self._counted: dict[str, _Counted] = {}
        self._hour: dict[str, tuple[float, int]] = {}

    def look(self, now_s: float) -> Sequence[Observation]:
        """Look at every memory controller and at the machine checks."""
        seen: list[Observation] = []
        for folder in children(self._controllers, "mc"):
            corrected, lost = read_int(folder / "ce_count"), read_int(folder / "ue_count")
            if corrected is not None or lost is not None:
                seen.append(self._controller(folder.name, corrected or 0, lost or 0, now_s))
        checks = _machine_checks(read_text(self._proc / "interrupts"))
        if checks is not None:
            seen.append(self._machine_checks(checks, now_s))
        return seen

    def _rise(self, key: str, value: int, now_s: float) -> tuple[int, bool]:
        known = self._counted.get(key)
        if known is None:
            self._counted[key] = _Counted(value, value, now_s)
            return 0, True
        return known.rise(value), False

    def _controller(self, name: str, corrected: int, lost: int, now_s: float) -> Observation:
        target = f"memory {name}"
        values: dict[str, Value] = {"corrected": corrected, "uncorrected": lost}
        rise, first = self._rise(f"{name}/ue", lost, now_s)
        if rise or (first and lost):
            when = f"{rise} new" if rise else f"{lost} since boot"
            return faulty(
                self.name,
                "edac_uncorrected",
                Symptom.KERNEL_PANIC,
                Action.EVICT_MACHINE if rise else Action.WARN_ONLY,
                f"uncorrected memory errors: {when}",
                target,
                values=values,
            )
        if (rate := self._corrected_in_hour(name, corrected, now_s)) is not None:
            return faulty(
                self.name,
                "edac_corrected",
                Symptom.KERNEL_PANIC,
                Action.WARN_ONLY,
                f"{rate} corrected memory errors within an hour: the module is wearing out",
                target,
                confidence=Confidence.LOW,
                values=values,
            )
        text = f"{corrected} corrected and {lost} uncorrected memory errors since boot"
        return healthy(self.name, text, target, values=values)

    def _corrected_in_hour(self, name: str, corrected: int, now_s: float) -> int | None:
        """How many there were in this hour, when they are too many."""
        begun, at_first = self._hour.get(name, (now_s, corrected))
        if corrected < at_first or now_s - begun > 3600:
            begun, at_first = now_s, corrected
        self._hour[name] = (begun, at_first)
        count = corrected - at_first
        return count if count > self._settings.corrected_per_hour_max else None

    def _machine_checks(self, count: int, now_s: float) -> Observation:
        target = "machine checks"
        values: dict[str, Value] = {"exceptions": count}
        rise, _ = self._rise("mce", count, now_s)
        if not rise:
            text = f"{count} machine check exceptions since boot"
            return healthy(self.name, text, target, values=values)
        return faulty(
            self.name,
            "machine_check",
            Symptom.KERNEL_PANIC,
            Action.STOP_TIME_CHECK,
            f"{rise} new machine check exceptions",
            target,
            confidence=Confidence.LOW,
            values=values,
        )

    def not_here(self) -> Mapping[str, str]:
        """Why memory errors are not counted, where they are not."""
        if any(True for _ in children(self._controllers, "mc")):
            return {}
        return {"memory controllers": f"{self._controllers} has none (no EDAC driver)"}

    def not_looked_at(self) -> Mapping[str, Sequence[str]]:
        """Nothing is left out."""
        return {}

    def close(self) -> None:
        """Holds nothing."""


def _machine_checks(interrupts: str | None) -> int | None:
    """Machine check exceptions of all processors, counted once each; None where there are none."""
    row = re.search(r"^\s*MCE:((?:[ \t]+[0-9]{1,20})+)", interrupts or "", re.MULTILINE)
    # Broadcast to all processors: the highest count is the number of events.
    return max(int(word) for word in row[1].split()) if row else None


@dataclass(frozen=True, slots=True)
class _Finding:
    rule: str
    action: Action
    reason: str
    confidence: Confidence = Confidence.HIGH


class StorageProbe:
    """Disks and file systems that say themselves that they have failed.

    NVMe controllers that are not live, SCSI disks that the kernel has given up, degraded md arrays,
    and the errors that ext4 and btrfs count. What the kernel logs about them is in ``kernel_log``.
    """

    name = "storage"
    interval = "host"

    def __init__(self, *, sys: Path) -> None:
        """Nothing is read yet; ``sys`` is where /sys is."""
        self._sys = sys
        self._counted: dict[str, int] = {}
        self._any = False

    def look(self, now_s: float) -> Sequence[Observation]:  # noqa: ARG002 - counters need no clock
        """Look at every disk and file system that tells."""
        seen = [*self._nvme(), *self._scsi(), *self._arrays(), *self._file_systems()]
        self._any = bool(seen)
        return seen

    def _say(
        self, target: str, well: str, found: _Finding | None, values: Mapping[str, Value] = NOTHING
    ) -> Observation:
        if found is None:
            return healthy(self.name, well, target, values=values)
        return faulty(
            self.name,
            found.rule,
            Symptom.FILESYSTEM_IO,
            found.action,
            found.reason,
            target,
            confidence=found.confidence,
            values=values,
        )

    def _nvme(self) -> Iterator[Observation]:
        for folder in children(self._sys / "class" / "nvme", "nvme"):
            state = (read_word(folder / "state") or "")[:40]
            if not state:
                continue
            found = None
            if state in ("dead", "deleting", "deleting (no IO)"):
                text = f"the controller is {state}"
                found = _Finding("nvme_dead", Action.EVICT_MACHINE, text)
            elif state in ("resetting", "connecting"):
                text = f"the controller is {state}"
                found = _Finding("nvme_resetting", Action.WARN_ONLY, text, Confidence.LOW)
            yield self._say(folder.name, f"the controller is {state}", found)

    def _scsi(self) -> Iterator[Observation]:
        for folder in children(self._sys / "block", "sd"):
            state = (read_word(folder / "device" / "state") or "")[:40]
            if not state:
                continue
            found = None
            if state in ("offline", "transport-offline"):
                found = _Finding("disk_offline", Action.EVICT_MACHINE, f"the disk is {state}")
            elif rise := self._rise(folder.name, to_int(_word(folder, "device", "ioerr_cnt"))):
                text = f"{rise} new commands that ended with an error"
                found = _Finding("disk_errors", Action.WARN_ONLY, text, Confidence.LOW)
            yield self._say(folder.name, f"the disk is {state}", found)

    def _arrays(self) -> Iterator[Observation]:
        for folder in children(self._sys / "block", "md"):
            missing = read_int(folder / "md" / "degraded")
            if missing is None:
                continue
            text = f"the array runs without {missing} of its disks"
            found = _Finding("array_degraded", Action.WARN_ONLY, text) if missing > 0 else None
            yield self._say(folder.name, "all disks of the array are there", found)

    def _file_systems(self) -> Iterator[Observation]:
        for folder in children(self._sys / "fs" / "ext4"):
            count = read_int(folder / "errors_count")
            if count is not None:
                yield self._errors(f"ext4 {folder.name}", count)
        for folder in children(self._sys / "fs" / "btrfs"):
            for device in children(folder / "devinfo"):
                lines = (read_text(device / "error_stats") or "").splitlines()
                counts = [to_int(line.rpartition(" ")[2]) for line in lines]
                if counts:
                    total = sum(count or 0 for count in counts)
                    yield self._errors(f"btrfs {folder.name[:8]} device {device.name}", total)

    def _errors(self, target: str, count: int) -> Observation:
        first = target not in self._counted
        rise = self._rise(target, count)
        found = None
        if rise:
            text = f"the file system found {rise} new errors"
            found = _Finding("filesystem_errors", Action.EVICT_MACHINE, text)
        elif first and count:
            text = f"the file system has found {count} errors since it was last checked"
            found = _Finding("filesystem_errors", Action.WARN_ONLY, text)
        return self._say(target, f"{count} errors", found, values={"errors": count})

    def _rise(self, key: str, value: int | None) -> int:
        """How much it has risen since the last look; 0 at the first one."""
        if value is None:
            return 0
        rise = max(0, value - self._counted.get(key, value))
        self._counted[key] = value
        return rise

    def not_here(self) -> Mapping[str, str]:
        """Why no disk was looked at, where none was."""
        if self._any:
            return {}
        return {"disks": f"{self._sys} shows no NVMe, SCSI or md disk, no ext4 and no btrfs"}

    def not_looked_at(self) -> Mapping[str, Sequence[str]]:
        """Nothing is left out."""
        return {}

    def close(self) -> None:
        """Holds nothing."""


def _word(folder: Path, *names: str) -> str:
    return read_word(folder.joinpath(*names)) or ""
