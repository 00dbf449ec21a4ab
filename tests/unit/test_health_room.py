"""More faults than an agent keeps: which stay, and that nothing is told again and again."""

from __future__ import annotations

from pathlib import Path

from everstep.decide.observation import Observation
from everstep.decide.words import Action, Symptom, Verdict
from everstep.machine.health import EVENTS_MAX, KEPT_MAX
from tests.unit.test_health import Machine


def full_disk(name: object, action: Action = Action.WARN_ONLY) -> Observation:
    return Observation(
        probe="disk",
        target=f"/{name}",
        verdict=Verdict.FAULTY,
        reason="full",
        rule="full",
        symptom=Symptom.DISK_FULL,
        action=action,
    )


def test_more_than_is_kept_is_no_news_at_every_look(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    many = [full_disk(n) for n in range(KEPT_MAX + 30)]
    for _ in range(20):
        machine.sees(*many, probe="disk")
    assert len(machine.events) == KEPT_MAX
    assert machine.board.seen()[0].age_s == 38.0, "those that are kept grow old"
    machine.sees(*many[10:], probe="disk")
    machine.sees(*many[10:], probe="disk")
    assert machine.verdicts[KEPT_MAX:] == ["healthy"] * 10 + ["faulty"] * 10, "there is room again"


def test_what_matters_more_finds_room(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    many = [full_disk(n) for n in range(KEPT_MAX)]
    worst = full_disk("scratch", Action.EVICT_MACHINE)
    machine.sees(*many, probe="disk")
    for _ in range(3):
        machine.sees(*many, worst, probe="disk")
    assert machine.verdicts == ["faulty"] * (KEPT_MAX + 1)
    assert machine.board.seen()[0].observation.target == "/scratch"


def test_what_flaps_is_told_more_often_where_it_calls_for_an_eviction(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for action, told in ((Action.WARN_ONLY, EVENTS_MAX), (Action.EVICT_MACHINE, 4 * EVENTS_MAX)):
        machine.events.clear()
        for _ in range(100):
            machine.sees(full_disk(action, action), probe="disk")
            machine.sees(probe="disk")
        assert len(machine.events) == told
