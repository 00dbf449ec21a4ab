"""Hangs and slow runs of real ranks over gloo: the right rank and the right process are found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.decide.aggregation import judge_hang
from everstep.decide.fail_slow import judge_slow
from everstep.decide.stack_outliers import rank_stacks
from everstep.decide.stack_report import ProcessRole, StackFinding, StackReport, Wait
from everstep.decide.topology import topology
from everstep.decide.words import Confidence
from everstep.machine.proc import Scope, read_process
from everstep.machine.stacks import CaptureLimits, StackTarget, capture

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "stack_world.py"
RANKS = 4
LIMIT_S = 60.0
LOOK = CaptureLimits(total_s=20.0, process_s=5.0)
ONE_LOOK = CaptureLimits(total_s=20.0, process_s=5.0, looks=1, lines=False)
REPLICAS = topology({"dp": RANKS}, ("dp",), 2)
STAGES = topology({"pp": 2, "dp": 2}, ("pp", "dp"), 1)


class World:
    """The ranks, and what can be asked of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "EVERSTEP_RUN_MARK": f"world.{folder}"}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(RANKS)],
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.pids = [int(self.process.stdout.readline()) for _ in range(RANKS)]
        ticks = [found.start_ticks for pid in self.pids if (found := read_process(pid))]
        self.target = StackTarget(
            machine_id="m1",
            scope=Scope(
                mark=f"world.{folder}", leaders=dict(zip(self.pids, ticks, strict=True)), shim=None
            ),
            ranks={pid: rank for rank, pid in enumerate(self.pids)},
        )

    def begin(self, scenario: str) -> None:
        self.number += 1
        command = self.folder / f"do-{self.number}"
        command.with_suffix(".new").write_text(scenario, encoding="ascii")
        command.with_suffix(".new").rename(command)

    async def end(self) -> None:
        """Release the ranks; they must finish the scenario, which shows that nobody was hurt."""
        (self.folder / f"go-{self.number}").touch()
        done = [self.folder / f"done-{self.number}-{rank}" for rank in range(RANKS)]
        deadline = time.monotonic() + LIMIT_S
        while not all(path.exists() for path in done):
            assert time.monotonic() < deadline, "the ranks go on after they were looked at"
            await asyncio.sleep(0.02)

    async def when(
        self, ready: Callable[[StackReport], bool], limits: CaptureLimits = LOOK
    ) -> StackReport:
        """A report of the moment at which the scenario has come to its point."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            report = await capture(self.target, ONE_LOOK)
            if ready(report):
                return await capture(self.target, limits)
            assert time.monotonic() < deadline, report
            await asyncio.sleep(0.05)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    try:
        yield made
    finally:
        made.close()


def waiting(*expected: int) -> Callable[[StackReport], bool]:
    """Exactly these ranks wait for their peers."""

    def ready(report: StackReport) -> bool:
        stacks = rank_stacks(report.groups, RANKS)
        now = {rank for rank, group in stacks.items() if group.waits_for is Wait.PEERS}
        return now == set(expected)

    return ready


def blamed(finding: StackFinding) -> list[tuple[int, ProcessRole]]:
    return [(c.rank, c.role) for c in finding.culprits]


async def test_a_rank_that_is_stopped_in_a_collective(world: World) -> None:
    def others_wait(report: StackReport) -> bool:
        stacks = rank_stacks(report.groups, RANKS)
        others = all(stacks[r].waits_for is Wait.PEERS for r in (0, 1, 3) if r in stacks)
        return others and any(group.state == "T" for group in report.groups)

    world.begin("train")
    await world.when(lambda report: len(rank_stacks(report.groups, RANKS)) == RANKS, ONE_LOOK)
    os.kill(world.pids[2], signal.SIGSTOP)
    try:
        report = await world.when(others_wait)
    finally:
        os.kill(world.pids[2], signal.SIGCONT)
    await world.end()
    finding = judge_hang(report.groups, REPLICAS)
    assert finding.rule == "stack_stopped"
    assert blamed(finding) == [(2, ProcessRole.RANK)]
    assert finding.culprits[0].pids == (world.pids[2],)
    assert (finding.machines, finding.axis) == ((1,), None)
    stopped = rank_stacks(report.groups, RANKS)[2]
    assert stopped.frames, "a stopped process has a stack all the same"


async def test_a_rank_that_is_asleep_before_the_collective(world: World) -> None:
    world.begin("asleep")
    report = await world.when(waiting(0, 2, 3))
    await world.end()
    finding = judge_hang(report.groups, REPLICAS)
    assert finding.rule == "stack_outside_collective"
    assert finding.confidence is Confidence.HIGH
    assert blamed(finding) == [(1, ProcessRole.RANK)]
    assert "wait_for_release" in finding.reason
    assert finding.machines == (0,)
    assert not report.missed


async def test_a_data_loader_that_is_stuck(world: World) -> None:
    world.begin("loader")
    report = await world.when(waiting(0, 1, 2))
    loaders = [g for g in report.groups if g.role is ProcessRole.DATA_LOADER]
    await world.end()
    finding = judge_hang(report.groups, REPLICAS)
    assert blamed(finding) == [(3, ProcessRole.DATA_LOADER)]
    assert "wait_for_release" in finding.reason
    assert finding.machines == (1,)
    (pid,) = finding.culprits[0].pids
    assert pid not in world.pids
    assert all("serve (stack_world.py" not in f for g in loaders for f in g.frames), "inherited"


async def test_a_checkpoint_helper_that_is_stuck_while_its_rank_waits(world: World) -> None:
    world.begin("checkpoint")
    report = await world.when(waiting(1, 2, 3))
    await world.end()
    finding = judge_hang(report.groups, REPLICAS)
    assert blamed(finding) == [(0, ProcessRole.CHECKPOINT_HELPER)]
    assert finding.culprits[0].pids[0] not in world.pids
    assert finding.machines == (0,)


async def test_a_slow_rank_is_found_in_five_short_rounds(world: World) -> None:
    world.begin("slow")
    await world.when(waiting(0, 1, 3), ONE_LOOK)
    rounds = []
    for _ in range(5):
        rounds.append((await capture(world.target, ONE_LOOK)).groups)
        await asyncio.sleep(0.37)
    await world.end()
    finding = judge_slow(rounds, REPLICAS)
    assert finding.rule == "stack_slow", finding
    assert blamed(finding) == [(2, ProcessRole.RANK)]
    assert finding.machines == (1,)


async def test_stages_that_differ_by_nature_are_no_suspects(world: World) -> None:
    world.begin("stages_wait")
    report = await world.when(waiting(1, 3))
    await world.end()
    finding = judge_hang(report.groups, STAGES)
    assert (finding.rule, finding.culprits, finding.machines) == ("stack_alike", (), ())
    stacks = rank_stacks(report.groups, RANKS)
    assert stacks[0].fingerprint != stacks[1].fingerprint, "they do differ"


async def test_a_pipeline_that_trains_has_no_laggard(world: World) -> None:
    world.begin("stages_train")
    await world.when(waiting(1, 3), ONE_LOOK)
    rounds = []
    for _ in range(5):
        rounds.append((await capture(world.target, ONE_LOOK)).groups)
        await asyncio.sleep(0.37)
    await world.end()
    finding = judge_slow(rounds, STAGES)
    assert (finding.culprits, finding.machines) == ((), ()), finding
