"""Writing down what the workflows know, and reading the policy as it is now.

Every write is idempotent by its ids: a result that was lost in an outage is written again with the
same content. Not here: machines, runs and jobs (``activities.launch``, ``activities.isolation``).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from temporalio import activity

from activities.clients import ledger_call
from activities.failpoints import after_effect
from activities.policy_source import PolicySource, read_snapshot
from everstep.spec import messages as m
from everstep.spec.base import Message
from everstep.spec.policy import PolicySnapshot


class RecordsLedger(Protocol):
    """What recording needs of the ledger."""

    def record_progress(self, request: m.RecordProgress, /) -> object:
        """Store boundaries of runs and the job's phase."""

    def record_incident(self, request: m.RecordIncident, /) -> object:
        """Store an incident's round."""

    def close_incident(self, request: m.CloseIncident, /) -> object:
        """Mark an incident over."""

    def remember_policy(self, snapshot: PolicySnapshot, /, *, now: datetime) -> object:
        """Keep a policy that a job takes up, so that decisions can name it by its hash."""


class Records:
    """The activities of this file."""

    def __init__(self, ledger: RecordsLedger, policy: PolicySource) -> None:
        self._ledger = ledger
        self._policy = policy

    @activity.defn(name="record_progress")
    async def record_progress(self, request: m.RecordProgress) -> m.Done:
        """Store boundaries of runs and the job's phase."""
        return await _write(self._ledger.record_progress, request)

    @activity.defn(name="record_incident")
    async def record_incident(self, request: m.RecordIncident) -> m.Done:
        """Store an incident's round with evidence and decision."""
        return await _write(self._ledger.record_incident, request)

    @activity.defn(name="close_incident")
    async def close_incident(self, request: m.CloseIncident) -> m.Done:
        """Mark an incident over."""
        return await _write(self._ledger.close_incident, request)

    @activity.defn(name="read_policy")
    async def read_policy(self, request: m.ReadPolicy) -> PolicySnapshot:
        """The policy as it is now, with the job's overrides."""
        snapshot = await read_snapshot(self._policy, request.overrides)
        await ledger_call(self._ledger.remember_policy, snapshot, now=datetime.now(UTC))
        after_effect()
        return snapshot


async def _write(function: Callable[[Any], object], request: Message) -> m.Done:
    await ledger_call(function, request)
    after_effect()
    return m.Done()
