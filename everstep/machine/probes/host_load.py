"""Whether the processors keep up: load, CPU pressure, steal, and tasks that hang in the kernel.

The paper's "CPU overload": training threads wait for a processor, so GPUs wait for them. It slows a
job and breaks nothing, so it only warns. Soft lockups are in the kernel log (``kernel_log``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Confidence, Symptom
from everstep.machine.probes.host_read import (
    faulty,
    healthy,
    names_in,
    pairs,
    pressure,
    read_text,
    read_word,
    to_float,
    to_int,
    unknown,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """Thresholds of ``LoadProbe``."""

    load_per_cpu_max: float
    """Load average of a minute for each processor."""
    pressure_max: float
    """Share of the last minute in which some task waited for a processor."""
    steal_max: float
    """Share of processor time that the hypervisor gave to others."""


@dataclass(frozen=True, slots=True)
class _Times:
    at_s: float
    total: int
    steal: int


class LoadProbe:
    """Load, CPU pressure (PSI) and steal."""

    name = "load"
    interval = "host"

    def __init__(self, settings: LoadSettings, *, proc: Path) -> None:
        """Nothing is read yet; ``proc`` is where /proc is."""
        self._settings = settings
        self._proc = proc
        self._before: _Times | None = None

    def look(self, now_s: float) -> Sequence[Observation]:
        """Look at loadavg, pressure and stat."""
        stat = read_text(self._proc / "stat") or ""
        cpus = len(re.findall(r"^cpu[0-9]+ ", stat, re.MULTILINE))
        load = to_float((read_text(self._proc / "loadavg") or "").partition(" ")[0])
        if not cpus or load is None:
            return [unknown(self.name, f"{self._proc} has no loadavg or no processors in stat")]
        waiting = pressure(read_text(self._proc / "pressure" / "cpu")).get("some_avg60")
        steal = self._steal(stat, now_s)
        values: dict[str, Value] = {
            "load_1min": load,
            "cpus": cpus,
            "pressure_some_avg60_percent": waiting,
            "steal_share": None if steal is None else round(steal, 4),
        }
        settings = self._settings
        wrong = []
        # Load alone also counts tasks that wait for a disk; pressure alone is quickly high.
        crowded = load / cpus > settings.load_per_cpu_max
        if crowded and (waiting is None or waiting > settings.pressure_max * 100):
            text = f"load {load:.1f} on {cpus} processors"
            if waiting is not None:
                text += f", a task waited for one in {waiting:.0f} % of the last minute"
            wrong.append(("cpu_overload", text))
        if steal is not None and steal > settings.steal_max:
            wrong.append(("cpu_steal", f"the hypervisor took {steal:.0%} of the processors' time"))
        if not wrong:
            return [healthy(self.name, f"load {load:.1f} on {cpus} processors", values=values)]
        return [
            faulty(self.name, rule, Symptom.MFU_DECLINE, Action.WARN_ONLY, text, values=values)
            for rule, text in wrong
        ]

    def _steal(self, stat: str, now_s: float) -> float | None:
        """Share since the last look; None at the first one."""
        fields = [to_int(word) for word in stat.partition("\n")[0].split()[1:9]]
        ticks = [field for field in fields if field is not None and field >= 0]
        if len(ticks) < 8:
            return None
        before, self._before = self._before, _Times(now_s, sum(ticks), ticks[7])
        if before is None or self._before.total <= before.total:
            return None
        share = (ticks[7] - before.steal) / (self._before.total - before.total)
        return min(max(share, 0.0), 1.0)

    def close(self) -> None:
        """Holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HungTaskSettings:
    """Thresholds of ``HungTaskProbe``."""

    hung_after_s: float
    """A task that sleeps uninterruptibly for so long without being run once hangs."""
    look_every_s: float
    """All processes are looked at this often: that costs more than other probes."""


@dataclass(slots=True)
class _Sleeper:
    since_s: float
    switches: int


_STORAGE = re.compile(r"\b(nfs|rpc_|ll_|cl_|fuse|ceph|cifs|smb|gpfs|beegfs|weka)", re.IGNORECASE)
_DEVICE = re.compile(
    r"\b(nvidia|_nv[0-9]|nv_|uvm_|rm_ioctl|os_acquire|mlx|ib_uverbs)", re.IGNORECASE
)
_PARKED = re.compile(r"refrigerator|freez|vfork", re.IGNORECASE)
"""Frozen on purpose, or waiting for a child to begin: state D, and no fault."""
_KTHREADD = "2"


@dataclass(frozen=True, slots=True, order=True)
class _Hung:
    program: bool
    """A program's process, and no thread of the kernel itself."""
    age_s: float
    pid: str


class HungTaskProbe:
    """Processes that stay in state D, as the kernel's own hung-task check counts them.

    The state alone is not enough (a busy disk shows it in every second look): a task hangs when it
    was never run in between, which its count of context switches tells. Threads other than a
    process's first one are left to the kernel's own check, which logs them.
    """

    name = "hung_tasks"
    interval = "host"

    def __init__(self, settings: HungTaskSettings, *, proc: Path) -> None:
        """Nothing is read yet; ``proc`` is where /proc is."""
        self._settings = settings
        self._proc = proc
        self._sleepers: dict[tuple[str, str], _Sleeper] = {}
        self._looked_s: float | None = None
        self._last: Sequence[Observation] = ()

    def look(self, now_s: float) -> Sequence[Observation]:
        """Look at all processes, or answer the last look when that was a moment ago."""
        if self._looked_s is not None and now_s - self._looked_s < self._settings.look_every_s:
            return self._last
        self._looked_s = now_s
        names = [name for name in names_in(self._proc) if name.isdecimal()]
        if not names:
            self._last = [unknown(self.name, f"{self._proc} shows no processes")]
            return self._last
        asleep = {}
        kernel = set()
        for pid, start, parent in self._asleep(names):
            asleep[pid, start] = self._switches(pid)
            if _KTHREADD in (pid, parent):
                kernel.add(pid)
        self._sleepers = {
            key: old
            if (old := self._sleepers.get(key)) is not None and old.switches == switches
            else _Sleeper(now_s, switches)
            for key, switches in asleep.items()
        }
        hung = [
            _Hung(pid not in kernel, now_s - sleeper.since_s, pid)
            for (pid, _), sleeper in self._sleepers.items()
            if now_s - sleeper.since_s >= self._settings.hung_after_s
            and not _PARKED.search(self._waits_in(pid))
        ]
        self._last = [self._judge(max(hung), len(hung))] if hung else [self._well(len(asleep))]
        return self._last

    def _well(self, asleep: int) -> Observation:
        return healthy(self.name, "no task hangs in the kernel", values={"uninterruptible": asleep})

    def _asleep(self, names: list[str]) -> list[tuple[str, str, str]]:
        """Pid, start time and parent of those in state D."""
        found = []
        for pid in names:
            text = read_text(self._proc / pid / "stat", 4096)
            fields = (text or "").rpartition(")")[2].split()
            if len(fields) > 19 and fields[0] == "D":
                found.append((pid, fields[19], fields[1]))
        return found

    def _switches(self, pid: str) -> int:
        counts = pairs(read_text(self._proc / pid / "status", 65536))
        return counts.get("voluntary_ctxt_switches", 0) + counts.get(
            "nonvoluntary_ctxt_switches", 0
        )

    def _waits_in(self, pid: str) -> str:
        return (read_word(self._proc / pid / "wchan") or "")[:64]

    def _judge(self, longest: _Hung, count: int) -> Observation:
        age, pid = longest.age_s, longest.pid
        program = (read_word(self._proc / pid / "comm") or "?")[:64]
        stack = read_text(self._proc / pid / "stack", 4096) or ""  # root only
        waits_in = self._waits_in(pid)
        where = stack or waits_in
        symptom, action = Symptom.HANG, Action.STOP_TIME_CHECK
        if _DEVICE.search(where):
            symptom = Symptom.GPU_UNAVAILABLE
        elif _STORAGE.search(where):
            symptom, action = Symptom.FILESYSTEM_IO, Action.WAIT_EXTERNAL
        if not longest.program:  # some drivers' threads sleep so for ever and mean nothing by it
            action = Action.WARN_ONLY
        others = f" and {count - 1} more" if count > 1 else ""
        inside = f" in {waits_in}" if waits_in not in ("", "0") else ""
        return faulty(
            self.name,
            "hung_task",
            symptom,
            action,
            f"process {pid} ({program}){others} has hung in the kernel{inside} for {age:.0f} s",
            confidence=Confidence.LOW,
            values={
                "pid": to_int(pid),
                "program": program,
                "hung_s": round(age, 1),
                "hung_tasks": count,
                "wchan": waits_in,
                "stack": stack[:1000],
            },
        )

    def close(self) -> None:
        """Holds nothing."""
