"""The demo's hands and eyes: break a rank, an agent, a controller, the server; see what follows.

What training does is read from the agents themselves, so that it can be seen while the Temporal
server and the controllers are away. Waits are for states, each with a limit; nothing sleeps and
hopes. Not here: what is broken when, and what has to follow (``everstep.demo.faults``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.client import Client
from everstep.decide.words import FINAL_PHASES, JobPhase, RunPhase
from everstep.errors import EverstepError, Unreachable
from everstep.ledger import IncidentDetail, Ledger, RunRow
from everstep.machine.client import AgentClient
from everstep.machine.conversation import AgentRefused, AgentUnreachable
from everstep.secrets import Secrets
from everstep.spec.messages import JobStatus
from workers.embedded import Embedded

POLL_S = 0.05
START_LIMIT_S = 180.0
RECOVER_LIMIT_S = 180.0
FIRE_LIMIT_S = 60.0
STEPS_BETWEEN_FAULTS = 2


class DemoFailed(EverstepError):
    """Something that had to happen did not, within its limit."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What the agents say about the job's live run."""

    generation: int
    step: int
    """Lowest last step of all ranks whose machine answered; -1 before the first."""
    answered: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Before:
    """What was so before a fault."""

    generation: int
    step: int
    incidents: int


class Stage:
    """A running embedded Everstep and one job on it."""

    def __init__(self, embedded: Embedded, client: Client, job_id: str, orders: Path) -> None:
        """Look at ``job_id``; ``orders`` is the directory that the job takes its faults from."""
        self.embedded = embedded
        self.client = client
        self.job_id = job_id
        self.orders = orders
        self.failed_at = -1
        """Highest step before the last fault: the next one comes later, so that there is progress
        between them."""
        up = embedded.addresses
        token = Secrets.load(up.secrets).controller
        self._agents = {
            machine_id: AgentClient(url, token, machine_id=machine_id)
            for machine_id, url in up.agents.items()
        }
        self.ledger = Ledger(up.ledger)

    async def close(self) -> None:
        """Close connections."""
        for agent in self._agents.values():
            await agent.aclose()
        self.ledger.close()

    # --- eyes

    async def status(self) -> JobStatus | None:
        """The job's status, or None while server or controllers are away."""
        try:
            return await self.client.status(self.job_id)
        except Unreachable:
            return None

    async def sight(self) -> Sight | None:
        """The newest run that agents have live ranks of, or None."""
        found: dict[int, dict[str, int]] = {}
        infos = await asyncio.gather(*(self._info(machine_id) for machine_id in self._agents))
        for machine_id, runs in infos:
            for generation, step in runs.items():
                found.setdefault(generation, {})[machine_id] = step
        if not found:
            return None
        newest = max(found)
        steps = found[newest]
        return Sight(newest, min(steps.values()), tuple(sorted(steps)))

    async def _info(self, machine_id: str) -> tuple[str, dict[int, int]]:
        try:
            info = await self._agents[machine_id].info()
        except (AgentUnreachable, AgentRefused):
            return machine_id, {}
        return machine_id, {
            run.generation: -1 if run.step is None else run.step
            for run in info.runs
            if run.job_id == self.job_id and run.live_ranks
        }

    async def pids(self) -> dict[int, int]:
        """Process ids of the live run's ranks."""
        sight = await self.sight()
        if sight is None:
            raise DemoFailed(f"{self.job_id} has no live ranks")
        pids: dict[int, int] = {}
        for machine_id in sight.answered:
            state = await self._agents[machine_id].run_state(self.job_id, sight.generation)
            if state is not None:
                pids |= state.pids
        return pids

    async def log(self, rank: int, *, generation: int) -> str:
        """What a rank of a run on one machine has written so far; empty while there is no log."""
        run = next((r for r in await self.runs() if r.generation == generation), None)
        if run is None:
            return ""
        try:
            agent = self._agents[run.machines[0].machine_id]
            return await agent.log_tail(self.job_id, generation, rank)
        except (AgentUnreachable, AgentRefused):
            return ""

    async def until(
        self, what: str, found: Callable[[], Awaitable[bool]], *, limit_s: float
    ) -> None:
        """Wait until something is so.

        Raises:
            DemoFailed: it is not within the limit, or the job has ended meanwhile.
        """
        deadline = time.monotonic() + limit_s
        while not await found():
            if time.monotonic() > deadline:
                status = await self.status()
                where = f"; the job is {status.phase}: {status.reason}" if status else ""
                raise DemoFailed(f"not within {limit_s:g} s: {what}{where}")
            await asyncio.sleep(POLL_S)

    async def until_step(self, step: int, *, limit_s: float = START_LIMIT_S) -> Sight:
        """Wait until every rank has completed ``step``; what agents then say."""
        seen: list[Sight] = []

        async def there() -> bool:
            sight = await self.sight()
            if sight is not None and sight.step >= step:
                seen.append(sight)
            return bool(seen)

        await self.until(f"{self.job_id} at step {step}", there, limit_s=limit_s)
        return seen[-1]

    async def settled(self) -> Before:
        """Wait until the job trains without an open incident, beyond where the last fault hit."""
        ready: list[Before] = []

        async def there() -> bool:
            status = await self.status()
            sight = await self.sight()
            if status is None or sight is None or status.phase is not JobPhase.RUNNING:
                if status is not None and status.phase in FINAL_PHASES:
                    raise DemoFailed(f"{self.job_id} has {status.phase} early: {status.reason}")
                return False
            trains = sight.generation == status.generation and len(sight.answered) == len(
                status.machines
            )
            beyond = sight.step >= self.failed_at + STEPS_BETWEEN_FAULTS
            if trains and beyond and status.open_incident is None:
                ready.append(Before(sight.generation, sight.step, status.incidents_total))
            return bool(ready)

        await self.until(f"{self.job_id} trains undisturbed", there, limit_s=START_LIMIT_S)
        self.failed_at = ready[-1].step
        return ready[-1]

    async def recovered(self, before: Before, *, rounds: int = 1) -> None:
        """Wait until the job trains again in a newer run and its incident is over."""

        async def there() -> bool:
            status = await self.status()
            if status is not None and status.phase in FINAL_PHASES:
                raise DemoFailed(f"{self.job_id} has {status.phase}: {status.reason}")
            if (
                status is None
                or status.generation < before.generation + rounds
                or status.phase is not JobPhase.RUNNING
                or status.open_incident is not None
                or status.incidents_total <= before.incidents
            ):
                return False
            newest = (await self.runs())[-1]
            return (
                newest.generation == status.generation
                and newest.at(RunPhase.FIRST_STEP) is not None
            )

        await self.until(f"{self.job_id} recovered", there, limit_s=RECOVER_LIMIT_S)

    async def new_incidents(self, before: Before) -> list[IncidentDetail]:
        """Incidents since ``before``, oldest first, in full."""
        rows = await asyncio.to_thread(self.ledger.incidents, self.job_id)
        newer = sorted(row.number for row in rows if row.number > before.incidents)
        ids = {row.number: row.incident_id for row in rows}
        details = [await asyncio.to_thread(self.ledger.incident, ids[number]) for number in newer]
        return [detail for detail in details if detail is not None]

    async def runs(self) -> list[RunRow]:
        """The job's runs, oldest first."""
        found = await asyncio.to_thread(self.ledger.runs, self.job_id)
        return sorted(found, key=lambda run: run.generation)

    # --- hands

    async def signal_rank(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank from outside; answers when."""
        pid = (await self.pids())[rank]
        at = time.time()
        os.kill(pid, number)
        return at

    async def order(self, *orders: tuple[str, int]) -> float:
        """Have ranks break themselves at the next step; answers when the first one did.

        Args:
            orders: kind and rank of each; all at the same step.
        """
        sight = await self.sight()
        step = (sight.step if sight else self.failed_at) + 2
        names = [f"{kind}.rank{rank}.step{step}" for kind, rank in orders]
        self.orders.mkdir(parents=True, exist_ok=True)
        for name in names:
            (self.orders / name).touch()
        return await self.fired(*names)

    async def fired(self, *names: str) -> float:
        """Wait until orders have been carried out; answers when the first one was."""
        notes = [self.orders / "fired" / name for name in names]

        async def there() -> bool:
            return all(note.is_file() and note.stat().st_size > 0 for note in notes)

        await self.until(f"fault {' and '.join(names)}", there, limit_s=FIRE_LIMIT_S)
        return min(float(json.loads(note.read_text())["time_s"]) for note in notes)

    async def next_step_after(self, at: float, step: int) -> float:
        """Wait for the first step beyond ``step``; seconds from ``at`` to it."""
        await self.until_step(step + 1)
        return max(0.0, time.time() - at)

    async def outage(self, part: str, seconds: float) -> None:
        """Kill a part with -9 and keep it away for a time."""
        self.embedded.hold(part)
        with contextlib.ExitStack() as stack:
            stack.callback(self.embedded.release, part)
            await self.killed(part)
            await asyncio.sleep(seconds)  # the length of the outage is the fault itself

    async def killed(self, part: str) -> int:
        """Kill a part with -9 and wait until it is gone; answers its process id."""
        self.embedded.parts[part].expect_ready()
        pid = self.embedded.kill(part)
        if pid is None:
            raise DemoFailed(f"{part} was not running")

        async def gone() -> bool:
            return self.embedded.pid(part) != pid

        await self.until(f"{part} is gone", gone, limit_s=10)
        return pid

    async def back(self, part: str) -> None:
        """Wait until a part that was killed answers again."""
        await asyncio.wait_for(self.embedded.parts[part].was_ready.wait(), timeout=60)
