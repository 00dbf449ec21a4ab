"""What the catalogue of signatures says about the end of a rank's log, on the rank's own machine.

A catalogue that cannot be read costs its findings and nothing else: ranks are looked after by what
the runtime itself prints (``everstep.decide.logs``). Not here: signatures and rules
(``everstep.decide.diagnosis``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import structlog

from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.tail import diagnose_tail
from everstep.decide.diagnosis.types import TailFinding
from everstep.errors import EverstepError
from everstep.spec.log_catalogue import load_signatures

WHY_CHARS_MAX = 200
LINES_MAX = 2

log = structlog.get_logger(__name__)


@cache
def signatures() -> Catalogue | None:
    """The installation's catalogue, read once; None when it is not accepted."""
    try:
        return load_signatures()
    except (EverstepError, OSError, ValueError) as error:
        log.warning("log signatures cannot be used", problem=str(error)[:500])
        return None


def finding_of(
    lines: Sequence[str], *, rank: int, exit_code: int | None, signal: int | None
) -> TailFinding | None:
    """What a rank suffered that ended by itself; small enough for a report."""
    catalogue = signatures()
    if catalogue is None:
        return None
    found = diagnose_tail(catalogue, lines, rank=rank, exit_code=exit_code, signal=signal)
    if found is None:
        return None
    return replace(found, why=found.why[:WHY_CHARS_MAX], evidence=found.evidence[:LINES_MAX])
