"""The nemesis: strikes at random, by a seed, and counts every blow.

Which blow comes next, whom it hits and how long the pause is, all follow from the seed; when a blow
lands in the life of a job does not, since real processes are never twice alike.

Not here: what must hold afterwards (``test_nemesis``, ``tests.support.judge``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter as Tally
from collections.abc import Awaitable, Callable

from tests.support.world import Job, World
from workers.embedded import TEMPORAL

PAUSE_S = (0.3, 2.0)
MISSED_LIMIT_S = 60.0
"""How much longer the rage may last for a kind that has hit nothing yet."""
FROZEN_S = (0.5, 6.0)
"""Up to longer than a heartbeat, so that another controller acts for one that is frozen."""
OUTAGE_S = (0.2, 1.5)
RANK_PAUSE_S = (0.1, 1.5)
"""A rank that stands still for less than the hang rule's time, and goes on."""


class Nemesis:
    """Breaks one world until it is told to be quiet."""

    def __init__(self, world: World, job: Job, seed: int) -> None:
        self.world = world
        self.job = job
        self.dice = random.Random(seed)
        self.blows: Tally[str] = Tally()
        self._frozen: set[str] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._kinds: dict[str, Callable[[], Awaitable[bool]]] = {
            "kill controller": self._kill_controller,
            "freeze controller": self._freeze_controller,
            "kill agent": self._kill_agent,
            "freeze agent": self._freeze_agent,
            "kill rank": self._kill_rank,
            "freeze rank": self._freeze_rank,
            "kill server": self._kill_server,
        }

    @property
    def kinds(self) -> frozenset[str]:
        """All kinds of blows."""
        return frozenset(self._kinds)

    async def rage(self, seconds: float) -> None:
        """Strike until the time is over, then set everything free again."""
        over = time.monotonic() + seconds
        # Every kind once first, in an order of the seed's: none may be missed by chance.
        deck = sorted(self._kinds)
        self.dice.shuffle(deck)
        try:
            while time.monotonic() < over or deck:
                kind = deck.pop() if deck else self.dice.choice(sorted(self._kinds))
                if await self._kinds[kind]():
                    self.blows[kind] += 1
                elif not self.blows[kind] and time.monotonic() < over + MISSED_LIMIT_S:
                    deck.insert(0, kind)  # it hit nothing: once more later
                await asyncio.sleep(self.dice.uniform(*PAUSE_S))
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _later(self, delay_s: float, undo: Callable[[], object]) -> None:
        """Undo a blow after a time, or when the rage ends, whichever comes first."""

        async def wait() -> None:
            try:
                await asyncio.sleep(delay_s)
            finally:
                undo()

        task = asyncio.create_task(wait())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    # --- blows: each answers whether it hit anything

    def _kill(self, part: str) -> bool:
        return self.world.embedded.kill(part, signal.SIGKILL) is not None

    def _freeze(self, part: str) -> bool:
        embedded = self.world.embedded
        if part in self._frozen or embedded.kill(part, signal.SIGSTOP) is None:
            return False
        self._frozen.add(part)

        def thaw() -> None:
            self._frozen.discard(part)
            embedded.kill(part, signal.SIGCONT)

        self._later(self.dice.uniform(*FROZEN_S), thaw)
        return True

    async def _kill_controller(self) -> bool:
        return self._kill(self.dice.choice(self.world.embedded.controller_names))

    async def _freeze_controller(self) -> bool:
        return self._freeze(self.dice.choice(self.world.embedded.controller_names))

    async def _kill_agent(self) -> bool:
        return self._kill(self.dice.choice(self.world.embedded.machine_ids))

    async def _freeze_agent(self) -> bool:
        return self._freeze(self.dice.choice(self.world.embedded.machine_ids))

    async def _kill_server(self) -> bool:
        embedded = self.world.embedded
        embedded.hold(TEMPORAL)
        hit = self._kill(TEMPORAL)
        self._later(self.dice.uniform(*OUTAGE_S), lambda: embedded.release(TEMPORAL))
        return hit

    async def _kill_rank(self) -> bool:
        pid = await self._some_rank()
        return pid is not None and _signal(pid, signal.SIGKILL)

    async def _freeze_rank(self) -> bool:
        pid = await self._some_rank()
        if pid is None or not _signal(pid, signal.SIGSTOP):
            return False
        self._later(self.dice.uniform(*RANK_PAUSE_S), lambda: _signal(pid, signal.SIGCONT))
        return True

    async def _some_rank(self) -> int | None:
        ranks = sorted(process.pid for process in self.world.ranks(self.job.name))
        return self.dice.choice(ranks) if ranks else None


def _signal(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
