"""Looking may fail in any way: exits, teardown and adoption go on without what it would show."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from everstep.machine.health import NoProbes
from everstep.machine.monitor import RunMonitor
from everstep.machine.observed import Observed
from everstep.machine.rdma import Watch
from everstep.machine.stacks import StackTarget
from everstep.machine.stacks.evidence import StackEvidence
from everstep.spec.agent_api import EventKind
from tests.process.runs_world import Machine, is_alive, rank_report, until

WAITS = "mark(f'ready-{rank}'); wait('go'); sys.exit(3)"


class Broken(RunMonitor):
    """A monitor that a bug has made useless."""

    looks = 0

    def observe(self, *_: Any, **__: Any) -> list[Observed]:
        self.looks += 1
        raise ZeroDivisionError("a bug")


async def test_a_look_that_fails_hides_no_exit_and_prevents_no_teardown(machine: Machine) -> None:
    pids = await machine.start(f"{WAITS} if rank == 0 else time.sleep(600)", ranks=2)
    await machine.marked("ready-0")
    run = machine.manager._runs["job", 1]
    run.monitor = broken = Broken(
        policy=run.record.plan.policy, ranks=run.record.ranks, started_ns=0, facts=run.facts
    )
    await until(lambda: broken.looks > 1, "it looks again")
    machine.go("go")
    assert (await machine.event(EventKind.RANK_EXITED)).data["exit_code"] == 3
    await machine.event(EventKind.RUN_ENDED)
    report = machine.state().report
    assert report.teardown_clean
    assert rank_report(report, 1).stopped_by_us
    assert not is_alive(pids[1])


class Hears(RunMonitor):
    """A monitor that keeps what it is told of RDMA traffic."""

    heard: int | None = None

    def traffic(self, now_ns: int, total_bytes: int) -> list[Observed]:
        self.heard = total_bytes
        return super().traffic(now_ns, total_bytes)


async def test_a_network_driver_that_hangs_holds_no_run_up(machine: Machine) -> None:
    asked, answers = threading.Event(), threading.Event()

    def look() -> int:
        asked.set()
        answers.wait(20)
        return 4096

    await machine.start(WAITS)
    await machine.marked("ready-0")
    run = machine.manager._runs["job", 1]
    run.monitor = monitor = Hears(
        policy=run.record.plan.policy, ranks=run.record.ranks, started_ns=0, facts=run.facts
    )
    run._senses._rdma = Watch(look)
    await until(asked.is_set, "counters are read")
    await machine.restart()
    assert monitor.heard is None
    again = machine.manager._runs["job", 1]
    again.monitor = after = Hears(
        policy=run.record.plan.policy, ranks=run.record.ranks, started_ns=0, facts=again.facts
    )
    again._senses._rdma = Watch(look)
    answers.set()
    await until(lambda: after.heard == 4096, "what was read is judged")
    machine.go("go")
    await machine.event(EventKind.RUN_ENDED)


class BrokenProbes(NoProbes):
    """Probes that nobody can ask."""

    asked = 0

    async def look_again(self, limit_s: float) -> None:
        self.asked += 1
        raise RuntimeError(f"a bug, within {limit_s} s")


async def test_probes_that_fail_prevent_no_stop(machine: Machine) -> None:
    probes = BrokenProbes()
    machine.manager = machine.new_manager(health=probes)
    await machine.start(WAITS)
    await machine.marked("ready-0")
    report = await machine.stop()
    assert (report.teardown_clean, probes.asked) == (True, 1)
    assert report.observations == ()


async def test_stacks_that_cannot_be_taken_are_none(tmp_path: Path) -> None:
    evidence = StackEvidence(tmp_path / "stacks.json")

    def find_target() -> StackTarget:
        raise KeyError("a bug")

    await evidence.take(find_target)
    assert evidence.report is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\x00", b"[" * 100_000, b'{"machine_id": 1, "groups": [{}]}', None],
    ids=["empty", "torn", "binary", "deep", "another form", "a folder"],
)
async def test_stacks_that_cannot_be_read_prevent_no_adoption(
    machine: Machine, content: bytes | None
) -> None:
    pids = await machine.start(WAITS)
    await machine.marked("ready-0")
    taken = machine.folder() / "stacks.json"
    if content is None:
        taken.mkdir()
    else:
        taken.write_bytes(content)
    await machine.restart()
    assert machine.state().report.stacks is None
    assert is_alive(pids[0])
    machine.go("go")
    await machine.event(EventKind.RANK_EXITED)
