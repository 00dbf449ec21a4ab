"""Incidents: records that repeat, overtake each other, are huge, or hold what crashes write."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from everstep.decide.words import IncidentState, Rung, Symptom, Verdict
from everstep.ledger import IncidentDetail, LedgerConflict
from everstep.ledger.bounds import OBSERVATIONS_MAX, REPORTS_BYTES_MAX
from everstep.spec import messages as m
from everstep.spec.agent_api import EventKind
from tests.ledger.support import Fleet, at, decision, finding, incident, report


@pytest.fixture
def running(fleet: Fleet) -> Fleet:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    return fleet


def detail(fleet: Fleet, incident_id: str = "train-1") -> IncidentDetail:
    found = fleet.ledger.incident(incident_id)
    assert found is not None
    return found


def closing(**changes: Any) -> m.CloseIncident:
    return m.CloseIncident(
        **{
            "incident_id": "train-1",
            "state": IncidentState.STABLE,
            "closed_at": at(400),
            "summary": "hang: evict m1; stable again",
            **changes,
        }
    )


def test_everything_that_was_recorded_can_be_explained(running: Fleet) -> None:
    running.ledger.record_incident(incident())
    running.ledger.record_incident(incident(decision=decision(), evidence=("rank 1 slept",)))
    running.evict("m1")
    running.ledger.close_incident(closing())

    found = detail(running)

    assert (found.state, found.symptom, found.closed_at) == (
        IncidentState.STABLE,
        Symptom.HANG,
        at(400),
    )
    assert found.decisions == (decision(),), "the ladder's input, state and output, whole"
    (round_,) = found.rounds
    assert (round_.detected_at, round_.stopped_at) == (at(30), at(30.5))
    assert round_.evidence == ["rank 1 slept"]
    assert round_.reports[0]["machine_id"] == "m1"
    (observation,) = found.observations
    assert (observation.kind, observation.verdict, observation.data, observation.age_s) == (
        EventKind.RANK_STALLED,
        Verdict.FAULTY,
        {"step": 2**40},
        0.25,
    )
    (action,) = found.actions
    assert (action.kind, action.target, action.at) == ("evict", "m1", at(40))
    (row,) = running.ledger.incidents("train")
    assert row.model_dump() == {key: getattr(found, key) for key in type(row).model_fields}
    assert row.rounds_total == 1
    assert running.ledger.incidents("other") == []
    assert running.ledger.incident("train-9") is None


def records() -> dict[str, Any]:
    """The writes of one incident of two rounds, as the two workflows send them."""
    second = {
        "round_number": 2,
        "symptom": Symptom.NETWORK_NCCL,
        "summary": "second",
        "detected_at": at(60),
        "stopped_at": at(61),
    }
    late = decision(round_number=2, decided_at=at(62))
    return {
        "open": incident(),
        "decided": incident(decision=decision(), evidence=("looked",)),
        "open 2": incident(**second),
        "decided 2": incident(**second, decision=late, evidence=("looked again",)),
        "closed": closing(),
    }


@pytest.mark.parametrize("order", list(itertools.permutations(records()))[::17])
def test_late_and_repeated_records_end_in_the_same_ledger(
    running: Fleet, order: tuple[str, ...]
) -> None:
    writes = records()
    for name in (*order, *order):
        write = writes[name]
        if isinstance(write, m.CloseIncident):
            running.ledger.close_incident(write)
        else:
            running.ledger.record_incident(write)

    found = detail(running)

    assert (found.state, found.symptom) == (IncidentState.STABLE, Symptom.NETWORK_NCCL)
    assert found.summary == "hang: evict m1; stable again"
    assert [r.evidence for r in found.rounds] == [["looked"], ["looked again"]]
    assert [d.decision_id for d in found.decisions] == ["train-1-r1", "train-1-r2"]
    assert len(found.observations) == 2


def test_the_first_end_of_an_incident_holds(running: Fleet) -> None:
    running.ledger.record_incident(incident())
    running.ledger.close_incident(closing())

    running.ledger.close_incident(closing(state=IncidentState.GAVE_UP, closed_at=at(999)))
    running.ledger.record_incident(incident(state=IncidentState.WAITING_FOR_PERSON))

    found = detail(running)
    assert (found.state, found.closed_at) == (IncidentState.STABLE, at(400))


def test_an_end_that_overtakes_the_record_is_shown_once_the_record_is_there(
    running: Fleet,
) -> None:
    running.ledger.close_incident(closing(state=IncidentState.GAVE_UP))
    assert running.ledger.incidents() == []
    assert running.ledger.incident("train-1") is None

    running.ledger.record_incident(incident())

    assert detail(running).state is IncidentState.GAVE_UP


def test_a_person_is_waited_for_until_the_next_round(running: Fleet) -> None:
    running.ledger.record_incident(incident(state=IncidentState.WAITING_FOR_PERSON))
    assert detail(running).state is IncidentState.WAITING_FOR_PERSON

    running.ledger.record_incident(incident(round_number=2))

    assert detail(running).state is IncidentState.OPEN


def test_a_warning_is_recorded_open_and_closed_at_once(running: Fleet) -> None:
    running.ledger.record_incident(
        incident(state=IncidentState.STABLE, closed_at=at(30), symptom=Symptom.CHECKPOINT_ERROR)
    )

    assert (detail(running).state, detail(running).closed_at) == (IncidentState.STABLE, at(30))


def test_a_closer_look_at_a_warning_says_more_and_an_earlier_record_less(running: Fleet) -> None:
    over: dict[str, Any] = {"state": IncidentState.STABLE, "closed_at": at(30), "decision": None}
    first, second = (
        incident(**over, round_number=number, summary=said)
        for number, said in ((1, "slow"), (2, "slow; rank 3 is behind"))
    )
    for record in (first, second, first):
        running.ledger.record_incident(record)

    assert detail(running).summary == "slow; rank 3 is behind"
    assert [r.round_number for r in detail(running).rounds] == [1, 2]


def test_a_round_decided_anew_keeps_the_later_decision(running: Fleet) -> None:
    again = decision(decided_at=at(90), finding=finding(reason="looked closer"))
    running.ledger.record_incident(incident(decision=decision()))
    running.ledger.record_incident(incident(decision=again))
    running.ledger.record_incident(incident(decision=decision()))
    running.ledger.record_incident(
        incident(decision=again.model_copy(update={"approved_by": "ann"}))
    )

    (found,) = detail(running).decisions
    assert (found.finding.reason, found.approved_by) == ("looked closer", "ann")


def test_what_a_crashed_process_writes_can_be_stored(running: Fleet) -> None:
    """NUL bytes come from logs, NaN and infinity from the incident itself."""
    nasty = "NaN loss\x00 at step 5"
    running.ledger.record_incident(
        incident(
            summary=nasty,
            evidence=(nasty,),
            reports=(report(log_lines=(nasty,), stalled_for_s=float("inf")),),
            observations=(
                m.ObservationRecord(
                    kind=EventKind.NONFINITE,
                    verdict=Verdict.FAULTY,
                    reason=nasty,
                    data={"loss": float("nan"), "norms": [float("-inf"), 1.5], nasty: nasty},
                ),
            ),
            decision=decision(finding=finding(reason=nasty)),
        )
    )

    found = detail(running)

    clean = "NaN loss\ufffd at step 5"
    assert found.summary == clean
    assert found.observations[0].data == {"loss": "nan", "norms": ["-inf", 1.5], clean: clean}
    assert found.rounds[0].reports[0]["ranks"][0]["log_lines"] == [clean]
    assert found.decisions[0].finding.reason == clean


def test_evidence_is_bounded_and_says_what_was_left_out(running: Fleet) -> None:
    lines = ("x" * 300,) * 20
    running.ledger.record_incident(
        incident(
            reports=tuple(report(f"m{n}", ranks=8, log_lines=lines) for n in range(400)),
            observations=tuple(
                m.ObservationRecord(
                    kind=EventKind.PROBE,
                    verdict=Verdict.UNKNOWN,
                    rank=n,
                    data={"blob": "y" * 10_000},
                )
                for n in range(OBSERVATIONS_MAX + 44)
            ),
            evidence=("line",) * 1000,
        )
    )

    found = detail(running)

    assert len(str(found.rounds[0].reports)) < 2 * REPORTS_BYTES_MAX
    assert "log lines" in found.rounds[0].cut
    assert "of 400 machines" in found.rounds[0].cut
    assert "44 observations" in found.rounds[0].cut
    assert len(found.observations) == OBSERVATIONS_MAX
    assert "left_out" in found.observations[0].data
    assert len(found.rounds[0].evidence) < 1000


def test_an_incident_needs_its_job_and_run(fleet: Fleet) -> None:
    with pytest.raises(LedgerConflict, match="job train: not in this ledger"):
        fleet.ledger.record_incident(incident())
    fleet.job()
    with pytest.raises(LedgerConflict, match="run train.1: not in this ledger"):
        fleet.ledger.record_incident(incident())
    assert fleet.ledger.incidents() == []


def test_a_rung_is_stored_under_its_word(running: Fleet) -> None:
    running.ledger.record_incident(incident(decision=decision()))

    assert detail(running).decisions[0].decision.rung is Rung.EVICT
