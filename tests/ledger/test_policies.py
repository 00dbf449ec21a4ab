"""Policies by hash and by application, notifications, and retention."""

from __future__ import annotations

from datetime import timedelta

from everstep.decide.words import IncidentState
from everstep.ledger import Pruned
from everstep.spec import messages as m
from everstep.spec.policy import PolicySnapshot
from tests.ledger.support import Fleet, at, decision, incident


def test_the_policy_applied_last_is_active_and_all_are_remembered(
    fleet: Fleet, policy: PolicySnapshot
) -> None:
    other = policy.model_copy(update={"hash": "other"})
    ledger = fleet.ledger
    assert ledger.active_policy() is None

    assert ledger.apply_policy(policy, "a: 1", author="ann", reason="first", now=at(1))
    assert not ledger.apply_policy(policy, "a: 1", author="bob", reason="again", now=at(2))
    assert ledger.apply_policy(other, "a: 2", author="bob", reason="better", now=at(3))
    assert ledger.apply_policy(policy, "a: 1", author="ann", reason="back", now=at(4))

    assert ledger.active_policy() == ("a: 1", policy.hash)
    assert [(row.reason, row.active) for row in ledger.policy_history()] == [
        ("back", True),
        ("better", False),
        ("first", False),
    ]


def test_the_policy_behind_a_hash_can_be_read_whole(fleet: Fleet, policy: PolicySnapshot) -> None:
    fleet.ledger.remember_policy(policy, now=at(1))
    fleet.ledger.remember_policy(policy, now=at(2))

    stored = fleet.ledger.policy_by_hash(policy.hash)

    assert stored is not None
    assert type(policy.policy).model_validate(stored) == policy.policy
    assert fleet.ledger.policy_by_hash("unknown") is None


def test_a_message_is_noted_once(fleet: Fleet) -> None:
    assert not fleet.ledger.was_notified("k")
    assert fleet.ledger.note_notification("k", now=at(1))
    assert not fleet.ledger.note_notification("k", now=at(2))
    assert fleet.ledger.was_notified("k")


def test_pruning_removes_old_evidence_and_keeps_incidents_and_decisions(
    fleet: Fleet, policy: PolicySnapshot
) -> None:
    retention = policy.policy.retention
    fleet.machines("m1", "m2", "m3", "m4")
    for job in ("train", "other"):
        fleet.job(job)
        fleet.open(job)
    fleet.ledger.record_incident(incident(decision=decision(), evidence=("seen",)))
    fleet.ledger.close_incident(
        m.CloseIncident(
            incident_id="train-1", state=IncidentState.STABLE, closed_at=at(400), summary="over"
        )
    )
    fleet.ledger.record_incident(incident(incident_id="train-2", number=2))
    fleet.ledger.note_notification("k", now=at(1))
    fleet.end()
    later = at(0) + retention.observations

    assert fleet.ledger.prune(later, retention) == Pruned()
    pruned = fleet.ledger.prune(later + timedelta(seconds=1000), retention)

    assert pruned == Pruned(observations=2, rounds=1, claims=1, notifications=1)
    over = fleet.ledger.incident("train-1")
    still_open = fleet.ledger.incident("train-2")
    assert over is not None
    assert still_open is not None
    assert over.decisions == (decision(),)
    assert over.rounds[0].reports == []
    assert "retention" in over.rounds[0].cut
    assert still_open.rounds[0].reports != [], "its incident is not over"
    assert fleet.ledger.prune(later + timedelta(seconds=1000), retention) == Pruned()
