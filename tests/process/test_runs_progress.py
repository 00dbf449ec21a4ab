"""Progress through the real trainer library: first step, hang, sections, NaN, failed saves."""

from __future__ import annotations

import os
import signal

import pytest

from everstep.spec.agent_api import EventKind
from tests.process.runs_world import Machine, plan, rank_report, until

TRAIN = """
import everstep_trainer
session = everstep_trainer.attach()
"""

STEADY = (
    TRAIN
    + """
step = 0
while True:
    time.sleep(0.02)
    session.step(step, loss=1.0 / (step + 1))
    step += 1
    if step == 30:
        mark(f"steady-{rank}")
"""
)


async def steady(machine: Machine, ranks: int = 2, **limits: object) -> dict[int, int]:
    pids = await machine.start(STEADY, ranks=ranks, limits=limits)
    for rank in pids:
        await machine.marked(f"steady-{rank}")
    return pids


async def test_the_first_step_is_told_once(machine: Machine) -> None:
    await machine.start(
        TRAIN
        + """
for step in range(100, 200):
    wait(f"go-{rank}")
    session.step(step)
    time.sleep(0.01)
    mark("stepped")
time.sleep(600)
""",
        ranks=2,
    )
    machine.go("go-0")
    await machine.marked("stepped")
    assert not machine.of(EventKind.FIRST_STEP), "one of two ranks is not all"
    machine.go("go-1")
    event = await machine.event(EventKind.FIRST_STEP)
    assert event.rank is None
    assert event.data["step"] >= 100
    await until(lambda: machine.manager.summaries()[0].step == 199, "all steps are seen")
    await machine.event(EventKind.FIRST_STEP)
    assert machine.state().first_step_seen
    await machine.restart()
    assert machine.state().first_step_seen
    await machine.event(EventKind.FIRST_STEP)


async def test_steps_of_a_run_shorter_than_a_look_are_seen(machine: Machine) -> None:
    await machine.start(TRAIN + "session.step(41, loss=0.5)")
    await machine.event(EventKind.RUN_ENDED)
    kinds = [e.kind for e in machine.events]
    assert kinds.index(EventKind.FIRST_STEP) < kinds.index(EventKind.RUN_ENDED)
    assert machine.of(EventKind.RANK_EXITED)[0].data["step"] == 41
    assert rank_report(machine.state().report, 0).step == 41


async def test_a_summary_is_what_ranks_last_said(machine: Machine) -> None:
    await machine.start(
        TRAIN + "session.step(10 + rank, loss=0.25, grad_norm=2.0)\ntime.sleep(600)", ranks=2
    )
    await until(lambda: (s := machine.manager.summaries()) and s[0].step == 10, "steps are seen")
    await machine.event(EventKind.FIRST_STEP)
    (summary,) = machine.manager.summaries()
    assert (summary.live_ranks, summary.step, summary.loss, summary.grad_norm) == (2, 10, 0.25, 2.0)
    assert summary.step_age_s is not None
    assert summary.step_age_s >= 0


async def test_a_stopped_rank_is_reported_stalled_with_its_process_state(
    machine: Machine,
) -> None:
    pids = await steady(machine)
    os.kill(pids[1], signal.SIGSTOP)
    event = await machine.event(EventKind.RANK_STALLED, 1)
    assert event.data["process_state"] == "T"
    assert event.data["stalled_for_s"] >= 1.5
    assert event.data["step"] >= 29
    assert not machine.of(EventKind.RANK_STALLED, 0), "the other goes on"
    report = await machine.stop()
    assert report.teardown_clean
    stalled = rank_report(report, 1)
    assert stalled.process_state == "T"
    assert stalled.stalled_for_s is not None
    assert stalled.stalled_for_s >= 1.5
    assert stalled.stopped_by_us
    assert rank_report(report, 0).stalled_for_s is None


async def test_a_rank_that_goes_on_is_reported_moving(machine: Machine) -> None:
    pids = await steady(machine)
    os.kill(pids[0], signal.SIGSTOP)
    await machine.event(EventKind.RANK_STALLED, 0)
    assert rank_report(machine.state().report, 0).stalled_for_s is not None
    os.kill(pids[0], signal.SIGCONT)
    await machine.event(EventKind.RANK_MOVING, 0)
    assert rank_report(machine.state().report, 0).stalled_for_s is None


async def test_a_stall_is_not_told_again_by_the_next_agent(machine: Machine) -> None:
    pids = await steady(machine)
    os.kill(pids[1], signal.SIGSTOP)
    await machine.event(EventKind.RANK_STALLED, 1)
    await machine.restart()
    await machine.event(EventKind.RUN_ADOPTED)
    assert rank_report(machine.state().report, 1).stalled_for_s is not None
    os.kill(pids[1], signal.SIGCONT)
    await machine.event(EventKind.RANK_MOVING, 1)
    await machine.event(EventKind.RANK_STALLED, 1)


async def test_a_section_has_a_limit_of_its_own(machine: Machine) -> None:
    await machine.start(
        TRAIN
        + """
for step in range(40):
    session.step(step)
    time.sleep(0.02)
with session.section("eval", limit_s=2.5):
    mark("evaluating")
    wait("go on")
session.step(40)
time.sleep(600)
""",
        limits={"hang_min_s": 1.0, "hang_factor": 2.0},
    )
    await machine.marked("evaluating")
    event = await machine.event(EventKind.RANK_STALLED)
    assert event.data["section"] == "eval"
    assert event.data["limit_s"] == pytest.approx(2.5)
    assert event.data["stalled_for_s"] >= 2.5, "not after the limit for steps"
    assert rank_report(machine.state().report, 0).section == "eval"
    machine.go("go on")
    await machine.event(EventKind.RANK_MOVING)


async def test_the_policy_limits_sections_that_name_no_limit(machine: Machine) -> None:
    await machine.start(
        TRAIN + "with session.section('load'): time.sleep(600)", limits={"section_max_s": 0.4}
    )
    event = await machine.event(EventKind.RANK_STALLED)
    assert event.data["section"] == "load"
    assert event.data["limit_s"] == pytest.approx(0.4)


async def test_before_the_first_step_there_is_another_limit(machine: Machine) -> None:
    await machine.start(
        "if rank == 0: time.sleep(600)\n" + TRAIN + "time.sleep(600)",
        ranks=2,
        limits={"first_step_max_s": 0.8, "hang_min_s": 0.1},
    )
    for rank in (0, 1):  # also the one that has not even attached, since its neighbour has
        event = await machine.event(EventKind.RANK_STALLED, rank)
        assert event.data["limit_s"] == pytest.approx(0.8)
        assert event.data["step"] is None


async def test_a_script_without_the_library_is_never_called_hanging(machine: Machine) -> None:
    limits = {"first_step_max_s": 0.1, "hang_min_s": 0.1, "section_max_s": 0.1}
    await machine.start("mark('ready'); wait('go')", ranks=2, limits=limits)
    await machine.marked("ready")
    # A second run that does use the library is the clock: it is called hanging in the meantime.
    await machine.manager.start(
        "other",
        1,
        plan(TRAIN + "time.sleep(600)", limits={"first_step_max_s": 1.0}),
    )
    stalled = await machine.event(EventKind.RANK_STALLED)
    assert stalled.job_id == "other"
    assert "no rank has attached to the trainer library" in machine.state().report.note
    machine.go("go")
    await machine.event(EventKind.RUN_ENDED)
    assert not machine.of(EventKind.FIRST_STEP)
    assert machine.state().succeeded


async def test_a_loss_that_is_not_finite_is_told_once_and_stays_known(machine: Machine) -> None:
    await machine.start(
        TRAIN
        + """
for step in range(50):
    session.step(step, loss=float("nan") if step == 7 else 1.0)
mark("done")
time.sleep(600)
"""
    )
    await machine.marked("done")
    event = await machine.event(EventKind.NONFINITE, 0)
    assert event.data["step"] == 7
    await until(lambda: machine.manager.summaries()[0].step == 49, "it trains on")
    await machine.restart()
    report = await machine.stop()
    assert rank_report(report, 0).nonfinite_step == 7
    await machine.event(EventKind.NONFINITE, 0)


async def test_a_loss_that_is_not_finite_right_before_the_end_is_seen(machine: Machine) -> None:
    await machine.start(TRAIN + "session.step(3, grad_norm=float('inf')); os._exit(1)")
    await machine.event(EventKind.RUN_ENDED)
    kinds = [e.kind for e in machine.events]
    assert kinds.index(EventKind.NONFINITE) < kinds.index(EventKind.RANK_EXITED)


async def test_each_failed_save_is_told(machine: Machine) -> None:
    (machine.state_dir / "no-directory").write_text("a file")
    await machine.start(
        TRAIN
        + """
for step in (5, 6):
    session.step(step)
    assert not session.save(step, {"x": 1})
    mark(f"tried-{step}")
    wait(f"go-{step}")
""",
        checkpoint_dir=str(machine.state_dir / "no-directory"),
    )
    first = await machine.event(EventKind.SAVE_FAILED)
    assert first.data["step"] == 5
    assert first.data["error"]
    machine.go("go-5")
    await until(lambda: len(machine.of(EventKind.SAVE_FAILED)) == 2, "the second is told")
    assert machine.of(EventKind.SAVE_FAILED)[1].data["step"] == 6
    assert rank_report(machine.state().report, 0).save_error
    machine.go("go-6")
    await machine.event(EventKind.RUN_ENDED)
    assert len(machine.of(EventKind.SAVE_FAILED)) == 2
    assert machine.state().succeeded, "a failed save does not end training"
