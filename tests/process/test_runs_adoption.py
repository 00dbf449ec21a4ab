"""Agents and shims die; ranks go on, and nothing that happened is lost or told twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.decide.words import RankState
from everstep.machine.facts import FactsFile
from everstep.spec.agent_api import EventKind
from tests.process.runs_world import Event, Machine, is_alive, plan, rank_report, until

PROGRAM = Path(__file__).with_name("run_manager_program.py")


class Agent:
    """An agent's core in a process of its own, and all events that the machine has emitted."""

    def __init__(self, machine: Machine, tmp_path: Path) -> None:
        self.machine = machine
        self._events_file = tmp_path / "events.jsonl"
        self._events_file.touch()
        self._plan_file = tmp_path / "plan.json"
        self.process: subprocess.Popen[bytes] | None = None

    async def start_run(self, script: str, **options: object) -> None:
        self._plan_file.write_text(plan(script, **options).model_dump_json())  # type: ignore[arg-type]
        self.process = subprocess.Popen(  # noqa: ASYNC220 - a test may block for a moment
            [sys.executable, PROGRAM, self.machine.state_dir, self._events_file, self._plan_file],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        await until(lambda: self.emitted(EventKind.RUN_STARTED), "the run starts")

    def stop_run(self, grace_s: float) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(b"stop %f\n" % grace_s)
        self.process.stdin.flush()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process = None

    def emitted(self, kind: EventKind) -> list[Event]:
        """By the process or by its successor in the test's own process."""
        lines = [json.loads(line) for line in self._events_file.read_text().splitlines()]
        all_events = [Event(EventKind(line.pop("kind")), **line) for line in lines]
        return [e for e in (*all_events, *self.machine.events) if e.kind is kind]

    def ranks_exited(self) -> list[int | None]:
        return sorted((e.rank for e in self.emitted(EventKind.RANK_EXITED)), key=str)


@pytest.fixture
def agent(machine: Machine, tmp_path: Path) -> Iterator[Agent]:
    made = Agent(machine, tmp_path)
    yield made
    made.kill()


async def test_ranks_do_not_notice_the_death_of_their_agent(agent: Agent, machine: Machine) -> None:
    await agent.start_run("mark('ready'); wait('go'); print('done')", ranks=2)
    await machine.marked("ready")
    agent.kill()
    await machine.restart()
    adopted = await machine.event(EventKind.RUN_ADOPTED)
    assert adopted.data["live_ranks"] == 2
    assert machine.manager.live_jobs() == {"job": 1}
    machine.go("go")
    ended = await machine.event(EventKind.RUN_ENDED)
    assert ended.data["succeeded"] is True
    assert agent.ranks_exited() == [0, 1]


async def test_an_exit_while_no_agent_lived_is_reported_once(
    agent: Agent, machine: Machine
) -> None:
    await agent.start_run(
        "mark(f'ready-{rank}')\nif rank == 1:\n    wait('go'); sys.exit(7)\ntime.sleep(600)",
        ranks=2,
    )
    await machine.marked("ready-0")
    await machine.marked("ready-1")
    agent.kill()
    machine.go("go")
    exits = machine.folder() / "exits.jsonl"
    await until(lambda: exits.read_text().strip(), "the shim records the exit")
    await machine.restart()
    event = await machine.event(EventKind.RANK_EXITED, 1)
    assert event.data["exit_code"] == 7
    await machine.event(EventKind.RUN_ENDED)
    assert agent.ranks_exited() == [1]
    report = machine.state().report
    assert [r.stopped_by_us for r in report.ranks] == [True, False]
    await machine.restart()
    await machine.event(EventKind.RUN_ENDED)
    assert agent.ranks_exited() == [1], "a third agent has nothing to add"
    assert machine.state().report.ranks[1].exit_code == 7


async def test_a_run_that_ended_well_while_no_agent_lived(agent: Agent, machine: Machine) -> None:
    await agent.start_run("mark('ready'); wait('go')")
    await machine.marked("ready")
    shim_pid = machine.shim_pid()
    agent.kill()
    machine.go("go")
    await until(lambda: not is_alive(shim_pid), "the run ends")
    await machine.restart()
    ended = await machine.event(EventKind.RUN_ENDED)
    assert ended.data["succeeded"] is True
    assert not machine.of(EventKind.PROCESSES_VANISHED)
    assert agent.ranks_exited() == [0]


async def test_an_agent_that_dies_in_the_settle_window(agent: Agent, machine: Machine) -> None:
    await agent.start_run(
        "if rank == 0: sys.exit(4)\ntime.sleep(600)", ranks=2, limits={"settle_window_s": 3.0}
    )
    facts = machine.folder() / "facts.bin"
    await until(lambda: FactsFile(facts).load().exits_reported == [0], "the exit is reported")
    agent.kill()
    await machine.restart()
    await machine.event(EventKind.RUN_ENDED)
    assert agent.ranks_exited() == [0], "what was told is not told again"
    assert [r.stopped_by_us for r in machine.state().report.ranks] == [False, True]


async def test_an_agent_that_dies_in_a_teardown(agent: Agent, machine: Machine) -> None:
    await agent.start_run(
        """
        signal.signal(signal.SIGTERM, lambda *_: mark("asked"))
        mark("ready")
        while True:
            time.sleep(0.05)
        """
    )
    await machine.marked("ready")
    agent.stop_run(grace_s=60.0)
    await machine.marked("asked")
    agent.kill()
    await machine.restart()
    await machine.event(EventKind.RUN_ENDED)
    report = rank_report(machine.state().report, 0)
    assert report.stopped_by_us
    assert report.signal == signal.SIGKILL
    assert agent.ranks_exited() == [], "it did not end by itself"


async def test_an_ended_run_keeps_its_evidence_for_the_next_agent(machine: Machine) -> None:
    await machine.start("if rank == 1: raise ValueError('boom')\ntime.sleep(600)", ranks=2)
    await machine.event(EventKind.RUN_ENDED)
    before = machine.state().report
    events = list(machine.events)
    await machine.restart()
    report = await machine.stop()
    assert machine.events == events
    assert [r.exit_code for r in report.ranks] == [r.exit_code for r in before.ranks] == [None, 1]
    assert [r.stopped_by_us for r in report.ranks] == [True, False]
    assert report.ranks[0].process_state == before.ranks[0].process_state is not None
    assert report.ranks[1].log_lines == before.ranks[1].log_lines != ()


async def test_everything_is_killed_together_with_the_agent(agent: Agent, machine: Machine) -> None:
    await agent.start_run("mark(f'ready-{rank}'); time.sleep(600)", ranks=2)
    await machine.marked("ready-0")
    await machine.marked("ready-1")
    agent.kill()
    ranks = [json.loads(x) for x in (machine.folder() / "ranks.jsonl").read_text().split("\n") if x]
    os.kill(machine.shim_pid(), signal.SIGKILL)  # first: it must not record anything
    for rank in ranks:
        os.kill(rank["pid"], signal.SIGKILL)
    await until(lambda: not any(is_alive(r["pid"]) for r in ranks), "the ranks are gone")
    await machine.restart()
    event = await machine.event(EventKind.PROCESSES_VANISHED)
    assert event.data["ranks"] == [0, 1]
    await machine.event(EventKind.RUN_ENDED)
    assert not machine.of(EventKind.RUN_ADOPTED)
    assert not machine.of(EventKind.RANK_EXITED)
    report = await machine.stop()
    assert report.processes_vanished
    assert report.teardown_clean
    assert {r.state for r in report.ranks} == {RankState.UNKNOWN}


async def test_shim_and_ranks_killed_under_a_living_agent(machine: Machine) -> None:
    pids = await machine.start("mark('ready'); time.sleep(600)", ranks=2)
    await machine.marked("ready")
    for pid in (machine.shim_pid(), *pids.values()):
        os.kill(pid, signal.SIGKILL)
    event = await machine.event(EventKind.PROCESSES_VANISHED)
    assert event.data["ranks"] == [0, 1]
    await machine.event(EventKind.RUN_ENDED)
    assert not machine.of(EventKind.RANK_EXITED)
    assert machine.state().report.processes_vanished


async def test_a_shim_that_is_killed_alone_costs_exit_codes_only(machine: Machine) -> None:
    pids = await machine.start("wait(f'go-{rank}'); sys.exit(3)", ranks=2)
    os.kill(machine.shim_pid(), signal.SIGKILL)
    facts = machine.folder() / "facts.bin"
    await until(lambda: FactsFile(facts).load().shim_lost, "the loss is noted")
    assert all(is_alive(pid) for pid in pids.values())
    machine.go("go-1")
    event = await machine.event(EventKind.RANK_EXITED, 1)
    # Unknown, unless we looked before init had reaped it. Never anything else.
    assert event.data["exit_code"] in {None, 3}
    assert event.data["signal"] is None
    await machine.event(EventKind.RUN_ENDED)
    report = machine.state().report
    assert not report.processes_vanished
    assert report.teardown_clean
    assert [r.state for r in report.ranks] == [RankState.EXITED, RankState.EXITED]
    assert [r.stopped_by_us for r in report.ranks] == [True, False]
    assert not any(is_alive(pid) for pid in pids.values())


async def test_a_shim_that_is_killed_alone_is_noticed_by_the_next_agent_too(
    machine: Machine,
) -> None:
    await machine.start("wait('go')")
    os.kill(machine.shim_pid(), signal.SIGKILL)
    await machine.restart()
    assert (await machine.event(EventKind.RUN_ADOPTED)).data["live_ranks"] == 1
    facts = machine.folder() / "facts.bin"
    await until(lambda: FactsFile(facts).load().shim_lost, "the loss is noted")
    machine.go("go")
    assert (await machine.event(EventKind.RANK_EXITED)).data["exit_code"] in {None, 0}
    assert not machine.of(EventKind.PROCESSES_VANISHED)


async def test_a_frozen_shim_is_woken_to_say_how_a_rank_ended(machine: Machine) -> None:
    await machine.start("wait('go'); sys.exit(6)")
    os.kill(machine.shim_pid(), signal.SIGSTOP)
    machine.go("go")
    assert (await machine.event(EventKind.RANK_EXITED)).data["exit_code"] == 6
    await machine.event(EventKind.RUN_ENDED)


async def test_pids_that_have_a_new_owner_are_not_taken_for_ranks(machine: Machine) -> None:
    await machine.start("mark('ready'); time.sleep(600)")
    await machine.marked("ready")
    await machine.manager.close()
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    stranger = subprocess.Popen(program)  # noqa: ASYNC220 - a test may block for a moment
    try:
        os.kill(machine.shim_pid(), signal.SIGKILL)
        files = machine.folder() / "ranks.jsonl", machine.folder() / "shim.json"
        for path in files:
            record = json.loads(path.read_text().strip())
            os.kill(record["pid"], signal.SIGKILL)
            record["pid"] = stranger.pid
            path.write_text(json.dumps(record) + "\n")
        await machine.restart()
        await machine.event(EventKind.PROCESSES_VANISHED)
        await machine.stop()
        assert stranger.poll() is None, "it was not ours to end"
    finally:
        stranger.kill()
        stranger.wait()


async def test_after_a_reboot_everything_has_vanished(machine: Machine) -> None:
    pids = await machine.start("mark('ready'); time.sleep(600)")
    await machine.marked("ready")
    await machine.manager.close()
    record_file = machine.folder() / "plan.json"
    record = json.loads(record_file.read_text())
    record["boot_id"] = "another-boot"
    record["mark"] = "another-mark"  # a process with the old mark cannot exist after a reboot
    record_file.write_text(json.dumps(record))
    await machine.restart()
    await machine.event(EventKind.PROCESSES_VANISHED)
    await machine.event(EventKind.RUN_ENDED)
    report = machine.state().report
    assert report.processes_vanished
    assert report.ranks[0].exited_ago_s is None, "its clock has begun anew"
    assert is_alive(pids[0]), "pids of another boot are strangers"


async def test_an_agent_that_died_before_it_started_anything(machine: Machine) -> None:
    await machine.start("print('hello')")
    await machine.event(EventKind.RUN_ENDED)
    await machine.manager.close()
    # The state in which a kill right after the making of the folder leaves it.
    folder = machine.folder()
    size = (folder / "facts.bin").stat().st_size
    (folder / "facts.bin").write_bytes(bytes(size))
    for name in ("shim.json", "ranks.jsonl", "exits.jsonl"):
        (folder / name).write_bytes(b"\n" * (folder / name).stat().st_size)
    events = list(machine.events)
    await machine.restart()
    assert machine.events == events
    assert machine.manager.state("job", 1) is None
    assert not folder.exists()
    await machine.start("print('hello')")
    await until(lambda: machine.manager.state("job", 1) is not None, "it may start now")


async def test_a_broken_run_folder_does_not_keep_the_agent_from_the_others(
    machine: Machine,
) -> None:
    await machine.start("wait('go')", generation=1)
    broken = machine.state_dir / "runs" / "other" / "4"
    broken.mkdir(parents=True)
    (broken / "plan.json").write_bytes(os.urandom(300))
    (machine.state_dir / "runs" / "stray-file").write_text("")
    await machine.restart()
    await machine.event(EventKind.RUN_ADOPTED)
    assert machine.manager.live_jobs() == {"job": 1}


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "json"])
async def test_damaged_records_never_keep_an_agent_from_starting(
    machine: Machine, damage: str
) -> None:
    names = ["plan.json", "facts.bin", "shim.json", "ranks.jsonl", "exits.jsonl", "launch.json"]
    contents = {"empty": b"", "garbage": os.urandom(9000), "json": b"[1]\n5\n{}\n"}
    for number in range(len(names)):
        await machine.manager.start(f"job-{number}", 1, plan("mark('ready'); wait('go')"))
    await machine.manager.close()
    for number, name in enumerate(names):
        path = machine.state_dir / "runs" / f"job-{number}" / "1" / name
        path.unlink()
        if damage != "missing":
            path.write_bytes(contents[damage])
    machine.manager = machine.new_manager()
    await machine.manager.adopt()
    machine.manager.summaries()
    for number in range(len(names)):
        machine.manager.state(f"job-{number}", 1)
    await machine.start("pass")
    await until(lambda: machine.state().succeeded, "the machine works")
