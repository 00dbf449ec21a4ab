"""Stacks of real runs under their shims: every process, every way to a stack, and every limit."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import sys
from pathlib import Path

import pytest

from everstep.decide.attribution import attribute
from everstep.decide.stack_report import ProcessRole, StackGroup, StackReport, StackSource, ranks_of
from everstep.decide.words import Symptom
from everstep.machine.stacks import CaptureLimits, capture
from everstep.machine.stacks.of_run import capture_run, stack_target
from everstep.machine.stacks.py_spy import find_py_spy, not_permitted
from everstep.spec.agent_api import EventKind
from tests.process.runs_world import Machine, is_alive, until

LIMITS = CaptureLimits(total_s=20.0, process_s=5.0, gap_s=0.0)
NO_PY_SPY = Path("/no/such/py-spy")

ATTACHED = """
import everstep_trainer
session = everstep_trainer.attach()

def stuck():
    mark(f"ready-{rank}")
    wait("go")

stuck()
mark(f"went-on-{rank}")
"""

WITH_CHILDREN = """
import multiprocessing

def write_checkpoint():
    mark(f"helper-{rank}")
    wait("go")

if __name__ == "__main__":
    helper = multiprocessing.get_context("fork").Process(target=write_checkpoint)
    helper.start()
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    other = subprocess.Popen(["sleep", "600"])
    helper.join()
    mark(f"joined-{rank}")
    program.kill(); other.kill(); program.wait(); other.wait()
"""


def functions(group: StackGroup) -> list[str]:
    return [line.partition(" ")[0] for line in group.frames]


def of_role(report: StackReport, role: ProcessRole) -> list[StackGroup]:
    return [group for group in report.groups if group.role is role]


async def test_every_process_of_a_run_is_found_with_its_rank_and_role(machine: Machine) -> None:
    pids = await machine.start(WITH_CHILDREN, ranks=2)
    for rank in pids:
        await machine.marked(f"helper-{rank}")
    run = machine.manager._runs["job", 1]

    async def whole() -> StackReport:
        report = await capture_run(run, LIMITS)
        while report.processes < 8 or len(of_role(report, ProcessRole.RANK)) > 1:
            await asyncio.sleep(0.01)
            report = await capture_run(run, LIMITS)
        return report

    report = await asyncio.wait_for(whole(), 30)
    (ranks,) = of_role(report, ProcessRole.RANK)
    assert (ranks.processes, ranks_of(ranks.spans)) == (2, (0, 1))
    assert set(ranks.pids) == set(pids.values())
    assert "join" in functions(ranks)
    (helpers,) = of_role(report, ProcessRole.CHECKPOINT_HELPER)
    assert (helpers.processes, ranks_of(helpers.spans)) == (2, (0, 1))
    assert "write_checkpoint" in functions(helpers)
    assert "<module>" not in functions(helpers), "that frame is the parent's"
    others = of_role(report, ProcessRole.OTHER)
    assert sum(group.processes for group in others) == 4
    assert {g.source for g in others} == {StackSource.PY_SPY, StackSource.PROC}
    assert (report.machine_id, report.missed) == ("m1", ())
    machine.go("go")
    for rank in pids:
        await machine.marked(f"joined-{rank}")


async def test_a_rank_behind_a_shell_is_the_script(machine: Machine) -> None:
    code = "import os,time; open('ready','w').close(); time.sleep(600)"
    await machine.start("", command=("sh", "-c", f'"{sys.executable}" -c "{code}"; exit $?'))
    await machine.marked("ready")
    report = await capture_run(machine.manager._runs["job", 1], LIMITS)
    (rank,) = of_role(report, ProcessRole.RANK)
    (shell,) = of_role(report, ProcessRole.LAUNCHER)
    assert functions(rank) == ["<module>"]
    assert (shell.source, ranks_of(shell.spans)) == (StackSource.PROC, (0,))


async def test_ranks_answer_by_signal_where_py_spy_is_missing(machine: Machine) -> None:
    pids = await machine.start(ATTACHED, ranks=2)
    await ready(machine, pids)
    target = stack_target(machine.manager._runs["job", 1])
    by_signal = await old_enough(machine, pids, program=NO_PY_SPY)
    (group,) = by_signal.groups
    assert (group.source, group.processes) == (StackSource.FAULTHANDLER, 2)
    assert functions(group) == ["wait", "stuck", "<module>"]
    assert not by_signal.missed
    (same,) = (await capture(target, LIMITS)).groups
    assert same.source is StackSource.PY_SPY
    assert functions(same) == functions(group)
    machine.go("go")
    for rank in pids:
        await machine.marked(f"went-on-{rank}")


async def test_a_rank_that_would_not_survive_the_signal_never_gets_it(machine: Machine) -> None:
    pids = await machine.start("mark(f'ready-{rank}')\nwait('go')\nmark(f'went-on-{rank}')")
    await ready(machine, pids)
    report = await old_enough(machine, pids, program=NO_PY_SPY)
    (missed,) = report.missed
    assert "py-spy cannot be started" in missed.reason
    assert "does not use the trainer library" in missed.reason
    assert ranks_of(missed.spans) == (0,)
    assert report.groups[0].source is StackSource.PROC
    assert is_alive(pids[0])
    machine.go("go")
    await machine.marked("went-on-0")


async def test_a_handler_of_the_users_own_is_left_alone(machine: Machine) -> None:
    pids = await machine.start(
        """
number = int(os.environ["EVERSTEP_STACK_SIGNAL"])
signal.signal(number, lambda *_: mark("handled"))
"""
        + ATTACHED
        + "os.kill(os.getpid(), number)\ntime.sleep(0)\nwait('handled')\nmark('kept')"
    )
    await ready(machine, pids)
    machine.go("go")
    await machine.marked("kept")
    assert not (machine.folder() / "stacks" / "rank-0.txt").read_text()


async def test_a_stopped_rank_has_a_stack_and_its_state(machine: Machine) -> None:
    pids = await machine.start(ATTACHED)
    await ready(machine, pids)
    os.kill(pids[0], signal.SIGSTOP)
    await until(lambda: state_of(pids[0]) == "T", "the rank is stopped")
    run = machine.manager._runs["job", 1]
    (group,) = (await capture_run(run, LIMITS)).groups
    assert (group.state, group.source) == ("T", StackSource.PY_SPY)
    assert functions(group)[-2:] == ["stuck", "<module>"]
    blind = await capture(stack_target(run), LIMITS, program=NO_PY_SPY)
    assert blind.groups[0].state == "T", "known even without a stack"
    assert "it is stopped" in blind.missed[0].reason
    os.kill(pids[0], signal.SIGCONT)
    machine.go("go")
    await machine.marked("went-on-0")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another account")
async def test_an_account_that_may_not_look_says_so_once_and_asks(machine: Machine) -> None:
    setpriv, program = shutil.which("setpriv"), find_py_spy()
    if setpriv is None or program is None:
        pytest.skip("needs setpriv of util-linux")
    asked = machine.state_dir.parent / "asked"
    wrapper = machine.state_dir.parent / "py-spy-of-nobody"
    wrapper.write_text(
        f'#!/bin/sh\necho x >>"{asked}"\n'
        f'exec "{setpriv}" --reuid 65534 --clear-groups --inh-caps=-all "{program}" "$@"\n'
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    pids = await machine.start("mark(f'ready-{rank}')\nwait('go')", ranks=3)
    await ready(machine, pids)
    one_by_one = CaptureLimits(total_s=20.0, process_s=5.0, gap_s=0.0, parallel=1)
    target = stack_target(machine.manager._runs["job", 1])
    report = await capture(target, one_by_one, program=wrapper)
    (missed,) = report.missed
    assert missed.reason.startswith(not_permitted()[:100])
    assert (missed.processes, ranks_of(missed.spans)) == (3, (0, 1, 2))
    assert len(asked.read_text().split()) == 1, "what is not permitted is not tried again"


async def test_a_py_spy_that_hangs_costs_no_more_than_its_limit(machine: Machine) -> None:
    slow = machine.state_dir.parent / "py-spy-that-hangs"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    pids = await machine.start("mark(f'ready-{rank}')\nwait('go')", ranks=4)
    await ready(machine, pids)
    limits = CaptureLimits(total_s=0.6, process_s=0.2, parallel=2)
    target = stack_target(machine.manager._runs["job", 1])
    report = await asyncio.wait_for(capture(target, limits, program=slow), 20)
    assert sum(m.processes for m in report.missed) == 4
    assert all("within" in m.reason for m in report.missed)
    assert all(is_alive(pid) for pid in pids.values())


async def test_a_file_that_leads_elsewhere_is_not_written_to(machine: Machine) -> None:
    pids = await machine.start(ATTACHED)
    await ready(machine, pids)
    victim = machine.state_dir / "victim"
    victim.write_text("precious")
    file = machine.folder() / "stacks" / "rank-0.txt"
    for change in (file.symlink_to, file.hardlink_to, lambda _: os.mkfifo(file)):
        file.unlink()
        change(victim)
        report = await old_enough(machine, pids, program=NO_PY_SPY)
        assert report.groups[0].source is StackSource.PROC
        assert victim.read_text() == "precious"


async def test_no_more_processes_than_the_limit_are_looked_at(machine: Machine) -> None:
    pids = await machine.start("mark(f'ready-{rank}')\nwait('go')", ranks=3)
    await ready(machine, pids)
    run = machine.manager._runs["job", 1]
    report = await capture_run(run, CaptureLimits(total_s=20.0, looks=1, processes_max=2))
    assert sum(g.processes for g in report.groups) == 2
    assert [(m.reason, m.processes) for m in report.missed] == [("more than 2 processes", 1)]
    assert report.processes == 3


HANGS = """
import everstep_trainer
session = everstep_trainer.attach()

def all_reduce():
    while not os.path.exists("go"):
        time.sleep(0.01)

def read_shard():
    wait("go")

for step in range(30):
    time.sleep(0.02)
    session.step(step)
read_shard() if rank == 1 else all_reduce()
"""


async def test_a_hang_is_told_with_the_stacks_of_before_the_teardown(machine: Machine) -> None:
    await machine.start(HANGS, ranks=4, axes=(("dp", 4),))
    for rank in range(4):
        await machine.event(EventKind.RANK_STALLED, rank)
    report = await machine.stop()
    assert report.teardown_clean
    assert report.stacks is not None
    assert (report.stacks.axes, report.stacks.ranks_per_machine) == ((("dp", 4),), 4)
    finding = attribute([report])
    assert (finding.symptom, finding.rule) == (Symptom.HANG, "hang_by_stacks")
    assert finding.culprit_ranks == (1,)
    assert "read_shard" in finding.reason
    assert "stack_outside_collective" in finding.reason
    assert finding.suspects == (), "a stack says where a rank is, and not that its machine is bad"
    await machine.restart()
    assert machine.state().report.stacks == report.stacks, "the next agent knows it too"


DEEP = """
import everstep_trainer
session = everstep_trainer.attach()
for number in range(20):
    exec(f"def call_{number}(): return call_{number + 1}()")

def call_20():
    wait("go")

for step in range(30):
    time.sleep(0.02)
    session.step(step)
call_0()
"""


async def test_only_innermost_frames_travel_with_the_report(machine: Machine) -> None:
    await machine.start(DEEP)
    await machine.event(EventKind.RANK_STALLED)
    whole = await capture_run(machine.manager._runs["job", 1], LIMITS)
    assert functions(whole.groups[0])[-2:] == ["call_0", "<module>"]
    report = await machine.stop()
    assert report.stacks is not None
    (group,) = report.stacks.groups
    assert functions(group) == ["wait", *(f"call_{n}" for n in range(20, 13, -1))]


async def test_a_stop_that_is_planned_or_without_a_hang_is_not_kept_waiting(
    machine: Machine,
) -> None:
    pids = await machine.start(ATTACHED)
    await ready(machine, pids)
    assert (await machine.stop()).stacks is None
    await machine.start(HANGS, generation=2)
    await machine.event(EventKind.RANK_STALLED, 0)
    assert (await machine.stop(generation=2, planned=True)).stacks is None


async def test_a_run_that_is_over_has_no_stacks(machine: Machine) -> None:
    await machine.start("pass")
    await until(lambda: machine.state().ended, "the run ends")
    report = await capture_run(machine.manager._runs["job", 1], LIMITS)
    assert (report.groups, report.missed, report.processes) == ((), (), 0)


async def ready(machine: Machine, pids: dict[int, int]) -> None:
    for rank in pids:
        await machine.marked(f"ready-{rank}")


async def old_enough(machine: Machine, pids: dict[int, int], *, program: Path) -> StackReport:
    """A report once the ranks are no longer taken for children about to become something else."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def age_s(pid: int) -> float:
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - started * tick_s

    await until(lambda: all(age_s(pid) > 1.1 for pid in pids.values()), "ranks are a second old")
    return await capture(stack_target(machine.manager._runs["job", 1]), LIMITS, program=program)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
