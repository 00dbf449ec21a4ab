"""Ending a run's processes, and proving that none is left.

SIGTERM to each rank's process group (and SIGCONT, so that a stopped rank can obey), a grace, then
SIGKILL to whatever is left of the run, then a look at all processes. It reaches only what the run
has started: the sessions of its ranks, descendants of its shim, and processes that carry the run's
mark. A process that outlives SIGKILL hangs in a driver: the machine is then not clean, and the note
names the process.

Evidence is captured by the caller before. Not here: when a run is ended, and what is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.machine.proc import Process, ProcessHandle, Scope, find_members

_LOOK_S = 0.02
_LOOK_MAX_S = 0.2
_SCAN_MAX_S = 10.0
"""Reading the environment of a process whose memory lock is stuck in the kernel blocks for ever."""


@dataclass(frozen=True, slots=True)
class TeardownResult:
    """Whether nothing is left of the run, else what is."""

    clean: bool
    note: str = ""


class Teardown:
    """One verified teardown. ``hasten`` may shorten its grace while it is going on."""

    def __init__(
        self,
        scope: Scope,
        ranks: Mapping[int, ProcessHandle],
        *,
        grace_s: float,
        kill_wait_s: float,
    ) -> None:
        self._scope = scope
        self._leaders = [handle for handle in ranks.values() if not handle.exited]
        self._grace_until = time.monotonic() + grace_s
        self._kill_wait_s = kill_wait_s

    def hasten(self, grace_s: float) -> None:
        """Wait no longer than ``grace_s`` from now before SIGKILL."""
        self._grace_until = min(self._grace_until, time.monotonic() + grace_s)

    async def run(self) -> TeardownResult:
        """End everything, then look."""
        try:
            await self._ask_ranks()
            await self._ask_leftovers()
            return await self._kill()
        except TimeoutError:
            return TeardownResult(False, f"looking at processes took over {_SCAN_MAX_S:.0f} s")

    async def _members(self) -> dict[int, Process]:
        look = asyncio.to_thread(find_members, self._scope)
        return await asyncio.wait_for(look, _SCAN_MAX_S)

    async def _ask_ranks(self) -> None:
        for leader in self._leaders:
            if not leader.exited:
                # The handle proves that the pid, so the group's number, is still the rank's.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(leader.pid, signal.SIGTERM)
                    os.killpg(leader.pid, signal.SIGCONT)
        while not all(leader.exited for leader in self._leaders):
            if not self._in_grace:
                return
            await asyncio.sleep(_LOOK_S)

    @property
    def _in_grace(self) -> bool:
        return time.monotonic() < self._grace_until

    async def _ask_leftovers(self) -> None:
        """Data loaders and helpers that ranks left behind get what is left of the grace."""
        asked: set[tuple[int, int]] = set()
        pause_s = _LOOK_S
        while self._in_grace and (members := await self._members()):
            for process in members.values():
                name = (process.pid, process.start_ticks)
                if name not in asked:
                    asked.add(name)
                    _send(process, signal.SIGTERM, signal.SIGCONT)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_MAX_S)

    async def _kill(self) -> TeardownResult:
        until = time.monotonic() + self._kill_wait_s
        pause_s = _LOOK_S
        while members := await self._members():
            if time.monotonic() > until:
                left = ", ".join(f"{p.pid} (state {p.state})" for p in members.values())
                note = f"processes outlived SIGKILL by {self._kill_wait_s:g} s: {left}"
                return TeardownResult(False, note[:400])
            for process in members.values():
                _send(process, signal.SIGKILL)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_MAX_S)
        return TeardownResult(True)


def _send(process: Process, *numbers: int) -> None:
    handle = ProcessHandle.open(process.pid, process.start_ticks)
    if handle is not None:
        for number in numbers:
            handle.signal(number)
        handle.close()
