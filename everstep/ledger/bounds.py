"""How much evidence the ledger keeps of one round: enough to explain it, never without a limit.

A crash of ten thousand ranks brings ten thousand reports with log lines. What is left out is said
in words, so that nobody takes the rest for everything. What goes first matters least: the lines of
ranks that we stopped ourselves are collateral.

Not here: how long evidence is kept (``policies.prune``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from everstep.decide.attribution import MachineReport
from everstep.ledger.types import clean_json
from everstep.spec.evidence import LINES_FIRST
from everstep.spec.messages import ObservationRecord

REPORTS_BYTES_MAX = 256 * 1024
OBSERVATIONS_MAX = 256
OBSERVATION_DATA_BYTES_MAX = 4 * 1024
EVIDENCE_LINES_MAX = 200

_REPORT = TypeAdapter(MachineReport)


def bounded_reports(reports: Sequence[MachineReport]) -> tuple[list[dict[str, Any]], str]:
    """``reports`` as JSON within ``REPORTS_BYTES_MAX``, and what was left out."""
    kept = list(reports)
    data, cut = _dump(kept), []
    for leave_out in LINES_FIRST:
        if _size(data) <= REPORTS_BYTES_MAX:
            break
        kept = [leave_out.applied(report) for report in kept]
        data = _dump(kept)
        cut.append(leave_out.what)
    else:
        data, dropped = _first_fitting(data)
        if dropped:
            cut.append(f"{dropped} of {len(reports)} machines")
    return data, f"left out: {', '.join(cut)}" if cut else ""


def bounded_data(observation: ObservationRecord) -> dict[str, Any]:
    """The observation's ``data`` within its limit, else a note of its size."""
    data: dict[str, Any] = clean_json(observation.data)
    size = _size(data)
    if size <= OBSERVATION_DATA_BYTES_MAX:
        return data
    return {"left_out": f"{size} bytes, more than {OBSERVATION_DATA_BYTES_MAX}"}


def _dump(reports: Sequence[MachineReport]) -> list[dict[str, Any]]:
    return [_REPORT.dump_python(report, mode="json") for report in reports]


def _size(data: Any) -> int:
    return len(json.dumps(data))


def _first_fitting(data: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """As many reports as fit, and how many did not."""
    kept, total = [], 0
    for report in data:
        total += _size(report) + 2
        if total > REPORTS_BYTES_MAX:
            break
        kept.append(report)
    return kept, len(data) - len(kept)
