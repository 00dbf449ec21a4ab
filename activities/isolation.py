"""Taking machines out of use.

An eviction is one ledger transaction: the machine's lease ends and a block begins, keyed by
``(incident_id, step, machine, generation)``, so that whoever repeats it, after a crash or a thaw,
gets the first answer. The agent learns of it by its next registration.

Not here: deciding whom to evict (``everstep.decide.ladder``), and telling a cluster manager.
"""

from __future__ import annotations

from typing import Protocol

import structlog
from temporalio import activity

from activities.clients import ledger_call
from activities.failpoints import after_effect
from everstep.spec import messages as m

log = structlog.get_logger(__name__)


class EvictionLedger(Protocol):
    """What evicting needs of the ledger."""

    def evict(self, request: m.EvictMachines, /) -> m.EvictedMachines:
        """End leases and begin blocks, each once."""


class Isolation:
    """The activity of this file."""

    def __init__(self, ledger: EvictionLedger) -> None:
        self._ledger = ledger

    @activity.defn(name="evict_machines")
    async def evict_machines(self, request: m.EvictMachines) -> m.EvictedMachines:
        """Take machines out of use and block them, exactly once each."""
        evicted = await ledger_call(self._ledger.evict, request)
        after_effect()
        log.info(
            "machines evicted",
            job_id=request.job_id,
            incident_id=request.incident_id,
            machines=list(evicted.evicted),
            already=dict(evicted.already),
            reason=request.reason,
        )
        return evicted
