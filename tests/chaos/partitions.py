"""The stories of ``test_partitions``, each a program in namespaces of its own.

    unshare --net --mount python -m tests.chaos.partitions STORY FOLDER

Ends with 0 when everything was as it has to be. Not in the test's own process: it would have to
move into another network with everything in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from everstep.decide.words import JobPhase, Rung, RunOutcome, RunPhase, Symptom
from everstep.machine.progress import ProgressReader
from tests.chaos.network import CONTROL, Machine, Networked, build
from tests.support import judge
from tests.support.counting import Counter
from tests.support.world import FLEET_POLICY, World, until
from workers import up_power
from workers.embedded import EmbeddedOptions

CATCH_LIMIT_S = 60.0


@contextlib.asynccontextmanager
async def networked(folder: Path, machines: int) -> AsyncIterator[tuple[World, Networked]]:
    """A world whose machines can be cut off."""
    policy = folder / "policy.yaml"
    policy.write_text(FLEET_POLICY, encoding="utf-8")
    options = EmbeddedOptions(
        state=folder / "state", machines=machines, slots=2, controllers=1, policy=policy
    )
    embedded = Networked(options, build(machines))
    await embedded.start()
    try:
        yield World(embedded, folder), embedded
    finally:
        await embedded.stop()


async def cut_from_one_side(folder: Path) -> None:
    """One after the other in one world: from the controller, from peers for long, for a while."""
    async with networked(folder, 2) as (world, embedded):
        await _cut_from_the_controller(world, embedded)
        await _cut_from_its_peers(world, embedded)
        await _cut_from_its_peers_for_a_while(world, embedded)


async def _cut_from_the_controller(world: World, embedded: Networked) -> None:
    """Training goes on, and nothing happens."""
    counter = Counter("controller", world.folder, steps=400)
    async with world.job(counter) as job:
        machine = embedded.network[(await job.at_step(10)).answered[-1]]
        machine.cut_from(CONTROL)

        await until("the machine to be out of reach", lambda: _silent(embedded, machine))
        # Long enough for the watch to notice: three heartbeats without a line.
        await job.more_steps(150)
        assert await _silent(embedded, machine)
        assert not counter.out.exists(), "the job was over before the cut could matter"
        machine.heal(CONTROL)
        await job.undisturbed()
        assert judge.blocked(world.ledger_url) == []


async def _silent(embedded: Networked, machine: Machine) -> bool:
    """Whether an agent does not answer on the controller's side of the network."""
    port = embedded.addresses.agents[machine.machine_id].rpartition(":")[2]
    try:
        async with asyncio.timeout(0.5):
            _, writer = await asyncio.open_connection(machine.address, int(port))
    except (OSError, TimeoutError):
        return True
    writer.close()
    return False


async def _cut_from_its_peers(world: World, embedded: Networked) -> None:
    """Ranks lose each other, nobody is blamed; a person is asked, and after the cut it goes on."""
    counter = Counter(
        "peers",
        world.folder,
        steps=80,
        flags=("--timeout-s", "2", "--connect-s", "2"),
        policy={"ladder": {"stable_after": "10m", "unclear_restarts_max": 1}},
    )
    async with world.job(counter) as job:
        used = (await job.at_step(10)).answered
        machine, *others = (embedded.network[machine_id] for machine_id in reversed(used))
        machine.cut_from(*(other.address for other in others))
        status = await job.in_phase(JobPhase.WAITING_FOR_PERSON)
        assert "1 of 1 restarts for unclear used" in status.reason, status.reason
        first, second = await job.runs()
        # The second run could not even begin.
        assert first.at(RunPhase.FIRST_STEP) is not None
        assert second.at(RunPhase.FIRST_STEP) is None
        machine.heal(*(other.address for other in others))
        await job.client.resume(counter.name, by="test")
        incidents = await job.succeeded()
        assert len(incidents) == 1, judge.story(incidents)
        decisions = incidents[0].decisions
        rungs = [d.decision.rung for d in decisions]
        assert rungs == [Rung.REATTEMPT, Rung.ASK_PERSON], judge.story(incidents)
        for decision in decisions:
            # Lost peers and a peer that is late look alike from within.
            named = decision.finding.symptom
            assert named in (Symptom.NETWORK_NCCL, Symptom.HANG), judge.story(incidents)
            assert decision.finding.suspects == ()
        assert judge.blocked(world.ledger_url) == []


async def _cut_from_its_peers_for_a_while(world: World, embedded: Networked) -> None:
    """The cut ends while the next run tries to begin: it heals without anybody."""
    counter = Counter(
        "while", world.folder, steps=120, flags=("--timeout-s", "3", "--connect-s", "30")
    )
    async with world.job(counter) as job:
        used = (await job.at_step(10)).answered
        machine, *others = (embedded.network[machine_id] for machine_id in reversed(used))
        machine.cut_from(*(other.address for other in others))

        async def again() -> bool:
            runs = await job.runs()
            return len(runs) == 2 and runs[1].at(RunPhase.STARTED) is not None

        await until("the second run", again)
        machine.heal(*(other.address for other in others))
        incidents = await job.succeeded()
        assert len(incidents) == 1, judge.story(incidents)
        assert [d.decision.rung for d in incidents[0].decisions] == [Rung.REATTEMPT]
        assert incidents[0].symptom in (Symptom.NETWORK_NCCL, Symptom.HANG)
        assert judge.blocked(world.ledger_url) == []


async def cut_off_and_back_with_live_ranks(folder: Path) -> None:
    """Evicted and replaced; back, its ranks are stopped first, and none of their commits counts."""
    counter = Counter(
        "zombie",
        folder,
        steps=150,
        keep=1000,
        policy={
            "detection": {"hang_min": "4s", "machine_lost_after": "3s"},
            "machines": {"command_timeout": "2s"},
        },
    )
    async with networked(folder, 3) as (world, embedded), world.job(counter) as job:
        used = (await job.at_step(60)).answered
        machine = embedded.network[used[-1]]
        pids = await job.stage.pids()
        state = embedded.machine_state(machine.machine_id)
        old = {p.pid: p for p in up_power.ranks(state)}
        assert set(old) == {pids[2], pids[3]}
        # Its last rank stands still within a save, its part not written yet; then the cable is out.
        step = await _freeze_within_a_save(state, counter, pids[3])
        machine.unplug()
        await job.trains_in(2)
        assert judge.blocked(world.ledger_url) == [machine.machine_id]
        second = (await job.runs())[1]
        assert second.restore is not None
        assert second.restore.step < step
        assert machine.machine_id not in {ref.machine_id for ref in second.machines}
        # The zombie wakes up and tries to finish its checkpoint, still cut off.
        assert all(p.is_running() for p in old.values())
        os.kill(pids[3], signal.SIGCONT)

        reader = _progress(state, counter)

        async def refused() -> bool:
            # By the fence, which ends it; or its folder is gone, since the new run has tidied up.
            seen = reader.read()
            tidied = seen is not None and seen.save_failed_step == step
            return tidied or not old[pids[3]].is_running()

        await until("the commit to be refused", refused)
        assert not (_folder(counter, step) / "COMPLETE.json").exists()
        assert old[pids[2]].is_running(), "nobody but the fence has stopped anything there yet"
        machine.plug_in()

        async def stopped() -> bool:
            return not list(up_power.ranks(state))

        await until("the old ranks to be stopped", stopped)
        incidents = await job.succeeded()
        assert len(incidents) == 1, judge.story(incidents)
        (decision,) = incidents[0].decisions
        assert decision.decision.evict == (machine.machine_id,)
        assert [run.outcome for run in await job.runs()] == [
            RunOutcome.FAILED,
            RunOutcome.SUCCEEDED,
        ]
        assert judge.blocked(world.ledger_url) == [machine.machine_id]
        # Of every step, the commit of exactly one run counts.
        counted: dict[str, list[str]] = {}
        for path in counter.checkpoints.glob("step-*/COMPLETE.json"):
            number, generation = path.parent.name.removeprefix("step-").split(".")
            counted.setdefault(number, []).append(generation)
        assert all(len(generations) == 1 for generations in counted.values()), counted


def _folder(counter: Counter, step: int) -> Path:
    return counter.checkpoints / f"step-{step:012d}.g000001"


def _progress(state: Path, counter: Counter) -> ProgressReader:
    return ProgressReader(state / "runs" / counter.name / "1" / "progress" / "rank-3.bin")


async def _freeze_within_a_save(state: Path, counter: Counter, pid: int) -> int:
    """Stop rank 3 while it writes its part of a checkpoint; answers the step."""
    reader = _progress(state, counter)
    deadline = time.monotonic() + CATCH_LIMIT_S
    while time.monotonic() < deadline:
        os.kill(pid, signal.SIGSTOP)
        await until("the rank to stand still", lambda: _stands(pid))
        seen = reader.read()
        saving = seen is not None and seen.section == "save"
        step = seen.step if saving and seen else None
        if step is not None and not (_folder(counter, step) / "rank-3.part").exists():
            return step
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(random.uniform(0.001, 0.03))
    raise AssertionError("the rank was never caught within a save")


async def _stands(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    return stat.rpartition(")")[2].split()[0] == "T"


STORIES: dict[str, Callable[[Path], Coroutine[Any, Any, None]]] = {
    story.__name__: story for story in (cut_from_one_side, cut_off_and_back_with_live_ranks)
}


def main(arguments: list[str]) -> int:
    """Run one story."""
    story, folder = arguments
    asyncio.run(STORIES[story](Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
