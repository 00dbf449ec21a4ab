"""Following a run: one watch activity for each shard, restarted as its milestones pass.

Not here: what to do about what a watch reports (``training_job``).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from temporalio.exceptions import ActivityError, is_cancelled_exception

    from activities import contracts
    from everstep.decide.words import Verdict
    from everstep.spec import messages as m
    from everstep.spec.agent_api import EventKind
    from workflows.context import JobContext


@dataclass
class Watches:
    """Handles of the watches of one run. Holds nothing that must survive: cursors are state."""

    context: JobContext
    handles: dict[int, Any] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    """Shards whose ranks have all succeeded."""
    finished_at: datetime | None = None
    """When the first of them had."""

    def ensure(self) -> None:
        """Start a watch for every shard that has none."""
        state = self.context.state
        run = state.run
        if run is None:
            raise RuntimeError("no run to watch")
        for index, shard in enumerate(self.context.shards()):
            if index in self.handles or index in self.finished:
                continue
            first_step = run.first_step_at is None
            self.handles[index] = contracts.schedule(
                contracts.watch_run,
                m.WatchRun(
                    job_id=state.job_id,
                    run_id=run.run_id,
                    generation=run.generation,
                    machines=shard,
                    cursors={
                        ref.machine_id: state.cursors[ref.machine_id]
                        for ref in shard
                        if ref.machine_id in state.cursors
                    },
                    until=m.WatchUntil(
                        # Milestones come from the shard of rank 0 alone: one answer, not many.
                        first_step=first_step and index == 0,
                        after_s=self._tick_s() if index == 0 else None,
                    ),
                    policy=self.context.policy,
                    told=state.told,
                ),
                heartbeat=self.context.policy.policy.detection.watch_lost_after,
                summary=f"watch run {run.generation}"
                + (" until its first step" if first_step else "")
                + f" on {shard[0].machine_id}"
                + (f" and {len(shard) - 1} more" if len(shard) > 1 else ""),
            )

    def _tick_s(self) -> float:
        policy = self.context.policy.policy
        tick = policy.detection.progress_report_interval.total_seconds()
        incident = self.context.state.incident
        if incident is not None and incident.recovered_at is not None:
            left = (
                policy.ladder.stable_after - (workflow.now() - incident.recovered_at)
            ).total_seconds()
            tick = max(0.1, min(tick, left))
        return tick

    def patience_s(self) -> float | None:
        """How long to wait for the next news: for ever, unless some shards have finished.

        Within a shard the watch itself knows whom to wait for; here a machine that cannot be
        reached is given the time after which it would be lost in any case.
        """
        if self.finished_at is None:
            return None
        limits = self.context.policy.policy.detection
        until = self.finished_at + limits.exit_skew_max + limits.machine_lost_after
        return max(0.0, (until - workflow.now()).total_seconds())

    def any_done(self) -> bool:
        """True when a watch has something to say."""
        return any(handle.done() for handle in self.handles.values())

    async def collect(self) -> list[m.WatchResult]:
        """Results of the watches that have returned, in shard order."""
        done = sorted(i for i, handle in self.handles.items() if handle.done())
        return [await self._take(index) for index in done]

    async def cancel(self) -> list[m.WatchResult]:
        """Cancel all watches and take what they had: cursors, or news that came first."""
        for index in sorted(self.handles):
            self.handles[index].cancel()
        return [await self._take(index) for index in sorted(self.handles)]

    async def _take(self, index: int) -> m.WatchResult:
        result = await self._result_of(self.handles.pop(index))
        if workflow.cancellation_reason() is not None:
            # A watch that is told to end answers all the same, which hides from the one who waits
            # for it that the job was cancelled meanwhile.
            raise asyncio.CancelledError
        if result.kind == "succeeded":
            self.finished.add(index)
            self.finished_at = self.finished_at or workflow.now()
        self.context.state.cursors.update(result.cursors)
        return result

    @staticmethod
    async def _result_of(handle: Any) -> m.WatchResult:
        try:
            result: m.WatchResult = await handle
        except ActivityError as error:
            if is_cancelled_exception(error):
                return m.WatchResult(kind="cancelled")
            # A watch that cannot work is blindness, not a fault of the machines.
            result = m.WatchResult(
                kind="blind",
                observations=(
                    m.ObservationRecord(
                        kind=EventKind.PROBE,
                        verdict=Verdict.UNKNOWN,
                        reason=str(error.cause or error)[:600],
                    ),
                ),
            )
            await workflow.sleep(5, summary="a watch failed; look again")
        return result
