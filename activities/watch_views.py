"""What a watch keeps of one machine, and how it turns an agent's words into observations.

Whatever an agent says is cut to size here before it can enter Temporal's history.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from activities.failures import one_line
from everstep.decide.attribution import RankReport
from everstep.decide.words import Verdict
from everstep.spec import agent_api as api
from everstep.spec import messages as m

DATA_BYTES_MAX = 1200
CURSOR = re.compile("[0-9a-f]{16}:[0-9]{1,18}")


@dataclass(slots=True)
class MachineView:
    """One machine of the shard, as this watch sees it."""

    ref: m.MachineRef
    cursor: str | None
    reachable: bool = False
    boot_id: str | None = None
    ring_id: str = ""
    needs_state: bool = True
    """Events may be missing: ask for the run's present state."""
    not_known_since: float | None = None
    first_step: bool = False
    prints_steps: bool = False
    """Its step is read from a log, where one rank prints for the whole run."""
    succeeded: bool = False
    exited_zero_at: float | None = None
    summary: api.RunSummary | None = None
    told_step: int | None = None
    """Step told by other than heartbeats: the first one, the last one of a run that has ended."""
    lost_reason: str = ""
    asked_at: float | None = None
    """When the state that is being awaited was asked for."""
    known_at: float | None = None
    """When the newest state was asked for: older words about the machine itself are in it."""


def cursor_at(ring_id: str, seq: int) -> str | None:
    """A cursor that agents take; None (the whole ring) where the agent itself said nonsense."""
    cursor = f"{ring_id[:17]}:{seq}"
    return cursor if CURSOR.fullmatch(cursor) else None


def how_it_ended(rank: RankReport) -> str:
    """Signal or exit code of a rank, for people."""
    if rank.signal is not None:
        return f"signal {rank.signal}"
    return "no exit record" if rank.exit_code is None else f"code {rank.exit_code}"


def observed(
    view: MachineView,
    kind: api.EventKind,
    rank: int | None,
    reason: str,
    data: dict[str, Any],
    age_s: float,
) -> m.ObservationRecord:
    """A fact of trouble, or a warning, as evidence."""
    return m.ObservationRecord(
        kind=kind,
        verdict=Verdict.FAULTY,
        machine_id=view.ref.machine_id,
        rank=rank,
        age_s=max(0.0, age_s),
        reason=one_line(reason, 300),
        data=bounded_data(data),
    )


def bounded_data(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` as JSON that every reader of the history can take, if it is small."""
    plain = {
        key: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in data.items()
    }
    try:
        sizes = {key: len(json.dumps(value, allow_nan=False)) for key, value in plain.items()}
    except (ValueError, TypeError, RecursionError):
        return {"left_out": "not finite JSON"}
    left_out = []
    while sum(sizes.values()) > DATA_BYTES_MAX:
        left_out.append(max(sizes, key=lambda key: sizes[key]))
        del sizes[left_out[-1]]
    kept = {key: plain[key] for key in sizes}
    return kept | {"left_out": one_line(", ".join(left_out), 100)} if left_out else kept
