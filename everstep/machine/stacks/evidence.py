"""The stacks of a run that hangs, taken before it is torn down, and kept in the run's folder.

Only a hang is worth the time: where a rank has failed, its log says more, and the others only wait
for the end. What was taken stays for the agent's successor.

Not here: taking (``capture``), and what the stacks say (``everstep.decide.aggregation``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from everstep.decide.stack_groups import compact
from everstep.decide.stack_report import StackReport
from everstep.machine.facts import Stopping
from everstep.machine.stacks.capture import CaptureLimits, StackTarget, capture

LIMITS = CaptureLimits(total_s=3.0, process_s=1.5, gap_s=0.2)
"""Every second of it is a second in which the job stands still."""
_BYTES_MAX = 256 * 1024
_REPORT = TypeAdapter(StackReport)

log = structlog.get_logger(__name__)


class StackEvidence:
    """What was seen of one run, once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.report = self._read()

    def _read(self) -> StackReport | None:
        with contextlib.suppress(OSError, ValidationError), self._path.open("rb") as file:
            return _REPORT.validate_json(file.read(_BYTES_MAX))
        return None

    def wanted(self, stopping: Stopping | None) -> bool:
        """Whether a rank that is about to be ended had made no progress for too long."""
        if self.report is not None or stopping is None or stopping.planned:
            return False
        return any(seen.stalled_for_s is not None for seen in stopping.evidence.values())

    async def take(self, find_target: Callable[[], StackTarget]) -> None:
        """Take the stacks and keep them; whatever goes wrong must not keep the teardown waiting."""
        try:
            self.report = compact(await capture(find_target(), LIMITS))
        except Exception as error:  # noqa: BLE001 - evidence is worth less than the end of the run
            log.error("stacks could not be taken", error=repr(error))  # noqa: TRY400 - see above
            return
        with contextlib.suppress(OSError):
            self._path.touch(mode=0o600)
            self._path.write_bytes(_REPORT.dump_json(self.report))
