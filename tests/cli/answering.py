"""A ``TrainingJob`` that only answers, for tests of those who ask."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from everstep.decide.words import JobPhase
from everstep.spec import messages as m


@workflow.defn(name=m.TRAINING_JOB)
class Answering:
    """Says what it was told, refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.phase = JobPhase.RUNNING

    @workflow.run
    async def run(self, raw: Any) -> m.JobResult:
        command = raw["command"][0]
        if command == "refused":
            raise ApplicationError("layout: no", type="InvalidJobSpec", non_retryable=True)
        await workflow.wait_condition(lambda: self.phase is not JobPhase.RUNNING)
        if self.phase is JobPhase.FAILED:
            raise ApplicationError("it does not heal", type="JobFailed", non_retryable=True)
        return m.JobResult(job_id=raw["name"], phase=self.phase, runs=1, incidents=0)

    @workflow.query
    def status(self) -> m.JobStatus:
        return m.JobStatus(
            job_id="job",
            phase=self.phase,
            world_size=2,
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
        )

    @workflow.update
    def pause(self, request: m.PauseRequest) -> m.UpdateAnswer:
        return m.UpdateAnswer(phase=self.phase, message=f"{request.reason} by {request.by}")

    @pause.validator
    def _may_pause(self, request: m.PauseRequest) -> None:
        if request.reason == "no":
            raise ValueError("cannot pause now")

    @workflow.update
    def cancel(self, request: m.CancelRequest) -> m.UpdateAnswer:
        self.phase = JobPhase(request.reason)
        return m.UpdateAnswer(phase=self.phase)
