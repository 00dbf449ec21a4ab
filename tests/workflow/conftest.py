"""The real server with time skipping, one a session, and a worker with a scripted fleet a test.

Not the separate time-skipping test server: that one loses a workflow task now and then, when an
activity is cancelled while its completion is arriving, and then keeps its clock locked.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowHandle
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    Worker,
)

from activities import contracts
from everstep.spec import messages as m
from everstep.spec.load import load_policy
from everstep.spec.policy import Policy
from tests.support.server import dev_server
from tests.workflow.world import World
from workers.embedded import SERVER_FLAGS
from workers.runtime import workflow_runner
from workflows.incident import Incident
from workflows.training_job import TrainingJob


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def env() -> AsyncIterator[WorkflowEnvironment]:
    """The embedded server as ``everstep up`` starts it, and its time skips."""
    skips = ["--dynamic-config-value", "frontend.WorkflowTimeSkippingEnabled=true"]
    async with await dev_server(
        [*SERVER_FLAGS, *skips], time_skipping=True, data_converter=pydantic_data_converter
    ) as environment:
        yield environment


@pytest.fixture(scope="session")
def default_policy() -> Policy:
    """The packaged policy."""
    return load_policy(None).policy


async def ended(handle: Any) -> Any:
    """The job's result, soon."""
    return await asyncio.wait_for(handle.result(), 20)


async def ask(handle: Any, update: str, request: Any) -> m.UpdateAnswer:
    """Send an update."""
    answer: m.UpdateAnswer = await handle.execute_update(
        update, request, result_type=m.UpdateAnswer
    )
    return answer


@dataclass
class Bench:
    """One test's job: its world, and how to start and ask it."""

    client: Client
    env: WorkflowEnvironment
    world: World
    name: str
    queue: str

    def spec(self, **changes: Any) -> dict[str, Any]:
        """A job of two machines with two ranks each."""
        return {
            "name": self.name,
            "command": ["python", "train.py"],
            "machines": 2,
            "ranks_per_machine": 2,
            **changes,
        }

    async def start(self, spec: dict[str, Any] | None = None) -> WorkflowHandle[Any, Any]:
        """Start the job as raw JSON, as any SDK would."""
        return await self.client.start_workflow(
            m.TRAINING_JOB,
            spec or self.spec(),
            id=m.job_workflow_id(self.name),
            task_queue=m.TASK_QUEUE,
            result_type=m.JobResult,
        )

    async def status(self, handle: WorkflowHandle[Any, Any]) -> m.JobStatus:
        """The job's own account."""
        status: m.JobStatus = await handle.query("status", result_type=m.JobStatus)
        return status

    async def until(
        self, condition: Callable[[], Awaitable[bool] | bool], *, limit: int = 400
    ) -> None:
        """Wait for a state, in real time, with a limit."""
        for _ in range(limit):
            answer = condition()
            if await answer if not isinstance(answer, bool) else answer:
                return
            await asyncio.sleep(0.025)
        raise AssertionError("the state was never reached")

    async def until_cancel_requested(self, handle: WorkflowHandle[Any, Any]) -> None:
        """Wait until the workflow itself has seen that it was cancelled."""

        async def seen() -> bool:
            events = [e async for e in handle.fetch_history_events()]
            asked = next((e.event_id for e in events if _is(e, "CANCEL_REQUESTED")), None)
            return asked is not None and any(
                e.event_id > asked and _is(e, "WORKFLOW_TASK_COMPLETED") for e in events
            )

        await self.until(seen)

    async def until_phase(self, handle: WorkflowHandle[Any, Any], *phases: str) -> m.JobStatus:
        """Wait until the job is in one of the phases."""

        async def there() -> bool:
            return (await self.status(handle)).phase in phases

        await self.until(there)
        return await self.status(handle)


def _is(event: HistoryEvent, kind: str) -> bool:
    return EventType.Name(event.event_type).endswith(kind)


class OnlyMine(Interceptor):
    """Keeps what an earlier test left on the shared queues away from this test's script.

    And fails the activities that the script says fail for good.
    """

    def __init__(self, name: str, world: World) -> None:
        self._name, self._world = name, world

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:  # noqa: A002 - the SDK's name
        name, world = self._name, self._world

        class Inbound(ActivityInboundInterceptor):
            async def execute_activity(self, input: ExecuteActivityInput) -> Any:  # noqa: A002 - the SDK's name
                if name not in (activity.info().workflow_id or ""):
                    raise ApplicationError("of another test", non_retryable=True)
                kind = activity.info().activity_type
                world.counts["all"] += 1
                if kind in world.failing:
                    world.counts[kind] += 1
                    raise ApplicationError(
                        world.failing[kind], type=contracts.PERMANENT_FAILURE, non_retryable=True
                    )
                return await super().execute_activity(input)

        return Inbound(next)


@pytest.fixture
def world(default_policy: Policy) -> World:
    """Four machines with two ranks each; modules may have another one."""
    return World(default_policy)


@pytest_asyncio.fixture(loop_scope="session")
async def bench(env: WorkflowEnvironment, world: World) -> AsyncIterator[Bench]:
    """A worker for both queues with a scripted fleet."""
    name = f"t{uuid.uuid4().hex[:10]}"
    async with AsyncExitStack() as stack:
        for queue in (m.TASK_QUEUE, m.WATCH_QUEUE):
            await stack.enter_async_context(
                Worker(
                    env.client,
                    task_queue=queue,
                    workflows=[TrainingJob, Incident] if queue == m.TASK_QUEUE else [],
                    activities=world.activities(),
                    workflow_runner=workflow_runner(),
                    interceptors=[OnlyMine(name, world)],
                )
            )
        yield Bench(env.client, env, world, name, m.TASK_QUEUE)
