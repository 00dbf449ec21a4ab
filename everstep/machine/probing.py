"""The probes of an agent: run for its life, and what they see kept for whoever asks.

``Probing`` ties a runner to the board that remembers over restarts. It may be given other intervals
and limits while it runs (the policy comes with a controller's answer), and it lets all probes look
at once when a run ends, because what killed a rank is often a second younger than the last look.

Not here: any probe, threads and deadlines (``everstep.machine.probes``), events (``health``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from everstep.decide.reports import Seen
from everstep.machine.health import HealthBoard
from everstep.machine.probes.base import Probe
from everstep.machine.probes.board import Change
from everstep.machine.probes.runner import ProbeRunner
from everstep.spec.policy import ProbesPolicy

FIGURES_INTERVAL_S = 2.0
"""How often figures of what is held are refreshed; changes are taken at once."""

MakeProbes = Callable[[ProbesPolicy], Sequence[Probe]]

log = structlog.get_logger(__name__)


class Probing:
    """Runs probes and answers what they see. All methods are for the event loop."""

    def __init__(self, board: HealthBoard, make: MakeProbes) -> None:
        """Nothing is looked at before ``use``.

        Args:
            board: what remembers.
            make: the probes under a policy; called again when the policy is another one.
        """
        self._board = board
        self._make = make
        self._policy: ProbesPolicy | None = None
        self._runner: ProbeRunner | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def use(self, policy: ProbesPolicy) -> None:
        """Look in this policy's way from now on."""
        async with self._lock:
            if policy == self._policy:
                return
            self._policy = policy
            await self._end()
            probes = await asyncio.to_thread(self._make, policy)
            self._runner = ProbeRunner(
                probes,
                {
                    "gpu": policy.gpu_interval.total_seconds(),
                    "host": policy.host_interval.total_seconds(),
                    "network": policy.network_interval.total_seconds(),
                },
                self._changed,
                look_deadline_s=policy.look_deadline.total_seconds(),
            )
            await self._runner.start()
            self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Stop looking."""
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None
        if self._runner is not None:
            await self._runner.stop()
            self._runner = None

    # --- what they see -------------------------------------------------------------------------

    def seen(self) -> tuple[Seen, ...]:
        """What is not healthy now, or was not until lately."""
        return self._board.seen()

    def healthy_probes(self) -> tuple[str, ...]:
        """Probes that found everything well."""
        return self._board.healthy_probes()

    async def look_again(self, limit_s: float) -> None:
        """Let all probes look now, and wait until they have, or until the limit."""
        runner = self._runner
        if runner is None:
            return
        await runner.look_all(limit_s)
        self._take(runner)

    def _changed(self, change: Change) -> None:
        if self._runner is not None:
            self._take(self._runner, change.observation.probe)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(FIGURES_INTERVAL_S)
            if self._runner is not None:
                self._take(self._runner)

    def _take(self, runner: ProbeRunner, probe: str | None = None) -> None:
        state = [observation for observation, _ in runner.state()]
        for name, count in runner.looked.items():
            # Before its first look a probe has not seen anything go that an earlier agent saw.
            if (count.looks or count.stuck or count.errors) and probe in (None, name):
                self._board.take(name, [o for o in state if o.probe == name])
