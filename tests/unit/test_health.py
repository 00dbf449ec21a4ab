"""What an agent makes of its probes: one event for a beginning, one for an end, none between."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.observation import Observation
from everstep.decide.words import Action, Confidence, Symptom, Verdict
from everstep.machine.health import CLEARED_KEPT_S, EVENTS_MAX, KEPT_MAX, SEEN_MAX, HealthBoard
from everstep.spec.agent_api import EventKind
from everstep.spec.probe_events import event_data, observation_of
from tests.support.observations import WARNING, XID


def well(probe: str = "kernel_log", target: str = "gpu 3") -> Observation:
    return Observation(probe=probe, target=target, verdict=Verdict.HEALTHY, reason="nothing new")


def blind(probe: str = "kernel_log", target: str = "gpu 3") -> Observation:
    return Observation(probe=probe, target=target, verdict=Verdict.UNKNOWN, reason="cannot be read")


class Machine:
    """A board whose clock and events a test holds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "health.json"
        self.now = 100.0
        self.events: list[dict[str, Any]] = []
        self.board = self.started()

    def started(self) -> HealthBoard:
        self.board = HealthBoard(self.path, self._emit, clock=lambda: self.now)
        return self.board

    def _emit(self, kind: EventKind, **event: Any) -> None:
        assert kind is EventKind.PROBE
        json.dumps(event, allow_nan=False)
        self.events.append(event)

    def sees(self, *observations: Observation, probe: str = "kernel_log") -> None:
        self.now += 2.0
        self.board.take(probe, observations)

    @property
    def verdicts(self) -> list[str]:
        return [event["data"]["verdict"] for event in self.events]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_what_is_well_is_no_event(machine: Machine) -> None:
    machine.sees(well())
    assert machine.events == []
    assert machine.board.seen() == ()
    assert machine.board.healthy_probes() == ("kernel_log",)


def test_a_fault_is_told_once_and_its_end_once(machine: Machine) -> None:
    for _ in range(3):
        machine.sees(XID)
    machine.sees(well())
    machine.sees(well())
    assert machine.verdicts == ["faulty", "healthy"]
    began, ended = (event["data"] for event in machine.events)
    assert (began["rule"], began["action"]) == ("xid_79", "evict_machine")
    assert (ended["probe"], ended["target"], ended["rule"]) == ("kernel_log", "gpu 3", "xid_79")
    (seen,) = machine.board.seen()
    assert (seen.age_s, seen.cleared_ago_s) == (8.0, 2.0)


def test_what_has_gone_is_told_for_a_while(machine: Machine) -> None:
    machine.sees(XID)
    machine.sees()
    assert [s.cleared_ago_s for s in machine.board.seen()] == [0.0]
    machine.now += CLEARED_KEPT_S
    machine.sees(well())
    assert machine.board.seen() == ()


def test_a_probe_that_cannot_look_has_not_seen_the_fault_go(machine: Machine) -> None:
    machine.sees(XID)
    machine.sees(blind())
    assert machine.verdicts == ["faulty", "unknown"]
    assert [s.cleared_ago_s for s in machine.board.seen()] == [None, None]
    machine.sees(well())
    assert sorted(machine.verdicts[2:]) == ["healthy", "healthy"]


def test_other_probes_and_targets_are_left_alone(machine: Machine) -> None:
    machine.sees(XID)
    machine.sees(well("disk", "/"), probe="disk")
    assert machine.verdicts == ["faulty"]
    assert machine.board.healthy_probes() == ("disk",)


def test_another_action_is_news_and_other_figures_are_not(machine: Machine) -> None:
    warned = replace(WARNING, reason="12 replays", values={})
    machine.sees(warned, probe="gpu")
    machine.sees(
        Observation(**{**_fields(warned), "reason": "13 replays", "values": {"n": 13}}), probe="gpu"
    )
    assert len(machine.events) == 1
    assert machine.board.seen()[0].observation.reason == "13 replays"
    machine.sees(Observation(**{**_fields(warned), "action": Action.EVICT_MACHINE}), probe="gpu")
    assert [event["data"]["action"] for event in machine.events] == ["warn_only", "evict_machine"]


def _fields(observation: Observation) -> dict[str, Any]:
    return {name: getattr(observation, name) for name in Observation.__slots__}


def test_a_new_agent_repeats_nothing_and_forgets_nothing(machine: Machine) -> None:
    machine.sees(XID)
    machine.started()
    machine.sees(XID)
    assert machine.verdicts == ["faulty"]
    assert [s.age_s for s in machine.board.seen()] == [2.0]
    machine.started()
    machine.sees(well())
    assert machine.verdicts == ["faulty", "healthy"]


@pytest.mark.parametrize(
    "text", ["", "{", '{"boot_id": "another", "seen": []}', "[]", '{"seen":1}']
)
def test_a_file_that_is_no_memory_is_none(machine: Machine, text: str) -> None:
    machine.sees(XID)
    machine.path.write_text(text)
    assert machine.started().seen() == ()


def test_what_flaps_is_told_a_few_times_and_kept(machine: Machine) -> None:
    link = Observation(
        probe="link",
        target="eth0",
        verdict=Verdict.FAULTY,
        reason="down",
        rule="link_down",
        symptom=Symptom.NETWORK_HOST,
        action=Action.WARN_ONLY,
    )
    for _ in range(50):
        machine.sees(link, probe="link")
        machine.sees(well("link", "eth0"), probe="link")
    assert len(machine.events) == EVENTS_MAX
    machine.sees(link, probe="link")
    assert [s.cleared_ago_s for s in machine.board.seen()] == [None]


def test_answers_and_memory_are_bounded_and_the_weightiest_comes_first(machine: Machine) -> None:
    machine.sees(XID)
    many = [
        Observation(
            probe="disk",
            target=f"/{n}",
            verdict=Verdict.FAULTY,
            reason="x" * 1000,
            rule="full",
            symptom=Symptom.DISK_FULL,
            action=Action.WARN_ONLY,
            values={f"value_{v}": "y" * 500 for v in range(50)},
        )
        for n in range(3 * KEPT_MAX)
    ]
    machine.sees(*many, probe="disk")
    seen = machine.board.seen()
    assert len(seen) == SEEN_MAX
    assert seen[0].observation.rule == "xid_79"
    assert all(len(json.dumps(event)) < 1500 for event in machine.events)


TEXT = st.text(max_size=400)


@given(
    probe=st.text(min_size=1, max_size=80),
    target=TEXT,
    reason=TEXT,
    rule=TEXT,
    verdict=st.sampled_from(Verdict),
    symptom=st.none() | st.sampled_from(Symptom),
    action=st.none() | st.sampled_from(Action),
    confidence=st.sampled_from(Confidence),
    values=st.dictionaries(TEXT, st.none() | TEXT | st.integers() | st.floats() | st.booleans()),
)
def test_an_observation_survives_its_event(**fields: Any) -> None:
    observation = Observation(**fields)
    data = json.loads(json.dumps(event_data(observation), allow_nan=False))
    back = observation_of(observation.reason, data)
    assert back is not None
    again = json.loads(json.dumps(event_data(back), allow_nan=False))
    assert again == data
    assert (back.verdict, back.symptom, back.action) == (
        observation.verdict,
        observation.symptom,
        observation.action,
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)


@given(
    reason=TEXT,
    data=st.dictionaries(
        st.sampled_from(
            ["probe", "target", "verdict", "symptom", "action", "confidence", "rule", "values"]
        ),
        JSON | st.sampled_from(["faulty", "gpu", "evict_machine", "high"]),
    ),
)
def test_whatever_an_agent_sends_is_an_observation_or_none(
    reason: str, data: dict[str, Any]
) -> None:
    found = observation_of(reason, data)
    assert found is None or len(json.dumps(event_data(found), allow_nan=False)) < 4000
