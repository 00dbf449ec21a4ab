"""Memory of the machine: OOM kills, what is left, pressure and swapping, and /dev/shm.

An OOM kill is counted by the kernel in ``vmstat`` for the machine and in each control group for
itself; both are read, so that "the job's own limit" differs from "the machine ran out". Who was
killed is in the kernel log (``kernel_log``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Confidence, Symptom
from everstep.machine.probes.host_read import (
    faulty,
    healthy,
    pairs,
    pressure,
    read_int,
    read_text,
    size,
    unknown,
)

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NO_LIMIT = 1 << 60


def cgroup_folders(proc: Path, mount: Path, pid: int | str = "self") -> list[Path]:
    """The memory control groups of a process, v1 and v2, below the cgroup mount."""
    found = []
    for line in (read_text(proc / str(pid) / "cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/") or ".." in path.split("/"):
            continue
        tail = path.lstrip("/")
        if "memory" in controllers.split(","):
            found.append(mount / "memory" / tail)
        elif number == "0" and not controllers:
            found += [mount / tail, mount / "unified" / tail]
    return [folder for folder in found if _kills(folder) is not None]


def _kills(folder: Path) -> int | None:
    """OOM kills that a control group has counted; None where it counts none (a root group)."""
    for name in ("memory.events", "memory.oom_control"):
        count = pairs(read_text(folder / name)).get("oom_kill")
        if count is not None:
            return count
    return None


def _limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = read_int(folder / name)
        if limit is not None and 0 < limit < _NO_LIMIT:
            return limit
    return None


class OomProbe:
    """OOM kills of the machine and of the control groups it is given (or finds itself in)."""

    name = "oom"
    interval = "host"

    def __init__(
        self, *, proc: Path, cgroups: Callable[[], Iterable[Path]] = tuple, settle: bool = True
    ) -> None:
        """Nothing is read yet.

        Args:
            proc: where /proc is.
            cgroups: folders of control groups, asked for at each look: runs come and go.
            settle: what was counted before the first look is no news.
        """
        self._proc = proc
        self._cgroups = cgroups
        self._before: int | None = None if settle else 0
        self._groups_before: dict[Path, int] = {}

    def look(self, now_s: float) -> Sequence[Observation]:  # noqa: ARG002 - counters need no clock
        """Compare the counters with those of the last look."""
        total = pairs(read_text(self._proc / "vmstat")).get("oom_kill")
        seen, explained = self._look_at_groups()
        if total is None:
            return [*seen, unknown(self.name, "the kernel counts no OOM kills in vmstat")]
        rise = 0 if self._before is None else max(0, total - self._before)
        self._before = total
        rest = rise - explained
        if rest > 0:
            reason = f"the kernel killed {_times(rest)} because memory ran out"
            seen.append(
                faulty(
                    self.name,
                    "oom_kill",
                    Symptom.CPU_OOM,
                    Action.WARN_ONLY,
                    reason,
                    confidence=Confidence.LOW,  # whose process it was, the kernel log says
                    values={"kills": rest, "kills_since_boot": total},
                )
            )
        else:
            reason = f"no new OOM kill ({total} since boot)"
            seen.append(healthy(self.name, reason, values={"kills_since_boot": total}))
        return seen

    def _look_at_groups(self) -> tuple[list[Observation], int]:
        seen: list[Observation] = []
        explained = 0
        groups: dict[Path, int] = {}
        for folder in dict.fromkeys(self._cgroups()):
            kills = _kills(folder)
            if kills is None:
                continue
            groups[folder] = kills
            before = self._groups_before.get(folder, kills)
            target = f"cgroup {folder.name}"
            if kills <= before:
                seen.append(healthy(self.name, f"no new OOM kill ({kills} so far)", target))
                continue
            explained += kills - before
            limit = _limit(folder)
            bound = f" at its limit of {size(limit)}" if limit else ""
            seen.append(
                faulty(
                    self.name,
                    "oom_kill_cgroup",
                    Symptom.CPU_OOM,
                    Action.FIX_CONFIG_GIVE_UP,
                    f"the kernel killed {_times(kills - before)} of this control group{bound}",
                    target,
                    values={"kills": kills - before, "limit_bytes": limit, "cgroup": str(folder)},
                )
            )
        self._groups_before = groups
        return seen, explained

    def close(self) -> None:
        """Holds nothing."""


def _times(count: int) -> str:
    return "a process" if count == 1 else f"{count} processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Thresholds of ``MemoryProbe``."""

    available_min: float
    """Share of memory that has to be available."""
    pressure_max: float
    """Share of the last ten seconds in which every task waited for memory."""
    swap_bytes_per_s_max: float
    """Swapping in and out, together."""


class MemoryProbe:
    """Memory available, memory pressure (PSI), and swapping."""

    name = "memory"
    interval = "host"

    def __init__(self, settings: MemorySettings, *, proc: Path) -> None:
        """Nothing is read yet; ``proc`` is where /proc is."""
        self._settings = settings
        self._proc = proc
        self._swapped: tuple[float, int] | None = None

    def look(self, now_s: float) -> Sequence[Observation]:
        """Look at meminfo, pressure and vmstat."""
        memory = pairs(read_text(self._proc / "meminfo"))
        total, available = memory.get("MemTotal", 0), memory.get("MemAvailable")
        if total <= 0 or available is None:
            return [unknown(self.name, f"{self._proc / 'meminfo'} has no MemTotal or MemAvailable")]
        share = available / total
        waiting = pressure(read_text(self._proc / "pressure" / "memory")).get("full_avg10")
        swap = self._swap_rate(now_s)
        values: dict[str, Value] = {
            "available_bytes": available * 1024,
            "total_bytes": total * 1024,
            "pressure_full_avg10_percent": waiting,
            "swap_bytes_per_s": None if swap is None else round(swap),
        }
        left = f"{size(available * 1024)} of {size(total * 1024)} available"
        settings = self._settings
        wrong: list[tuple[str, Symptom, str]] = []
        if share < settings.available_min:
            least = f"less than {settings.available_min:.1%}"
            wrong.append(("memory_low", Symptom.CPU_OOM, f"{left}, {least}"))
        if waiting is not None and waiting > settings.pressure_max * 100:
            text = f"every task waited for memory in {waiting:.0f} % of the last 10 s"
            wrong.append(("memory_pressure", Symptom.MFU_DECLINE, text))
        if swap is not None and swap > settings.swap_bytes_per_s_max:
            wrong.append(("swap_storm", Symptom.MFU_DECLINE, f"swapping {size(swap)} a second"))
        if not wrong:
            return [healthy(self.name, left, values=values)]
        return [
            faulty(self.name, rule, symptom, Action.WARN_ONLY, text, values=values)
            for rule, symptom, text in wrong
        ]

    def _swap_rate(self, now_s: float) -> float | None:
        """Bytes a second since the last look; None at the first one."""
        counters = pairs(read_text(self._proc / "vmstat"))
        if "pswpin" not in counters or "pswpout" not in counters:
            return None
        pages = counters["pswpin"] + counters["pswpout"]
        before, self._swapped = self._swapped, (now_s, pages)
        if before is None or now_s <= before[0] or pages < before[1]:
            return None
        return (pages - before[1]) * _PAGE_BYTES / (now_s - before[0])

    def close(self) -> None:
        """Holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmSettings:
    """Thresholds of ``ShmProbe``."""

    size_min: int
    """Bytes that /dev/shm has to have: NCCL and data loaders use it."""
    free_min: float
    """Share of it that has to be free."""


class ShmProbe:
    """Size of /dev/shm and what is free of it (containers give 64 MiB unless told otherwise)."""

    name = "shm"
    interval = "host"

    def __init__(self, settings: ShmSettings, *, folder: Path) -> None:
        """Nothing is read yet."""
        self._settings = settings
        self._folder = folder

    def look(self, now_s: float) -> Sequence[Observation]:  # noqa: ARG002 - no rates here
        """Look at the file system; it is in memory, so it cannot hang."""
        target = str(self._folder)
        try:
            found = os.statvfs(self._folder)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            return [unknown(self.name, f"cannot be looked at: {error}", target)]
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        values: dict[str, Value] = {"size_bytes": total, "free_bytes": free}
        seen = []
        if total < self._settings.size_min:
            least = size(self._settings.size_min)
            seen.append(
                faulty(
                    self.name,
                    "shm_small",
                    Symptom.CONFIG_ERROR,
                    Action.WARN_ONLY,
                    f"only {size(total)} large; NCCL and data loaders need {least} or more",
                    target,
                    values=values,
                )
            )
        if total and free < self._settings.free_min * total:
            seen.append(
                faulty(
                    self.name,
                    "shm_full",
                    Symptom.DISK_FULL,
                    Action.WARN_ONLY,
                    f"{size(free)} of {size(total)} free: programs that use it die of SIGBUS",
                    target,
                    values=values,
                )
            )
        return seen or [
            healthy(self.name, f"{size(free)} of {size(total)} free", target, values=values)
        ]

    def not_here(self) -> Mapping[str, str]:
        """Whether there is no shared memory."""
        return {} if self._folder.is_dir() else {"shared memory": f"{self._folder} is not there"}

    def not_looked_at(self) -> Mapping[str, Sequence[str]]:
        """Nothing is left out."""
        return {}

    def close(self) -> None:
        """Holds nothing."""
