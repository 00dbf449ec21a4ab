"""The hang rule and its neighbours, in invented time."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from everstep.machine.facts import Facts
from everstep.machine.monitor import NS, Observed, RunMonitor
from everstep.machine.progress import Progress
from everstep.spec.agent_api import AgentRunPolicy, EventKind

START_S = 1000.0

POLICY = AgentRunPolicy(
    settle_window_s=0.3,
    first_step_max_s=600,
    hang_min_s=60,
    hang_factor=10,
    section_max_s=1800,
    exit_skew_max_s=30,
    failure_grace_s=1,
    kill_wait_s=10,
    runs_kept_max=20,
)

EMPTY = Progress(
    pid=1,
    step=None,
    loss=None,
    grad_norm=None,
    attached=True,
    finished=False,
    step_at_ns=0,
    nonfinite_step=None,
    steps_reported=0,
    section=None,
    section_entered_ns=0,
    section_left_ns=0,
    section_max_s=None,
    committed_step=None,
    save_failed_step=None,
    save_error=None,
)


class Job:
    """Ranks in invented time; the monitor looks every second."""

    def __init__(self, ranks: int = 2, facts: Facts | None = None) -> None:
        self.now_s = START_S
        self.facts = facts or Facts()
        self.ranks: dict[int, Progress | None] = dict.fromkeys(range(ranks), EMPTY)
        self.live = set(self.ranks)
        self.found: list[Observed] = []
        self.monitor = self.new_monitor()

    def new_monitor(self) -> RunMonitor:
        return RunMonitor(
            policy=POLICY,
            ranks=tuple(self.ranks),
            started_ns=int(START_S * NS),
            facts=self.facts,
        )

    def change(self, rank: int, **fields: Any) -> None:
        self.ranks[rank] = dataclasses.replace(self.ranks[rank] or EMPTY, **fields)

    def step(self, *ranks: int) -> None:
        for rank in ranks or tuple(self.ranks):
            before = self.ranks[rank] or EMPTY
            self.change(
                rank,
                step=before.steps_reported,
                steps_reported=before.steps_reported + 1,
                step_at_ns=int(self.now_s * NS),
            )

    def look(self) -> None:
        self.found += self.monitor.observe(
            int(self.now_s * NS), self.ranks, self.live, lambda rank: "T" if rank == 1 else "S"
        )

    def wait(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 1)
            self.look()

    def train(self, steps: int, step_time_s: float) -> None:
        for _ in range(steps):
            self.wait(step_time_s)
            self.step()
            self.look()

    def kinds(self) -> list[tuple[EventKind, int | None]]:
        return [(fact.kind, fact.rank) for fact in self.found]

    def stalled(self) -> list[int | None]:
        return [rank for kind, rank in self.kinds() if kind is EventKind.RANK_STALLED]


def test_a_hang_is_relative_to_the_jobs_own_rhythm() -> None:
    job = Job()
    job.train(steps=10, step_time_s=20)
    job.wait(190)
    assert job.stalled() == [], "ten steps have not gone by"
    job.wait(20)
    assert job.stalled() == [0, 1], "in a collective all ranks stall together"
    fact = job.found[-1]
    assert fact.data["limit_s"] == 200
    assert fact.data["process_state"] == "T"
    assert fact.data["step"] == 9
    job.wait(5000)
    assert len(job.stalled()) == 2, "told once"


def test_no_hang_below_the_minimum_however_fast_the_steps() -> None:
    job = Job()
    job.train(steps=100, step_time_s=0.01)
    job.wait(59)
    assert job.stalled() == []
    job.wait(3)
    assert job.stalled() == [0, 1]


def test_one_slow_step_does_not_loosen_the_rule_for_ever() -> None:
    job = Job()
    job.train(steps=30, step_time_s=10)
    job.train(steps=1, step_time_s=90)
    job.train(steps=10, step_time_s=10)
    job.wait(105)
    assert job.stalled() == [0, 1]


def test_the_rhythm_is_not_known_after_the_first_step() -> None:
    job = Job(ranks=1)
    job.train(steps=1, step_time_s=30)
    job.wait(590)
    assert job.stalled() == [], "the second step may be as slow as the first"
    job.wait(20)
    assert job.stalled() == [0]


def test_the_first_step_has_its_own_limit_counted_from_the_start() -> None:
    job = Job()
    job.ranks = {0: EMPTY, 1: None}
    job.wait(599)
    assert job.stalled() == []
    job.wait(2)
    assert job.stalled() == [0, 1], "one attached, so the other should have"


def test_attaching_late_does_not_prolong_the_limit_for_the_first_step() -> None:
    job = Job(ranks=1)
    job.ranks = {0: None}
    job.wait(500)
    job.ranks = {0: EMPTY}
    job.wait(102)
    assert job.stalled() == [0]


def test_without_the_library_there_are_no_rules() -> None:
    job = Job()
    job.ranks = {0: None, 1: None}
    job.wait(10_000)
    assert job.found == []
    assert not job.monitor.uses_library


def test_a_section_stops_the_clock_for_steps_and_restarts_it() -> None:
    job = Job(ranks=1)
    job.train(steps=10, step_time_s=1)
    job.change(0, section="eval", section_entered_ns=int(job.now_s * NS))
    job.wait(1700)
    assert job.stalled() == []
    job.change(0, section=None, section_entered_ns=0, section_left_ns=int(job.now_s * NS))
    job.wait(59)
    assert job.stalled() == [], "leaving a section is moving"
    job.train(steps=5, step_time_s=1)
    assert job.monitor.step_time_s == 1.0, "time in a section is no step time"
    job.wait(62)
    assert job.stalled() == [0]


def test_the_step_after_a_long_section_may_be_slow_like_the_first() -> None:
    """Data loaders start anew after an evaluation, and something may be compiled once more."""
    job = Job(ranks=1)
    job.train(steps=10, step_time_s=1)
    job.change(0, section="eval", section_entered_ns=int(job.now_s * NS))
    job.wait(300)
    job.change(0, section=None, section_entered_ns=0, section_left_ns=int(job.now_s * NS))
    job.wait(595)
    assert job.stalled() == []
    job.step()
    job.look()
    job.wait(59)
    assert job.stalled() == []
    job.wait(5)
    assert job.stalled() == [0], "from then on the rhythm counts again"


def test_a_hang_after_a_long_section_is_found_too() -> None:
    job = Job(ranks=1)
    job.train(steps=10, step_time_s=1)
    job.change(0, section="eval", section_entered_ns=int(job.now_s * NS))
    job.wait(300)
    job.change(0, section=None, section_entered_ns=0, section_left_ns=int(job.now_s * NS))
    job.wait(605)
    assert job.stalled() == [0]


def test_a_pause_in_which_nobody_looked_is_not_held_against_ranks() -> None:
    """The machine was frozen or the agent starved; a rank that was well has a moment to show it."""
    job = Job(ranks=2)
    job.train(steps=10, step_time_s=1)
    job.now_s += 3600
    job.look()
    assert job.stalled() == []
    job.wait(55)
    assert job.stalled() == []
    job.wait(10)
    assert job.stalled() == [0, 1]


def test_a_section_that_is_shorter_than_a_look_is_no_step_time() -> None:
    job = Job(ranks=1)
    job.train(steps=10, step_time_s=1)
    for _ in range(20):
        job.now_s += 500  # nobody looks meanwhile
        job.change(0, section_left_ns=int(job.now_s * NS))
        job.now_s += 1
        job.step()
        job.look()
    assert job.monitor.step_time_s == 1.0


def test_a_job_with_a_section_in_every_step_has_a_rhythm_too() -> None:
    job = Job(ranks=1)
    for _ in range(10):
        job.wait(20)
        job.step()
        job.change(0, section_left_ns=int(job.now_s * NS) + 1)  # it saves at every step
        job.look()
    job.wait(190)
    assert job.stalled() == []
    job.wait(20)
    assert job.stalled() == [0], "not only after the ten minutes of a first step"
    assert job.found[-1].data["limit_s"] == 200


def test_a_sections_own_limit_wins() -> None:
    job = Job(ranks=1)
    job.train(steps=10, step_time_s=1)
    job.change(0, section="save", section_entered_ns=int(job.now_s * NS), section_max_s=5.0)
    job.wait(7)
    assert job.stalled() == [0]
    assert job.found[-1].data["section"] == "save"
    assert job.found[-1].data["limit_s"] == 5.0


def test_steps_within_a_section_are_moving() -> None:
    job = Job(ranks=1)
    job.change(0, section="train", section_entered_ns=int(job.now_s * NS), section_max_s=50.0)
    job.train(steps=50, step_time_s=10)
    assert job.stalled() == []


def test_moving_again_is_told_and_a_second_hang_too() -> None:
    job = Job(ranks=1)
    job.train(steps=10, step_time_s=1)
    job.wait(100)
    assert job.monitor.stalled_for_s(0, int(job.now_s * NS)) == 100
    job.step()
    job.look()
    assert job.monitor.stalled_for_s(0, int(job.now_s * NS)) is None
    job.wait(100)
    kinds = [kind for kind, _ in job.kinds() if kind is not EventKind.FIRST_STEP]
    assert kinds == [EventKind.RANK_STALLED, EventKind.RANK_MOVING, EventKind.RANK_STALLED]


def test_a_rank_that_has_ended_is_not_stalled() -> None:
    job = Job()
    job.train(steps=10, step_time_s=1)
    job.live = {1}
    job.wait(100)
    assert job.stalled() == [1]


def test_a_rank_that_is_done_has_time_to_leave() -> None:
    job = Job(ranks=1)
    job.train(steps=10, step_time_s=1)
    job.change(0, finished=True)
    job.wait(1790)
    assert job.stalled() == []
    job.wait(20)
    assert job.stalled() == [0]


def test_the_first_step_is_a_fact_of_all_ranks() -> None:
    job = Job(ranks=3)
    job.step(0, 2)
    job.look()
    assert job.found == []
    job.wait(4)
    job.step(1)
    job.look()
    (fact,) = job.found
    assert (fact.kind, fact.rank) == (EventKind.FIRST_STEP, None)
    assert fact.at_ns == int((START_S + 4) * NS), "the last of the first steps"
    job.train(steps=5, step_time_s=1)
    assert len(job.found) == 1


def test_trouble_is_told_once_for_each_cause() -> None:
    job = Job(ranks=1)
    job.change(0, nonfinite_step=4, save_failed_step=4, save_error="disk full")
    job.wait(5)
    job.change(0, save_failed_step=5)
    job.wait(5)
    assert job.kinds() == [
        (EventKind.NONFINITE, 0),
        (EventKind.SAVE_FAILED, 0),
        (EventKind.SAVE_FAILED, 0),
    ]


def test_the_next_agent_knows_what_was_told_and_the_rhythm() -> None:
    job = Job(ranks=1)
    job.change(0, nonfinite_step=4)
    job.train(steps=10, step_time_s=20)
    told = len(job.found)
    job.facts = Facts.model_validate_json(job.facts.model_dump_json(exclude_defaults=True))
    job.monitor = job.new_monitor()
    job.wait(190)
    assert len(job.found) == told
    job.wait(20)
    assert job.stalled() == [0], "limit learned by the agent before"
    job.facts = Facts.model_validate_json(job.facts.model_dump_json(exclude_defaults=True))
    job.monitor = job.new_monitor()
    job.wait(100)
    assert job.stalled() == [0], "still the same stall"


def test_clocks_that_ranks_invent_do_no_harm() -> None:
    job = Job(ranks=1)
    job.change(0, steps_reported=2**64 - 1, step=2**63 - 1, step_at_ns=2**64 - 1)
    job.wait(5)
    job.change(0, steps_reported=3, step=0, step_at_ns=1, section_left_ns=2**64 - 1)
    job.wait(5)
    job.change(0, section="x", section_entered_ns=2**64 - 1)
    job.wait(5)
    assert job.stalled() == []


@given(
    st.lists(st.floats(min_value=0.5, max_value=50), min_size=5, max_size=40),
    st.integers(min_value=1, max_value=4),
)
def test_a_job_whose_steps_vary_less_than_the_factor_never_hangs(
    times_s: list[float], ranks: int
) -> None:
    bounded = [max(t, max(times_s) / 9) for t in times_s]
    job = Job(ranks=ranks)
    for time_s in bounded:
        job.train(steps=1, step_time_s=time_s)
    assert job.stalled() == []


def test_every_fact_is_small() -> None:
    job = Job(ranks=1)
    job.change(
        0,
        section="s" * 64,
        section_entered_ns=int(job.now_s * NS),
        section_max_s=1.0,
        nonfinite_step=2**62,
        save_failed_step=2**62,
        save_error="\u00e9" * 128,
        step=2**62,
    )
    job.wait(10)
    assert len(job.found) == 3
    assert all(len(json.dumps(fact.data)) < 1500 for fact in job.found)
