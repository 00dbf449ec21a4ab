"""Policies, notifications, and keeping the ledger from growing without end.

``policy_snapshots`` holds every policy that some job was under, by hash: what a decision refers to
by ``policy_hash`` can be read years later. ``policy_applications`` holds what people applied to the
fleet; the newest one is active.

Not here: reading and checking policy files (``everstep.spec``).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import delete, update
from sqlmodel import Session, col, select

from everstep.decide.words import FINAL_PHASES
from everstep.ledger import tables as t
from everstep.ledger.base import Part
from everstep.ledger.database import lock_of
from everstep.ledger.views import PolicyRow, Pruned
from everstep.spec.policy import PolicySnapshot, RetentionPolicy

PRUNED = "pruned by the policy's retention"


class Policies(Part):
    """Policies, notifications and retention."""

    def apply_policy(
        self, snapshot: PolicySnapshot, yaml_text: str, *, author: str, reason: str, now: datetime
    ) -> bool:
        """Make a policy the fleet's active one; False when it is active already."""
        return self._database.write(
            lambda session: _apply(session, snapshot, yaml_text, author, reason, now),
            locks=[lock_of("policy"), lock_of("policy", snapshot.hash)],
            durable=True,
        )

    def active_policy(self) -> tuple[str, str] | None:
        """Text and hash of the policy that was applied last; None when none ever was."""
        query = select(t.PolicyApplication).where(col(t.PolicyApplication.active).is_(True))

        def work(session: Session) -> tuple[str, str] | None:
            active = session.exec(query).first()
            return None if active is None else (active.yaml_text, active.hash)

        return self._database.read(work)

    def policy_history(self) -> list[PolicyRow]:
        """Every application of a policy, newest first."""
        query = select(t.PolicyApplication).order_by(col(t.PolicyApplication.id).desc())
        return self._database.read(
            lambda session: [PolicyRow.model_validate(row) for row in session.exec(query)]
        )

    def remember_policy(self, snapshot: PolicySnapshot, *, now: datetime) -> None:
        """Keep a policy that a job takes up (with its overrides), so that its hash can be read."""
        self._database.write(
            lambda session: remember(session, snapshot, now),
            locks=[lock_of("policy", snapshot.hash)],
        )

    def policy_by_hash(self, policy_hash: str) -> dict[str, Any] | None:
        """The policy that decisions name by ``policy_hash``."""

        def work(session: Session) -> dict[str, Any] | None:
            entry = session.get(t.PolicyEntry, policy_hash)
            return None if entry is None else entry.policy

        return self._database.read(work)

    def note_notification(self, key: str, *, now: datetime) -> bool:
        """Note that people got the message ``key``; True the first time."""

        def work(session: Session) -> bool:
            if session.get(t.Notification, key) is not None:
                return False
            session.add(t.Notification(key=key, at=now))
            return True

        return self._database.write(work, locks=[lock_of("notification", key)])

    def was_notified(self, key: str) -> bool:
        """True when ``note_notification`` has noted the key."""
        return self._database.read(lambda session: session.get(t.Notification, key) is not None)

    def prune(self, now: datetime, retention: RetentionPolicy) -> Pruned:
        """Remove what the policy does not keep longer; incidents and decisions stay for ever.

        With observations go the reports and evidence lines of rounds whose incident is over, and
        the stored answers and notifications of jobs that ended as long ago.
        """
        before = now - retention.observations
        return self._database.write(lambda session: _prune(session, before))


def remember(session: Session, snapshot: PolicySnapshot, now: datetime) -> None:
    """Keep a policy by its hash, within a transaction that holds the lock of that hash."""
    if session.get(t.PolicyEntry, snapshot.hash) is None:
        session.add(
            t.PolicyEntry(
                hash=snapshot.hash,
                policy=snapshot.policy.model_dump(mode="json"),
                source=snapshot.source,
                first_seen_at=now,
            )
        )
        session.flush()


def _apply(
    session: Session,
    snapshot: PolicySnapshot,
    yaml_text: str,
    author: str,
    reason: str,
    now: datetime,
) -> bool:
    remember(session, snapshot, now)
    query = select(t.PolicyApplication).where(col(t.PolicyApplication.active).is_(True))
    active = session.exec(query).first()
    if active is not None:
        if active.hash == snapshot.hash and active.yaml_text == yaml_text:
            return False
        active.active = False
        session.add(active)
        session.flush()
    session.add(
        t.PolicyApplication(
            hash=snapshot.hash, yaml_text=yaml_text, author=author, reason=reason, applied_at=now
        )
    )
    return True


def _prune(session: Session, before: datetime) -> Pruned:
    over = select(t.Incident.incident_id).where(col(t.Incident.closed_at) < before)
    old_observations = select(t.Observation.id).where(col(t.Observation.observed_at) < before)
    ended = select(t.Job.job_id).where(
        col(t.Job.phase).in_(sorted(FINAL_PHASES)), col(t.Job.ended_at) < before
    )
    rounds = (
        update(t.Round)
        .where(col(t.Round.incident_id).in_(over), col(t.Round.cut) != PRUNED)
        .values(reports=[], evidence=[], cut=PRUNED)
    )
    return Pruned(
        observations=_count(
            session, delete(t.Observation).where(col(t.Observation.id).in_(old_observations))
        ),
        rounds=_count(session, rounds),
        claims=_count(session, delete(t.Claim).where(col(t.Claim.job_id).in_(ended))),
        notifications=_count(
            session, delete(t.Notification).where(col(t.Notification.at) < before)
        ),
    )


def _count(session: Session, statement: Any) -> int:
    return session.connection().execute(statement).rowcount
