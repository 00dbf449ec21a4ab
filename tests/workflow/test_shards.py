"""A job of six hundred machines: three shards, and evidence that must fit into Temporal."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio

from everstep.decide.words import JobPhase, LogClass, Rung, Symptom
from everstep.spec import messages as m
from everstep.spec.load import load_policy, snapshot_for_job
from everstep.spec.policy import Policy
from tests.workflow.conftest import Bench
from tests.workflow.world import Say, Script, World, exited, rank_exit

pytestmark = pytest.mark.asyncio(loop_scope="session")

MACHINES, RANKS = 600, 8
PAYLOAD_BYTES_MAX = 2 * 1024 * 1024
"""The server's limit."""
FIRST = Say("first_step", step=1)
DONE = Say("succeeded", step=100)
STARTS = (0, 256, 512)
"""Group rank of the first machine of each shard."""


@pytest.fixture
def world(default_policy: Policy) -> World:
    """Many machines with eight ranks each, and one to spare."""
    made = World(default_policy, machines=0, ranks_per_machine=RANKS)
    made.idle = [f"rack-{i:04d}.cluster.example" for i in range(MACHINES + 1)]
    return made


@pytest_asyncio.fixture(loop_scope="session")
async def handle(bench: Bench) -> Any:
    """The job, started by the test."""
    return lambda: bench.start(bench.spec(machines=MACHINES, ranks_per_machine=RANKS))


def shards(first: list[Say], second: list[Say], third: list[Say]) -> dict[int, list[Say]]:
    """What the watches of the three shards report."""
    return dict(zip(STARTS, (first, second, third), strict=True))


def collapsed(culprit: int) -> dict[int, Any]:
    """One rank was killed, and every other one says at length that its peers are gone."""
    line = "[rank%d] torch.distributed.DistBackendError: " + "x" * 260
    ranks = {
        rank: exited(rank, exit_code=1, log_class=LogClass.PEER_LOST, line=line % rank, step=40)
        for rank in range(MACHINES * RANKS)
    }
    return ranks | {culprit: exited(culprit, signal=9, step=40)}


async def test_all_shards_are_started_followed_and_finish(bench: Bench, handle: Any) -> None:
    world = bench.world
    world.scripts[1] = Script(shards=shards([FIRST, DONE], [DONE], [DONE]))
    result = await (await handle()).result()
    assert (result.phase, result.runs, result.incidents) == (JobPhase.SUCCEEDED, 1, 0)
    assert {r.machines[0].group_rank: len(r.machines) for r in world.started} == {
        0: 256,
        256: 256,
        512: 88,
    }
    assert {r.machines_total for r in world.started} == {MACHINES}
    assert world.unused() == []


async def test_trouble_in_a_later_shard_stops_all_and_its_evidence_fits(
    bench: Bench, handle: Any
) -> None:
    world = bench.world
    used, culprit = set(world.idle[:MACHINES]), 300 * RANKS + 3
    world.scripts[1] = Script(
        ranks=collapsed(culprit),
        shards=shards(
            [FIRST, Say("hold", step=40)],
            [Say("trouble", step=40, observations=(rank_exit(culprit),))],
            [Say("hold", step=40)],
        ),
    )
    world.scripts[2] = Script(shards=shards([FIRST, DONE], [DONE], [DONE]))
    result = await (await handle()).result()
    assert (result.phase, result.runs, result.incidents) == (JobPhase.SUCCEEDED, 2, 1)
    assert {r.machines[0].group_rank for r in world.stopped} == set(STARTS)
    record = world.incidents[f"{bench.name}-1-r1"]
    assert record.decision is not None
    assert record.decision.decision.rung is Rung.REATTEMPT
    assert record.decision.finding.first_failed_rank == culprit
    assert {r.machine_id for r in record.reports} == used
    assert culprit in {rank.rank for report in record.reports for rank in report.ranks}
    assert await biggest_payload(bench, f"incident-{bench.name}-1-r1") < PAYLOAD_BYTES_MAX * 0.9


async def test_lost_machine_in_the_last_shard_is_replaced_in_its_place(
    bench: Bench, handle: Any
) -> None:
    world = bench.world
    gone, spare = world.idle[MACHINES - 1], world.idle[MACHINES]
    world.scripts[1] = Script(
        unreachable=frozenset({gone}),
        lost=frozenset({gone}),
        shards=shards(
            [FIRST, Say("hold", step=40)],
            [Say("hold", step=40)],
            [
                Say(
                    "trouble",
                    step=40,
                    observations=(rank_exit(MACHINES * RANKS - 1),),
                )
            ],
        ),
    )
    world.scripts[2] = Script(shards=shards([FIRST, DONE], [DONE], [DONE]))
    await (await handle()).result()
    assert [e.machines for e in world.evictions] == [(gone,)]
    assert world.incidents[f"{bench.name}-1-r1"].symptom is Symptom.KERNEL_PANIC
    again = {ref.group_rank: ref for request in world.started[3:] for ref in request.machines}
    assert again[MACHINES - 1].machine_id == spare
    assert sorted(again) == list(range(MACHINES))


async def test_continue_as_new_after_one_shard_has_finished(bench: Bench, handle: Any) -> None:
    world = bench.world
    world.scripts[1] = Script(
        shards=shards([FIRST, Say("hold", step=99), DONE], [DONE, DONE], [Say("hold"), DONE])
    )
    job = await handle()
    await bench.until(lambda: world.held_watches == 2)
    await job.signal("roll", m.RollRequest())
    result = await job.result()
    assert (result.phase, result.runs) == (JobPhase.SUCCEEDED, 1)
    assert world.unused() == []


async def test_a_shard_that_hangs_is_noticed_though_another_one_ticks(
    bench: Bench, handle: Any
) -> None:
    """Ticks of the first shard must not put off the end of patience with it for ever."""
    world = bench.world
    overrides = {"detection": {"exit_skew_max": "200ms", "machine_lost_after": "100ms"}}
    world.policy = snapshot_for_job(load_policy(None), overrides)
    ticks = [Say("tick", step=99, after_s=0.05) for _ in range(60)]
    world.scripts[1] = Script(shards=shards([FIRST, *ticks], [DONE], [DONE]))
    world.scripts[2] = Script(shards=shards([FIRST, DONE], [DONE], [DONE]))
    assert (await (await handle()).result()).runs == 2
    assert world.scripts[1].shards[0], "it came to the end of its ticks"


async def biggest_payload(bench: Bench, workflow_id: str) -> int:
    """Bytes of the largest payload in the histories of the job and of one round."""
    biggest = 0
    for name in (f"job-{bench.name}", workflow_id):
        async for event in bench.client.get_workflow_handle(name).fetch_history_events():
            biggest = max(biggest, event.ByteSize())
    return biggest
