"""Looking at processes, and signalling exactly the one that was looked at.

A pid alone names nothing: it is reused. Everything here goes by pid *and* start time, and signals
go through a pidfd that was opened before the start time was compared, so they can never reach a
stranger. Not here: which processes belong to a run's teardown, and when (``teardown``).
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.machine.shim import boot_id

__all__ = [
    "Process",
    "ProcessHandle",
    "Scope",
    "boot_id",
    "exit_of_zombie",
    "find_members",
    "read_process",
]

MARK_VARIABLE = "EVERSTEP_RUN_MARK"
_ENVIRON_BYTES_MAX = 4 * 1024 * 1024
_DEAD_STATES = frozenset("ZXx")


@dataclass(frozen=True, slots=True)
class Process:
    """One line of ``/proc/PID/stat``, as far as it is needed."""

    pid: int
    start_ticks: int
    state: str
    parent: int
    session: int
    exit_status: int
    """Wait status of a zombie; 0 for others, and where the kernel does not tell us."""

    @property
    def alive(self) -> bool:
        """False for zombies: they run nothing and hold nothing."""
        return self.state not in _DEAD_STATES


def read_process(pid: int) -> Process | None:
    """The process with this pid, or None."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = raw.rpartition(b")")[2].split()
    return Process(
        pid=pid,
        start_ticks=int(fields[19]),
        state=fields[0].decode("ascii", "replace"),
        parent=int(fields[1]),
        session=int(fields[3]),
        exit_status=int(fields[49]) if len(fields) > 49 else 0,
    )


def exit_of_zombie(process: Process) -> tuple[int | None, int | None]:
    """Exit code and signal of a zombie, from its wait status."""
    if os.WIFSIGNALED(process.exit_status):
        return None, os.WTERMSIG(process.exit_status)
    return os.WEXITSTATUS(process.exit_status), None


class ProcessHandle:
    """One process that cannot be mistaken for another: a pidfd, checked against a start time."""

    def __init__(self, pid: int, start_ticks: int, fd: int) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self.fd = fd

    @classmethod
    def open(cls, pid: int, start_ticks: int) -> ProcessHandle | None:
        """A handle on the process, or None when it is gone (or its pid has a new owner)."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return None
        process = read_process(pid)  # after the open: the pid cannot change hands any more
        if process is None or process.start_ticks != start_ticks:
            os.close(fd)
            return None
        return cls(pid, start_ticks, fd)

    @property
    def exited(self) -> bool:
        """True once the process has ended, reaped or not."""
        if self.fd < 0:
            return True
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def signal(self, number: int) -> bool:
        """Send a signal; False when the process is gone or may not be signalled."""
        if self.fd < 0:
            return False
        try:
            signal.pidfd_send_signal(self.fd, number)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Give the descriptor back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a run has started on this machine: the only processes that it may ever end."""

    mark: str
    """Value of ``EVERSTEP_RUN_MARK`` in the environment of every process of the run."""
    leaders: dict[int, int]
    """Pid to start time of each rank; ranks lead sessions of their own."""
    shim: tuple[int, int] | None
    """Pid and start time of the shim; all its descendants belong to the run."""


def command_line_mentions(argument: str) -> bool:
    """Whether any live process has exactly this argument on its command line."""
    wanted = os.fsencode(argument)
    for pid in _pids():
        try:
            if wanted in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - by name


def _all_processes() -> dict[int, Process]:
    found = (read_process(pid) for pid in _pids())
    return {process.pid: process for process in found if process is not None}


def _has_mark(pid: int, mark: str) -> bool:
    try:
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            environ = file.read(_ENVIRON_BYTES_MAX)
    except OSError:
        return False  # gone, a kernel thread, or of another user (then it is none of ours)
    return b"\0%s=%s\0" % (MARK_VARIABLE.encode(), mark.encode()) in b"\0" + environ + b"\0"


def _descendants(roots: Collection[int], processes: dict[int, Process]) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), ()):
            yield child
            queue.append(child)


def find_members(
    scope: Scope,
    *,
    look: Callable[[], dict[int, Process]] = _all_processes,
    has_mark: Callable[[int, str], bool] = _has_mark,
) -> dict[int, Process]:
    """Every live process of the run, without its shim: sessions, descendants and marked ones."""
    processes = look()
    sessions = set()
    for pid, start_ticks in scope.leaders.items():
        leader = processes.get(pid)
        # A session outlives its leader. If the leader's pid has a new owner, the kernel has seen
        # the old session end, and the number may name a stranger's session now.
        if leader is None or leader.start_ticks == start_ticks:
            sessions.add(pid)
    shim = None
    if scope.shim is not None:
        seen = processes.get(scope.shim[0])
        if seen is not None and seen.start_ticks == scope.shim[1]:
            shim = seen.pid
    members = {p.pid for p in processes.values() if p.session in sessions}
    members |= {
        p.pid for p in processes.values() if p.pid not in members and has_mark(p.pid, scope.mark)
    }
    roots = set(members) if shim is None else members | {shim}
    members |= set(_descendants(roots, processes))
    members -= {os.getpid(), shim}
    return {pid: processes[pid] for pid in sorted(members) if processes[pid].alive}
