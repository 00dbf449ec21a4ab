"""One part of ``up``: started again when it dies, given up when never ready, surely ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from everstep.errors import ConfigurationProblem
from workers.up_parts import FAILED_STARTS_MAX, Part, PartSpec, last_line

LIMIT_S = 20.0
READY_THEN_WAIT = "import pathlib, signal, sys; pathlib.Path(sys.argv[1]).touch(); signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + READY_THEN_WAIT


class Bench:
    """A part made of a few lines of Python that touches a file when it is ready."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "ready"
        self.log = folder / "part.log"
        self.parts: list[Part] = []

    def part(self, program: str) -> Part:
        async def ready() -> bool:
            return self.mark.exists()

        argv = (sys.executable, "-c", program, str(self.mark))
        made = Part(PartSpec(name="part", argv=argv, log_path=self.log, ready=ready))
        self.parts.append(made)
        return made


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for part in bench.parts:
        await part.stop(grace_s=0.1)


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not found():
            await asyncio.sleep(0.02)


async def test_a_part_that_dies_is_started_again(bench: Bench) -> None:
    part = bench.part(READY_THEN_WAIT)
    part.start()
    await part.until_ready()
    first = part.kill(signal.SIGKILL)
    await until(lambda: part.pid not in (None, first))
    assert part.starts == 2


async def test_a_held_part_stays_away_until_it_is_released(bench: Bench) -> None:
    part = bench.part(READY_THEN_WAIT)
    part.start()
    await part.until_ready()
    part.hold()
    part.kill(signal.SIGKILL)
    await until(lambda: part.pid is None)
    await asyncio.sleep(0.5)  # longer than the first backoff: it would be back by now
    assert (part.pid, part.starts) == (None, 1)
    part.release()
    await until(lambda: part.pid is not None)


async def test_a_part_that_never_gets_ready_is_given_up_with_its_last_word(bench: Bench) -> None:
    part = bench.part("import sys; sys.exit('error: the disk is full')")
    part.start()
    with pytest.raises(ConfigurationProblem, match="the disk is full") as caught:
        await part.until_ready()
    assert str(bench.log) in str(caught.value)
    assert part.starts == FAILED_STARTS_MAX


async def test_a_part_whose_configuration_is_wrong_is_not_tried_again(bench: Bench) -> None:
    part = bench.part("import sys; print('no such policy', file=sys.stderr); sys.exit(3)")
    part.start()
    with pytest.raises(ConfigurationProblem, match="no such policy"):
        await part.until_ready()
    assert part.starts == 1


async def test_a_part_that_does_not_listen_is_ended_by_force(bench: Bench) -> None:
    part = bench.part(DEAF)
    part.start()
    await part.until_ready()
    pid = part.pid
    assert pid is not None
    await part.stop(grace_s=0.2)
    assert not psutil.pid_exists(pid)


async def test_hurry_cuts_the_grace_short(bench: Bench) -> None:
    part = bench.part(DEAF)
    part.start()
    await part.until_ready()
    hurry = asyncio.Event()
    began = time.monotonic()
    stopping = asyncio.create_task(part.stop(grace_s=600, hurry=hurry))
    hurry.set()
    await stopping
    assert time.monotonic() - began < 300


async def test_a_frozen_part_can_be_stopped(bench: Bench) -> None:
    part = bench.part(READY_THEN_WAIT)
    part.start()
    await part.until_ready()
    part.kill(signal.SIGSTOP)
    await part.stop(grace_s=LIMIT_S)
    assert part.pid is None


def test_children_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "ready"
    program = f"""
import asyncio, pathlib, sys
from workers.up_parts import Part, PartSpec
async def main():
    async def ready(): return pathlib.Path({str(mark)!r}).exists()
    argv = (sys.executable, "-c", {READY_THEN_WAIT!r}, {str(mark)!r})
    part = Part(PartSpec(name="p", argv=argv, log_path=pathlib.Path({str(tmp_path / "l")!r}),
                ready=ready))
    part.start()
    await part.until_ready()
    print(part.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert supervisor.stdout is not None
    child = psutil.Process(int(supervisor.stdout.readline()))
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    _, alive = psutil.wait_procs([child], timeout=LIMIT_S)
    left = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert not left


def test_the_last_line_is_the_last_one_with_something_on_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert "no log" in last_line(path)
    path.write_text("first\nerror: second\n\n  \n")
    assert last_line(path) == "second"
    path.write_text("")
    assert "nothing" in last_line(path)
