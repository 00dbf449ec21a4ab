"""``TrainingJob``: one per job, for months; the recovery state machine.

The main loop looks at the state, does the one thing that follows from it, and writes the state. It
can be killed at any await: history replay brings it back to the same place, and every activity it
repeats is idempotent by key. Parts: ``starting``, ``watching``, ``recovering``; memory: ``state``.

Not here: I/O of any kind, and knowledge of what a failure means (``everstep.decide``).
"""

from __future__ import annotations

import asyncio
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from temporalio.exceptions import (
        ActivityError,
        ApplicationError,
        ChildWorkflowError,
    )

    from activities import contracts
    from everstep.decide.ladder import person_resumed
    from everstep.decide.words import (
        FINAL_PHASES,
        JobPhase,
        RunOutcome,
    )
    from everstep.spec import messages as m
    from everstep.spec.job import JobSpec
    from workflows import incidents, progress, recovering, starting
    from workflows.context import Cancelled, JobContext, cancelled
    from workflows.intake import CONTINUED, state_from
    from workflows.state import JobState, NextRun, Wish
    from workflows.watching import Watches

ALL_FINISHED = "all ranks finished"
HISTORY_EVENTS_MAX = 1_000
"""Continue as new beyond this: replay runs at 3,500 events/s against a 2 s task timeout."""


@workflow.defn(name=m.TRAINING_JOB)
class TrainingJob:
    """One training job under control, across all of its runs."""

    @workflow.init
    def __init__(self, raw: Any) -> None:
        self._invalid: ApplicationError | None = None
        try:
            state = state_from(raw)
        except ApplicationError as error:
            # Raised in run(): only there does it end the workflow; here it would park the task.
            self._invalid = error
            state = JobState(
                spec=JobSpec(name="invalid", command=("false",)), created_at=workflow.now()
            )
        self._context = JobContext(state)

    # --- the main loop

    @workflow.run
    async def run(self, raw: Any) -> m.JobResult:  # noqa: ARG002 - taken by __init__
        """Run the job until it succeeds, is cancelled, or gives up."""
        if self._invalid is not None:
            raise self._invalid
        try:
            self._context.show()
            if self._context.state.continued == 0:
                await self._register()
            while True:
                result = await self._guarded()
                if result is not None:
                    return result
        except (asyncio.CancelledError, ActivityError, ChildWorkflowError) as error:
            if not cancelled(error):
                raise
            # Temporal's own cancellation (UI, CLI): same clean-up, then end as cancelled.
            await self._finish(JobPhase.CANCELLED, "cancelled through Temporal")
            raise asyncio.CancelledError from None

    async def _guarded(self) -> m.JobResult | None:
        """One turn of the loop; an activity that fails for good leaves the job with a person."""
        try:
            return await self._next()
        except Cancelled:
            return None  # the wish is the next thing to be taken up
        except (ActivityError, ChildWorkflowError) as error:
            if cancelled(error):
                raise
            why = str(error.cause or error)[:500]
            self._context.enter(JobPhase.WAITING_FOR_PERSON, f"Everstep cannot go on: {why}")
            self._context.record()
            self._context.tell(f"cannot-go-on-{self._context.key()}", "needs_person")
            return None

    async def _next(self) -> m.JobResult | None:
        """Do the one thing that follows from the state; a result ends the job."""
        state = self._context.state
        if state.wish is Wish.CANCEL:
            state.wish = None  # if it cannot be carried out, a person is told, and asks again
            return await self._finish(JobPhase.CANCELLED, self._why_cancelled())
        waiting = state.phase in (JobPhase.PAUSED, JobPhase.WAITING_FOR_PERSON)
        if state.wish is Wish.RESUME and not waiting:
            state.wish = None  # it overtook the pause it was meant for
        if state.phase is JobPhase.STOPPING:
            return await self._finish(JobPhase.FAILED, state.reason)
        if waiting:
            await self._wait_for_person()
        elif state.wish is Wish.PAUSE:
            await self._pause()
        elif state.run is None:
            return await self._start_next_run()
        else:
            return await self._follow()
        return None

    async def _register(self) -> None:
        context, state = self._context, self._context.state
        registered = await contracts.call(
            contracts.register_job,
            m.RegisterJob(
                job_id=state.job_id,
                workflow_id=workflow.info().workflow_id,
                temporal_run_id=workflow.info().run_id,
                spec=state.spec,
            ),
            summary=f"enter job {state.job_id} into the ledger",
        )
        if registered.problem:
            raise ApplicationError(
                registered.problem, type=contracts.INVALID_JOB_SPEC, non_retryable=True
            )
        state.policy = registered.policy
        state.created_at = registered.created_at
        state.incidents_total = registered.incidents_total
        live = registered.live_run
        if live is None:
            return
        # The ledger holds a run of this job: Temporal's database was lost, or somebody ended the
        # workflow. The run is adopted; if it has ended meanwhile, the watch will say so.
        state.run = m.RunRef(
            run_id=live.run_id,
            generation=live.generation,
            machines=live.machines,
            code_version=live.code_version,
            code_path=live.code_path,
            restore=live.restore,
            start_reason="adopted",
            opened_at=live.opened_at,
            first_step_at=live.first_step_at,
        )
        state.code_version, state.code_path = live.code_version, live.code_path
        state.runs_total = live.generation
        context.enter(
            JobPhase.RUNNING, f"adopted run {live.generation}, which the ledger holds open"
        )

    # --- starting and following

    async def _start_next_run(self) -> m.JobResult | None:
        context = self._context
        await self._roll_if_due()
        if not await starting.open_run(context):
            return None
        problems = await starting.start_run(context)
        return await self._recover(problems) if problems else None

    async def _recover(self, trouble: tuple[m.ObservationRecord, ...]) -> m.JobResult | None:
        finished = await recovering.recover(self._context, trouble)
        return await self._finish(JobPhase.SUCCEEDED, ALL_FINISHED) if finished else None

    async def _follow(self) -> m.JobResult | None:
        """Follow the run until it ends or something has to be done first."""
        context, state = self._context, self._context.state
        watches = Watches(context)
        while True:
            watches.ensure()
            waited = await context.wait(
                lambda: watches.any_done() or state.wish is not None or self._roll_due(),
                timeout_s=watches.patience_s(),
                summary="watch the run",
            )
            results = await watches.collect()
            if not waited:
                results.append(progress.early_exit())
            if not results:
                results = await watches.cancel()
            trouble = tuple(o for r in results if r.kind == "trouble" for o in r.observations)
            if trouble:
                progress.note(context, results)
                await watches.cancel()
                return await self._recover(trouble)
            progress.note(context, results)
            if len(watches.finished) == len(context.shards()):
                return await self._finish(JobPhase.SUCCEEDED, ALL_FINISHED)
            if state.wish is not None and not watches.handles:
                return None
            if not watches.handles:
                await self._roll_if_due()

    # --- people

    async def _pause(self) -> None:
        context, state = self._context, self._context.state
        note, state.wish, state.wish_note = state.wish_note, None, ""
        run = state.run
        if run is not None:
            context.enter(JobPhase.STOPPING, "stopping for a pause")
            context.note_trouble(state.progress.step)
            reports = await recovering.stop_run(context, "paused", planned=True)
            left = [r.machine_id for r in reports if not r.reachable or not r.teardown_clean]
            if left:
                workflow.logger.warning("not stopped on all machines", extra={"machines": left})
            state.next_run = NextRun(
                start_reason="resume", keep=tuple(ref.machine_id for ref in run.machines)
            )
            recovering.close_run(context, RunOutcome.STOPPED)
        context.enter(JobPhase.PAUSED, note or "paused")
        context.record()

    async def _wait_for_person(self) -> None:
        context, state = self._context, self._context.state
        context.show()
        await workflow.wait_condition(lambda: state.wish is not None or state.roll)
        await self._roll_if_due()
        if state.wish is Wish.RESUME:
            state.wish, state.wish_note = None, ""
            if state.phase is JobPhase.WAITING_FOR_PERSON:
                state.ladder = person_resumed(state.ladder)
            context.enter(JobPhase.STARTING, "resumed by a person")
        elif state.wish is Wish.PAUSE:
            state.wish = None

    def _why_cancelled(self) -> str:
        note = self._context.state.wish_note
        return f"cancelled: {note}" if note else "cancelled"

    # --- ends and new beginnings

    async def _finish(self, phase: JobPhase, reason: str) -> m.JobResult:
        """Stop what runs, give the machines back, close the books."""
        context, state = self._context, self._context.state
        context.ending = True
        if phase is not JobPhase.SUCCEEDED:
            context.enter(JobPhase.STOPPING, reason)
        if state.run is not None:
            context.note_trouble(state.progress.step)
            ettr = context.ettr()
            if phase is not JobPhase.SUCCEEDED:
                await recovering.stop_run(context, reason, planned=True)
            recovering.close_run(
                context,
                RunOutcome.SUCCEEDED if phase is JobPhase.SUCCEEDED else RunOutcome.STOPPED,
            )
        else:
            ettr = context.ettr()
        if state.incident is not None and phase is JobPhase.SUCCEEDED:
            incidents.stable(context)
        elif state.incident is not None:
            incidents.gave_up(context, reason)
        await context.drain()
        context.enter(phase, reason)
        await contracts.call(
            contracts.close_job,
            m.CloseJob(
                job_id=state.job_id,
                phase=phase,
                reason=reason[:600],
                closed_at=workflow.now(),
                ettr=ettr,
            ),
            summary=f"close the job: {phase}",
        )
        await workflow.wait_condition(workflow.all_handlers_finished)
        if phase is JobPhase.FAILED:
            raise ApplicationError(reason, type="JobFailed", non_retryable=True)
        return m.JobResult(
            job_id=state.job_id,
            phase=phase,
            reason=reason[:600],
            runs=state.runs_total,
            incidents=state.incidents_total,
            final_step=state.progress.step,
            ettr=ettr,
        )

    def _roll_due(self) -> bool:
        """Asked for or due, and nothing beside that a new beginning would cut off."""
        due = (
            self._context.state.roll
            or workflow.info().get_current_history_length() > HISTORY_EVENTS_MAX
        )
        return due and self._context.nothing_beside()

    async def _roll_if_due(self) -> None:
        """Continue as new if due: called only where no watch and no command is in flight."""
        state = self._context.state
        if not (state.roll or workflow.info().get_current_history_length() > HISTORY_EVENTS_MAX):
            return
        await self._context.drain()
        await workflow.wait_condition(workflow.all_handlers_finished)
        if state.wish is Wish.CANCEL:
            return
        state.roll = False
        state.continued += 1
        workflow.continue_as_new({CONTINUED: state.model_dump(mode="json")})

    # --- messages

    @workflow.query
    def status(self) -> m.JobStatus:
        """The job as it stands."""
        state, run = self._context.state, self._context.state.run
        return m.JobStatus(
            job_id=state.job_id,
            phase=state.phase,
            reason=state.reason,
            run_id=run.run_id if run else None,
            generation=run.generation if run else state.runs_total,
            code_version=state.code_version,
            machines=tuple(ref.machine_id for ref in run.machines) if run else (),
            world_size=state.spec.world_size,
            progress=state.progress,
            restored_step=run.restore.step if run and run.restore else None,
            incidents_total=state.incidents_total,
            open_incident=state.incident.incident_id if state.incident else None,
            incidents=state.recent,
            ettr=self._context.ettr(),
            created_at=state.created_at,
            policy_hash=state.policy.hash if state.policy else None,
            unreachable=state.unreachable,
        )

    @workflow.update
    def pause(self, request: m.PauseRequest) -> m.UpdateAnswer:
        """Stop the ranks at once, keep the machines, wait for ``resume``."""
        return self._wish(Wish.PAUSE, request.reason, request.by)

    @pause.validator
    def _may_pause(self, request: m.PauseRequest) -> None:  # noqa: ARG002
        self._refuse_if_cancelled()
        phase = self._context.state.phase
        if phase in FINAL_PHASES or phase in (
            JobPhase.PAUSED,
            JobPhase.WAITING_FOR_PERSON,
            JobPhase.STOPPING,
        ):
            raise ValueError(f"cannot pause a job that is {phase.value}")

    @workflow.update
    def resume(self, request: m.ResumeRequest) -> m.UpdateAnswer:
        """Go on after a pause, or after a person has looked at the job."""
        return self._wish(Wish.RESUME, request.note, request.by)

    @resume.validator
    def _may_resume(self, request: m.ResumeRequest) -> None:  # noqa: ARG002
        self._refuse_if_cancelled()
        state = self._context.state
        waiting = state.phase in (JobPhase.PAUSED, JobPhase.WAITING_FOR_PERSON)
        if not waiting and state.wish is not Wish.PAUSE:
            raise ValueError(
                f"nothing to resume: the job is {state.phase.value}, "
                "only a paused job or one that waits for a person can be resumed"
            )

    @workflow.update
    def cancel(self, request: m.CancelRequest) -> m.UpdateAnswer:
        """Stop the ranks, give the machines back, end the job."""
        return self._wish(Wish.CANCEL, request.reason, request.by)

    @cancel.validator
    def _may_cancel(self, request: m.CancelRequest) -> None:  # noqa: ARG002
        phase = self._context.state.phase
        if phase in FINAL_PHASES:
            raise ValueError(f"the job has ended already: {phase.value}")

    @workflow.signal
    def roll(self, request: m.RollRequest) -> None:  # noqa: ARG002
        """Continue as new at the next safe point."""
        self._context.state.roll = True

    def _refuse_if_cancelled(self) -> None:
        if self._context.state.wish is Wish.CANCEL:
            raise ValueError("the job is being cancelled")

    def _wish(self, wish: Wish, note: str, by: str) -> m.UpdateAnswer:
        state = self._context.state
        state.wish = wish
        state.wish_note = f"{note} (by {by})" if note and by else note or (f"by {by}" if by else "")
        return m.UpdateAnswer(phase=state.phase, message=f"{wish.value} will be taken up now")
