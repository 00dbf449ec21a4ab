"""Named situations of a scripted fleet: what histories are recorded from (``tests/replay``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from temporalio.client import Client, WorkflowHandle

from everstep.decide.stack_report import ProcessRole, StackCulprit, StackFinding
from everstep.decide.words import Confidence, LogClass, Verdict
from everstep.spec import messages as m
from everstep.spec.agent_api import EventKind
from tests.workflow.world import Say, Script, World, exited, rank_exit

FIRST = Say("first_step", step=1)
DONE = Say("succeeded", step=100)
Drive = Callable[[World, WorkflowHandle[Any, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    """How the fleet behaves, and what a person does meanwhile."""

    prepare: Callable[[World], None]
    drive: Drive | None = None


def _clean(world: World) -> None:
    world.scripts[1] = Script([FIRST, Say("tick", step=50), DONE])


def _rank_failure(world: World) -> None:
    world.checkpoints[1] = 40
    world.scripts[1] = Script(
        [FIRST, Say("trouble", step=43, observations=(rank_exit(2),))],
        ranks={2: exited(2, signal=9, step=43)},
    )
    world.scripts[2] = Script([FIRST, DONE])


def _machine_loss(world: World) -> None:
    world.checkpoints[1] = 40
    gone = {
        rank: exited(
            rank, exit_code=1, log_class=LogClass.PEER_LOST, line="Connection closed by peer"
        )
        for rank in (0, 1)
    }
    world.scripts[1] = Script(
        [FIRST, Say("trouble", step=43, observations=(rank_exit(0),))],
        ranks=gone,
        unreachable=frozenset({"m2"}),
        lost=frozenset({"m2"}),
    )
    world.scripts[2] = Script([FIRST, DONE])


def _low_confidence(world: World) -> None:
    lost_peer = {
        rank: exited(
            rank, exit_code=1, log_class=LogClass.PEER_LOST, line="Connection reset by peer"
        )
        for rank in range(4)
    }
    world.scripts[1] = Script(
        [FIRST, Say("trouble", step=9, observations=(rank_exit(0),))], ranks=lost_peer
    )
    world.scripts[2] = Script([FIRST, DONE])


def _user_error(world: World) -> None:
    failing = {
        1: exited(1, exit_code=1, log_class=LogClass.PYTHON_EXCEPTION, line="TypeError: no", step=5)
    }
    for generation in range(1, 10):
        world.scripts[generation] = Script(
            [FIRST, Say("trouble", step=5, observations=(rank_exit(1),))], ranks=failing
        )


SLOW = m.ObservationRecord(
    kind=EventKind.STEP_TIME_DECLINE,
    verdict=Verdict.FAULTY,
    machine_id="m1",
    rank=0,
    reason="1.4 times",
)
"""What a watch says when steps have become slow."""


def behind(*machines: int) -> m.FoundSlowRanks:
    """Rank 3 was behind in all rounds; machines by their index in the run."""
    culprit = StackCulprit(rank=3, role=ProcessRole.RANK, reason="behind in 5 of 5 rounds")
    finding = StackFinding(
        rule="stack_slow" if machines else "stack_no_group",
        reason="rank 3 behind in 5 of 5 rounds",
        confidence=Confidence.LOW,
        culprits=(culprit,),
        outliers=(3,),
        machines=machines,
    )
    return m.FoundSlowRanks(finding=finding, rounds=5, evidence=("rank 3: at last in compute",))


def _slow_steps(world: World) -> None:
    """One rank is behind in the first run; the look at the second one ends with it."""
    world.slow = behind(1)
    for generation in (1, 2):
        world.scripts[generation] = Script(
            [
                FIRST,
                Say("tick", step=10, observations=(SLOW,)),
                Say("trouble", step=43, observations=(rank_exit(2),), after_s=0.5),
            ],
            ranks={2: exited(2, signal=9, step=43)},
        )
    world.scripts[3] = Script([FIRST, DONE])


def _paused(world: World) -> None:
    world.scripts[1] = Script([FIRST, Say("hold", step=12)])
    world.scripts[2] = Script([FIRST, DONE])


async def _until_held(world: World) -> None:
    import asyncio

    for _ in range(400):
        if world.held_watches:
            return
        await asyncio.sleep(0.025)
    raise AssertionError("no watch was ever held")


async def _pause_and_resume(world: World, handle: WorkflowHandle[Any, Any]) -> None:
    await _until_held(world)
    await handle.execute_update("pause", m.PauseRequest(), result_type=m.UpdateAnswer)
    for _ in range(400):
        status = await handle.query("status", result_type=m.JobStatus)
        if status.phase == "paused":
            break
    await handle.execute_update("resume", m.ResumeRequest(), result_type=m.UpdateAnswer)


async def _roll_at_stop(world: World, handle: WorkflowHandle[Any, Any]) -> None:
    """Ask for continue-as-new while the failed run is being stopped."""
    import asyncio

    loop = asyncio.get_running_loop()
    asked: list[asyncio.Task[None]] = []
    world.on_stop = lambda _: asked.append(
        loop.create_task(handle.signal("roll", m.RollRequest(reason="upgrade")))
    )
    await handle.result()
    assert asked, "nobody asked for continue-as-new"


SCENARIOS: dict[str, Scenario] = {
    "clean": Scenario(_clean),
    "rank-failure": Scenario(_rank_failure),
    "machine-loss": Scenario(_machine_loss),
    "continue-as-new-in-incident": Scenario(_machine_loss, _roll_at_stop),
    "low-confidence": Scenario(_low_confidence),
    "user-error-gives-up": Scenario(_user_error),
    "pause-resume": Scenario(_paused, _pause_and_resume),
    "slow-steps": Scenario(_slow_steps),
}


async def play(
    client: Client, world: World, scenario: Scenario, name: str
) -> WorkflowHandle[Any, Any]:
    """Run one situation to its end."""
    scenario.prepare(world)
    handle: WorkflowHandle[Any, Any] = await client.start_workflow(
        m.TRAINING_JOB,
        {"name": name, "command": ["python", "train.py"], "machines": 2, "ranks_per_machine": 2},
        id=m.job_workflow_id(name),
        task_queue=m.TASK_QUEUE,
        result_type=m.JobResult,
    )
    if scenario.drive is not None:
        await scenario.drive(world, handle)
    try:
        await handle.result()
    except Exception as error:
        if name != "user-error-gives-up":
            raise RuntimeError(f"{name} failed") from error
    return handle
