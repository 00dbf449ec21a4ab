"""The ledger: machines, leases, jobs, runs, incidents, decisions, policies and code versions.

It outlives every workflow (Temporal forgets closed ones after its retention) and it is where
promise 3 is kept: generations only rise, a machine is leased once, an evicted one stays out. Those
are constraints of the database, not habits of this code.

Not here: telemetry, logs and checkpoints (they stay on agents), and secrets (nowhere).
"""

from __future__ import annotations

from everstep.ledger.errors import LedgerConflict, LedgerError, LedgerUnavailable
from everstep.ledger.store import Ledger
from everstep.ledger.views import (
    ActionRow,
    CodeVersionRow,
    IncidentDetail,
    IncidentRow,
    JobRow,
    MachineRow,
    MachineStanding,
    MachineState,
    ObservationRow,
    PhaseMark,
    PolicyRow,
    Pruned,
    RoundRow,
    RunRow,
)

__all__ = [
    "ActionRow",
    "CodeVersionRow",
    "IncidentDetail",
    "IncidentRow",
    "JobRow",
    "Ledger",
    "LedgerConflict",
    "LedgerError",
    "LedgerUnavailable",
    "MachineRow",
    "MachineStanding",
    "MachineState",
    "ObservationRow",
    "PhaseMark",
    "PolicyRow",
    "Pruned",
    "RoundRow",
    "RunRow",
]
