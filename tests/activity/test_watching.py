"""The fold of a watch: bad news first, in whatever order and however old."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities import watch_views, watching
from activities.watching import OBSERVATIONS_MAX, Shard
from everstep.decide.words import RankState, Verdict
from everstep.spec import messages as m
from everstep.spec.agent_api import EventKind, GapLine
from tests.activity.fakes import (
    GENERATION,
    JOB,
    RING,
    RUN,
    event,
    exited,
    heartbeat,
    hello,
    policy,
    refs,
    report,
    state,
)

SETTLE = policy().policy.detection.settle_window.total_seconds()
SKEW = policy().policy.detection.exit_skew_max.total_seconds()
BLIND = policy().policy.detection.blind_job_after.total_seconds()


def shard(*machine_ids: str, **fields: Any) -> Shard:
    request = m.WatchRun(
        job_id=JOB,
        run_id=RUN,
        generation=GENERATION,
        machines=refs(*(machine_ids or ("m1", "m2"))),
        policy=policy(),
        **fields,
    )
    return Shard(request=request, started_at=100.0)


def connected(*machine_ids: str, **fields: Any) -> Shard:
    """A shard whose machines are all reached and fine."""
    watch = shard(*machine_ids, **fields)
    for machine_id, view in watch.machines.items():
        watch.take(view, hello(machine_id), 100.0)
        watch.state(view, state(machine_id), 100.0)
    return watch


def test_trouble_waits_for_the_settle_window_and_brings_its_witnesses() -> None:
    watch = connected()
    first, second = watch.machines.values()
    watch.take(
        first, event(EventKind.RANK_EXITED, rank=0, data={"exit_code": None, "signal": 9}), 110
    )
    assert watch.result(110 + SETTLE / 2) is None
    watch.take(second, event(EventKind.RANK_EXITED, rank=2, data={"exit_code": 1}), 110.1)
    result = watch.result(110 + SETTLE)
    assert result is not None
    assert result.kind == "trouble"
    assert [(o.machine_id, o.rank) for o in result.observations] == [("m1", 0), ("m2", 2)]
    assert {o.verdict for o in result.observations} == {Verdict.FAULTY}


@pytest.mark.parametrize("kind", sorted(watching._TROUBLE))
def test_every_kind_of_trouble_is_trouble(kind: EventKind) -> None:
    watch = connected()
    watch.take(watch.machines["m1"], event(kind, rank=1, reason="why"), 110)
    result = watch.result(120)
    assert result is not None
    assert (result.kind, result.observations[0].kind) == ("trouble", kind)


@pytest.mark.parametrize(
    "fields", [{"job_id": "other"}, {"generation": 2}, {"generation": 4}, {"run_id": "job.2"}]
)
def test_events_of_other_jobs_and_runs_are_not_ours(fields: dict[str, Any]) -> None:
    watch = connected()
    watch.take(watch.machines["m1"], event(EventKind.PROCESSES_VANISHED, seq=7, **fields), 110)
    assert watch.result(200) is None
    assert watch.cursors() == {"m1": f"{RING}:7"}


def test_lost_connections_are_never_trouble() -> None:
    watch = connected(until=m.WatchUntil(after_s=60))
    watch.lost(watch.machines["m2"], "connection refused", 101)
    assert watch.result(159) is None
    result = watch.result(161)
    assert result is not None
    assert (result.kind, result.unreachable) == ("tick", ("m2",))
    assert result.observations == ()


def test_unreachable_machines_stand_beside_the_trouble_as_unknown() -> None:
    watch = connected()
    watch.lost(watch.machines["m2"], "timed out", 101)
    watch.take(watch.machines["m1"], event(EventKind.RANK_STALLED, rank=0), 110)
    result = watch.result(111)
    assert result is not None
    by_kind = {o.kind: o for o in result.observations}
    assert by_kind["unreachable"].verdict is Verdict.UNKNOWN
    assert by_kind["unreachable"].machine_id == "m2"


def test_all_machines_unreachable_is_blindness_after_the_policys_time() -> None:
    watch = connected()
    for view in watch.machines.values():
        watch.lost(view, "gone", 200)
    assert watch.result(200 + BLIND - 1) is None
    result = watch.result(200 + BLIND)
    assert result is not None
    assert result.kind == "blind"
    assert result.unreachable == ("m1", "m2")


def test_one_machine_that_comes_back_ends_blindness() -> None:
    watch = connected()
    for view in watch.machines.values():
        watch.lost(view, "gone", 200)
    watch.take(watch.machines["m2"], hello("m2"), 210)
    assert watch.result(200 + BLIND + 1) is None


def test_machines_never_reached_are_blindness_too() -> None:
    assert shard().result(100 + BLIND - 1) is None
    result = shard().result(100 + BLIND)
    assert result is not None
    assert result.kind == "blind"


def test_success_needs_every_machine() -> None:
    watch = connected()
    first, second = watch.machines.values()
    watch.state(first, state("m1", exited(0, 0), ended=True, succeeded=True), 110)
    assert watch.result(111) is None
    watch.take(second, event(EventKind.RUN_ENDED, data={"succeeded": True}), 111)
    assert second.needs_state
    watch.state(second, state("m2", exited(2, 0), ended=True, succeeded=True), 111)
    result = watch.result(111)
    assert result is not None
    assert result.kind == "succeeded"


def test_a_rank_that_ends_well_while_others_go_on_is_trouble_after_the_skew() -> None:
    watch = connected()
    watch.take(
        watch.machines["m1"], event(EventKind.RANK_EXITED, rank=0, data={"exit_code": 0}), 110
    )
    assert watch.result(110 + SKEW - 1) is None
    assert watch.next_instant(111) <= 110 + SKEW
    result = watch.result(110 + SKEW)
    assert result is not None
    assert result.kind == "trouble"
    assert result.observations[0].kind is EventKind.EARLY_EXIT
    assert "m2" in result.observations[0].reason


def test_age_of_an_early_exit_counts() -> None:
    watch = connected()
    line = event(EventKind.RANK_EXITED, rank=0, data={"exit_code": 0}, age_s=SKEW)
    watch.take(watch.machines["m1"], line, 110)
    assert watch.result(110) is not None


def test_a_stalled_rank_that_moves_again_within_the_window_is_forgiven() -> None:
    watch = connected()
    view = watch.machines["m1"]
    watch.take(view, event(EventKind.RANK_STALLED, rank=1), 110)
    watch.take(view, event(EventKind.RANK_MOVING, seq=2, rank=1), 110.1)
    assert watch.result(200) is None


def test_a_moving_rank_forgives_nothing_else() -> None:
    watch = connected()
    view = watch.machines["m1"]
    watch.take(view, event(EventKind.RANK_STALLED, rank=1), 110)
    watch.take(view, event(EventKind.NONFINITE, seq=2, rank=0), 110)
    watch.take(view, event(EventKind.RANK_MOVING, seq=3, rank=1), 110.1)
    result = watch.result(111)
    assert result is not None
    assert [o.kind for o in result.observations] == [EventKind.NONFINITE]


def test_a_failed_save_is_a_warning_with_a_tick_and_not_at_every_step() -> None:
    watch = connected(until=m.WatchUntil(after_s=60))
    view = watch.machines["m1"]
    for seq in range(1, 500):
        watch.take(view, event(EventKind.SAVE_FAILED, seq=seq, rank=0, reason="ENOSPC"), 101)
    assert watch.result(101) is None
    result = watch.result(100 + watching.WARN_INTERVAL_MIN_S)
    assert result is not None
    assert result.kind == "tick"
    assert len(result.observations) == OBSERVATIONS_MAX
    assert {o.kind for o in result.observations} == {EventKind.SAVE_FAILED}


def test_first_step_needs_every_machine_and_may_be_told_in_three_ways() -> None:
    watch = connected("m1", "m2", "m3", until=m.WatchUntil(first_step=True))
    first, second, third = watch.machines.values()
    watch.take(first, event(EventKind.FIRST_STEP), 101)
    watch.take(second, heartbeat(step=5), 101)
    assert watch.result(102) is None
    watch.state(third, state("m3", first_step_seen=True), 102)
    result = watch.result(102)
    assert result is not None
    assert result.kind == "first_step"


def test_a_printed_step_is_the_first_step_of_every_machine() -> None:
    """One rank prints for the whole run; the other machines never will."""
    watch = connected("m1", "m2", until=m.WatchUntil(first_step=True))
    watch.take(
        watch.machines["m2"], event(EventKind.FIRST_STEP, data={"step": 4, "source": "log"}), 101
    )
    result = watch.result(102)
    assert result is not None
    assert result.kind == "first_step"
    assert result.progress == m.Progress(step=4, from_log=True)
    watch = connected("m1", "m2", until=m.WatchUntil(first_step=True))
    watch.take(watch.machines["m1"], heartbeat(step=5, step_from_log=True), 101)
    result = watch.result(102)
    assert result is not None
    assert result.kind == "first_step"


def test_progress_is_the_newest_that_was_told() -> None:
    watch = connected()
    first, second = watch.machines.values()
    watch.take(first, heartbeat(step=7, loss=1.5, grad_norm=0.5), 101)
    watch.take(second, heartbeat(step=6, loss=9.0), 101)
    assert watch.progress() == m.Progress(step=7, loss=1.5, grad_norm=0.5)


def test_progress_knows_the_first_and_the_last_step_before_heartbeats_do() -> None:
    watch = connected()
    first, second = watch.machines.values()
    watch.take(first, event(EventKind.FIRST_STEP, data={"step": 4}), 101)
    assert watch.progress() == m.Progress(step=4)
    watch.take(first, heartbeat(step=8, loss=2.0), 102)
    assert watch.progress() == m.Progress(step=8, loss=2.0)
    ended = state("m2", exited(2, 0, step=11), exited(3, 0, step=10), ended=True, succeeded=True)
    watch.state(second, ended, 103)
    assert watch.progress() == m.Progress(step=10, loss=2.0)


def asks(view: watch_views.MachineView) -> bool:
    return view.needs_state


def test_a_gap_and_another_boot_ask_for_the_state() -> None:
    watch = connected()
    view = watch.machines["m1"]
    assert not asks(view)
    watch.take(view, GapLine(ring_id=RING, oldest_seq=40), 101)
    assert asks(view)
    assert view.cursor == f"{RING}:39"
    watch.state(view, state(), 101)
    watch.take(view, hello("m1", boot="boot2"), 102)
    assert asks(view)


@pytest.mark.parametrize(
    "rank, kind",
    [
        (exited(0, 1), EventKind.RANK_EXITED),
        (exited(0, None, signal=11), EventKind.RANK_EXITED),
        (exited(0, None), EventKind.RANK_EXITED),
    ],
)
def test_exits_that_were_missed_are_found_in_the_state(rank: Any, kind: EventKind) -> None:
    watch = connected()
    watch.state(watch.machines["m1"], state("m1", rank), 110)
    result = watch.result(111)
    assert result is not None
    assert result.observations[0].kind is kind


def test_other_troubles_that_were_missed_are_found_in_the_state() -> None:
    watch = connected("m1", "m2", "m3", "m4")
    stalled = _running(stalled_for_s=3.0)
    nonfinite = _running(nonfinite_step=9)
    one, two, three, four = watch.machines.values()
    watch.state(one, state("m1", stalled), 110)
    watch.state(two, state("m2", nonfinite), 110)
    watch.state(three, state("m3", report=report("m3", planned_stop="maintenance")), 110)
    watch.state(four, state("m4", report=report("m4", processes_vanished=True)), 110)
    result = watch.result(111)
    assert result is not None
    assert [o.kind for o in result.observations] == [
        EventKind.RANK_STALLED,
        EventKind.NONFINITE,
        EventKind.PLANNED_STOP,
        EventKind.PROCESSES_VANISHED,
    ]


def _running(**fields: Any) -> Any:
    from everstep.decide.attribution import RankReport

    return RankReport(rank=0, machine_id="m1", state=RankState.RUNNING, **fields)


def test_a_run_that_ended_otherwise_is_trouble() -> None:
    watch = connected()
    watch.state(watch.machines["m1"], state(ended=True), 110)
    result = watch.result(111)
    assert result is not None
    assert result.observations[0].kind is EventKind.RUN_ENDED


def test_an_agent_that_does_not_know_the_run_must_say_so_twice() -> None:
    watch = shard("m1")
    view = watch.machines["m1"]
    watch.take(view, hello(), 100)
    watch.not_known(view, 100.0)
    watch.not_known(view, 100.5)
    assert view.needs_state
    assert watch.result(101) is None
    watch.not_known(view, 101.5)
    result = watch.result(103)
    assert result is not None
    assert result.observations[0].kind is EventKind.PROCESSES_VANISHED


def test_the_same_trouble_told_twice_is_one_observation() -> None:
    watch = connected()
    view = watch.machines["m1"]
    watch.take(view, event(EventKind.RANK_EXITED, rank=0, data={"exit_code": 1}), 110)
    watch.state(view, state("m1", exited(0, 1)), 110)
    result = watch.result(111)
    assert result is not None
    assert len(result.observations) == 1


def test_observations_are_bounded_and_no_machine_is_cut_off() -> None:
    machine_ids = [f"m{i:02}" for i in range(20)]
    watch = connected(*machine_ids)
    for view in watch.machines.values():
        for rank in range(8):
            line = event(EventKind.RANK_EXITED, rank=rank, data={"exit_code": 1})
            watch.take(view, line, 110)
    result = watch.result(111)
    assert result is not None
    assert len(result.observations) == OBSERVATIONS_MAX
    assert {o.machine_id for o in result.observations} == set(machine_ids)


def test_data_that_is_too_large_or_not_finite_does_not_enter_the_history() -> None:
    watch = connected()
    data = {"exit_code": 1, "loss": math.nan, "log_lines": ["x" * 10_000]}
    watch.take(watch.machines["m1"], event(EventKind.RANK_EXITED, rank=0, data=data), 110)
    result = watch.result(111)
    assert result is not None
    assert result.observations[0].data == {"exit_code": 1, "loss": "nan", "left_out": "log_lines"}


def test_long_and_many_lined_reasons_are_cut_to_one_line() -> None:
    watch = connected()
    line = event(EventKind.NONFINITE, rank=0, reason="a\nb\x1b[31m" + "c" * 5000)
    watch.take(watch.machines["m1"], line, 110)
    result = watch.result(111)
    assert result is not None
    reason = result.observations[0].reason
    assert len(reason) <= 300
    assert reason.isprintable()


KINDS = st.sampled_from(sorted(EventKind))
LINES = st.one_of(
    st.builds(
        event,
        KINDS,
        seq=st.integers(1, 2**63),
        rank=st.none() | st.integers(-5, 10**6),
        reason=st.text(max_size=2000),
        age_s=st.floats(allow_nan=False, min_value=-1e9, max_value=1e9),
        data=st.dictionaries(
            st.text(max_size=20), st.none() | st.booleans() | st.floats() | st.text(max_size=2000)
        ),
    ),
    st.builds(heartbeat, step=st.none() | st.integers()),
    st.builds(hello, boot=st.sampled_from(["b1", "b2"])),
    st.builds(GapLine, ring_id=st.text(max_size=30), oldest_seq=st.integers()),
)


@given(st.lists(LINES, max_size=40))
@settings(max_examples=60)
def test_whatever_an_agent_says_the_fold_answers_and_stays_small(lines: list[Any]) -> None:
    watch = connected(until=m.WatchUntil(after_s=1000))
    view = watch.machines["m1"]
    for i, line in enumerate(lines):
        watch.take(view, line, 101 + i)
    result = watch.result(5000)
    assert result is not None
    assert len(result.observations) <= OBSERVATIONS_MAX
    assert all(watch_views.CURSOR.fullmatch(cursor) for cursor in result.cursors.values())
    text = result.model_dump_json()
    assert len(text) < 200_000
    assert m.WatchResult.model_validate(json.loads(text)).kind == result.kind
