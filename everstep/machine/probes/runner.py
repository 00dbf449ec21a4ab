"""Runs the probes of a machine side by side, each in one thread of its own, at its interval.

A probe may do anything: raise, take long, never come back. None of that reaches the others, the
agent's event loop or the number of threads; a look that does not come back is itself an
observation. Not here: what is new in what was seen (``board``), and what a probe looks at.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import structlog

from everstep.decide.observation import Observation
from everstep.machine.probes.base import Probe
from everstep.machine.probes.board import RULE_FAILED, RULE_STUCK, Change, ProbeBoard
from everstep.machine.probes.once import (
    Explains,
    Look,
    close_probe,
    look_at,
    run_once,
    stuck_reason,
    unknown_probe,
)

__all__ = ["Explains", "Look", "LookCount", "ProbeRunner", "Urgent", "run_once"]

STOP_MAX_S = 0.8
"""How long a stop waits for looks under way; a stuck one is left behind in its daemon thread."""

log = structlog.get_logger(__name__)


@runtime_checkable
class Urgent(Protocol):
    """A probe that hears of trouble by itself and need not wait for its interval."""

    def on_news(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, when a look now would find something new."""
        ...


@dataclass(slots=True)
class LookCount:
    """What one probe has cost and yielded since the start."""

    looks: int = 0
    """Looks that came back with observations."""
    errors: int = 0
    """Looks that raised."""
    stuck: int = 0
    """Looks that were over their deadline, whether or not they came back later."""
    last_took_s: float = 0.0
    total_took_s: float = 0.0


class ProbeRunner:
    """All probes of one machine. Its methods are for the event loop that it was started in."""

    def __init__(
        self,
        probes: Sequence[Probe],
        intervals_s: Mapping[str, float],
        on_change: Callable[[Change], None],
        *,
        look_deadline_s: float,
        on_look: Callable[[str, Sequence[Observation]], None] = lambda _probe, _seen: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs before ``start``.

        Args:
            probes: with names that are unique among them; closed by this runner.
            intervals_s: seconds for each of the probes' ``interval`` names.
            on_change: called in the event loop for each thing that is new.
            look_deadline_s: a look that takes longer is stuck.
            on_look: called in the event loop with all that one look of a probe has yielded; for a
                look that failed or is stuck, with one unknown observation.
            clock: seconds, monotonic; given to the looks and used for ages.

        Raises:
            ValueError: two probes of one name, or an interval that is not given.
        """
        names = [probe.name for probe in probes]
        if len(set(names)) != len(names):
            raise ValueError(f"probes need names of their own, got {sorted(names)}")
        missing = {probe.interval for probe in probes} - set(intervals_s)
        if missing:
            raise ValueError(f"no interval for {', '.join(sorted(missing))}")
        self._board = ProbeBoard()
        self._on_change = on_change
        self._on_look = on_look
        self._deadline_s = look_deadline_s
        self._clock = clock
        self._looked = {name: LookCount() for name in names}
        self._workers = [_Worker(probe, intervals_s[probe.interval], self) for probe in probes]
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def looked(self) -> Mapping[str, LookCount]:
        """Counters by probe."""
        return self._looked

    def state(self) -> list[tuple[Observation, float]]:
        """All that is held now, each with its age in seconds: since it was last seen."""
        return self._board.state(self._clock())

    def look_now(self, probe: str) -> None:
        """Let a probe look at once, unless it is looking; from any thread."""
        for worker in self._workers:
            if worker.name == probe:
                worker.wake()

    async def look_all(self, limit_s: float) -> bool:
        """Let all probes look now; True when all are back within the limit.

        A look that is under way counts: it began before this call, but what it has not come to yet
        it still sees.
        """
        for worker in self._workers:
            worker.landed.clear()
            worker.wake()
        waits = [asyncio.ensure_future(worker.landed.wait()) for worker in self._workers]
        if not waits:
            return True
        _, late = await asyncio.wait(waits, timeout=limit_s)
        for wait in late:
            wait.cancel()
        return not late

    async def start(self) -> None:
        """Let every probe look for the first time, now."""
        self._loop = asyncio.get_running_loop()
        for worker in self._workers:
            worker.start(self._loop)

    async def stop(self) -> None:
        """End within a second, whatever the probes do."""
        for worker in self._workers:
            worker.stop()
        ends = [worker.ended for worker in self._workers if worker.ended is not None]
        if ends:
            await asyncio.wait(ends, timeout=STOP_MAX_S)
        left = [worker.name for worker in self._workers if worker.running]
        if left:
            log.warning("probes that do not come back are left behind", probes=left)

    # Called in the event loop, by the workers.

    def began(self, worker: _Worker, look: int) -> None:
        """A look has begun: see to it that it ends."""
        if self._loop is not None and not worker.stopping:
            worker.timer = self._loop.call_later(self._deadline_s, self._late, worker, look)

    def ended(self, worker: _Worker, found: Sequence[Observation] | str, took_s: float) -> None:
        """A look has ended, with observations or with an error's text."""
        if worker.timer is not None:
            worker.timer.cancel()
        if worker.stopping:
            return
        count = self._looked[worker.name]
        count.last_took_s = took_s
        count.total_took_s += took_s
        now_s = self._clock()
        if isinstance(found, str):
            count.errors += 1
            changes = self._board.failed(worker.name, found, now_s)
            found = [unknown_probe(worker.name, RULE_FAILED, found)]
        else:
            count.looks += 1
            changes = self._board.landed(worker.name, found, now_s)
        self._tell(worker.name, found, changes)
        worker.landed.set()

    def _late(self, worker: _Worker, look: int) -> None:
        if worker.stopping or worker.look != look or self._loop is None:
            return
        if worker.stuck_look != look:
            worker.stuck_look = look
            self._looked[worker.name].stuck += 1
        now_s = self._clock()
        reason = stuck_reason(now_s - worker.began_s)
        changes = self._board.stuck(worker.name, reason, now_s)
        self._tell(worker.name, [unknown_probe(worker.name, RULE_STUCK, reason)], changes)
        worker.timer = self._loop.call_later(self._deadline_s, self._late, worker, look)

    def _tell(self, probe: str, found: Sequence[Observation], changes: Sequence[Change]) -> None:
        try:
            self._on_look(probe, found)
            for change in changes:
                self._on_change(change)
        except Exception:
            log.exception("what a probe saw could not be passed on", probe=probe)

    def now_s(self) -> float:
        """The runner's clock."""
        return self._clock()


class _Worker:
    """One probe and its thread."""

    def __init__(self, probe: Probe, interval_s: float, runner: ProbeRunner) -> None:
        self.name = probe.name
        self.look = 0
        self.stuck_look = 0
        self.began_s = 0.0
        self.stopping = False
        self.timer: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[None] | None = None
        self.landed = asyncio.Event()
        self._probe = probe
        self._interval_s = interval_s
        self._runner = runner
        self._wake = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        # A daemon: a stuck look must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"probe-{self.name}", daemon=True)

    @property
    def running(self) -> bool:
        return self.ended is not None and not self.ended.done()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ended = loop.create_future()
        if isinstance(self._probe, Urgent):
            self._probe.on_news(self.wake)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        self.stopping = True
        if self.timer is not None:
            self.timer.cancel()
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self.stopping:
                self._wake.clear()
                pause_s = self._look_once()
                if not self.stopping:
                    self._wake.wait(pause_s)
        finally:
            close_probe(self._probe)
            self._post(self._set_ended)

    def _look_once(self) -> float:
        """Look; returns the seconds until the next time."""
        now_s = self._runner.now_s()
        self.look += 1
        self.began_s = now_s
        self._post(self._runner.began, self, self.look)
        began = time.monotonic()
        found = look_at(self._probe, now_s)
        took_s = time.monotonic() - began
        self.look += 1  # the look that a timer may still ask for is over
        self._post(self._runner.ended, self, found, took_s)
        # A look that takes longer than the interval leaves out the times that it has missed.
        intervals = math.floor(took_s / self._interval_s) + 1
        return max(intervals * self._interval_s - took_s, self._interval_s / 10)

    def _set_ended(self) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(call, *args)
            except RuntimeError:  # the loop is closed: nobody wants to know any more
                self.stopping = True
