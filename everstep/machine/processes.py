"""The processes of one run, followed through pidfds: who is alive, who has gone, and how.

A pidfd tells at once that a rank has ended, whoever its parent is; the shim's records tell how. A
rank without a record is given time, as long as its shim lives; when the shim is gone too, the exit
is *lost*, either together with everything else (the machine was swept, or rebooted) or alone.

Not here: what follows from an exit (``run``).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from everstep.machine.folder import RankExit, RankStart, RunFolder
from everstep.machine.proc import ProcessHandle, exit_of_zombie, read_process

NS = 1_000_000_000
_RETRY_S = 0.01
_WAKE_SHIM_AFTER_S = 0.2
_RECORD_WAIT_S = 2.0
"""How long a living shim may take to record an exit (somebody may have stopped it)."""
_TOGETHER_S = 0.2
"""Ranks and shim that go within this time went together."""
_SHIM_LOST_AFTER_S = 1.0
_SHIM_END_S = 2.0
RESOLVE_MAX_S = _RECORD_WAIT_S + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who wants to know. ``lost`` gets the ranks, and whether shim and ranks went together."""

    exited: Callable[[RankExit], None]
    lost: Callable[[list[int], bool], None]
    all_gone: Callable[[], None]
    shim_lost: Callable[[], None]


class RunProcesses:
    """Follows the processes of one run."""

    def __init__(self, folder: RunFolder, listener: Listener) -> None:
        self._folder = folder
        self._listener = listener
        self.starts: dict[int, RankStart] = {}
        self.handles: dict[int, ProcessHandle] = {}
        """Ranks that have not been seen to end."""
        self.shim_name: tuple[int, int] | None = None
        self._shim: ProcessHandle | None = None
        self._shim_is_lost = False
        self._missing: dict[int, int] = {}
        """Ranks that are gone and whose exit is not known yet, and since when."""
        self._retry: asyncio.TimerHandle | None = None
        self._shim_check: asyncio.TimerHandle | None = None
        self.resolved = asyncio.Event()
        """Set when every rank is gone and its exit is known or lost."""

    def attach(self, *, same_boot: bool, shim_lost: bool, settled: Collection[int]) -> None:
        """Find what is alive.

        ``settled`` ranks were concluded before. ``same_boot`` is False when the machine was
        rebooted since the run started: its pids mean nothing then.
        """
        loop = asyncio.get_running_loop()
        now_ns = time.monotonic_ns()
        self.starts = self._folder.read_starts()
        self._shim_is_lost = shim_lost
        self.shim_name = self._folder.read_shim() if same_boot else None
        if self.shim_name is not None:
            self._shim = ProcessHandle.open(*self.shim_name)
        if self._shim is not None:
            loop.add_reader(self._shim.fd, self._shim_gone)
        for rank, start in self.starts.items():
            handle = ProcessHandle.open(start.pid, start.start_ticks) if same_boot else None
            if handle is not None:
                self.handles[rank] = handle
                loop.add_reader(handle.fd, self._rank_gone, rank)
            elif rank not in settled:
                self._missing[rank] = now_ns

    @property
    def live(self) -> tuple[int, ...]:
        """Ranks whose process exists at this instant."""
        return tuple(sorted(rank for rank, handle in self.handles.items() if not handle.exited))

    @property
    def shim_alive(self) -> bool:
        """Whether the shim still exists."""
        return self._shim is not None and not self._shim.exited

    def process_state(self, rank: int, training_pid: int | None) -> str | None:
        """State letter of a live rank; ``T`` if either it or its training process is stopped.

        The two differ when the rank is a shell that waits for the script.
        """
        handle = self.handles.get(rank)
        if handle is None:
            return None
        pids = [training_pid, handle.pid] if training_pid else [handle.pid]
        states = [process.state for pid in pids if (process := read_process(pid)) is not None]
        stopped = [state for state in states if state in "Tt"]
        return next(iter(stopped or states), None)

    def detach(self) -> None:
        """Stop following; nothing is ended."""
        for timer in (self._retry, self._shim_check):
            if timer is not None:
                timer.cancel()
        for handle in list(self.handles.values()):
            self._forget(handle)
        self.handles.clear()
        if self._shim is not None:
            self._forget(self._shim)

    @staticmethod
    def _forget(handle: ProcessHandle) -> None:
        if handle.fd >= 0:
            asyncio.get_running_loop().remove_reader(handle.fd)
        handle.close()

    def _rank_gone(self, rank: int) -> None:
        self._forget(self.handles.pop(rank))
        self._missing[rank] = time.monotonic_ns()
        self.collect()

    def _shim_gone(self) -> None:
        if self._shim is None:
            return
        self._forget(self._shim)
        self.collect()
        if self.handles:
            self._shim_check = asyncio.get_running_loop().call_later(
                _SHIM_LOST_AFTER_S, self._check_lost_shim
            )

    def _check_lost_shim(self) -> None:
        if self.live:
            self._shim_is_lost = True
            self._listener.shim_lost()

    def collect(self) -> None:
        """Match ranks that are gone with the shim's records."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        shim_alive = self.shim_alive  # looked at before its records are read
        records = self._folder.read_exits()
        known = [records[rank] for rank in self._missing if rank in records]
        for ended in sorted(known, key=lambda e: e.at_ns):
            del self._missing[ended.rank]
            self._listener.exited(ended)
        if self._missing:
            self._wait_or_give_up(shim_alive=shim_alive)
        if not self.handles and not self._missing and not self.resolved.is_set():
            self.resolved.set()
            self._listener.all_gone()

    def _wait_or_give_up(self, *, shim_alive: bool) -> None:
        waited_s = (time.monotonic_ns() - min(self._missing.values())) / NS
        if waited_s < (_RECORD_WAIT_S if shim_alive else _TOGETHER_S):
            if waited_s > _WAKE_SHIM_AFTER_S and self._shim is not None:
                self._shim.signal(signal.SIGCONT)
            self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self.collect)
            return
        lost = sorted(self._missing)
        self._missing.clear()
        together = not shim_alive and not self.handles and not self._shim_is_lost
        for rank in [] if together else list(lost):
            ended = self._zombie_exit(rank)
            if ended is not None:
                lost.remove(rank)
                self._listener.exited(ended)
        if lost:
            self._listener.lost(lost, together)

    def _zombie_exit(self, rank: int) -> RankExit | None:
        """A rank that nobody has reaped yet still shows how it ended."""
        start = self.starts[rank]
        process = read_process(start.pid)
        if process is None or process.state != "Z" or process.start_ticks != start.start_ticks:
            return None
        code, number = exit_of_zombie(process)
        return RankExit(rank, code, number, time.monotonic_ns())

    async def end_shim(self, *, by_force: bool) -> None:
        """Wait until the shim has ended by itself, as it does when it has no descendants left."""
        until = time.monotonic() + _SHIM_END_S
        while self._shim is not None and not self._shim.exited:
            if time.monotonic() > until:
                if not by_force:
                    return  # it waits for what could not be ended, and will reap it one day
                self._shim.signal(signal.SIGKILL)
            await asyncio.sleep(_RETRY_S)
