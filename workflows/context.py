"""What every part of the job's state machine needs: its state, its keys, its page, its side jobs.

``JobContext`` is the only mutable thing in a ``TrainingJob``. It hands out idempotency keys, keeps
track of activities and rounds that run beside the main line (records, incident rounds), and shows
the state. Not here: any decision.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from temporalio.common import SearchAttributeKey
    from temporalio.exceptions import ActivityError, ChildWorkflowError, is_cancelled_exception

    from activities import contracts
    from everstep.decide.ettr import RunTimes, productive_intervals
    from everstep.decide.words import JobPhase, RunPhase, Symptom
    from everstep.spec import messages as m
    from everstep.spec.policy import PolicySnapshot
    from workflows import page
    from workflows.state import RUN_TIMES_MAX, JobState, Wish

STATE_ATTRIBUTE = SearchAttributeKey.for_keyword("EverstepState")
SYMPTOM_ATTRIBUTE = SearchAttributeKey.for_keyword("EverstepSymptom")
CODE_ATTRIBUTE = SearchAttributeKey.for_keyword("EverstepCodeVersion")
SHARD_SIZE = 256
"""Machines that one activity drives (design section 3)."""


class Cancelled(Exception):
    """A person asked to cancel while something was being waited for."""


def cancelled(error: BaseException) -> bool:
    """True for the job's own cancellation; a person can also cancel one round of an incident."""
    return is_cancelled_exception(error) and workflow.cancellation_reason() is not None


class JobContext:
    """The job's state and the few verbs that all parts share."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self.rendezvous: tuple[str, int, str] = ("", 0, "")
        """Address, port and checkpoint directory of the run that is being started."""
        self.entered_at: datetime | None = None
        self.ending = False
        """True once the job is being closed: what was cancelled then must not stop the closing."""
        self.look: Any = None
        """The look at the present run's stacks that goes on beside, if any."""
        self._beside: list[Any] = []
        self._shown: dict[str, str] = {}

    # --- keys and time

    @property
    def policy(self) -> PolicySnapshot:
        """The policy as the job saw it last.

        Raises:
            RuntimeError: before ``register_job`` has answered (a bug; parks the workflow task).
        """
        if self.state.policy is None:
            raise RuntimeError("the policy is not read yet")
        return self.state.policy

    def key(self) -> str:
        """A new idempotency key.

        It holds the Temporal run id, so that a reset or relaunched workflow never gets an old one's
        stored answer.
        """
        self.state.requests += 1
        return f"{workflow.info().run_id}/{self.state.requests}"

    def shards(self) -> list[tuple[m.MachineRef, ...]]:
        """The run's machines in shards, by group rank."""
        machines = self.state.run.machines if self.state.run else ()
        return [machines[i : i + SHARD_SIZE] for i in range(0, len(machines), SHARD_SIZE)]

    # --- things that run beside the main line

    def beside(self, handle: Any) -> None:
        """Keep track of an activity or round whose result nobody waits for now."""
        self._beside = [h for h in self._beside if not h.done()]
        self._beside.append(handle)

    def nothing_beside(self) -> bool:
        """True when everything that ran beside has ended: needed before continue-as-new."""
        return all(h.done() for h in self._beside)

    async def drain(self) -> None:
        """Wait for everything beside; its failures are its own (they are in the history)."""
        while self._beside:  # what ends may begin something else
            try:
                await self._beside.pop(0)
            except (ActivityError, ChildWorkflowError) as error:
                if cancelled(error) and not self.ending:
                    raise
                workflow.logger.warning("a side job failed", extra={"error": str(error)[:300]})

    def end_look(self) -> None:
        """The run that is looked at ends."""
        if self.look is not None and not self.look.done():
            self.look.cancel()
        self.look = None

    async def unless_cancelled(self, handle: Any) -> Any:
        """Wait for ``handle``, or cancel it and unwind when a person wants the job ended.

        Raises:
            Cancelled: the wish came first.
        """
        await workflow.wait_condition(lambda: handle.done() or self.state.wish is Wish.CANCEL)
        if not handle.done():
            handle.cancel()
            raise Cancelled
        return await handle

    async def wait(
        self, until: Callable[[], bool], *, timeout_s: float | None, summary: str
    ) -> bool:
        """Wait for a condition for a time (None: for ever); True when it came true."""
        try:
            await workflow.wait_condition(until, timeout=timeout_s, timeout_summary=summary)
        except TimeoutError:
            return False
        return True

    # --- showing and recording

    def enter(self, phase: JobPhase, reason: str) -> None:
        """Change the phase, with the reason a person sees."""
        self.state.phase = phase
        self.entered_at = workflow.now()
        self.state.reason = reason[:600]
        self.show()

    def show(self) -> None:
        """Refresh the page and the search attributes."""
        state = self.state
        workflow.set_current_details(
            page.job_page(state, namespace=workflow.info().namespace, ettr=self.ettr())
        )
        symptom = state.incident.symptom if state.incident else None
        wanted = {
            "state": state.phase.value,
            "symptom": symptom or "",
            "code": state.code_version or "",
        }
        if wanted == self._shown:
            return
        self._shown = wanted
        workflow.upsert_search_attributes(
            [
                STATE_ATTRIBUTE.value_set(state.phase.value),
                SYMPTOM_ATTRIBUTE.value_set(symptom)
                if isinstance(symptom, Symptom)
                else SYMPTOM_ATTRIBUTE.value_unset(),
                CODE_ATTRIBUTE.value_set(state.code_version)
                if state.code_version
                else CODE_ATTRIBUTE.value_unset(),
            ]
        )

    def record(
        self, phases: dict[RunPhase, datetime] | None = None, *, step: int | None = None
    ) -> None:
        """Store the job's phase, and boundaries of the present run, beside the main line."""
        run = self.state.run
        boundaries = tuple(
            m.RecordPhase(run_id=run.run_id, phase=phase, at=at, step=step)
            for phase, at in (phases or {}).items()
            if run is not None
        )
        names = ", ".join(phases or ()) or self.state.phase.value
        self.beside(
            contracts.schedule(
                contracts.record_progress,
                m.RecordProgress(
                    job_id=self.state.job_id,
                    phase=self.state.phase,
                    phases=boundaries,
                    at=self.entered_at or workflow.now(),
                    code_version=self.state.code_version,
                ),
                summary=f"record {names}",
            )
        )

    def tell(
        self, key: str, severity: Literal["warning", "needs_person"], reason: str = ""
    ) -> None:
        """Tell people what state the job is in, beside the main line; once for each ``key``."""
        reason = reason or self.state.reason
        self.beside(
            contracts.schedule(
                contracts.notify,
                m.Notify(
                    key=f"{self.state.job_id}-{key}",
                    severity=severity,
                    job_id=self.state.job_id,
                    text=f"{self.state.job_id}: {reason}"[:600],
                ),
                summary=f"tell people: {reason}"[:200],
            )
        )

    def ettr(self) -> float | None:
        """Productive time / wall-clock time so far, 0..1; None before the first step."""
        state, now_s = self.state, workflow.now().timestamp()
        current = self._times()
        runs = state.effort.runs + ((current,) if current else ())
        wall_s = now_s - state.created_at.timestamp()
        intervals = productive_intervals(runs, now_s)
        productive_s = state.effort.folded_s + sum(end - begin for begin, end in intervals)
        if wall_s <= 0 or productive_s <= 0:
            return None
        return min(1.0, productive_s / wall_s)

    def _times(self, *, trouble_s: float | None = None, step: int | None = None) -> RunTimes | None:
        run = self.state.run
        if run is None or run.first_step_at is None:
            return None
        return RunTimes(
            opened_s=run.opened_at.timestamp(),
            first_step_s=run.first_step_at.timestamp(),
            trouble_s=trouble_s,
            restored_step=run.restore.step if run.restore else None,
            last_step=step,
        )

    def note_trouble(self, step: int | None) -> None:
        """Close the books on a run that stopped making progress now."""
        effort = self.state.effort
        ended = self._times(trouble_s=workflow.now().timestamp(), step=step)
        if ended is None or self.state.run is None:
            return
        self.state.run = self.state.run.model_copy(update={"first_step_at": None})
        runs = (*effort.runs, ended)
        for old in runs[:-RUN_TIMES_MAX]:
            effort.folded_s += sum(e - b for b, e in productive_intervals((old,), old.opened_s))
        effort.runs = runs[-RUN_TIMES_MAX:]
