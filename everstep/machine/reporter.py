"""Saying something about a run exactly once: to the agent's ring, to its facts, to its log.

None of the three may keep the agent from looking after ranks: a ring, a disk or a standard error
that fails is noted as far as that is possible, and life goes on. Not here: what there is to say.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import structlog

from everstep.machine.facts import FactsFile
from everstep.machine.folder import RunRecord
from everstep.machine.monitor import NS
from everstep.spec.agent_api import EventKind

REASON_MAX = 300

log = structlog.get_logger(__name__)


class Emit(Protocol):
    """Where events go: the agent's ring."""

    def __call__(
        self,
        kind: EventKind,
        *,
        job_id: str,
        run_id: str,
        generation: int,
        rank: int | None = None,
        reason: str = "",
        data: dict[str, Any] = ...,
        at_monotonic: float | None = None,
    ) -> None:
        """Keep one event; ``data`` is below 1.5 KB of JSON."""


class Reporter:
    """The voice and memory of one run."""

    def __init__(self, record: RunRecord, facts_file: FactsFile, emit: Emit) -> None:
        self._record = record
        self._facts_file = facts_file
        self._emit = emit
        self.facts = facts_file.load()

    def save(self) -> None:
        """Write the facts down."""
        try:
            self._facts_file.save(self.facts)
        except (OSError, ValueError) as error:
            self.note("facts could not be written down", error=str(error))

    def emit(
        self,
        kind: EventKind,
        *,
        rank: int | None = None,
        reason: str = "",
        data: dict[str, Any] | None = None,
        at_ns: int | None = None,
    ) -> None:
        """Emit an event of this run."""
        try:
            self._emit(
                kind,
                job_id=self._record.job_id,
                run_id=self._record.plan.run_id,
                generation=self._record.generation,
                rank=rank,
                reason=reason[:REASON_MAX],
                data=data or {},
                at_monotonic=at_ns / NS if at_ns is not None else None,
            )
        except Exception as error:  # noqa: BLE001 - whatever the ring does, ranks come first
            self.note("an event was lost", kind=kind.value, error=str(error))

    def note(self, message: str, **details: Any) -> None:
        """Log a line; standard error may be on a full disk, which is no reason to fail."""
        with contextlib.suppress(OSError):
            log.warning(
                message,
                job_id=self._record.job_id,
                run_id=self._record.plan.run_id,
                machine_id=self._record.machine_id,
                **details,
            )
