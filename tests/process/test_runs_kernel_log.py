"""What the kernel prints because we end a run, and what it prints because the run fails.

Real ranks write the lines that a driver would print into the file that the probe follows.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest_asyncio

from everstep.machine.health import HealthBoard
from everstep.machine.probing import Probing
from everstep.machine.run_places import TEARDOWNS_KEPT_S, RunPlaces
from everstep.spec.agent_api import EventKind
from everstep.spec.load import load_policy
from tests.process.runs_world import Machine, until
from workers.agent_probes import ProbeChoice, maker

LOOK_MAX_S = 20.0
PRINTS = """
def prints(*xids):
    with open({log!r}, "a") as log:
        for xid in xids:
            line = "NVRM: Xid (PCI:0000:05:00): %d, pid=%d, name=python, Ch 00000010\\n"
            log.write(line % (xid, os.getpid()))

def ended(*_):
    prints(45, 79)
    os._exit(1)

signal.signal(signal.SIGTERM, ended)
"""


class World:
    """A machine whose agent follows a file as its kernel log."""

    def __init__(self, machine: Machine, log: Path) -> None:
        self.machine = machine
        self.log = log
        self.places = RunPlaces()
        board = HealthBoard(machine.state_dir / "health.json", lambda *_, **__: None)
        choice = ProbeChoice(probes=("kernel_log",), kernel_log=log)
        self.probing = Probing(board, maker(choice, self.places))
        self.machine.manager = machine.new_manager(health=self.probing)
        self.places.runs = self.machine.manager

    async def start(self, script: str, ranks: int = 1) -> None:
        script = PRINTS.format(log=str(self.log)) + script
        await self.machine.start(script, ranks=ranks, limits={"settle_window_s": 2.0})

    async def rules(self) -> set[str]:
        """What stands after one more look."""
        await self.probing.look_again(LOOK_MAX_S)
        return {seen.observation.rule for seen in self.probing.seen()} - {""}


@pytest_asyncio.fixture
async def world(machine: Machine, tmp_path: Path) -> AsyncIterator[World]:
    log = tmp_path / "kern.log"
    log.touch()
    made = World(machine, log)
    policy = load_policy(None, environ={}).policy.probes
    # Nobody looks but whom the test or the failure of a rank asks to.
    await made.probing.use(policy.model_copy(update={"host_interval": timedelta(hours=1)}))
    await made.probing.look_again(LOOK_MAX_S)
    yield made
    await made.probing.close()


async def test_what_ranks_print_because_we_end_them_is_nothing(world: World) -> None:
    await world.start("mark('up'); time.sleep(600)")
    await world.machine.marked("up")
    assert list(world.places.teardowns()) == []
    before_s = time.monotonic()

    report = await world.machine.stop()

    assert report.teardown_clean
    assert "Xid (PCI:0000:05:00): 45" in await asyncio.to_thread(world.log.read_text)
    assert await world.rules() == {"xid_79"}, "what no teardown explains stands"
    ((from_s, until_s),) = world.places.teardowns()
    assert before_s <= from_s < until_s <= time.monotonic()


async def test_what_a_rank_prints_before_it_fails_by_itself_stands(world: World) -> None:
    await world.start("prints(45); sys.exit(1)")
    await world.machine.event(EventKind.RUN_ENDED)
    assert await world.rules() == {"xid_45"}
    assert list(world.places.teardowns()) == [], "there was nobody to end"


async def test_the_first_rank_to_fail_is_heard_before_the_others_are_ended(world: World) -> None:
    script = """
if rank == 0:
    wait('up')
    prints(43)
    sys.exit(1)
mark('up')
time.sleep(600)
"""
    await world.start(script, ranks=2)
    await world.machine.event(EventKind.RUN_ENDED)
    assert await world.rules() == {"xid_43", "xid_79"}


async def test_a_teardown_is_open_while_it_goes_on(world: World) -> None:
    await world.start(
        "signal.signal(signal.SIGTERM, lambda *_: mark('asked'))\n"
        "mark('up')\n"
        "while True: time.sleep(1)"
    )
    await world.machine.marked("up")
    stop = asyncio.create_task(world.machine.stop(grace_s=600.0))
    await world.machine.marked("asked")
    ((_, until_s),) = world.places.teardowns()
    assert until_s == math.inf
    await world.machine.stop(grace_s=0.0)
    await stop
    await until(lambda: max(world.places.teardowns())[1] < math.inf, "the teardown is over")


def test_a_teardown_is_told_for_a_minute() -> None:
    class Runs:
        def places(self) -> list[Path]:
            return []

        def pids(self) -> list[int]:
            return []

        def teardowns(self) -> list[tuple[float, float]]:
            return [(1.0, 2.0)]

    now_s = 2.0
    places = RunPlaces(clock=lambda: now_s)
    places.runs = Runs()
    assert list(places.teardowns()) == [(1.0, 2.0)]
    now_s += TEARDOWNS_KEPT_S + 1
    assert list(places.teardowns()) == []
