"""Machine probes in the fold of a watch: what stops a run at once, and what only goes on record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from activities.watching import WARN_INTERVAL_MIN_S, Shard
from everstep.decide.observation import Observation
from everstep.decide.reports import Seen
from everstep.decide.words import Action, Confidence, Verdict
from everstep.spec import messages as m
from everstep.spec.agent_api import EventKind, EventLine
from everstep.spec.probe_events import event_data
from tests.activity.fakes import event, report, state
from tests.activity.test_watching import SETTLE, connected
from tests.support.observations import BLIND, HOT, WARNING, XID, gone

NO_STOP = {
    "a warning": WARNING,
    "not sure": replace(XID, confidence=Confidence.LOW),
    "a check is wanted": replace(XID, action=Action.STOP_TIME_CHECK),
    "a service outside": replace(XID, action=Action.WAIT_EXTERNAL),
}
SEQ = iter(range(1000, 10**6))


def probe(observation: Observation, age_s: float = 0.0) -> EventLine:
    return EventLine(
        seq=next(SEQ),
        kind=EventKind.PROBE,
        age_s=age_s,
        reason=observation.reason,
        data=event_data(observation),
    )


def tell(watch: Shard, machine: str, observation: Observation, now: float, **more: Any) -> None:
    watch.take(watch.machines[machine], probe(observation, **more), now)


def trouble(watch: Shard, now: float) -> m.WatchResult:
    result = watch.result(now)
    assert result is not None
    assert result.kind == "trouble", result
    return result


def test_a_sure_fault_of_the_machine_stops_the_run_at_once() -> None:
    watch = connected()
    tell(watch, "m2", XID, 110, age_s=1.5)
    assert watch.result(110 + SETTLE / 2) is None
    (seen,) = trouble(watch, 110 + SETTLE).observations
    assert (seen.kind, seen.machine_id, seen.rank) == (EventKind.PROBE, "m2", None)
    assert (seen.verdict, seen.age_s) == (Verdict.FAULTY, 1.5)
    assert seen.as_trigger().observation == XID


def test_two_faults_of_one_machine_are_both_evidence() -> None:
    watch = connected()
    tell(watch, "m2", XID, 110)
    tell(watch, "m2", replace(XID, target="gpu 4"), 110.1)
    seen = trouble(watch, 111).observations
    assert [o.data["target"] for o in seen] == ["gpu 3", "gpu 4"]


def test_what_goes_within_the_settle_window_is_forgiven() -> None:
    watch = connected()
    tell(watch, "m1", XID, 110)
    tell(watch, "m1", gone(XID), 110 + SETTLE / 2)
    assert watch.result(130) is None


@pytest.mark.parametrize("why", NO_STOP)
def test_less_than_that_goes_on_record_once_and_nothing_stops(why: str) -> None:
    observation = NO_STOP[why]
    watch = connected()
    for now in (110.0, 111.0, 112.0):
        tell(watch, "m1", observation, now)
        tell(watch, "m1", gone(observation), now + 0.5)
    result = watch.result(100 + WARN_INTERVAL_MIN_S + 12)
    assert result is not None
    assert result.kind == "tick"
    (seen,) = result.observations
    assert (seen.kind, seen.verdict) == (EventKind.PROBE, Verdict.FAULTY)
    assert seen.data["rule"] == observation.rule


def test_unknown_is_neither_trouble_nor_a_warning() -> None:
    watch = connected()
    tell(watch, "m1", BLIND, 110)
    assert watch.result(130) is None


def test_a_probe_that_cannot_look_any_more_does_not_take_the_fault_back() -> None:
    watch = connected()
    tell(watch, "m1", XID, 110)
    tell(watch, "m1", BLIND, 110.1)
    assert trouble(watch, 111).observations[0].data["rule"] == "xid_79"


def test_what_the_job_has_on_record_is_not_told_again() -> None:
    watch = connected(told=("m1/gpu/gpu 3/pcie_replay",))
    tell(watch, "m1", WARNING, 110)
    tell(watch, "m2", WARNING, 110)
    result = watch.result(130)
    assert result is not None
    assert [o.machine_id for o in result.observations] == ["m2"]


def test_what_was_kept_beside_is_evidence_of_a_later_trouble_with_its_present_age() -> None:
    watch = connected()
    tell(watch, "m1", WARNING, 110, age_s=1.0)
    tell(watch, "m1", BLIND, 112)
    data = {"exit_code": 1, "signal": None}
    watch.take(watch.machines["m2"], event(EventKind.RANK_EXITED, rank=2, data=data), 150)
    seen = trouble(watch, 151).observations
    assert [o.kind for o in seen] == [EventKind.RANK_EXITED, EventKind.PROBE, EventKind.PROBE]
    assert [o.verdict for o in seen[1:]] == [Verdict.FAULTY, Verdict.UNKNOWN]
    assert (seen[1].age_s, seen[1].as_trigger().cleared) == (42.0, False)


@pytest.mark.parametrize("told", ["by an event", "by the state alone"])
def test_what_has_gone_again_is_evidence_as_such_and_no_machine_is_slow_by_it(told: str) -> None:
    watch = connected()
    view = watch.machines["m2"]
    tell(watch, "m2", HOT, 110)
    if told == "by an event":
        tell(watch, "m2", gone(HOT), 120)
    else:
        over = Seen(observation=HOT, age_s=10, cleared_ago_s=1)
        watch.state(view, state("m2", report=report("m2", observations=(over,))), 120)
    watch.take(watch.machines["m1"], event(EventKind.STEP_TIME_DECLINE), 130)
    result = watch.result(140)
    assert result is not None
    assert result.kind == "tick"
    data = {"exit_code": 1, "signal": None}
    watch.take(watch.machines["m1"], event(EventKind.RANK_EXITED, rank=1, data=data), 150)
    seen = trouble(watch, 160).observations[1]
    assert (seen.age_s, seen.data[m.CLEARED_AGO_S]) == (50.0, 40.0)
    assert seen.as_trigger().observation == HOT
    assert seen.as_trigger().cleared


def test_the_present_state_tells_what_events_did_not() -> None:
    watch = connected()
    view = watch.machines["m2"]
    watch.state(view, state("m2", report=report("m2", observations=(Seen(observation=XID),))), 110)
    (seen,) = trouble(watch, 111).observations
    assert (seen.machine_id, seen.data["rule"]) == ("m2", "xid_79")


def test_the_present_state_takes_back_what_is_over() -> None:
    watch = connected()
    tell(watch, "m2", XID, 110)
    over = Seen(observation=XID, age_s=9, cleared_ago_s=1)
    watch.state(watch.machines["m2"], state("m2", report=report("m2", observations=(over,))), 110.1)
    assert watch.result(130) is None


def test_old_events_of_the_ring_do_not_count_against_the_present_state() -> None:
    watch = connected()
    tell(watch, "m1", XID, 110, age_s=3600.0)
    assert watch.result(130) is None
    tell(watch, "m1", XID, 131, age_s=1.0)
    assert watch.result(140) is not None


def test_a_probe_event_that_says_nothing_is_nothing() -> None:
    watch = connected()
    line = EventLine(seq=1, kind=EventKind.PROBE, reason="x", data={"verdict": "faulty"})
    assert not watch.take(watch.machines["m1"], line, 110)
    assert watch.result(130) is None


def test_a_flood_of_warnings_stays_small() -> None:
    watch = connected()
    for n in range(2000):
        tell(watch, "m1", replace(WARNING, target=f"gpu {n}", reason="x" * 5000), 110 + n / 1000)
    result = watch.result(200)
    assert result is not None
    assert len(result.model_dump_json()) < 100_000


@pytest.mark.parametrize(
    "kind", [EventKind.LOSS_SPIKE, EventKind.LOG_SILENT, EventKind.RDMA_SILENT]
)
def test_a_signal_of_the_job_goes_on_record_once_a_run(kind: EventKind) -> None:
    watch = connected()
    for now in (110, 111):
        watch.take(watch.machines["m1"], event(kind, reason="why"), now)
    result = watch.result(130)
    assert result is not None
    assert (result.kind, [o.kind for o in result.observations]) == ("tick", [kind])
    word = result.observations[0].told_as(watch.request.generation)
    again = connected(told=(word,))
    again.take(again.machines["m2"], event(kind, reason="why"), 110)
    assert again.result(130) is None


@pytest.mark.parametrize("hot", [(), ("m1", "m2")], ids=["none", "several"])
def test_slow_steps_are_a_warning_unless_one_machine_alone_is_slowed_down(
    hot: tuple[str, ...],
) -> None:
    watch = connected()
    for machine in hot:
        tell(watch, machine, HOT, 110)
    watch.take(watch.machines["m1"], event(EventKind.STEP_TIME_DECLINE, reason="1.4 times"), 111)
    result = watch.result(130)
    assert result is not None
    assert result.kind == "tick"
    assert EventKind.STEP_TIME_DECLINE in [o.kind for o in result.observations]


def test_slow_steps_stop_the_run_beside_the_one_machine_that_is_slowed_down() -> None:
    slow = event(EventKind.STEP_TIME_DECLINE, reason="1.4 times")
    watch = connected()
    tell(watch, "m2", HOT, 110)
    watch.take(watch.machines["m1"], slow, 111)
    seen = trouble(watch, 112).observations
    assert [(o.kind, o.machine_id) for o in seen] == [
        (EventKind.STEP_TIME_DECLINE, "m1"),
        (EventKind.PROBE, "m2"),
    ]
