"""The gate that every command passes: once, in time, from its generation, also over crashes."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.machine.code import CodeStore, hash_directory
from everstep.machine.commands import CommandDesk, Machine
from everstep.machine.fences import Fences
from everstep.machine.guard import Refusal
from everstep.machine.journal import Entry, Journal, JournalUnavailable
from everstep.spec.agent_api import (
    Command,
    ErrorCode,
    FenceJob,
    MaterialiseCode,
    MaterialisedCode,
    PreparedRun,
    PrepareRun,
    Shutdown,
    StartedRun,
    StartRun,
    StoppedRun,
    StopRun,
)
from tests.agents import FakeRuns, make_plan, until


class Bench:
    """One agent's desk on a state directory; ``restart`` is what a crash and a new start are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = FakeRuns()
        self.shut_down = 0
        self.boots = 0
        self.restart()

    def close(self) -> None:
        self.journal.close()
        self.fences.close()

    def restart(self) -> None:
        if self.boots:
            self.close()
        self.boots += 1
        self.boot_id = f"boot-{self.boots}"
        self.journal = Journal(self.folder / "commands.sqlite")
        self.fences = Fences(self.folder / "fences")
        self.desk = CommandDesk(
            Machine(machine_id="m1", agent_boot_id=self.boot_id, address="10.0.0.1", slots=4),
            runs=self.runs,
            journal=self.journal,
            fences=self.fences,
            code=CodeStore(self.folder / "code"),
            code_in_use=_nothing,
            shut_down=self._shut_down,
        )

    def make(self, kind: type[Command], **fields: Any) -> Any:
        defaults: dict[str, Any] = {
            "job_id": "job",
            "generation": 1,
            "command_id": "c1",
            "agent_boot_id": self.boot_id,
            "not_after_s": time.monotonic() + 60,
        }
        if kind is StartRun:
            defaults["run"] = make_plan()
        if kind is StopRun:
            defaults |= {"reason": "test", "grace_s": 0.0, "kill_wait_s": 0.0}
        return kind.model_validate(defaults | fields)

    async def do(self, kind: type[Command], **fields: Any) -> Any:
        return await self.desk.handle(self.make(kind, **fields))

    async def refused(self, kind: type[Command], **fields: Any) -> ErrorCode:
        with pytest.raises(Refusal) as caught:
            await self.do(kind, **fields)
        assert "\n" not in caught.value.message
        return caught.value.code

    async def _shut_down(self, reason: str) -> dict[str, int]:
        del reason
        self.shut_down += 1
        return self.runs.live_jobs()


def _nothing() -> Collection[str]:
    return ()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


async def test_the_life_of_a_run(bench: Bench) -> None:
    assert await bench.do(PrepareRun, command_id="a") == PreparedRun(
        master_addr="10.0.0.1", master_port=29501
    )
    started = await bench.do(StartRun, command_id="b", run=make_plan(ranks=2))
    assert started == StartedRun(machine_id="m1", pids={0: 1000, 1: 1001})
    stopped = await bench.do(StopRun, command_id="c", reason="enough")
    assert isinstance(stopped, StoppedRun)
    assert stopped.report.note == "enough"
    assert [name for name, _, _ in bench.runs.calls] == ["prepare", "start", "stop"]


@pytest.mark.parametrize("kind", [PrepareRun, StartRun, StopRun, FenceJob, Shutdown])
@pytest.mark.parametrize(
    "change, code",
    [
        ({"agent_boot_id": "another"}, ErrorCode.WRONG_BOOT),
        ({"not_after_s": -1.0}, ErrorCode.EXPIRED),
        ({"not_after_s": math.nan}, ErrorCode.EXPIRED),
        ({"generation": 4}, ErrorCode.OLDER_GENERATION),
    ],
)
async def test_nothing_is_done_for_a_wrong_envelope(
    bench: Bench, kind: type[Command], change: dict[str, Any], code: ErrorCode
) -> None:
    bench.fences.saw("job", 5)
    assert await bench.refused(kind, **({"generation": 5} | change)) is code
    assert bench.runs.calls == []
    assert bench.shut_down == 0
    # A refusal is no first answer: the same id with a right envelope is carried out.
    await bench.do(kind, generation=5)
    assert len(bench.runs.calls) + bench.shut_down == (0 if kind is FenceJob else 1)


@pytest.mark.parametrize("kind", [PrepareRun, StartRun, StopRun])
async def test_a_repeated_command_gets_its_first_answer(bench: Bench, kind: type[Command]) -> None:
    first = await bench.do(kind)
    # Even when it is expired by now, and the generation is over.
    bench.fences.saw("job", 9)
    assert await bench.do(kind, not_after_s=0.0) == first
    bench.restart()
    assert await bench.do(kind, agent_boot_id="boot-1") == first
    assert len(bench.runs.calls) == 1


async def test_the_same_id_for_something_else_is_refused(bench: Bench) -> None:
    await bench.do(StopRun)
    assert await bench.refused(StopRun, reason="other") is ErrorCode.BAD_REQUEST
    assert await bench.refused(PrepareRun) is ErrorCode.BAD_REQUEST
    assert len(bench.runs.calls) == 1


async def test_a_repetition_waits_for_the_first_that_is_under_way(bench: Bench) -> None:
    bench.runs.gate = asyncio.Event()
    tasks = [asyncio.create_task(bench.do(StartRun)) for _ in range(5)]
    await until(lambda: bench.runs.calls, "the effect to begin")
    tasks[0].cancel()  # its sender went away
    assert not any(task.done() for task in tasks[1:])
    bench.runs.gate.set()
    answers = await asyncio.gather(*tasks[1:])
    assert answers == [answers[0]] * 4
    assert bench.runs.effects("start") == 1


async def test_expiry_is_looked_at_again_right_before_the_effect(bench: Bench) -> None:
    """The command was in time when it came, and waited for another one of its job."""
    bench.runs.gate = asyncio.Event()
    first = asyncio.create_task(bench.do(PrepareRun, command_id="slow"))
    await until(lambda: bench.runs.calls, "the effect to begin")
    limit = time.monotonic() + 0.05
    late = asyncio.create_task(bench.do(StartRun, command_id="late", not_after_s=limit))
    await until(lambda: time.monotonic() > limit, "the command to expire")
    bench.runs.gate.set()
    await first
    with pytest.raises(Refusal) as caught:
        await late
    assert caught.value.code is ErrorCode.EXPIRED
    assert bench.runs.effects("start") == 0
    await bench.do(StartRun, command_id="late")
    assert bench.runs.effects("start") == 1


class SlowJournal(Journal):
    """A journal on a disk so slow that commands expire while they are written down."""

    slow_until = 0.0

    def accept(self, command_id: str, digest: str) -> None:
        super().accept(command_id, digest)
        while time.monotonic() <= self.slow_until:
            time.sleep(0.005)


@pytest.mark.parametrize("kind", [StartRun, StopRun, Shutdown])
async def test_a_command_that_expires_while_it_is_written_down_leaves_no_trace(
    bench: Bench, tmp_path: Path, kind: type[Command]
) -> None:
    slow = SlowJournal(tmp_path / "slow.sqlite")
    bench.desk._journal = slow
    slow.slow_until = time.monotonic() + 0.05

    assert await bench.refused(kind, not_after_s=slow.slow_until) is ErrorCode.EXPIRED

    assert bench.runs.calls == []
    assert bench.shut_down == 0
    assert bench.fences.fence("job").highest_seen == 0
    assert slow.find("c1") is None
    await bench.do(kind)
    assert len(bench.runs.calls) + bench.shut_down == 1
    slow.close()


async def test_a_start_that_was_cut_short_is_looked_for_and_not_done_again(bench: Bench) -> None:
    crash = asyncio.Event()
    bench.runs.gate = crash
    dying = asyncio.create_task(bench.do(StartRun))
    await until(lambda: bench.runs.calls, "the effect to begin")
    # The ranks are there, and the agent dies before it could say so.
    bench.runs.gate = None
    await bench.runs.start("job", 1, make_plan())
    bench.restart()
    bench.runs.calls.clear()

    answer = await bench.do(StartRun)

    assert answer == StartedRun(machine_id="m1", pids={0: 1000})
    assert bench.runs.calls == []
    crash.set()
    await dying


async def test_a_start_that_was_cut_short_before_its_effect_is_done(bench: Bench) -> None:
    bench.journal.accept("c1", _digest_of(bench, StartRun))
    bench.restart()
    await bench.do(StartRun)
    assert bench.runs.effects("start") == 1


async def test_a_shutdown_that_took_effect_does_not_end_the_next_agent(bench: Bench) -> None:
    bench.journal.accept("c1", _digest_of(bench, Shutdown))
    bench.restart()
    assert (await bench.do(Shutdown)).stopped == {}
    assert bench.shut_down == 0
    await bench.do(Shutdown, command_id="c2")
    assert bench.shut_down == 1


def _digest_of(bench: Bench, kind: type[Command]) -> str:
    from everstep.machine.commands import _digest

    return _digest(bench.make(kind))


async def test_a_newer_start_ends_older_ranks_first(bench: Bench) -> None:
    await bench.do(StartRun, command_id="a", generation=3)
    await bench.do(StartRun, command_id="b", generation=4, run=make_plan(run_id="job-r4"))
    assert bench.runs.calls == [("start", "job", 3), ("stop_older", "job", 3), ("start", "job", 4)]
    assert await bench.refused(StartRun, command_id="c", generation=3) is ErrorCode.OLDER_GENERATION
    assert await bench.refused(StopRun, command_id="d", generation=3) is ErrorCode.OLDER_GENERATION
    bench.restart()
    assert await bench.refused(StartRun, command_id="c", generation=3) is ErrorCode.OLDER_GENERATION


async def test_a_fence_ends_older_ranks_and_leaves_their_evidence_to_be_asked_for(
    bench: Bench,
) -> None:
    await bench.do(StartRun, command_id="a", generation=3)
    await bench.do(FenceJob, command_id="b", generation=4)
    assert ("stop_older", "job", 3) in bench.runs.calls
    assert await bench.refused(StartRun, command_id="c", generation=3) is ErrorCode.OLDER_GENERATION
    assert isinstance(await bench.do(StopRun, command_id="d", generation=3), StoppedRun)
    bench.restart()
    assert (
        await bench.refused(PrepareRun, command_id="e", generation=3) is ErrorCode.OLDER_GENERATION
    )


async def test_another_run_under_the_same_generation_is_refused(bench: Bench) -> None:
    await bench.do(StartRun, command_id="a")
    other = make_plan(run_id="job-other")
    assert await bench.refused(StartRun, command_id="b", run=other) is ErrorCode.BUSY
    # The same run by another command (its first answer was lost for good): what is there.
    assert (await bench.do(StartRun, command_id="c")).pids == {0: 1000}
    assert bench.runs.effects("start") == 1


async def test_an_evicted_machine_and_an_ending_agent_start_nothing_and_stop(bench: Bench) -> None:
    await bench.do(StartRun, command_id="a")
    bench.desk.evicted = True
    assert await bench.refused(StartRun, command_id="b", generation=2) is ErrorCode.EVICTED
    assert await bench.refused(PrepareRun, command_id="c", generation=2) is ErrorCode.EVICTED
    bench.desk.evicted, bench.desk.ending = False, True
    assert await bench.refused(StartRun, command_id="b", generation=2) is ErrorCode.BUSY
    await bench.do(StopRun, command_id="d")
    assert bench.runs.effects("stop") == 1


async def test_a_failed_start_stays_failed_under_its_id(bench: Bench) -> None:
    bench.runs.failure = OSError("no such program")
    assert await bench.refused(StartRun) is ErrorCode.FAILED
    bench.runs.failure = None
    assert await bench.refused(StartRun) is ErrorCode.FAILED
    bench.restart()
    with pytest.raises(Refusal, match="no such program"):
        await bench.do(StartRun)
    assert bench.runs.effects("start") == 1
    await bench.do(StartRun, command_id="c2")


async def test_other_failures_may_be_tried_again(bench: Bench) -> None:
    bench.runs.failure = OSError("weather")
    assert await bench.refused(StopRun) is ErrorCode.FAILED
    bench.runs.failure = None
    assert isinstance(await bench.do(StopRun), StoppedRun)


@pytest.mark.parametrize(
    "change",
    [
        {"command": ()},
        {"command": ("a\0b",)},
        {"ranks_per_machine": 5},
        {"ranks_per_machine": 0},
        {"machines": 10**9},
        {"group_rank": 1},
        {"group_rank": -1},
        {"master_port": 0},
        {"master_addr": "a b"},
        {"env": {"A=B": "x"}},
        {"env": {"A": "x\0"}},
        {"working_dir": "relative"},
        {"code_path": "../x"},
        {"checkpoint_dir": "/a\0"},
        {"checkpoint_keep": 0},
        {"start_reason": "x" * 2000},
        {"restore": {"step": 1, "generation": 1, "path": "x"}},
        {"policy": {**make_plan().policy.model_dump(), "hang_min_s": math.inf}},
        {"policy": {**make_plan().policy.model_dump(), "runs_kept_max": 0}},
    ],
)
async def test_plans_that_make_no_sense_start_nothing(bench: Bench, change: dict[str, Any]) -> None:
    plan = make_plan().model_dump() | change
    assert await bench.refused(StartRun, run=plan) is ErrorCode.BAD_REQUEST
    assert bench.runs.calls == []


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, 1e9])
@pytest.mark.parametrize("name", ["grace_s", "kill_wait_s"])
async def test_a_stop_does_not_wait_for_ever(bench: Bench, name: str, value: float) -> None:
    assert await bench.refused(StopRun, **{name: value}) is ErrorCode.BAD_REQUEST
    assert bench.runs.calls == []


class FullJournal(Journal):
    """A journal whose disk has no room."""

    full = True

    def accept(self, command_id: str, digest: str) -> None:
        if self.full:
            raise JournalUnavailable("database or disk is full")
        super().accept(command_id, digest)


async def test_a_full_disk_stops_starting_and_not_stopping(bench: Bench, tmp_path: Path) -> None:
    await bench.do(StartRun, command_id="a")
    full = FullJournal(tmp_path / "full.sqlite")
    bench.desk._journal = full
    assert await bench.refused(PrepareRun, command_id="b", generation=2) is ErrorCode.FAILED
    start = {"command_id": "c", "generation": 2, "run": make_plan(run_id="job-r2")}
    assert await bench.refused(StartRun, **start) is ErrorCode.FAILED
    assert bench.fences.fence("job").highest_seen == 1  # so that generation 1 can be stopped
    first = await bench.do(StopRun, command_id="d")
    assert await bench.do(StopRun, command_id="d") == first
    assert bench.runs.effects("stop") == 1
    await bench.do(FenceJob, command_id="e", generation=2)
    full.full = False
    await bench.do(StartRun, **start)
    assert [name for name, _, _ in bench.runs.calls] == ["start", "stop", "start"]


async def test_a_version_is_brought_or_refused(bench: Bench, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("x")
    version = hash_directory(source)
    copy = {"code_version": version, "source": str(source)}
    answer = await bench.do(MaterialiseCode, command_id="a", **copy)
    assert answer == MaterialisedCode(path=str(tmp_path / "code" / version))
    wrong = {"code_version": "dir-" + "0" * 16, "source": str(source)}
    assert await bench.refused(MaterialiseCode, command_id="b", **wrong) is ErrorCode.BAD_REQUEST


class SlowCode(CodeStore):
    """A copy that takes until it is let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.copying = asyncio.Event()
        self.let_go = asyncio.Event()

    async def materialise(self, version: str, source: str, in_use: object) -> Path:
        del version, source, in_use
        self.copying.set()
        await self.let_go.wait()
        return Path("/done")


async def test_a_stop_is_not_kept_waiting_by_another_command(bench: Bench) -> None:
    bench.runs.gate = asyncio.Event()
    slow = [
        asyncio.create_task(bench.do(PrepareRun, command_id="a")),
        asyncio.create_task(bench.do(StopRun, command_id="b", grace_s=60.0)),
    ]
    await until(lambda: len(bench.runs.calls) == 2, "both to begin")
    quick = asyncio.create_task(bench.do(StopRun, command_id="c"))
    await until(lambda: bench.runs.effects("stop") == 2, "the second stop to begin")
    bench.runs.gate.set()
    await asyncio.gather(quick, *slow)


async def test_a_stop_is_not_kept_waiting_by_a_copy(bench: Bench, tmp_path: Path) -> None:
    slow = SlowCode(tmp_path / "code")
    bench.desk._code = slow
    copy = asyncio.create_task(
        bench.do(MaterialiseCode, command_id="a", code_version="x", source="/x")
    )
    await slow.copying.wait()
    assert isinstance(await bench.do(StopRun, command_id="b"), StoppedRun)
    assert not copy.done()
    slow.let_go.set()
    assert (await copy).path == "/done"


async def test_applying_a_fence_from_a_registration(bench: Bench) -> None:
    await bench.do(StartRun, command_id="a", generation=2)
    await bench.desk.apply_fence("job", 2)
    assert bench.runs.effects("stop_older") == 0
    await bench.desk.apply_fence("job", 3)
    assert bench.runs.calls[-1] == ("stop_older", "job", 2)


# --- the journal itself


@pytest.mark.parametrize(
    "bounds", [{"commands_max": 20}, {"answers_bytes_max": 20_000, "commands_max": 1000}]
)
def test_the_journal_is_bounded(tmp_path: Path, bounds: dict[str, int]) -> None:
    journal = Journal(tmp_path / "j", **bounds)
    for number in range(200):
        journal.accept(f"c{number}", "d")
        journal.finish(f"c{number}", "d", "x" * 1000)
    journal.close()
    connection = sqlite3.connect(tmp_path / "j")
    (count,) = connection.execute("SELECT COUNT(*) FROM commands").fetchone()
    connection.close()
    assert 20 <= count <= 20 + 64
    again = Journal(tmp_path / "j", **bounds)
    assert again.find("c0") is None
    assert again.find("c199") == Entry("c199", "d", "x" * 1000)
    again.close()


@pytest.mark.parametrize(
    "content", [b"", b"this is no database" * 1000, b"SQLite format 3\0" + b"x" * 5000]
)
def test_a_damaged_journal_is_put_aside(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    journal = Journal(path)
    journal.accept("c", "d")
    assert journal.find("c") is not None
    journal.close()
    told = capsys.readouterr().out.count("made anew")
    assert told == (1 if content else 0)
    assert path.with_name("j.damaged").exists() == bool(content)
    assert path.stat().st_mode & 0o077 == 0 or not content


def test_a_journal_that_cannot_be_opened_refuses_and_recovers(tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    journal = Journal(folder / "j")
    attempts: list[Callable[[], object]] = [
        lambda: journal.accept("c", "d"),
        lambda: journal.find("c"),
    ]
    for attempt in attempts:
        with pytest.raises(JournalUnavailable, match="unable to open"):
            attempt()
    journal.finish("c", "d", "{}")
    assert journal.find("c") is not None
    folder.mkdir()
    journal.accept("e", "d")
    journal.close()
    assert Journal(folder / "j").find("e") is not None
