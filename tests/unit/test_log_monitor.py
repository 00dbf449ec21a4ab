"""Scripts that only print: their rhythm, phases, silence and numbers, in invented time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from everstep.machine.facts import Facts
from everstep.machine.framework_log import LogStep
from everstep.machine.framework_log_reader import LogReading
from everstep.machine.monitor import NS, Observed, RunMonitor
from everstep.spec.agent_api import AgentRunPolicy, EventKind, SignalPolicy
from tests.unit.test_progress_monitor import EMPTY, POLICY, START_S

SIGNALS = SignalPolicy(
    log_hang_min_s=480,
    log_silent_after_s=1800,
    loss_spike_factor=5,
    loss_spike_window=50,
    loss_spike_sustained=5,
    loss_spike_warmup=20,
    step_time_factor=1.2,
    step_time_window_s=600,
    rdma_silent_after_s=600,
)
PRINTING = POLICY.model_copy(update={"signals": SIGNALS})


class Script:
    """Ranks that print; the monitor looks every second."""

    def __init__(self, ranks: int = 2, policy: AgentRunPolicy = PRINTING) -> None:
        self.now_s = START_S
        self.policy = policy
        self.facts = Facts()
        self.logs = {rank: LogReading() for rank in range(ranks)}
        self.library: dict[int, Any] = dict.fromkeys(range(ranks))
        self.live = set(self.logs)
        self.found: list[Observed] = []
        self.next_agent()

    def next_agent(self) -> None:
        text = self.facts.model_dump_json(exclude_defaults=True)
        self.facts = Facts.model_validate_json(text)
        self.monitor = RunMonitor(
            policy=self.policy,
            ranks=tuple(self.logs),
            started_ns=int(START_S * NS),
            facts=self.facts,
        )

    def prints(self, rank: int = 0, **step: Any) -> None:
        before = self.logs[rank]
        told = LogStep(**({"step": (before.step or 0) + 1} | step))
        self.logs[rank] = dataclasses.replace(
            before,
            bytes_seen=before.bytes_seen + 100,
            position=before.position + 100,
            steps=before.steps + 1,
            step=told.step,
            loss=told.loss if told.loss is not None else before.loss,
            phase=None,
            fresh=(told,),
        )

    def announces(self, phase: str, rank: int = 0) -> None:
        before = self.logs[rank]
        self.logs[rank] = dataclasses.replace(
            before, bytes_seen=before.bytes_seen + 50, position=before.position + 50, phase=phase
        )

    def writes(self, rank: int = 0) -> None:
        before = self.logs[rank]
        self.logs[rank] = dataclasses.replace(before, bytes_seen=before.bytes_seen + 10)

    def look(self) -> None:
        self.found += self.monitor.observe(
            int(self.now_s * NS), self.library, self.live, lambda rank: "S", self.logs
        )
        self.logs = {r: dataclasses.replace(told, fresh=()) for r, told in self.logs.items()}

    def wait(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 1)
            self.look()

    def train(self, lines: int, every_s: float, **step: Any) -> None:
        for _ in range(lines):
            self.wait(every_s - 1)
            self.prints(**step)
            self.wait(1)

    def of(self, kind: EventKind) -> list[Observed]:
        return [fact for fact in self.found if fact.kind is kind]


def test_a_printed_step_is_progress() -> None:
    script = Script()
    script.prints(step=7, loss=2.5)
    script.look()
    (fact,) = script.found
    assert (fact.kind, fact.rank) == (EventKind.FIRST_STEP, None)
    assert fact.data == {"step": 7, "source": "log"}
    progress = script.monitor.progress(0)
    assert progress is not None
    assert (progress.step, progress.loss, progress.source) == (7, 2.5, "log")
    assert script.monitor.progress(1) is None
    assert script.monitor.log_steps
    script.train(lines=20, every_s=10)
    assert len(script.found) == 1


def test_a_script_that_prints_no_steps_has_no_hang_rule() -> None:
    script = Script()
    for _ in range(100):
        script.writes()
        script.wait(1)
    script.wait(1700)
    assert script.found == []


def test_a_stall_is_one_event_and_moving_again_another() -> None:
    script = Script()
    script.train(lines=10, every_s=10)
    script.wait(478)
    assert not script.of(EventKind.RANK_STALLED)
    script.wait(10)
    (stalled,) = script.of(EventKind.RANK_STALLED)
    assert stalled.rank == 0
    assert stalled.data["limit_s"] == 480
    assert stalled.data["source"] == "log"
    assert script.monitor.stalled_for_s(0, int(script.now_s * NS)) is not None
    assert script.monitor.stalled_for_s(1, int(script.now_s * NS)) is None
    script.wait(3000)
    script.prints()
    script.wait(5)
    (moving,) = script.of(EventKind.RANK_MOVING)
    assert moving.data["step"] == 11
    assert len(script.of(EventKind.RANK_STALLED)) == 1


def test_a_stall_is_relative_to_how_often_it_prints() -> None:
    script = Script()
    script.train(lines=10, every_s=100)
    script.wait(990)
    assert not script.of(EventKind.RANK_STALLED), "ten lines have not gone by"
    script.wait(20)
    assert script.of(EventKind.RANK_STALLED)


def test_a_pause_that_ended_may_be_twice_as_long_the_next_time() -> None:
    """An evaluation that announces nothing."""
    script = Script()
    for pause_s in (400, 700, 1300, 1700):
        script.train(lines=30, every_s=5)
        script.wait(pause_s)
    assert not script.of(EventKind.RANK_STALLED)
    script.wait(101)
    assert script.of(EventKind.RANK_STALLED), "but never longer than a section"


@pytest.mark.parametrize("phase", ["eval", "save"])
def test_an_announced_phase_has_the_limit_of_a_section(phase: str) -> None:
    script = Script()
    script.train(lines=10, every_s=5)
    script.announces(phase)
    script.wait(1795)
    assert not script.of(EventKind.RANK_STALLED)
    script.wait(10)
    (stalled,) = script.of(EventKind.RANK_STALLED)
    assert stalled.data["section"] == phase
    script.announces(phase)
    script.wait(1)
    assert script.of(EventKind.RANK_MOVING), "the next evaluation is a sign of life too"


def test_the_second_line_may_take_as_long_as_a_first_step() -> None:
    script = Script()
    script.train(lines=1, every_s=5)
    script.wait(590)
    assert not script.of(EventKind.RANK_STALLED)
    script.wait(20)
    assert script.of(EventKind.RANK_STALLED)


def test_ranks_that_print_late_blame_nobody() -> None:
    """Rank 1's output lies in a buffer for a long time; the run moves."""
    script = Script()
    script.train(lines=3, every_s=5)
    script.prints(rank=1, step=2)
    script.wait(1)
    script.train(lines=200, every_s=5)
    assert not script.of(EventKind.RANK_STALLED)
    script.live = {1}
    script.wait(3000)
    assert not script.of(EventKind.RANK_STALLED), "who printed has ended: its exit tells more"


def test_old_lines_of_another_rank_are_no_steps() -> None:
    script = Script()
    script.train(lines=30, every_s=5)
    for _ in range(60):
        script.wait(9)
        script.prints(rank=1)  # what it had printed long ago, and only now comes out of a buffer
        if script.logs[1].step == 29:
            break
    assert script.monitor.progress(0) is not None
    script.wait(500)
    assert script.of(EventKind.RANK_STALLED)


def test_going_back_to_an_earlier_step_is_moving() -> None:
    script = Script()
    script.train(lines=30, every_s=5)
    script.prints(step=3)
    script.wait(400)
    script.train(lines=10, every_s=5)
    script.wait(400)
    assert not script.of(EventKind.RANK_STALLED)


def test_the_next_agent_tells_no_stall_twice_and_knows_the_rhythm() -> None:
    script = Script()
    script.train(lines=10, every_s=100)
    script.next_agent()
    script.prints()
    script.wait(990)
    assert not script.of(EventKind.RANK_STALLED)
    script.wait(20)
    assert len(script.of(EventKind.RANK_STALLED)) == 1
    script.next_agent()
    script.logs[0] = dataclasses.replace(script.logs[0], fresh=(LogStep(step=11),))
    script.wait(2000)
    assert not script.of(EventKind.RANK_MOVING), "it is the line from before"
    script.prints()
    script.wait(1)
    assert len(script.of(EventKind.RANK_MOVING)) == 1
    assert len(script.of(EventKind.RANK_STALLED)) == 1


def test_the_library_wins() -> None:
    script = Script(ranks=1)
    script.library[0] = dataclasses.replace(
        EMPTY, step=100, steps_reported=3, step_at_ns=int(script.now_s * NS)
    )
    script.prints(step=5)
    script.look()
    progress = script.monitor.progress(0)
    assert progress is not None
    assert (progress.step, progress.source) == (100, "library")
    assert script.monitor.library_steps
    assert not script.monitor.log_steps


def test_a_script_that_uses_the_library_only_to_save_is_not_late() -> None:
    """It never calls ``step``: before, that was a first step that did not come."""
    script = Script(ranks=2)
    script.library = {0: EMPTY, 1: EMPTY}
    script.train(lines=300, every_s=5)
    assert not script.of(EventKind.RANK_STALLED)
    progress = script.monitor.progress(0)
    assert progress is not None
    assert (progress.step, progress.attached) == (300, True)
    entered_ns = int(script.now_s * NS)
    for rank in script.library:
        script.library[rank] = dataclasses.replace(
            EMPTY, section="save", section_entered_ns=entered_ns, section_max_s=50.0
        )
    script.wait(60)
    assert {fact.rank for fact in script.of(EventKind.RANK_STALLED)} == {0, 1}


def test_a_line_before_the_librarys_first_report_is_no_first_step() -> None:
    """Scripts print a step, then report it; the first step is one of all ranks."""
    script = Script(ranks=2)
    script.library = {0: EMPTY, 1: EMPTY}
    script.prints(loss=2.0)
    script.look()
    assert script.found == []
    at_ns = int(script.now_s * NS)
    script.library[0] = dataclasses.replace(EMPTY, step=1, steps_reported=1, step_at_ns=at_ns)
    script.wait(5)
    assert script.found == []
    script.library[1] = script.library[0]
    script.wait(5)
    (fact,) = script.found
    assert fact.data == {"step": 1, "source": "library"}


def test_nan_in_a_log_is_told_once() -> None:
    script = Script()
    script.train(lines=3, every_s=5)
    script.logs[0] = dataclasses.replace(script.logs[0], nonfinite_step=4)
    script.train(lines=3, every_s=5)
    (fact,) = script.of(EventKind.NONFINITE)
    assert (fact.rank, fact.data["step"]) == (0, 4)


# --- numbers -----------------------------------------------------------------------------------


def test_a_loss_spike_of_all_ranks_is_one_event_and_its_end_another() -> None:
    script = Script(ranks=4)
    for loss, lines in ((2.0, 60), (30.0, 40), (2.0, 20)):
        for _ in range(lines):
            for rank in script.logs:
                script.prints(rank, loss=loss)
            script.wait(1)
    (spike,) = script.of(EventKind.LOSS_SPIKE)
    assert spike.rank is None, "it is not one rank's"
    assert spike.data["signal"] == "loss"
    assert (spike.data["value"], spike.data["baseline"], spike.data["step"]) == (30.0, 2.0, 65)
    assert spike.data["ranks"] == [0, 1, 2, 3]
    (over,) = script.of(EventKind.SIGNAL_RECOVERED)
    assert over.data == {"kind": "loss_spike"}
    assert all(len(json.dumps(fact.data)) < 1500 for fact in script.found)


def test_a_spike_of_one_rank_names_it() -> None:
    script = Script(ranks=3)
    for index in range(80):
        for rank in script.logs:
            script.prints(rank, grad_norm=50.0 if rank == 2 and index >= 60 else 1.0)
        script.wait(1)
    (spike,) = script.of(EventKind.LOSS_SPIKE)
    assert (spike.rank, spike.data["signal"], spike.data["ranks"]) == (2, "grad_norm", [2])


def test_the_next_agent_neither_repeats_a_spike_nor_forgets_its_end() -> None:
    script = Script(ranks=1)
    for loss, lines in ((2.0, 60), (30.0, 10)):
        script.train(lines, every_s=2, loss=loss)
    script.next_agent()
    script.train(lines=30, every_s=2, loss=30.0)
    assert len(script.of(EventKind.LOSS_SPIKE)) == 1
    assert not script.of(EventKind.SIGNAL_RECOVERED)
    script.next_agent()
    script.train(lines=10, every_s=2, loss=2.0)
    assert len(script.of(EventKind.SIGNAL_RECOVERED)) == 1


def test_no_rule_reaches_across_a_restart() -> None:
    """A run that begins with losses ten times those of the run before has no history."""
    before, after = Script(ranks=1), Script(ranks=1)
    before.train(lines=100, every_s=2, loss=0.2)
    after.train(lines=100, every_s=2, loss=2.0)
    assert not after.of(EventKind.LOSS_SPIKE)
    assert not after.of(EventKind.STEP_TIME_DECLINE)


def test_library_losses_are_judged_too_but_not_within_sections() -> None:
    script = Script(ranks=1)

    def step(loss: float, **changes: Any) -> None:
        before = script.library[0] or EMPTY
        script.library[0] = dataclasses.replace(
            before,
            step=before.steps_reported,
            steps_reported=before.steps_reported + 1,
            step_at_ns=int(script.now_s * NS),
            loss=loss,
            **changes,
        )
        script.wait(1)

    for _ in range(60):
        step(2.0)
    entered_ns = int(script.now_s * NS)
    for _ in range(10):
        step(40.0, section="eval", section_entered_ns=entered_ns)
    step(2.0, section=None, section_entered_ns=0, section_left_ns=int(script.now_s * NS))
    assert not script.of(EventKind.LOSS_SPIKE)
    for _ in range(10):
        step(40.0)
    (spike,) = script.of(EventKind.LOSS_SPIKE)
    assert spike.data["value"] == 40.0


def decline(script: Script, **slow: Any) -> Observed:
    for index in range(2400):
        script.prints(**{k: v[0 if index < 1500 else 1] for k, v in slow.items()})
        script.wait(1)
    (fact,) = script.of(EventKind.STEP_TIME_DECLINE)
    return fact


def test_slow_steps_are_told_by_the_time_that_a_line_names() -> None:
    fact = decline(Script(ranks=1), step_time_s=(1.0, 2.0))
    assert (fact.data["signal"], fact.data["ratio"]) == ("step_time", 2.0)
    assert fact.data["value"] == pytest.approx(2.0)


def test_slow_steps_are_told_by_mfu_first() -> None:
    """Longer batches take longer at the same MFU."""
    script = Script(ranks=1)
    for index in range(2400):
        script.prints(speed_kind="mfu", speed=40.0, step_time_s=1.0 if index < 1500 else 3.0)
        script.wait(1)
    assert not script.of(EventKind.STEP_TIME_DECLINE)
    fact = decline(Script(ranks=1), speed=(40.0, 25.0), speed_kind=("mfu", "mfu"))
    assert (fact.data["signal"], fact.data["value"]) == ("mfu", pytest.approx(25.0))
    assert fact.data["baseline"] == pytest.approx(40.0)


def test_slow_steps_are_told_by_when_lines_come() -> None:
    script = Script(ranks=1)
    script.train(lines=400, every_s=5)
    assert not script.of(EventKind.STEP_TIME_DECLINE)
    script.train(lines=100, every_s=9)
    (fact,) = script.of(EventKind.STEP_TIME_DECLINE)
    assert fact.data["value"] == pytest.approx(9.0)
    script.train(lines=200, every_s=5)
    assert [f.data["kind"] for f in script.of(EventKind.SIGNAL_RECOVERED)] == ["step_time_decline"]


def test_a_job_that_saves_at_every_step_is_judged_by_its_whole_steps() -> None:
    """Whether a look finds it in its section or not; a long section now and then is none."""
    script = Script(ranks=1)

    def train(steps: int, step_s: int) -> None:
        for number in range(steps):
            before = script.library[0] or EMPTY
            now = int(script.now_s * NS)
            saving = dataclasses.replace(
                before,
                step=before.steps_reported,
                steps_reported=before.steps_reported + 1,
                step_at_ns=now,
                section="save",
                section_entered_ns=now,
                section_left_ns=0,
            )
            script.library[0] = saving
            script.wait(1 if number % 100 else 60)
            script.library[0] = dataclasses.replace(
                saving,
                section=None,
                section_entered_ns=0,
                section_left_ns=int(script.now_s * NS),
            )
            script.wait(step_s - 1)

    train(400, 5)
    assert not script.of(EventKind.STEP_TIME_DECLINE)
    train(120, 10)
    (fact,) = script.of(EventKind.STEP_TIME_DECLINE)
    assert (fact.data["signal"], fact.data["ratio"]) == ("whole_step_time", 2.0)


def test_evaluations_are_no_slow_steps() -> None:
    script = Script(ranks=1)
    script.train(lines=200, every_s=5)
    for _ in range(40):
        script.train(lines=2, every_s=5)
        script.announces("eval")
        script.wait(60)
    assert not script.of(EventKind.STEP_TIME_DECLINE)


# --- silence -----------------------------------------------------------------------------------


def chatter(script: Script, seconds: float, every_s: float) -> None:
    until_s = script.now_s + seconds
    while script.now_s < until_s:
        script.writes()
        script.wait(every_s)


def test_a_chatty_script_that_falls_silent_is_told_and_so_is_its_return() -> None:
    script = Script()
    chatter(script, 1200, every_s=20)
    script.wait(1770)
    assert not script.found
    script.wait(60)
    (silent,) = script.of(EventKind.LOG_SILENT)
    assert silent.data["limit_s"] == 1800
    script.next_agent()
    script.wait(5000)
    assert len(script.found) == 1
    script.writes()
    script.wait(2)
    assert [f.data["kind"] for f in script.of(EventKind.SIGNAL_RECOVERED)] == ["log_silent"]


def test_a_chatty_start_is_no_rhythm() -> None:
    script = Script()
    chatter(script, 300, every_s=1)
    script.wait(20_000)
    assert script.found == []


def test_rare_output_may_pause_for_longer() -> None:
    script = Script()
    chatter(script, 30_000, every_s=1000)
    script.wait(8900)
    assert script.found == []
    script.wait(1200)
    assert script.of(EventKind.LOG_SILENT), "ten usual gaps"


def test_the_silence_of_the_dead_is_no_signal() -> None:
    script = Script()
    chatter(script, 1200, every_s=20)
    script.live = set()
    script.wait(5000)
    assert script.found == []


def rdma_looks(script: Script) -> Callable[[int, int], None]:
    """Looks at counters that rise at a rate (bytes a second)."""
    total = 0

    def looks(count: int, rate: int) -> None:
        nonlocal total
        for _ in range(count):
            script.wait(30)
            total += 30 * rate
            script.found += script.monitor.traffic(int(script.now_s * NS), total)

    return looks


def test_rdma_traffic_that_ceases_while_training_is_told_once() -> None:
    script = Script(ranks=1)
    looks = rdma_looks(script)

    looks(30, 0)
    script.prints()
    looks(30, 10**9)
    script.announces("eval")
    looks(40, 0)
    assert not script.of(EventKind.RDMA_SILENT), "nothing is due while it evaluates"
    script.prints()
    looks(5, 10**9)
    looks(25, 0)
    (fact,) = script.of(EventKind.RDMA_SILENT)
    assert fact.data["silent_for_s"] >= 600
    looks(2, 10**9)
    assert [f.data["kind"] for f in script.of(EventKind.SIGNAL_RECOVERED)] == ["rdma_silent"]


@pytest.mark.parametrize("phase", ["before the first step", "in a section"])
def test_rdma_traffic_may_cease_where_no_step_is_due(phase: str) -> None:
    script = Script(ranks=1)
    looks = rdma_looks(script)

    attached = dataclasses.replace(EMPTY, step_at_ns=int(script.now_s * NS))
    stepped = dataclasses.replace(attached, step=0, steps_reported=1)
    saving = dataclasses.replace(
        stepped, section="save", section_entered_ns=int(script.now_s * NS), section_max_s=7200.0
    )
    script.library[0] = attached if phase == "before the first step" else stepped
    looks(10, 10**9)
    script.library[0] = attached if phase == "before the first step" else saving
    looks(60, 0)
    assert not script.of(EventKind.RDMA_SILENT)
    script.library[0] = stepped
    looks(10, 10**9)
    looks(25, 0)
    assert len(script.of(EventKind.RDMA_SILENT)) == 1


def test_a_plan_of_before_there_were_signals_has_none() -> None:
    script = Script(policy=POLICY)
    chatter(script, 1200, every_s=20)
    script.wait(5000)
    for loss in [2.0] * 60 + [50.0] * 20:
        script.prints(loss=loss)
        script.wait(1)
    assert [fact.kind for fact in script.found] == [EventKind.FIRST_STEP]
    assert script.monitor.traffic(0, 5) == []


def test_time_in_which_nobody_could_look_is_not_held_against_anybody() -> None:
    """The machine was frozen: all stood still, the agent too."""
    script = Script()
    script.train(lines=20, every_s=5)
    script.now_s += 3600
    script.wait(470)
    assert not script.of(EventKind.RANK_STALLED)
    script.wait(20)
    assert script.of(EventKind.RANK_STALLED)
