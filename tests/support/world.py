"""A running Everstep for tests, and jobs in it: started, broken, awaited and judged.

The hands and eyes are the demo's own (``everstep.demo.stage.Stage``); everything is asked of agents
and the ledger, never of logs. Limits are generous, since machines that run tests are busy, and no
test says how long something took.

Not here: what a test breaks and what has to follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from everstep.client import Client
from everstep.decide.words import JobPhase, RunOutcome, RunPhase
from everstep.demo.stage import Before, Sight, Stage
from everstep.errors import EverstepError
from everstep.ledger import IncidentDetail, RunRow
from everstep.spec.messages import JobResult, JobStatus
from tests.support import judge
from tests.support.counting import Counter, final_sha256
from workers import up_power
from workers.embedded import Embedded, EmbeddedOptions

END_LIMIT_S = 150.0
QUIET_LIMIT_S = 20.0
FLEET_POLICY = "{machines: {register_interval: 1s}, detection: {heartbeat_interval: 500ms}}\n"
"""A machine that was away is known again, and one that is silent noticed, within seconds."""


async def until(
    what: str, found: Callable[[], Awaitable[bool]], *, limit_s: float = END_LIMIT_S
) -> None:
    """Wait until something is so; fail with its name at the limit."""
    deadline = time.monotonic() + limit_s
    while not await found():
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}"
        await asyncio.sleep(0.05)


@dataclass
class World:
    """An ``Embedded`` that runs, and the folder that its jobs write into."""

    embedded: Embedded
    folder: Path
    jobs: list[str] = field(default_factory=list)

    @property
    def ledger_url(self) -> str:
        """The ledger's database."""
        return self.embedded.addresses.ledger

    @property
    def state(self) -> Path:
        """What ``--state`` would be."""
        return self.embedded.options.state

    @contextlib.asynccontextmanager
    async def job(self, counter: Counter, *, launch: bool = True) -> AsyncIterator[Job]:
        """Launch a job; whatever happens, nothing of it goes on afterwards."""
        client = await self.embedded.client()
        stage = Stage(self.embedded, client, counter.name, counter.orders)
        self.jobs.append(counter.name)
        job = Job(self, counter, stage, client)
        try:
            if launch:
                await client.launch(counter.spec())
            yield job
        finally:
            try:
                await job.clean_up()
            finally:
                await stage.close()

    def ranks(self, job_id: str = "") -> list[psutil.Process]:
        """Live processes of ranks, of one job or of all."""
        found = [
            process
            for machine_id in self.embedded.machine_ids
            for process in up_power.ranks(self.embedded.machine_state(machine_id))
        ]
        return [p for p in found if not job_id or _job_of(p) == job_id]


def _job_of(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("EVERSTEP_JOB_ID", ""))
    except psutil.Error:
        return ""


@contextlib.asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[World]:
    """Start a world in ``folder`` and end it."""
    policy = folder / "policy.yaml"
    policy.write_text(FLEET_POLICY, encoding="utf-8")
    defaults: dict[str, Any] = {"machines": 2, "slots": 2, "controllers": 1, "policy": policy}
    embedded = Embedded(EmbeddedOptions(state=folder / "state", **(defaults | options)))
    await embedded.start()
    try:
        yield World(embedded, folder)
    finally:
        await embedded.stop()


class Job:
    """One counter job in a world."""

    def __init__(self, world: World, counter: Counter, stage: Stage, client: Client) -> None:
        """Use ``World.job``."""
        self.world = world
        self.counter = counter
        self.stage = stage
        self.client = client

    @property
    def name(self) -> str:
        """The job's id."""
        return self.counter.name

    # --- looking

    async def at_step(self, step: int) -> Sight:
        """Wait until every rank has completed ``step``."""
        return await self.stage.until_step(step)

    async def in_phase(self, *phases: JobPhase) -> JobStatus:
        """Wait until the job itself says that it is in one of these phases."""
        seen: list[JobStatus] = []

        async def there() -> bool:
            status = await self.stage.status()
            if status is not None and status.phase in phases:
                seen.append(status)
            return bool(seen)

        await until(f"{self.name} {' or '.join(phases)}", there)
        return seen[-1]

    async def runs(self) -> list[RunRow]:
        """The job's runs, oldest first."""
        return await asyncio.to_thread(judge.runs_of, self.stage.ledger, self.name)

    async def incidents(self) -> list[IncidentDetail]:
        """The job's incidents, oldest first."""
        return await asyncio.to_thread(judge.details, self.stage.ledger, self.name)

    async def trains_in(self, generation: int) -> None:
        """Wait until this run, or a newer one, has had its first step."""

        async def there() -> bool:
            runs = await self.runs()
            return any(run.generation >= generation and run.at(RunPhase.FIRST_STEP) for run in runs)

        await until(f"first step of run {generation} of {self.name}", there)

    async def more_steps(self, count: int = 3) -> None:
        """Wait until ranks have written down further steps: seen without server and controllers."""
        begun = self.counter.reached()

        async def further() -> bool:
            return self.counter.reached() >= begun + count

        await until(f"{count} more steps after {begun} of {self.name}", further)

    # --- the end

    async def ended(self) -> JobResult:
        """Wait for its end."""
        return await self.client.wait(self.name, timeout_s=END_LIMIT_S, poll_s=0.1)

    async def succeeded(self) -> list[IncidentDetail]:
        """Wait for a good end, judge everything that holds for all jobs; answers its incidents."""
        result = await self.ended()
        assert result.phase is JobPhase.SUCCEEDED, result
        runs = await self.judged()
        assert self.counter.sha256() == final_sha256(
            self.counter.steps, world_size=self.counter.world_size
        )
        assert self.counter.problems(runs) == []
        written = {rank: lines[-1]["step"] for rank, lines in self.counter.written().items()}
        assert written == dict.fromkeys(range(self.counter.world_size), self.counter.steps - 1)
        return await self.incidents()

    async def undisturbed(self) -> None:
        """Wait for a good end in the first run, without an incident."""
        incidents = await self.succeeded()
        assert judge.story(incidents) == []
        assert incidents == []
        assert [run.outcome for run in await self.runs()] == [RunOutcome.SUCCEEDED]

    async def judged(self) -> list[RunRow]:
        """Judge the ledger of a job that has ended; answers its runs."""
        url = self.world.ledger_url
        wrong: list[str] = []

        async def right() -> bool:
            # The record of the last round is written beside the job's own end.
            wrong[:] = await asyncio.to_thread(judge.ended_job, self.stage.ledger, url, self.name)
            return not wrong

        with contextlib.suppress(AssertionError):
            await until("the books", right, limit_s=QUIET_LIMIT_S)
        assert wrong == []
        assert self.world.ranks(self.name) == []
        return await self.runs()

    async def clean_up(self) -> None:
        """After a test that failed: end the job, so that it does not hold machines."""
        with contextlib.suppress(EverstepError, TimeoutError):
            status = await self.stage.status()
            if status is not None and status.phase not in (
                JobPhase.SUCCEEDED,
                JobPhase.FAILED,
                JobPhase.CANCELLED,
            ):
                await self.client.cancel(self.name, reason="the test is over")
                await self.client.wait(self.name, timeout_s=30, poll_s=0.1)


def before(sight: Sight, incidents: int = 0) -> Before:
    """What was so before a fault, in the demo's words."""
    return Before(sight.generation, sight.step, incidents)
