"""``watch_run`` and ``confirm_machines`` as activities: connections, heartbeats, cancellation."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs
from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.contracts import TEMPORARY_FAILURE
from activities.detection import ConfirmDetails, Detection, WatchDetails
from everstep.ledger import LedgerUnavailable
from everstep.machine.client import AgentRefused, AgentUnreachable
from everstep.spec import messages as m
from everstep.spec.agent_api import ErrorCode, EventKind, GapLine
from tests.activity.fakes import (
    GENERATION,
    JOB,
    RING,
    RUN,
    FakeAgent,
    FakeAgents,
    FakeLocations,
    event,
    exited,
    heartbeat,
    hello,
    policy,
    refs,
    report,
    state,
    until,
)

QUICK = {
    "detection": {
        "settle_window": "50ms",
        "heartbeat_interval": "300ms",
        "machine_lost_after": "1s",
    }
}


def watch(*machine_ids: str, **fields: Any) -> m.WatchRun:
    defaults: dict[str, Any] = {"until": m.WatchUntil(after_s=30)}
    return m.WatchRun(
        job_id=JOB,
        run_id=RUN,
        generation=GENERATION,
        machines=refs(*(machine_ids or ("m1",))),
        policy=policy(**QUICK),
        **(defaults | fields),
    )


class Bench:
    """One activity in its environment, with what it heartbeats."""

    def __init__(self, *agents: FakeAgent, ledger: FakeLocations | None = None) -> None:
        self.env = ActivityEnvironment()
        self.beats: list[Any] = []
        self.env.on_heartbeat = lambda *details: self.beats.append(details[0])
        self.ledger = ledger or FakeLocations()
        self.detection = Detection(self.ledger, FakeAgents(*agents))

    def resume_from(self, details: Any) -> None:
        self.env.info = dataclasses.replace(self.env.info, heartbeat_details=[details])

    async def watch(self, request: m.WatchRun) -> m.WatchResult:
        async with asyncio.timeout(20):
            return await self.env.run(self.detection.watch_run, request)


def agent(*lines: Any, machine_id: str = "m1", **fields: Any) -> FakeAgent:
    defaults: dict[str, Any] = {"state": state(machine_id)}
    return FakeAgent(
        machine_id=machine_id,
        connections=[[hello(machine_id), *lines, None]],
        **(defaults | fields),
    )


async def test_trouble_of_one_machine_is_returned_with_cursors_of_all() -> None:
    failed = event(EventKind.RANK_EXITED, seq=5, rank=1, data={"exit_code": None, "signal": 9})
    other = agent(event(EventKind.RUN_STARTED, seq=3), machine_id="m2")
    bench = Bench(agent(failed), other)
    result = await bench.watch(watch("m1", "m2"))
    assert result.kind == "trouble"
    assert result.observations[0].rank == 1
    assert result.cursors == {"m1": f"{RING}:5", "m2": f"{RING}:3"}
    assert result.unreachable == ()


@pytest.mark.parametrize(
    "reason",
    [
        AgentUnreachable("connection refused"),
        AgentRefused(ErrorCode.BUSY, "too many streams"),
        ValueError("garbage"),
        RuntimeError("whatever"),
    ],
)
async def test_a_broken_stream_makes_the_machine_unknown_and_is_opened_again(
    reason: Exception,
) -> None:
    fake = agent()
    failed = event(EventKind.NONFINITE, seq=9, rank=0)
    fake.connections = [
        [hello(), event(EventKind.RUN_STARTED, seq=4), reason],
        [reason],
        [hello(next_seq=9), failed, None],
    ]
    result = await Bench(fake).watch(watch())
    assert result.kind == "trouble"
    assert len(fake.cursors) == 3
    assert fake.cursors == [None, f"{RING}:4", f"{RING}:4"]


async def test_a_refused_cursor_is_given_up() -> None:
    fake = agent()
    fake.connections = [
        [AgentRefused(ErrorCode.BAD_REQUEST, "after: must be RING_ID:SEQ")],
        [hello(), event(EventKind.NONFINITE, seq=1, rank=0), None],
    ]
    result = await Bench(fake).watch(watch(cursors={"m1": "nonsense"}))
    assert fake.cursors == ["nonsense", None]
    assert result.kind == "trouble"


async def test_the_address_is_looked_up_again_and_a_silent_ledger_is_survived() -> None:
    calls = 0

    def hook() -> None:
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise LedgerUnavailable("ledger: does not answer")

    fake = agent(event(EventKind.NONFINITE, rank=0))
    result = await Bench(fake, ledger=FakeLocations(hook)).watch(watch())
    assert result.kind == "trouble"
    assert calls == 4


async def test_half_open_connections_are_noticed() -> None:
    fake = agent()
    fake.connections = [[hello(), None], [hello(), event(EventKind.NONFINITE, rank=0), None]]
    result = await Bench(fake).watch(watch())
    assert result.kind == "trouble"
    assert len(fake.cursors) == 2


async def test_one_log_line_for_a_machine_that_stays_away() -> None:
    bench = Bench(agent(down=True))
    with capture_logs() as logs:
        result = await bench.watch(watch(until=m.WatchUntil(after_s=0.6)))
    assert result.kind == "tick"
    assert result.unreachable == ("m1",)
    lines = [entry for entry in logs if entry["event"] == "machine unknown"]
    assert len(lines) == 1
    assert lines[0]["machine_id"] == "m1"


async def test_all_machines_away_is_blindness() -> None:
    soon = policy(detection={**QUICK["detection"], "blind_job_after": "700ms"})
    request = watch().model_copy(update={"policy": soon})
    result = await Bench(agent(down=True)).watch(request)
    assert result.kind == "blind"


async def test_an_agent_that_never_answers_for_the_state_is_unknown_not_trouble() -> None:
    fake = agent()
    fake.state = None  # "no such run", once at every look; the stream says nothing more
    fake.connections = [[hello(), AgentUnreachable("reset")]]
    result = await Bench(fake).watch(watch(until=m.WatchUntil(after_s=0.5)))
    assert result.kind == "tick"


async def test_a_run_the_agent_does_not_know_is_gone() -> None:
    fake = agent()
    fake.state = None
    # Asked at every line; the second time that is a second after the first one decides.
    fake.connections = [[hello(), heartbeat(), AgentUnreachable("reset")]]
    result = await Bench(fake).watch(watch())
    assert result.kind == "trouble"
    assert result.observations[0].kind is EventKind.PROCESSES_VANISHED


async def test_what_happened_before_the_watch_is_found_in_the_state() -> None:
    fake = agent(state=state("m1", exited(0, None, signal=9)))
    result = await Bench(fake).watch(watch())
    assert result.kind == "trouble"
    assert fake.asked["run_state"] == 1


async def test_a_gap_asks_for_the_state_again() -> None:
    fake = agent(GapLine(ring_id=RING, oldest_seq=100), heartbeat())
    bench = Bench(fake)
    await bench.watch(watch(until=m.WatchUntil(after_s=0.5)))
    assert fake.asked["run_state"] >= 2


async def test_success_when_every_machine_has_ended_well() -> None:
    agents = []
    for machine_id in ("m1", "m2"):
        ended = state(machine_id, exited(0, 0), ended=True, succeeded=True)
        agents.append(agent(machine_id=machine_id, state=ended))
    result = await Bench(*agents).watch(watch("m1", "m2"))
    assert result.kind == "succeeded"


async def test_heartbeats_carry_all_that_a_successor_needs() -> None:
    fake = agent(heartbeat(step=12, loss=2.5), event(EventKind.RUN_STARTED, seq=8))
    bench = Bench(fake, agent(machine_id="m2", down=True))
    # Less than the second of silence after which the stream of m1 would count as broken.
    await bench.watch(watch("m1", "m2", until=m.WatchUntil(after_s=0.85)))
    last = bench.beats[-1]
    assert isinstance(last, WatchDetails)
    assert last.cursors == {"m1": f"{RING}:8"}
    assert last.progress.step == 12
    assert last.unreachable == ("m2",)
    assert last.watched_s >= 0.85
    assert len(bench.beats) >= 3


async def test_a_successor_goes_on_where_the_heartbeats_ended() -> None:
    fake = agent(event(EventKind.RUN_STARTED, seq=21))
    bench = Bench(fake)
    # As it comes back from Temporal: plain JSON.
    bench.resume_from(
        WatchDetails(cursors={"m1": f"{RING}:20"}, watched_s=29.8).model_dump(mode="json")
    )
    result = await bench.watch(watch(cursors={"m1": f"{RING}:2"}))
    assert fake.cursors[0] == f"{RING}:20"
    assert result.kind == "tick"


@pytest.mark.parametrize("details", [{"cursors": 5}, "text", None, {"watched_s": "long"}])
async def test_details_of_another_version_are_ignored(details: Any) -> None:
    bench = Bench(agent(event(EventKind.NONFINITE, rank=0)))
    bench.resume_from(details)
    assert (await bench.watch(watch())).kind == "trouble"


@pytest.mark.parametrize(
    "details",
    [{"worker_shutdown": True}, {"timed_out": True}, {"not_found": True}, {"paused": True}],
)
async def test_losing_the_control_plane_touches_nothing(details: dict[str, bool]) -> None:
    fake = agent()
    bench = Bench(fake)
    task = asyncio.create_task(bench.watch(watch()))
    await until(lambda: fake.asked["run_state"] > 0)
    bench.env.cancel(ActivityCancellationDetails(**details))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.commands == []


async def test_a_cancellation_that_was_asked_for_returns_the_cursors() -> None:
    fake = agent(event(EventKind.SAVE_FAILED, seq=6, rank=0, reason="ENOSPC"))
    bench = Bench(fake)
    task = asyncio.create_task(bench.watch(watch()))
    await until(lambda: bool(bench.beats) and bench.beats[-1].cursors == {"m1": f"{RING}:6"})
    bench.env.cancel(ActivityCancellationDetails(cancel_requested=True))
    result = await task
    assert result.kind == "cancelled"
    assert result.cursors == {"m1": f"{RING}:6"}
    assert [o.kind for o in result.observations] == [EventKind.SAVE_FAILED]


async def test_no_task_is_left_behind() -> None:
    before = asyncio.all_tasks()
    bench = Bench(agent(), agent(machine_id="m2", down=True))
    await bench.watch(watch("m1", "m2", until=m.WatchUntil(after_s=0.2)))
    assert asyncio.all_tasks() == before


# --- confirm_machines


def confirm(*machine_ids: str) -> m.ConfirmMachines:
    return m.ConfirmMachines(
        job_id=JOB,
        generation=GENERATION,
        machines=refs(*machine_ids),
        command_id="run/7",
        policy=policy(**QUICK),
    )


class Clock:
    """A monotonic clock that jumps when told to."""

    def __init__(self, base: Callable[[], float]) -> None:
        self.base, self.jumped = base, 0.0

    def __call__(self) -> float:
        return self.base() + self.jumped


async def test_machines_that_stay_silent_are_lost_and_the_others_report() -> None:
    came_back = agent(machine_id="m2", stopped=report("m2", exited(2, 1, "m2")))
    bench = Bench(agent(down=True), came_back)
    result = await bench.env.run(bench.detection.confirm_machines, confirm("m1", "m2"))
    lost, there = result.reports
    assert (lost.machine_id, lost.reachable, lost.lost) == ("m1", False, True)
    assert (there.machine_id, there.reachable, there.lost) == ("m2", True, False)
    assert came_back.asked["stop_run"] == 1
    assert came_back.commands[0]["command_id"] == "run/7/m2"


async def test_a_machine_that_comes_back_in_time_is_stopped_and_not_lost() -> None:
    fake = agent(down=True, stopped=report("m1", exited(0, 0)))
    bench = Bench(fake)
    task = asyncio.create_task(bench.env.run(bench.detection.confirm_machines, confirm("m1")))
    await until(lambda: fake.asked["info"] > 0)
    fake.down = False
    result = await task
    assert result.reports == (report("m1", exited(0, 0)),)


async def test_a_frozen_agent_is_lost_like_an_absent_one() -> None:
    bench = Bench(agent(frozen=True))
    async with asyncio.timeout(15):
        result = await bench.env.run(bench.detection.confirm_machines, confirm("m1"))
    assert result.reports[0].lost


async def test_the_silence_so_far_is_remembered_across_controllers() -> None:
    bench = Bench(agent(down=True))
    bench.resume_from(ConfirmDetails(silent_s=0.95).model_dump(mode="json"))
    await bench.env.run(bench.detection.confirm_machines, confirm("m1"))
    assert bench.beats[0].silent_s == pytest.approx(0.95)
    assert len({beat.silent_s for beat in bench.beats}) <= 2


async def test_a_controller_that_was_frozen_does_not_count_that_against_a_machine() -> None:
    fake = agent(down=True)
    bench = Bench(fake)
    loop = asyncio.get_running_loop()
    clock = Clock(loop.time)
    bench.detection = Detection(bench.ledger, FakeAgents(fake), clock)
    slow = policy(detection={"machine_lost_after": "1h"})
    request = confirm("m1").model_copy(update={"policy": slow})
    task = asyncio.create_task(bench.env.run(bench.detection.confirm_machines, request))
    await until(lambda: fake.asked["info"] == 1)
    clock.jumped = timedelta(hours=2).total_seconds()
    await until(lambda: fake.asked["info"] >= 3)
    assert not task.done()
    bench.env.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_ledger_that_does_not_answer_says_nothing_about_a_machine() -> None:
    outage = {"ledger": True}

    def hook() -> None:
        if outage["ledger"]:
            raise LedgerUnavailable("ledger: does not answer")

    bench = Bench(agent(stopped=report("m1")), ledger=FakeLocations(hook))
    with pytest.raises(ApplicationError) as caught:
        await bench.env.run(bench.detection.confirm_machines, confirm("m1"))
    assert caught.value.type == TEMPORARY_FAILURE
    outage["ledger"] = False
    result = await bench.env.run(bench.detection.confirm_machines, confirm("m1"))
    assert (result.reports[0].reachable, result.reports[0].lost) == (True, False)


async def test_time_without_the_ledger_does_not_count_against_a_machine() -> None:
    """The machine's agent has moved meanwhile, and only the ledger could say where to."""
    ledger, fake = FakeLocations(), agent(down=True, stopped=report("m1"))

    def hook() -> None:
        if ledger.asked in range(2, 6):
            raise LedgerUnavailable("ledger: does not answer")
        fake.down = ledger.asked < 6

    ledger.hook = hook
    bench = Bench(fake, ledger=ledger)
    bench.resume_from(ConfirmDetails(silent_s=0.99).model_dump(mode="json"))
    result = await bench.env.run(bench.detection.confirm_machines, confirm("m1"))
    assert ledger.asked >= 6
    assert (result.reports[0].reachable, result.reports[0].lost) == (True, False)


async def test_an_agent_that_answers_and_knows_nothing_of_the_run_is_reachable() -> None:
    refusal = AgentRefused(ErrorCode.NOT_FOUND, "there is no such run")
    bench = Bench(agent(stopped=refusal))
    result = await bench.env.run(bench.detection.confirm_machines, confirm("m1"))
    assert result.reports[0].reachable
    assert result.reports[0].processes_vanished
