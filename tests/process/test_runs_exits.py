"""How ranks end, what is said about it, and what becomes of the others."""

from __future__ import annotations

import os
import signal
import time

import pytest

from everstep.decide.words import LogClass, RankState
from everstep.spec.agent_api import EventKind
from tests.process.runs_world import Machine, is_alive, rank_report, until

FOREVER = "time.sleep(600)"


@pytest.mark.parametrize("code", [1, 3, 17, 134])
async def test_an_exit_code_is_reported_as_it_is(machine: Machine, code: int) -> None:
    await machine.start(f"sys.exit({code})")
    event = await machine.event(EventKind.RANK_EXITED, 0)
    assert event.data["exit_code"] == code
    assert event.data["signal"] is None
    ended = await machine.event(EventKind.RUN_ENDED)
    assert ended.data["succeeded"] is False
    report = rank_report(machine.state().report, 0)
    assert (report.state, report.exit_code, report.signal) == (RankState.EXITED, code, None)
    assert not report.stopped_by_us


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
async def test_a_signal_is_reported_as_a_signal(machine: Machine, number: int) -> None:
    pids = await machine.start(FOREVER)
    os.kill(pids[0], number)
    event = await machine.event(EventKind.RANK_EXITED, 0)
    assert event.data["signal"] == number
    assert event.data["exit_code"] is None
    await machine.event(EventKind.RUN_ENDED)
    report = rank_report(machine.state().report, 0)
    assert (report.exit_code, report.signal) == (None, number)
    assert not report.stopped_by_us


async def test_success_is_all_ranks_ending_with_0(machine: Machine) -> None:
    await machine.start("print('done')", ranks=3)
    ended = await machine.event(EventKind.RUN_ENDED)
    assert ended.data == {"succeeded": True, "teardown_clean": True}
    state = machine.state()
    assert state.ended
    assert state.succeeded
    assert [r.exit_code for r in state.report.ranks] == [0, 0, 0]
    assert {e.rank for e in machine.of(EventKind.RANK_EXITED)} == {0, 1, 2}
    assert machine.events[0].kind is EventKind.RUN_STARTED
    assert machine.events[-1].kind is EventKind.RUN_ENDED
    await until(lambda: not is_alive(machine.shim_pid()), "the shim ends")
    assert machine.manager.live_jobs() == {}
    assert machine.manager.summaries() == ()


async def test_the_instant_of_an_exit_is_on_the_machines_clock(machine: Machine) -> None:
    before = time.monotonic()
    await machine.start("sys.exit(1)")
    event = await machine.event(EventKind.RANK_EXITED, 0)
    assert event.at_monotonic is not None
    assert before < event.at_monotonic < time.monotonic()
    report = rank_report(machine.state().report, 0)
    assert report.exited_ago_s is not None
    assert 0 <= report.exited_ago_s <= time.monotonic() - before


async def test_others_may_fail_by_themselves_within_the_settle_window(machine: Machine) -> None:
    pids = await machine.start(
        """
        if rank == 0:
            wait("go")
            sys.exit(5)
        if rank == 1:
            wait("go")
            time.sleep(0.2)
            raise RuntimeError("connection closed by peer")
        time.sleep(600)
        """,
        ranks=3,
        limits={"settle_window_s": 1.5},
    )
    machine.go("go")
    ended = await machine.event(EventKind.RUN_ENDED)
    assert ended.data["succeeded"] is False
    assert {e.rank for e in machine.of(EventKind.RANK_EXITED)} == {0, 1}
    report = machine.state().report
    assert [r.stopped_by_us for r in report.ranks] == [False, False, True]
    assert [r.exit_code for r in report.ranks] == [5, 1, None]
    assert rank_report(report, 1).log_class is not LogClass.SILENT
    assert rank_report(report, 2).signal == signal.SIGTERM
    assert rank_report(report, 2).process_state in {"R", "S"}, (
        "evidence was taken before the signal"
    )
    assert not any(is_alive(pid) for pid in pids.values())


async def test_a_clean_exit_beside_a_running_rank_is_early(machine: Machine) -> None:
    await machine.start("if rank == 1: time.sleep(600)", ranks=2, limits={"exit_skew_max_s": 0.4})
    event = await machine.event(EventKind.EARLY_EXIT)
    assert event.rank == 0
    assert event.data["running"] == [1]
    assert event.data["waited_s"] >= 0.4
    assert not machine.of(EventKind.RUN_ENDED), "what to do about it is the job's decision"
    report = await machine.stop()
    assert [r.exit_code for r in report.ranks] == [0, None]
    assert [r.stopped_by_us for r in report.ranks] == [False, True]
    await machine.event(EventKind.EARLY_EXIT)


async def test_a_command_that_cannot_be_started_says_why_in_the_log(machine: Machine) -> None:
    await machine.start("", command=("no-such-program", "--flag"))
    event = await machine.event(EventKind.RANK_EXITED, 0)
    assert event.data["exit_code"] == 127
    assert "no-such-program" in " ".join(event.data["log_lines"])
    await machine.event(EventKind.RUN_ENDED)


async def test_binary_garbage_and_progress_bars_in_a_log(machine: Machine) -> None:
    await machine.start(
        r"""
        out = sys.stdout.buffer
        out.write(bytes(range(256)) * 600 + b"\n")
        out.write(b"\x1b[31mred\x1b[0m\r  1%\r 50%\r100% done\n" + b"\xff\xfe" * 40 + b"\n")
        out.write(b"x" * 300_000 + b"\n")
        out.flush()
        raise ValueError("the last \x07 word " + "y" * 2000)
        """
    )
    event = await machine.event(EventKind.RANK_EXITED, 0)
    assert event.data["log_class"] == LogClass.PYTHON_EXCEPTION
    text = "\n".join(event.data["log_lines"])
    assert "the last" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    report = rank_report(machine.state().report, 0)
    assert report.log_lines
    assert all(len(line) <= 300 and line.isprintable() for line in report.log_lines)


async def test_a_stopped_rank_is_ended_and_named(machine: Machine) -> None:
    pids = await machine.start("mark(f'ready-{rank}'); time.sleep(600)", ranks=2)
    for rank in pids:
        await machine.marked(f"ready-{rank}")
    os.kill(pids[1], signal.SIGSTOP)
    await until(
        lambda: rank_report(machine.state().report, 1).process_state == "T", "rank 1 is stopped"
    )
    report = await machine.stop(planned=True, reason="maintenance")
    assert report.teardown_clean
    assert report.planned_stop == "maintenance"
    assert rank_report(report, 0).process_state in {"R", "S"}
    assert rank_report(report, 1).process_state == "T"
    # SIGTERM reaches a stopped process only together with SIGCONT: it did not need SIGKILL.
    assert [r.signal for r in report.ranks] == [signal.SIGTERM, signal.SIGTERM]
    kinds = [e.kind for e in machine.events]
    assert kinds == [
        EventKind.RUN_STARTED,
        EventKind.PLANNED_STOP,
        EventKind.RUN_ENDED,
        EventKind.RUN_STOPPED,
    ]


async def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(machine: Machine) -> None:
    await machine.start(
        """
        signal.signal(signal.SIGTERM, lambda *_: mark("asked"))
        mark("ready")
        while True:
            time.sleep(0.05)
        """
    )
    await machine.marked("ready")
    report = await machine.stop(grace_s=0.5)
    assert (machine.folder() / "work" / "asked").exists()
    assert rank_report(report, 0).signal == signal.SIGKILL
    assert report.teardown_clean


async def test_a_rank_may_save_within_the_grace(machine: Machine) -> None:
    await machine.start(
        """
        def save(*_):
            time.sleep(0.3)
            mark("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        mark("ready")
        while True:
            time.sleep(0.05)
        """
    )
    await machine.marked("ready")
    report = await machine.stop(grace_s=15.0)
    assert (machine.folder() / "work" / "saved").exists()
    assert rank_report(report, 0).exit_code == 0
    assert rank_report(report, 0).stopped_by_us
    assert not machine.state().succeeded, "it ended because we asked, not because it was done"


async def test_stopping_again_gives_the_same_report_and_no_more_events(machine: Machine) -> None:
    await machine.start("sys.exit(9)")
    await machine.event(EventKind.RUN_ENDED)
    before = list(machine.events)
    first = await machine.stop()
    second = await machine.stop()
    assert rank_report(first, 0).exit_code == rank_report(second, 0).exit_code == 9
    assert not rank_report(second, 0).stopped_by_us
    assert machine.events == before
