"""The SDK: launch a job, look at it, wait for it, tell it what to do.

    async with await Client.connect() as client:
        launched = await client.launch("job.yaml")
        result = await client.wait(launched.job_id)

``SyncClient`` (``everstep.sync_client``) has the same methods without ``await``. Workflows are
reached by name, never by import, so this module works beside any version of the controllers, and
everything here can be done by any other Temporal SDK: the input is the job spec as plain JSON.

Not here: where the server is (``everstep.connect``), what a person sees (``everstep.render``).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.common import (
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import RPCError

from everstep import rpc_errors
from everstep.connect import Places, find_places
from everstep.decide.words import FINAL_PHASES, JobPhase
from everstep.errors import (
    ConfigurationProblem,
    EverstepError,
    JobNotFound,
    Refused,
    SameNameOtherSpec,
    ServerUnreachable,
    Unreachable,
)
from everstep.spec import messages as m
from everstep.spec.base import Message
from everstep.spec.job import JobSpec
from everstep.spec_input import spec_details, spec_hash, spec_summary, to_spec

if TYPE_CHECKING:
    from everstep.sync_client import SyncClient

STATE_ATTRIBUTE = SearchAttributeKey.for_keyword("EverstepState")
SPEC_MEMO = "everstep_spec_sha256"
"""Memo of a started job: the hash of its spec, which tells a repeated launch from another job."""

CONNECT_TIMEOUT = timedelta(seconds=5)
QUERY_TIMEOUT = timedelta(seconds=10)
COURTESY_TIMEOUT = timedelta(seconds=2)
UPDATE_TIMEOUT = timedelta(seconds=20)
TASK_TIMEOUT = timedelta(seconds=2)
"""A controller killed inside a workflow task is replaced after this long."""
WAIT_POLL_S = 1.0

R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Answer of a launch."""

    job_id: str
    workflow_id: str
    already: bool
    """True: a job of this name and this spec was there already; nothing was started."""
    phase: JobPhase | None = None
    """Its phase, where it was there already and could say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One look at a job while waiting for it."""

    status: m.JobStatus | None
    problem: str = ""
    """Why there is no status at the moment (the server or all controllers are away)."""


class Client:
    """Talks to the jobs of one Temporal namespace."""

    def __init__(self, temporal: TemporalClient, places: Places | None = None) -> None:
        """Wrap a connected Temporal client; it needs ``pydantic_data_converter``."""
        self._temporal = temporal
        self._places = places

    @property
    def temporal(self) -> TemporalClient:
        """Temporal's own client, for what is not offered here."""
        return self._temporal

    @classmethod
    async def connect(cls, places: Places | None = None, *, address: str | None = None) -> Self:
        """Connect to the server that ``places`` names (default: looked up like the CLI does).

        Raises:
            ServerUnreachable: it does not answer.
            ConfigurationProblem: no address is known.
        """
        where = places or find_places(temporal=address)
        if where.temporal is None:
            raise ConfigurationProblem(
                "no Temporal server is known: start `everstep up`, or set --temporal or "
                f"EVERSTEP_TEMPORAL_ADDRESS to HOST:PORT (no up.json in {where.state})"
            )
        options = _connect_options(where)
        try:
            temporal = await TemporalClient.connect(
                where.temporal.value,
                data_converter=pydantic_data_converter,
                connect_timeout=CONNECT_TIMEOUT,
                runtime=_quiet_runtime(),
                **options,
            )
        except (RuntimeError, ValueError) as error:
            raise ServerUnreachable(
                f"the Temporal server does not answer ({where.describe_temporal()}): "
                f"{rpc_errors.core_reason(error)}"
            ) from None
        return cls(temporal, where)

    @staticmethod
    def sync(places: Places | None = None, *, address: str | None = None) -> SyncClient:
        """The same client for code without an event loop."""
        from everstep.sync_client import SyncClient

        return SyncClient(places, address=address)

    async def __aenter__(self) -> Self:
        """Nothing to open; see ``close``."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """See ``close``."""
        await self.close()

    async def close(self) -> None:
        """Let the SDK's threads come to rest (a program that ends at once may crash at exit)."""
        from everstep.short_lived import REST_BEFORE_CLOSE_S

        await asyncio.sleep(REST_BEFORE_CLOSE_S)

    # --- launching -----------------------------------------------------------------------------

    async def launch(
        self, spec: JobSpec | Mapping[str, Any] | str | Path, *, adopt: bool = False
    ) -> Launched:
        """Start a job. The same spec launched twice is an answer, not two jobs.

        Args:
            spec: a ``JobSpec``, its JSON as a mapping, or the path of a YAML file.
            adopt: start a workflow although one of this name ended before, or was lost with
                Temporal's database; it takes up the run that the ledger holds open.

        Raises:
            SameNameOtherSpec: a job of this name exists with another spec.
            ConfigurationProblem: the spec is not valid, or the namespace was not prepared.
        """
        job = await asyncio.to_thread(to_spec, spec)
        workflow_id = m.job_workflow_id(job.name)
        if await self._start(job, workflow_id, anew=adopt):
            return Launched(job_id=job.name, workflow_id=workflow_id, already=False)
        # An earlier start under this name whose input was refused was never a job.
        if await self._was_refused(workflow_id) and await self._start(job, workflow_id, anew=True):
            return Launched(job_id=job.name, workflow_id=workflow_id, already=False)
        return await self._found(job, workflow_id)

    async def _start(self, job: JobSpec, workflow_id: str, *, anew: bool) -> bool:
        """Start the workflow; False: one of this id is there (``anew``: one that still runs)."""
        try:
            await self._temporal.start_workflow(
                m.TRAINING_JOB,
                job.model_dump(mode="json", exclude_defaults=True),
                id=workflow_id,
                task_queue=m.TASK_QUEUE,
                task_timeout=TASK_TIMEOUT,
                # FAIL, because USE_EXISTING would not tell a job that was there from a new one.
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                id_reuse_policy=(
                    WorkflowIDReusePolicy.ALLOW_DUPLICATE
                    if anew
                    else WorkflowIDReusePolicy.REJECT_DUPLICATE
                ),
                memo={SPEC_MEMO: spec_hash(job)},
                search_attributes=TypedSearchAttributes(
                    [SearchAttributePair(STATE_ATTRIBUTE, JobPhase.VALIDATING.value)]
                ),
                static_summary=spec_summary(job),
                static_details=spec_details(job),
                rpc_timeout=UPDATE_TIMEOUT,
            )
        except WorkflowAlreadyStartedError:
            return False
        except rpc_errors.SDK_ERRORS as error:
            raise rpc_errors.translate(error, job.name) from None
        return True

    async def _was_refused(self, workflow_id: str) -> bool:
        """Whether the newest workflow of this id ended because its input was no valid job."""
        handle = self._temporal.get_workflow_handle(workflow_id)
        try:
            description = await handle.describe(rpc_timeout=QUERY_TIMEOUT)
            if description.status is not WorkflowExecutionStatus.FAILED:
                return False
            await handle.result(rpc_timeout=QUERY_TIMEOUT)
        except WorkflowFailureError as error:
            return rpc_errors.input_was_refused(error)
        except RPCError:
            return False
        return False

    async def adopt(self, job_id: str) -> Launched:
        """Start a workflow for a job that the ledger knows, with its stored spec."""
        if self._places is None:
            raise ConfigurationProblem("adopting a job needs the ledger: give `places`")
        from everstep.ledger_reader import read_job_spec

        spec = await asyncio.to_thread(read_job_spec, self._places.require_ledger(), job_id)
        return await self.launch(spec, adopt=True)

    async def _found(self, job: JobSpec, workflow_id: str) -> Launched:
        """The answer to a launch that found a job of the same name."""
        there = await self._hash_of(workflow_id)
        if there is not None and there != spec_hash(job):
            raise SameNameOtherSpec(
                f"a job named {job.name!r} exists already with a different spec; choose another "
                f"name (`everstep status {job.name}` shows the one there is)"
            )
        phase: JobPhase | None = None
        try:
            phase = (await self.status(job.name, limit=COURTESY_TIMEOUT)).phase
        except EverstepError:
            # It is there, which is what was asked; its phase is a courtesy.
            phase = None
        return Launched(job_id=job.name, workflow_id=workflow_id, already=True, phase=phase)

    async def _hash_of(self, workflow_id: str) -> str | None:
        """Hash of a job's spec: from its memo, else (a start by another tool) from its input."""
        handle = self._temporal.get_workflow_handle(workflow_id)
        try:
            description = await handle.describe(rpc_timeout=QUERY_TIMEOUT)
            stored = (await description.memo()).get(SPEC_MEMO)
            if isinstance(stored, str):
                return stored
            first = description.raw_description.workflow_execution_info.first_run_id
            origin = self._temporal.get_workflow_handle(workflow_id, run_id=first or None)
            async for event in origin.fetch_history_events(page_size=1):
                started = event.workflow_execution_started_event_attributes
                values = await self._temporal.data_converter.decode(
                    started.input.payloads, [dict[str, Any]]
                )
                return spec_hash(JobSpec.model_validate(values[0]))
        except Exception:  # noqa: BLE001 - whatever it is, the spec cannot be compared
            return None
        return None

    # --- looking -------------------------------------------------------------------------------

    async def status(self, job_id: str, *, limit: timedelta = QUERY_TIMEOUT) -> m.JobStatus:
        """The job's own answer about where it is."""
        try:
            found: m.JobStatus = await self._handle(job_id).query(
                "status", result_type=m.JobStatus, rpc_timeout=limit
            )
            return found
        except rpc_errors.SDK_ERRORS as error:
            raise rpc_errors.translate(error, job_id) from None

    async def wait(
        self,
        job_id: str,
        on_sight: Callable[[Sighting], None] | None = None,
        *,
        timeout_s: float | None = None,
        poll_s: float = WAIT_POLL_S,
    ) -> m.JobResult:
        """Wait until the job has ended; outages of server and controllers are waited out.

        Args:
            job_id: the job's name.
            on_sight: called with every look at the job in between.
            timeout_s: give up after this long.
            poll_s: time between two looks.

        Raises:
            JobFailed: its workflow ended without a result.
            TimeoutError: ``timeout_s`` has passed; the job goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        result = asyncio.create_task(self._result(job_id))
        try:
            while not result.done():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"{job_id} has not ended after {timeout_s:g} s; it goes on")
                if on_sight is not None:
                    on_sight(await self._look(job_id))
                await asyncio.wait({result}, timeout=poll_s if left is None else min(poll_s, left))
            return result.result()
        finally:
            result.cancel()
            await asyncio.gather(result, return_exceptions=True)

    async def _look(self, job_id: str) -> Sighting:
        try:
            return Sighting(status=await self.status(job_id))
        except (Unreachable, JobNotFound, Refused) as error:
            return Sighting(status=None, problem=str(error))

    async def _result(self, job_id: str) -> m.JobResult:
        while True:
            handle = self._temporal.get_workflow_handle(
                m.job_workflow_id(job_id), result_type=m.JobResult
            )
            try:
                result: m.JobResult = await handle.result()
                return result
            except WorkflowFailureError as error:
                raise rpc_errors.ended_without_result(error, job_id) from None
            except rpc_errors.SDK_ERRORS as error:
                translated = rpc_errors.translate(error, job_id)
                if not isinstance(translated, Unreachable):
                    raise translated from None
            await asyncio.sleep(WAIT_POLL_S)

    async def incidents(self, job_id: str) -> tuple[m.IncidentSummary, ...]:
        """The job's most recent incidents, newest first. All of them are in the ledger."""
        return (await self.status(job_id)).incidents

    async def history(self, job_id: str) -> str:
        """The workflow's recorded history as JSON (for replay tests and bug reports)."""
        try:
            return (await self._handle(job_id).fetch_history()).to_json()
        except rpc_errors.SDK_ERRORS as error:
            raise rpc_errors.translate(error, job_id) from None

    # --- telling -------------------------------------------------------------------------------

    async def pause(self, job_id: str, *, reason: str = "", by: str = "") -> m.UpdateAnswer:
        """Stop the ranks and keep the machines until ``resume``."""
        return await self._update(job_id, "pause", m.PauseRequest(reason=reason, by=by))

    async def resume(self, job_id: str, *, note: str = "", by: str = "") -> m.UpdateAnswer:
        """Go on after a pause, or after a person has looked at it."""
        return await self._update(job_id, "resume", m.ResumeRequest(note=note, by=by))

    async def cancel(self, job_id: str, *, reason: str = "", by: str = "") -> m.UpdateAnswer:
        """End the job."""
        return await self._update(job_id, "cancel", m.CancelRequest(reason=reason, by=by))

    async def roll(self, job_id: str, *, reason: str = "") -> None:
        """Ask the workflow to continue as new at its next safe point."""
        try:
            await self._handle(job_id).signal(
                "roll", m.RollRequest(reason=reason), rpc_timeout=QUERY_TIMEOUT
            )
        except rpc_errors.SDK_ERRORS as error:
            raise rpc_errors.translate(error, job_id) from None

    async def _update(self, job_id: str, name: str, request: Message) -> m.UpdateAnswer:
        # One id for all tries, so that a repeat after a lost answer is answered, not done again.
        update_id = uuid.uuid4().hex
        for last in (False, False, True):
            try:
                answer: m.UpdateAnswer = await self._handle(job_id).execute_update(
                    name,
                    request,
                    id=update_id,
                    result_type=m.UpdateAnswer,
                    rpc_timeout=UPDATE_TIMEOUT,
                )
                return answer
            except rpc_errors.SDK_ERRORS as error:
                # The workflow may continue as new between accepting and answering.
                if last or not rpc_errors.continued_as_new(error):
                    raise await self._why(rpc_errors.translate(error, job_id), job_id) from None
        raise AssertionError("unreachable: the last try returns or raises")

    async def _why(self, error: Exception, job_id: str) -> Exception:
        """Say "it has ended already" where the server says only "not found"."""
        if not isinstance(error, JobNotFound):
            return error
        try:
            description = await self._handle(job_id).describe(rpc_timeout=QUERY_TIMEOUT)
            if description.status is WorkflowExecutionStatus.RUNNING:
                return error
            status = await self.status(job_id)
        except Exception:  # noqa: BLE001 - the first error stands
            return error
        phase = status.phase if status.phase in FINAL_PHASES else "ended"
        return Refused(f"{job_id} has {phase} already; there is nothing to do")

    def _handle(self, job_id: str) -> WorkflowHandle[Any, Any]:
        return self._temporal.get_workflow_handle(m.job_workflow_id(job_id))


@lru_cache(maxsize=1)
def _quiet_runtime() -> Runtime:
    """The SDK's core without its own log lines: outages are told in our words."""
    quiet = LoggingConfig(TelemetryFilter(core_level="ERROR", other_level="ERROR"))
    return Runtime(telemetry=TelemetryConfig(logging=quiet), worker_heartbeat_interval=None)


def _connect_options(places: Places) -> dict[str, Any]:
    """Namespace, TLS and API key, as Temporal's own client configuration has them."""
    from temporalio.envconfig import ClientConfig

    options: dict[str, Any] = {}
    file = places.config_file
    # A local `everstep up` speaks plain gRPC whatever a configuration file says about others.
    local = places.up is not None and places.temporal is not None
    if not (local and places.temporal and places.temporal.value == places.up.temporal):  # type: ignore[union-attr]
        try:
            options.update(
                ClientConfig.load_client_connect_config(config_file=str(file) if file else None)
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigurationProblem(
                f"{file or 'the Temporal configuration'}: {rpc_errors.short(error)}"
            ) from None
        options.pop("target_host", None)
    options["namespace"] = places.namespace.value
    return options
