"""What people and outages do at the wrong moment: wishes and cancellations at every await.

Not here: the job's ordinary life (``test_training_job``), and many shards (``test_shards``).
"""

from __future__ import annotations

import asyncio

import pytest
from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.exceptions import CancelledError

from activities import contracts
from everstep.decide.words import JobPhase, LogClass
from everstep.spec import messages as m
from tests.workflow.conftest import Bench, ask, ended
from tests.workflow.world import Say, Script, exited, rank_exit

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIRST = Say("first_step", step=1)
DONE = Say("succeeded", step=100)
LOST_PEER = {
    rank: exited(rank, exit_code=1, log_class=LogClass.PEER_LOST, line="Connection reset by peer")
    for rank in range(4)
}
"""Nobody failed first: the job waits for the round's closer look."""


def trouble(rank: int) -> Say:
    """A watch that reports a failed rank."""
    return Say("trouble", step=40, observations=(rank_exit(rank),))


async def test_temporal_cancellation_while_a_watch_is_ending_is_not_lost(bench: Bench) -> None:
    world = bench.world
    world.gates["watch_end"] = asyncio.Event()
    world.scripts[1] = Script([FIRST, Say("hold", step=3)])
    handle = await bench.start()
    await bench.until(lambda: world.held_watches == 1)
    await handle.signal("roll", m.RollRequest())
    await bench.until(lambda: world.counts["watch_end"] == 1)
    await handle.cancel()
    await asyncio.sleep(0)
    await bench.until_cancel_requested(handle)
    world.gates["watch_end"].set()
    with pytest.raises(WorkflowFailureError) as caught:
        await ended(bench.client.get_workflow_handle(handle.id))
    assert isinstance(caught.value.cause, CancelledError)
    assert not world.running
    assert [c.phase for c in world.closed_jobs] == [JobPhase.CANCELLED]


async def test_a_round_that_a_person_cancels_does_not_cancel_the_job(bench: Bench) -> None:
    world = bench.world
    world.gates["diagnose_run"] = asyncio.Event()
    world.scripts[1] = Script([FIRST, trouble(0)], ranks=LOST_PEER)
    world.scripts[2] = Script([FIRST, DONE])
    handle = await bench.start()
    await bench.until(lambda: world.counts["diagnose_run"] > 0)
    await bench.client.get_workflow_handle(f"incident-{bench.name}-1-r1").cancel()
    status = await bench.until_phase(handle, JobPhase.WAITING_FOR_PERSON)
    assert "cannot go on" in status.reason
    assert world.closed_jobs == []
    await ask(handle, "cancel", m.CancelRequest())
    assert (await ended(handle)).phase is JobPhase.CANCELLED


async def test_a_round_beside_that_a_person_cancels_does_not_cancel_the_job(bench: Bench) -> None:
    world = bench.world
    world.gates["diagnose_run"] = asyncio.Event()
    world.scripts[1] = Script([FIRST, trouble(2)], ranks={2: exited(2, signal=9, step=9)})
    world.scripts[2] = Script([FIRST, Say("hold", step=50), DONE])
    handle = await bench.start()
    await bench.until(lambda: world.counts["diagnose_run"] > 0 and world.held_watches == 1)
    await handle.signal("roll", m.RollRequest())
    await bench.client.get_workflow_handle(f"incident-{bench.name}-1-r1").cancel()
    assert (await ended(handle)).phase is JobPhase.SUCCEEDED


async def test_a_job_that_cannot_be_closed_waits_for_a_person(bench: Bench) -> None:
    world = bench.world
    world.failing["close_job"] = "job is not in this ledger"
    world.scripts[1] = Script([FIRST, Say("hold", step=3)])
    handle = await bench.start()
    await bench.until(lambda: world.held_watches == 1)
    await ask(handle, "cancel", m.CancelRequest())
    await bench.until(lambda: world.counts["close_job"] > 0)
    status = await bench.until_phase(handle, JobPhase.WAITING_FOR_PERSON)
    assert "not in this ledger" in status.reason
    await bench.until(lambda: [n.severity for n in world.notes] == ["needs_person"])
    assert "not in this ledger" in world.notes[0].text
    tried = world.counts["close_job"]
    await asyncio.sleep(0.3)
    assert world.counts["close_job"] == tried == 1
    del world.failing["close_job"]
    await ask(handle, "cancel", m.CancelRequest(reason="again"))
    assert (await ended(handle)).phase is JobPhase.CANCELLED


@pytest.mark.parametrize("failing", sorted(contracts.OPTIONS))
async def test_an_activity_that_fails_for_good_never_leaves_a_job_that_nobody_can_end(
    bench: Bench, failing: str
) -> None:
    """Whatever it is: the job ends, or waits for a person, and does not try for ever."""
    world = bench.world
    world.failing[failing] = "nothing can be done about it"
    for generation in range(1, 9):
        world.scripts[generation] = Script(
            [FIRST, trouble(0)],
            ranks={0: exited(0, signal=9, step=generation)},
            unreachable=frozenset({f"m{generation + 1}"}) if generation == 1 else frozenset(),
            lost=frozenset({"m2"}),
        )
    handle = await bench.start(bench.spec(code="/code"))
    ends = (JobPhase.WAITING_FOR_PERSON, JobPhase.FAILED)

    async def over() -> bool:
        if failing in ("register_job", "watch_run"):
            return world.counts[failing] > 0
        return (await bench.status(handle)).phase in ends

    await bench.until(over)
    assert world.counts["all"] < 200
    if failing == "register_job":
        with pytest.raises(WorkflowFailureError):
            await ended(handle)
        return
    world.failing.clear()
    await ask(handle, "cancel", m.CancelRequest())
    assert (await ended(handle)).phase is JobPhase.CANCELLED
    assert not world.running
    assert [c.phase for c in world.closed_jobs] == [JobPhase.CANCELLED]


async def test_what_was_asked_after_a_cancellation_does_not_undo_it(bench: Bench) -> None:
    world = bench.world
    world.gates["start_ranks"] = asyncio.Event()
    handle = await bench.start()
    await bench.until(lambda: world.counts["start_ranks"] == 1)
    await ask(handle, "cancel", m.CancelRequest(reason="wrong data"))
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await ask(handle, "pause", m.PauseRequest())
    assert "being cancelled" in str(caught.value.cause)
    world.gates["start_ranks"].set()
    result = await ended(handle)
    assert result.phase is JobPhase.CANCELLED
    assert "wrong data" in result.reason
    assert not world.running


async def test_cancel_does_not_wait_for_a_machine_to_be_lost(bench: Bench) -> None:
    world = bench.world
    world.gates["confirm_machines"] = asyncio.Event()
    world.scripts[1] = Script([FIRST, trouble(0)], unreachable=frozenset({"m2"}))
    handle = await bench.start()
    await bench.until(lambda: world.counts["confirm_machines"] == 1)
    await ask(handle, "cancel", m.CancelRequest())
    assert (await ended(handle)).phase is JobPhase.CANCELLED
    assert [c.phase for c in world.closed_jobs] == [JobPhase.CANCELLED]


async def test_temporal_cancellation_while_a_wished_one_is_carried_out(bench: Bench) -> None:
    """It came while the ranks of a run that was being started were stopped."""
    world = bench.world
    world.gates |= {"materialise_code": asyncio.Event(), "stop_ranks": asyncio.Event()}
    handle = await bench.start(bench.spec(code="/code"))
    await bench.until(lambda: world.counts["materialise_code"] == 1)
    await ask(handle, "cancel", m.CancelRequest())
    await bench.until(lambda: world.counts["stop_ranks"] == 1)
    await handle.cancel()
    await bench.until_cancel_requested(handle)
    world.gates["stop_ranks"].set()
    with pytest.raises(WorkflowFailureError):
        await ended(handle)
    assert [c.phase for c in world.closed_jobs] == [JobPhase.CANCELLED]


async def test_a_round_that_runs_already_does_not_end_the_job(bench: Bench) -> None:
    """The workflow was reset or started anew, and the round of before is still at work."""
    world = bench.world
    await bench.client.start_workflow(
        m.INCIDENT, {}, id=f"incident-{bench.name}-1-r1", task_queue="nobody-works-here"
    )
    world.scripts[1] = Script([FIRST, trouble(2)], ranks={2: exited(2, signal=9, step=9)})
    world.scripts[2] = Script([FIRST, DONE])
    handle = await bench.start()
    assert (await ended(handle)).phase is JobPhase.SUCCEEDED
    assert world.incidents[f"{bench.name}-1-r1"].decision is not None
