"""Nothing of a run is left on the machine, and nothing else is touched."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.machine.guard import Refusal
from everstep.machine.proc import Process, Scope, find_members
from everstep.spec.agent_api import EventKind
from tests.process.runs_world import Machine, is_alive, rank_report, until

FREEZER = Path("/sys/fs/cgroup/freezer")

ORPHAN = """
# A helper in a session of its own, whose parent is gone: neither the rank's group nor its tree.
program = "import time; open('orphan-%d' % __import__('os').getpid(), 'w').close(); time.sleep(600)"
if os.fork() == 0:
    os.setsid()
    subprocess.Popen([sys.executable, "-c", program], env=ENV, start_new_session=True)
    os._exit(0)
os.wait()
"""


def orphan_script(env: str, then: str) -> str:
    return ORPHAN.replace("ENV", env) + then


async def orphan_pid(machine: Machine) -> int:
    work = machine.folder() / "work"
    await until(lambda: list(work.glob("orphan-*")), "the orphan runs")
    (found,) = work.glob("orphan-*")
    return int(found.name.removeprefix("orphan-"))


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user that has nothing to do with any run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("env", ["None", "{}"], ids=["marked", "environment emptied"])
async def test_an_orphan_in_its_own_session_is_found_and_ended(
    machine: Machine, bystander: subprocess.Popen[bytes], env: str
) -> None:
    await machine.start(orphan_script(env, "time.sleep(600)"))
    pid = await orphan_pid(machine)
    report = await machine.stop()
    assert report.teardown_clean
    assert not is_alive(pid)
    assert bystander.poll() is None


async def test_an_orphan_is_found_by_its_mark_when_the_shim_is_dead(machine: Machine) -> None:
    await machine.start(orphan_script("None", "time.sleep(600)"))
    pid = await orphan_pid(machine)
    os.kill(machine.shim_pid(), signal.SIGKILL)
    report = await machine.stop()
    assert report.teardown_clean
    assert not is_alive(pid)


async def test_an_exit_with_0_is_no_proof_of_a_clean_machine(machine: Machine) -> None:
    await machine.start(orphan_script("None", "wait('go')"), limits={"failure_grace_s": 0.2})
    pid = await orphan_pid(machine)
    machine.go("go")
    ended = await machine.event(EventKind.RUN_ENDED)
    assert ended.data["succeeded"] is True
    assert not is_alive(pid), "a run has ended when nothing of it is left"
    await until(lambda: not is_alive(machine.shim_pid()), "the shim ends")


async def test_children_in_the_ranks_session_are_ended_too(machine: Machine) -> None:
    await machine.start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # children inherit it
        for number in range(3):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            mark(f"child-{child.pid}")
        mark("ready")
        time.sleep(600)
        """
    )
    await machine.marked("ready")
    work = machine.folder() / "work"
    children = [int(p.name.removeprefix("child-")) for p in work.glob("child-*")]
    assert len(children) == 3
    report = await machine.stop(grace_s=0.2)
    assert report.teardown_clean
    assert rank_report(report, 0).signal == signal.SIGKILL
    assert not any(is_alive(pid) for pid in children)


async def test_two_stops_at_once_are_one_teardown(machine: Machine) -> None:
    await machine.start("mark('ready'); time.sleep(600)", ranks=2)
    await machine.marked("ready")
    reports = await asyncio.gather(*(machine.stop() for _ in range(3)))
    assert all(report.teardown_clean for report in reports)
    assert all(rank_report(report, 0).stopped_by_us for report in reports)
    await machine.event(EventKind.RUN_ENDED)


@pytest.mark.parametrize("begun", [False, True], ids=["at once", "after it began"])
async def test_a_second_stop_can_shorten_the_grace_of_the_first(
    machine: Machine, begun: bool
) -> None:
    await machine.start(
        """
        signal.signal(signal.SIGTERM, lambda *_: mark("asked"))
        mark("ready")
        while True:
            time.sleep(0.05)
        """
    )
    await machine.marked("ready")
    patient = asyncio.create_task(machine.stop(grace_s=600.0))
    await (machine.marked("asked") if begun else asyncio.sleep(0))
    await machine.stop(grace_s=0.1)
    report = await patient
    assert report.teardown_clean
    assert rank_report(report, 0).signal == signal.SIGKILL


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or not FREEZER.is_dir(),
    reason="NOT PROVED HERE: needs root and a version 1 freezer to make a process outlive SIGKILL",
)
async def test_a_process_that_outlives_sigkill_makes_the_machine_unclean(machine: Machine) -> None:
    pids = await machine.start(
        "mark('ready'); time.sleep(600)", ranks=2, limits={"kill_wait_s": 0.3}
    )
    await machine.marked("ready")
    cage = FREEZER / f"everstep-test-{os.getpid()}"
    cage.mkdir()
    try:
        (cage / "cgroup.procs").write_text(str(pids[0]))
        (cage / "freezer.state").write_text("FROZEN")
        await until(lambda: "FROZEN" in (cage / "freezer.state").read_text(), "it is frozen")
        report = await machine.stop(grace_s=0.1, kill_wait_s=0.3)
        assert not report.teardown_clean
        assert str(pids[0]) in report.note
        assert str(pids[1]) not in report.note
        assert not machine.of(EventKind.RUN_ENDED), "it has not ended"
        with pytest.raises(Refusal, match=f"generation 1 .*{pids[0]}"):
            await machine.start("print('two at once')", generation=2)
        (cage / "freezer.state").write_text("THAWED")
        again = await machine.stop(grace_s=0.1)
        assert again.teardown_clean
        await machine.event(EventKind.RUN_ENDED)
    finally:
        (cage / "freezer.state").write_text("THAWED")
        await machine.end()
        cage.rmdir()


# --- which processes belong to a run, without processes ---------------------------------------


def process(pid: int, *, parent: int = 1, session: int = 1, start: int = 100) -> Process:
    return Process(
        pid=pid, start_ticks=start, state="S", parent=parent, session=session, exit_status=0
    )


def members(processes: list[Process], marked: set[int] = frozenset()) -> set[int]:  # type: ignore[assignment]
    scope = Scope(mark="m", leaders={10: 100}, shim=(5, 90))
    return set(
        find_members(
            scope,
            look=lambda: {p.pid: p for p in processes},
            has_mark=lambda pid, _mark: pid in marked,
        )
    )


def test_members_are_sessions_descendants_and_marked_ones() -> None:
    found = members(
        [
            process(1, parent=0),
            process(5, session=5, start=90),
            process(10, parent=5, session=10),
            process(11, parent=10, session=10),
            process(12, parent=5, session=12),
            process(13, parent=1, session=13),
            process(14, parent=13, session=14),
            process(20, session=20),
            process(21, parent=20, session=20),
        ],
        marked={13},
    )
    assert found == {10, 11, 12, 13, 14}


def test_a_session_whose_leader_has_a_new_owner_is_a_strangers() -> None:
    found = members([process(10, session=10, start=777), process(11, parent=10, session=10)])
    assert found == set()


def test_a_session_outlives_its_leader() -> None:
    assert members([process(11, session=10)]) == {11}


def test_a_pid_that_was_the_shims_is_not_the_shim() -> None:
    found = members([process(5, session=5, start=4242), process(30, parent=5, session=30)])
    assert found == set()
