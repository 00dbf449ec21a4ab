"""Long outages: server, controller, agent or database is killed with -9 and stays away.

    python -m tests.sweep --outages [--minutes 10] [--only TEXT]

Each is one world with one job. While training, the outage must change nothing at all: not a step
lost, nobody evicted, no incident. In a recovery, the recovery waits and is then finished as if
there had been no outage. ``make test`` plays the same for seconds (``tests/chaos``).

Not here: short blows at every point (``arena``) and cut networks (``tests/chaos``).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from everstep.decide.words import Rung, RunOutcome
from tests.ledger.postgres import NoPostgres, PostgresServer, postgres_server
from tests.support import judge
from tests.support.counting import Counter
from tests.support.world import Job, World, running
from workers.embedded import TEMPORAL

STEP_MS = 50
MARGIN_S = 4
"""How much longer than the outage the job trains, where it trains through it."""
STANDSTILL_MAX_S = 20.0
"""Longest time without a step that a busy machine is forgiven."""
DATABASE_START_TRIES = 50

Part = Literal["server", "controller", "agent", "database"]
When = Literal["training", "recovery"]


@dataclass(frozen=True, slots=True)
class Outage:
    """What is away, and when."""

    part: Part
    during: When

    @property
    def name(self) -> str:
        """For ``--only`` and people."""
        return f"{self.part}-{self.during}"


OUTAGES = (
    Outage("server", "training"),
    Outage("server", "recovery"),
    Outage("controller", "training"),
    Outage("controller", "recovery"),
    Outage("agent", "training"),
    # An agent that is away while training has stopped is a lost machine: not an outage of ours.
    Outage("database", "training"),
    Outage("database", "recovery"),
)


@contextlib.asynccontextmanager
async def world_for(part: Part, folder: Path) -> AsyncIterator[tuple[World, PostgresServer | None]]:
    """A world; with its ledger in PostgreSQL where that is what will be killed.

    Raises:
        NoPostgres: none can run here.
    """
    with _database(part == "database") as (server, url):
        async with running(folder, ledger=url) as world:
            yield world, server


@contextlib.contextmanager
def _database(wanted: bool) -> Iterator[tuple[PostgresServer | None, str | None]]:
    if not wanted:
        yield None, None
        return
    with postgres_server() as server, server.database() as url:
        yield server, url


@contextlib.asynccontextmanager
async def away(outage: Outage, job: Job, server: PostgresServer | None) -> AsyncIterator[None]:
    """Kill the part with -9; bring it back at the end."""
    if outage.part == "database":
        if server is None:
            raise ValueError("no database to kill")
        await asyncio.to_thread(server.stop, signal.SIGKILL)
        try:
            yield
        finally:
            await _start_again(server)
        return
    embedded = job.world.embedded
    name = {
        "server": TEMPORAL,
        "controller": embedded.controller_names[0],
        "agent": embedded.machine_ids[0],
    }[outage.part]
    embedded.hold(name)
    try:
        await job.stage.killed(name)
        yield
    finally:
        embedded.release(name)
    await job.stage.back(name)


async def _start_again(server: PostgresServer) -> None:
    for _ in range(DATABASE_START_TRIES):
        try:
            await asyncio.to_thread(server.start)
        except NoPostgres:
            # Processes of the one that was killed still hold its shared memory.
            await asyncio.sleep(0.2)
        else:
            return
    raise NoPostgres("it does not come back")


async def play(part: Part, when: Sequence[When], folder: Path, seconds: float) -> None:
    """Outages of one part; fails with an assertion where anything is not as it has to be.

    Raises:
        NoPostgres: none can run here.
    """
    stories = {"training": _while_training, "recovery": _in_a_recovery}
    async with world_for(part, folder) as (world, server):
        for during in when:
            await stories[during](Outage(part, during), world, server, seconds)
            assert judge.blocked(world.ledger_url) == []


async def _while_training(
    outage: Outage, world: World, server: PostgresServer | None, seconds: float
) -> None:
    steps = int((seconds + MARGIN_S) * 1000 / STEP_MS)
    counter = Counter(outage.name, world.folder, steps=steps, step_ms=STEP_MS)
    async with world.job(counter) as job:
        await job.at_step(10)
        async with away(outage, job, server):
            await _trains_for(counter, seconds)
            assert not counter.out.exists(), "the job was over before the outage was"
        await job.undisturbed()


async def _trains_for(counter: Counter, seconds: float) -> None:
    """Watch steps go on, by what ranks write down themselves."""
    over = time.monotonic() + seconds
    reached, moved_at = counter.reached(), time.monotonic()
    while time.monotonic() < over:
        await asyncio.sleep(1.0)
        newest = await asyncio.to_thread(counter.reached)
        if newest > reached:
            reached, moved_at = newest, time.monotonic()
        stood_s = time.monotonic() - moved_at
        assert stood_s < STANDSTILL_MAX_S, f"no step for {stood_s:.0f} s in the outage"


async def _in_a_recovery(
    outage: Outage, world: World, server: PostgresServer | None, seconds: float
) -> None:
    counter = Counter(outage.name, world.folder, steps=150, step_ms=STEP_MS)
    async with world.job(counter) as job:
        await job.at_step(10)
        pid = (await job.stage.pids())[1]
        async with away(outage, job, server):
            await job.stage.signal_rank(1, signal.SIGKILL)
            await asyncio.sleep(seconds)  # the length of the outage is the fault itself
            assert pid not in {process.pid for process in world.ranks()}
        incidents = await job.succeeded()
        assert len(incidents) == 1, judge.story(incidents)
        rungs = [record.decision.rung for record in incidents[0].decisions]
        assert rungs == [Rung.REATTEMPT], judge.story(incidents)
        outcomes = [run.outcome for run in await job.runs()]
        assert outcomes == [RunOutcome.FAILED, RunOutcome.SUCCEEDED]


async def sweep_outages(minutes: float, only: str = "") -> int:
    """Play all outages one after the other; answers how many went wrong."""
    chosen = [outage for outage in OUTAGES if only in outage.name]
    wrong = 0
    for number, outage in enumerate(chosen, 1):
        verdict = "as it has to be"
        with tempfile.TemporaryDirectory(prefix="everstep-outage-") as folder:
            try:
                await play(outage.part, [outage.during], Path(folder), minutes * 60)
            except Exception as error:  # noqa: BLE001 - one outage's failure is a row of the table
                wrong += 1
                verdict = f"WRONG: {type(error).__name__}: {error}"[:600]
        print(f"[{number}/{len(chosen)}] {outage.name}, {minutes:g} min: {verdict}", flush=True)
    print(f"\n{len(chosen)} outages, {len(chosen) - wrong} as it has to be, {wrong} not")
    return wrong if chosen else 1
