"""A script that nobody prepared prints what Megatron-LM prints, and that is all that is known."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from everstep.machine.plans import plan_problem
from everstep.machine.report import FROM_LOG
from everstep.spec.agent_api import EventKind, HeartbeatLine, RunSummary, SignalPolicy
from tests.agents import make_plan, running_agent
from tests.process.runs_world import Machine, plan, policy, rank_report, until

SIGNALS = SignalPolicy(
    log_hang_min_s=1.5,
    log_silent_after_s=1800,
    loss_spike_factor=5,
    loss_spike_window=20,
    loss_spike_sustained=3,
    loss_spike_warmup=10,
    step_time_factor=1000,
    step_time_window_s=600,
    rdma_silent_after_s=600,
)

MEGATRON = """
def say(step, loss, norm="0.5"):
    print(f" iteration {step:8d}/{5000:8d} | consumed samples: {step * 8:12d} | elapsed time per "
          f"iteration (ms): 20.0 | learning rate: 1.0E-04 | global batch size:     8 | "
          f"lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {norm} | "
          "number of skipped iterations:   0 | number of nan iterations:   0 |", flush=True)

def train(first, last, loss):
    for step in range(first, last):
        time.sleep(0.02)
        say(step, loss)
"""

STALLS = (
    MEGATRON
    + """
if rank != world - 1:
    time.sleep(600)
train(1, 31, 2.5)
mark("steady")
wait("go")
train(31, 4000, 2.5)
"""
)


async def start(machine: Machine, script: str, **options: Any) -> dict[int, int]:
    script = "import os\nworld = int(os.environ['WORLD_SIZE'])\n" + script
    return await machine.start(script, limits={"signals": SIGNALS}, **options)


async def test_steps_of_the_rank_that_prints_and_a_stall(machine: Machine) -> None:
    pids = await start(machine, STALLS, ranks=3)
    first = await machine.event(EventKind.FIRST_STEP)
    assert first.data["source"] == "log"
    await machine.marked("steady")
    await until(lambda: machine.manager.summaries()[0].step == 30, "the last step is seen")
    (summary,) = machine.manager.summaries()
    assert (summary.step_from_log, summary.loss, summary.grad_norm) == (True, 2.5, 0.5)

    os.kill(pids[1], signal.SIGSTOP)
    stalled = await machine.event(EventKind.RANK_STALLED)
    assert (stalled.rank, stalled.data["step"], stalled.data["source"]) == (2, 30, "log")
    assert stalled.data["stalled_for_s"] >= 1.5
    report = machine.state().report
    assert FROM_LOG in report.note
    assert rank_report(report, 1).process_state == "T", "the one that is to blame"
    assert [rank.step for rank in report.ranks] == [None, None, None], "printing blames nobody"

    await machine.restart()
    assert rank_report(machine.state().report, 2).stalled_for_s is not None
    machine.go("go")
    await machine.event(EventKind.RANK_MOVING)
    await until(lambda: (machine.manager.summaries()[0].step or 0) > 60, "steps are seen again")
    assert len(machine.of(EventKind.FIRST_STEP)) == 1
    assert len(machine.of(EventKind.RANK_STALLED)) == 1


async def test_a_loss_spike_and_nan_in_a_log(machine: Machine) -> None:
    await start(
        machine,
        MEGATRON
        + """
train(1, 40, 2.5)
train(40, 60, 12.6)
train(60, 80, 2.5)
mark("recovered")
wait("nan")
say(80, float("nan"))
time.sleep(600)
""",
    )
    spike = await machine.event(EventKind.LOSS_SPIKE)
    assert spike.data["signal"] == "loss"
    assert spike.data["value"] == pytest.approx(12.6)
    assert spike.data["baseline"] == pytest.approx(2.5)
    assert 40 <= spike.data["step"] < 60
    await machine.marked("recovered")
    over = await machine.event(EventKind.SIGNAL_RECOVERED)
    assert over.data == {"kind": "loss_spike"}
    machine.go("nan")
    nonfinite = await machine.event(EventKind.NONFINITE)
    assert nonfinite.data["step"] == 80
    assert rank_report(machine.state().report, 0).nonfinite_step == 80


async def test_the_output_of_ranks_that_use_the_library_is_not_read(machine: Machine) -> None:
    await start(
        machine,
        MEGATRON
        + """
import everstep_trainer
session = everstep_trainer.attach()
session.step(0)
wait("go")
train(1, 20, 2.5)
session.step(1)
wait("end")
""",
    )
    run = machine.manager._runs["job", 1]
    await until(lambda: run.monitor.library_steps, "a step is seen")
    (follower,) = run._senses._logs._followers.values()
    before = follower.reading
    machine.go("go")

    def step() -> int | None:
        progress = run.monitor.progress(0)
        return progress.step if progress is not None else None

    await until(lambda: step() == 1, "the next step is seen")
    assert follower.reading == before
    machine.go("end")
    await machine.event(EventKind.RUN_ENDED)
    assert follower.reading == before


async def test_the_last_line_of_a_short_script_counts(machine: Machine) -> None:
    await start(machine, "print('step 3 loss 1.5', end='')")
    await machine.event(EventKind.RUN_ENDED)
    kinds = [e.kind for e in machine.events]
    assert kinds.index(EventKind.FIRST_STEP) < kinds.index(EventKind.RANK_EXITED)
    assert machine.of(EventKind.RANK_EXITED)[0].data["step"] == 3


async def test_a_jobs_own_pattern(machine: Machine) -> None:
    await start(
        machine,
        """
for n in range(100, 106):
    print(f"update={n};objective={n / 10}", flush=True)
time.sleep(600)
""",
        progress_pattern=r"update=(?P<step>\d+);objective=(?P<loss>[\d.]+)",
    )
    await until(lambda: (s := machine.manager.summaries()) and s[0].step == 105, "steps are seen")
    assert machine.manager.summaries()[0].loss == 10.5


def test_an_agent_takes_no_pattern_that_it_cannot_use() -> None:
    made = plan("pass", limits={}, progress_pattern="(?P<step")
    assert plan_problem(made, 4) == (
        "run.progress_pattern: must be a regular expression with a group named step"
    )


async def test_the_step_is_in_the_heartbeats_of_a_real_agent(tmp_path: Any) -> None:
    script = "import time\n" + MEGATRON + "train(1, 4000, 2.5)"
    made = make_plan(sys.executable, "-c", script, policy=policy(signals=SIGNALS))
    with running_agent(tmp_path) as agent:
        async with agent.client(machine_id="m1") as client:
            await client.start_run(
                job_id="job", generation=1, validity_s=30.0, command_id="c1", run=made
            )
            stream = client.stream(None)
            told: list[RunSummary] = []
            async for line in stream:
                if isinstance(line, HeartbeatLine):
                    told = [run for run in line.runs if run.step is not None]
                if told:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            assert (told[0].step_from_log, told[0].loss) == (True, 2.5)
            state = await client.run_state("job", 1)
            assert state.first_step_seen
