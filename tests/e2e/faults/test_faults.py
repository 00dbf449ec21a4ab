"""Faults inside a run: each is made for real, named, and gone a run later.

``docs/faults.md`` is the table of all faults. Not here: faults of Everstep itself
(``test_faults_control``), of machines (``test_faults_machine``), of the network (``tests/chaos``).
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from everstep.decide.words import JobPhase, Rung, RunOutcome, Side, Symptom
from everstep.errors import JobFailed
from everstep.ledger import IncidentDetail
from tests.support import judge
from tests.support.counting import Counter
from tests.support.world import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="package"),
]


def only(incidents: list[IncidentDetail], *, rounds: int = 1) -> IncidentDetail:
    """The one incident of a job, with as many rounds as there must be."""
    assert len(incidents) == 1, judge.story(incidents)
    incident = incidents[0]
    assert incident.rounds_total == rounds, judge.story(incidents)
    assert len(incident.decisions) == rounds
    # Nobody is blamed for what a rank did.
    assert not any(d.decision.evict or d.finding.suspects for d in incident.decisions)
    return incident


async def broken_from_within(
    world: World, counter: Counter, *orders: str, runs: int = 2
) -> list[IncidentDetail]:
    """Run a job that has its orders already; all of them must have fired, each once."""
    async with world.job(counter) as job:
        incidents = await job.succeeded()
        assert sorted(note["name"] for note in counter.fired()) == sorted(orders)
        outcomes = [run.outcome for run in await job.runs()]
        assert outcomes == [RunOutcome.FAILED] * (runs - 1) + [RunOutcome.SUCCEEDED]
    return incidents


async def test_rank_killed_from_outside(world: World) -> None:
    counter = Counter("sigkill", world.folder)
    async with world.job(counter) as job:
        await job.at_step(5)
        await job.stage.signal_rank(1, signal.SIGKILL)
        incident = only(await job.succeeded())
        decision = incident.decisions[0]
        assert decision.finding.symptom is Symptom.UNKNOWN
        assert decision.finding.culprit_ranks == (1,)
        assert decision.decision.rung is Rung.REATTEMPT
        first, second = await job.runs()
        # The same machines, from the last whole checkpoint.
        assert {m.machine_id for m in first.machines} == {m.machine_id for m in second.machines}
        assert second.restore is not None
        assert second.restore.step >= 4


async def test_rank_crashes_with_a_segmentation_fault(world: World) -> None:
    counter = Counter("sigsegv", world.folder, steps=40)
    order = counter.order("sigsegv", rank=2, step=10)
    incident = only(await broken_from_within(world, counter, order))
    finding = incident.decisions[0].finding
    assert finding.culprit_ranks == (2,)
    assert "SIGSEGV" in finding.reason


async def test_exception_in_one_rank_is_the_owners(world: World) -> None:
    counter = Counter("exception", world.folder, steps=40)
    order = counter.order("exception", rank=3, step=10)
    incident = only(await broken_from_within(world, counter, order))
    finding = incident.decisions[0].finding
    assert finding.symptom is Symptom.USER_CODE
    assert finding.side is Side.USER_CODE
    assert finding.culprit_ranks == (3,)
    assert "fault ordered: exception in rank 3" in finding.reason


async def test_rank_that_ends_well_too_early(world: World) -> None:
    counter = Counter("exit0", world.folder, steps=40)
    order = counter.order("exit0", rank=1, step=10)
    incident = only(await broken_from_within(world, counter, order))
    finding = incident.decisions[0].finding
    assert finding.symptom is Symptom.USER_CODE
    assert finding.culprit_ranks == (1,)


async def test_stopped_rank_is_a_hang(world: World) -> None:
    # Late enough that its agent has learned how long a step takes.
    counter = Counter("hang", world.folder, steps=100, policy={"detection": {"hang_min": "4s"}})
    order = counter.order("sigstop", rank=3, step=70)
    incident = only(await broken_from_within(world, counter, order))
    finding = incident.decisions[0].finding
    assert finding.symptom is Symptom.HANG
    assert finding.culprit_ranks == (3,)


async def test_loss_that_is_not_a_number_is_never_saved(world: World) -> None:
    counter = Counter("nan", world.folder, steps=40, keep=100)
    order = counter.order("nan", rank=0, step=10)
    async with world.job(counter) as job:
        incident = only(await job.succeeded())
        finding = incident.decisions[0].finding
        assert finding.symptom is Symptom.NAN_VALUE
        assert finding.culprit_ranks in ((0,), ())
        assert [note["name"] for note in counter.fired()] == [order]
        second = (await job.runs())[1]
        assert second.restore is not None
        bad = counter.fired()[0]["step"]
        folders = {path.parent.name for path in counter.checkpoints.glob("*/COMPLETE.json")}
        assert f"step-{bad - 1:012d}.g000001" in folders
        assert f"step-{bad:012d}.g000001" not in folders


async def test_two_faults_at_once_are_one_incident(world: World) -> None:
    counter = Counter("two", world.folder, steps=40)
    orders = [
        counter.order("sigkill", rank=0, step=10),
        counter.order("exception", rank=3, step=10),
    ]
    async with world.job(counter) as job:
        incidents = await job.succeeded()
        assert sorted(note["name"] for note in counter.fired()) == sorted(orders)
        assert len(incidents) == 1
        said = " ".join(d.finding.reason for d in incidents[0].decisions)
        assert "rank 0" in said
        assert "rank 3" in said
        # Rank 3 may be so slow that its fault comes only in the second run: another round then.
        assert len(await job.runs()) == incidents[0].rounds_total + 1 <= 3


async def test_same_fault_again_at_once_is_a_second_round(world: World) -> None:
    counter = Counter("again", world.folder, steps=40)
    orders = [counter.order("sigkill", rank=1, step=10, again=n) for n in range(2)]
    incident = only(await broken_from_within(world, counter, *orders, runs=3), rounds=2)
    # The second run had no step of its own: it was restored and struck again.
    assert [note["step"] for note in counter.fired()] == [10, 10]
    after = [d.state_after.no_progress_in_row for d in incident.decisions]
    assert after == [0, 1]


async def test_error_that_never_goes_away_ends_the_job(world: World) -> None:
    counter = Counter(
        "user-error",
        world.folder,
        steps=40,
        policy={"ladder": {"stable_after": "10m", "user_code_restarts_max": 1}},
    )
    counter.order("always.exception", rank=1, step=3)
    async with world.job(counter) as job:
        with pytest.raises(JobFailed) as caught:
            await job.ended()
        assert len(counter.fired()) == 2
        runs = await job.judged()
        assert [run.outcome for run in runs] == [RunOutcome.FAILED] * 2
        incident = only(await job.incidents(), rounds=2)
        assert [d.decision.rung for d in incident.decisions] == [Rung.REATTEMPT, Rung.GIVE_UP]
        row = job.stage.ledger.job(counter.name)
        assert row is not None
        assert row.phase is JobPhase.FAILED
        assert row.ended_at is not None
        for said in (str(caught.value), row.reason):
            assert "1 of 1 restarts for user_code used" in said
            assert "fault ordered: exception in rank 1" in said


async def test_all_ranks_killed_at_once(world: World) -> None:
    counter = Counter("all-ranks", world.folder)
    async with world.job(counter) as job:
        await job.at_step(5)
        pids = await job.stage.pids()
        killed = 0
        for pid in pids.values():
            # The agent may be quicker with the last ones.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        assert killed
        incidents = await job.succeeded()
        assert len(incidents) == 1
        assert not set(pids.values()) & {process.pid for process in world.ranks()}
        assert judge.blocked(world.ledger_url) == []
