"""What the end of one rank's log says about that rank: the agents' question.

Not here: the verdict about a whole job (``verdict``).
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.types import LogLine, LogSource, RankEnd, Role, TailFinding
from everstep.decide.diagnosis.verdict import diagnose

LINES_READ_MAX = 2_000
LINE_CHARS_MAX = 300
LINES_KEPT_MAX = 8


def diagnose_tail(
    catalogue: Catalogue,
    lines: Sequence[str],
    *,
    rank: int | None = None,
    exit_code: int | None = None,
    signal: int | None = None,
    stopped_by_us: bool = False,
) -> TailFinding | None:
    """What one rank suffered, by the last lines of its log and how it ended.

    Args:
        catalogue: the signatures.
        lines: oldest first, without line ends; only the last ``LINES_READ_MAX`` are read.
        rank: the rank that wrote them.
        exit_code: as the system gives it, if the rank has ended.
        signal: that ended it, if one did.
        stopped_by_us: it was alive until we stopped it; its end then says nothing.

    Returns:
        None when neither the lines nor the end say anything.
    """
    text = lines[-LINES_READ_MAX:]
    source = LogSource(
        file="",
        lines=tuple(LogLine(number, line) for number, line in enumerate(text, 1)),
        lines_total=len(text),
        rank=rank,
    )
    end = RankEnd(exit_code=exit_code, signal=signal, rank=rank, stopped_by_us=stopped_by_us)
    found = diagnose(catalogue, [source], [end])
    if found.rule == "nothing_found":
        return None
    return TailFinding(
        symptom=found.symptom,
        side=found.side,
        action=found.action,
        role=Role.TEARDOWN if stopped_by_us and found.role is Role.NOTE else found.role,
        confidence=found.confidence,
        rule=found.rule,
        machine_specific=found.machine_specific,
        why=found.why,
        evidence=tuple(line.text[:LINE_CHARS_MAX] for line in found.evidence[:LINES_KEPT_MAX]),
    )
