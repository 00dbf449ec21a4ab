"""Failpoints: named the same in every process, struck once, and absent unless asked for."""

from __future__ import annotations

import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from activities import failpoints as hook
from everstep.errors import ConfigurationProblem
from tests.activity.failpoint_workflow import TwoSteps, make_effect
from tests.support.server import dev_server
from workers.failpoints import (
    BRIDGE_ATTRIBUTE,
    BridgeFailpoints,
    FailpointConfig,
    Failpoints,
    failpoint_config,
    wrap_bridge,
)
from workers.runtime import workflow_runner

EXPECTED = [
    "workflow_task:TwoSteps:1:before_completion",
    "workflow_task:TwoSteps:1:after_completion",
    "activity:make_effect:1:before_body",
    "activity:make_effect:1:after_effect",
    "activity:make_effect:1:after_return",
    "workflow_task:TwoSteps:2:before_completion",
    "workflow_task:TwoSteps:2:after_completion",
    "activity:make_effect:2:before_body",
    "activity:make_effect:2:after_effect",
    "activity:make_effect:2:after_return",
    "workflow_task:TwoSteps:3:before_completion",
    "workflow_task:TwoSteps:3:after_completion",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def env() -> AsyncIterator[WorkflowEnvironment]:
    async with await dev_server() as environment:
        yield environment


def recorder(folder: Path) -> Failpoints:
    return Failpoints(
        FailpointConfig(action="record", name=str(folder / "names"), directory=folder)
    )


async def run_two_steps(
    env: WorkflowEnvironment, failpoints: Failpoints, *, cached: int = 1000
) -> int:
    queue = uuid.uuid4().hex
    worker = Worker(
        env.client,
        task_queue=queue,
        workflows=[TwoSteps],
        activities=[make_effect],
        workflow_runner=workflow_runner(),
        interceptors=[failpoints.interceptor()],
        max_cached_workflows=cached,
    )
    failpoints.install([worker])
    try:
        async with worker:
            result: int = await env.client.execute_workflow(
                TwoSteps.run, id=queue, task_queue=queue
            )
            return result
    finally:
        hook.set_hook(None)


@pytest.mark.asyncio(loop_scope="module")
async def test_every_place_is_reached_in_order(env: WorkflowEnvironment, tmp_path: Path) -> None:
    assert await run_two_steps(env, recorder(tmp_path)) == 2
    names = (tmp_path / "names").read_text().split()
    # A completion returns to us when the server has it; what it caused may come first.
    assert sorted(names) == sorted(EXPECTED)
    assert [n for n in names if "after_completion" not in n] == [
        n for n in EXPECTED if "after_completion" not in n
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_replays_are_not_counted_as_tasks(env: WorkflowEnvironment, tmp_path: Path) -> None:
    """Without a cache every task replays all before it; the names stay the same."""
    assert await run_two_steps(env, recorder(tmp_path), cached=0) == 2
    assert sorted((tmp_path / "names").read_text().split()) == sorted(EXPECTED)


@pytest.mark.parametrize("name", ["activity:make_effect:2:after_effect", EXPECTED[5]])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_failpoint_strikes_once_and_only_there(
    env: WorkflowEnvironment, tmp_path: Path, name: str
) -> None:
    struck: list[signal.Signals] = []
    config = FailpointConfig(action="kill", name=name, directory=tmp_path)
    assert await run_two_steps(env, Failpoints(config, struck.append)) == 2
    assert struck == [signal.SIGKILL]
    # Another process, or another job, in the same directory: it has struck already.
    assert await run_two_steps(env, Failpoints(config, struck.append)) == 2
    assert struck == [signal.SIGKILL]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_sdk_still_has_what_we_wrap(env: WorkflowEnvironment, tmp_path: Path) -> None:
    worker = Worker(env.client, task_queue="t", workflows=[TwoSteps], activities=[make_effect])
    inner = getattr(worker, BRIDGE_ATTRIBUTE)
    wrap_bridge(worker, recorder(tmp_path))
    wrapped = getattr(worker, BRIDGE_ATTRIBUTE)
    assert isinstance(wrapped, BridgeFailpoints)
    assert wrapped.poll_activity_task == inner.poll_activity_task
    workflow_worker = worker._workflow_worker
    assert workflow_worker is not None
    seen: object = workflow_worker._bridge_worker()
    assert seen is wrapped


def test_another_sdk_is_refused_loudly(tmp_path: Path) -> None:
    class OtherWorker:
        pass

    with pytest.raises(RuntimeError, match=BRIDGE_ATTRIBUTE):
        wrap_bridge(OtherWorker(), recorder(tmp_path))  # type: ignore[arg-type]


def test_numbers_are_the_same_in_every_process(tmp_path: Path) -> None:
    first, second = recorder(tmp_path), recorder(tmp_path)
    assert first.number("activity:x", "run/1") == 1
    assert second.number("activity:x", "run/2") == 2
    assert first.number("activity:x", "run/2") == 2
    assert second.number("activity:x", "run/1") == 1
    assert second.number("activity:y", "run/1") == 1


def test_freeze_stops_the_process(tmp_path: Path) -> None:
    struck: list[signal.Signals] = []
    config = FailpointConfig(action="freeze", name="activity:x:1:before_body", directory=tmp_path)
    failpoints = Failpoints(config, struck.append)
    failpoints.reached("activity:x:2:before_body")
    assert struck == []
    failpoints.reached("activity:x:1:before_body")
    assert struck == [signal.SIGSTOP]


def test_nothing_asked_for_is_nothing(tmp_path: Path) -> None:
    assert failpoint_config({}) is None
    assert failpoint_config({"EVERSTEP_FAILPOINT": ""}) is None
    config = failpoint_config(
        {
            "EVERSTEP_FAILPOINT": "activity:evict_machines:1:after_effect:kill",
            "EVERSTEP_FAILPOINT_DIR": str(tmp_path),
        }
    )
    assert config == FailpointConfig(
        action="kill", name="activity:evict_machines:1:after_effect", directory=tmp_path
    )


@pytest.mark.parametrize(
    "wanted",
    ["kill", "activity:x:1:before_body", "activity:x:1:before_body:explode", "x:kill", "record:"],
)
def test_what_does_not_exist_is_refused_by_name(tmp_path: Path, wanted: str) -> None:
    env = {"EVERSTEP_FAILPOINT": wanted, "EVERSTEP_FAILPOINT_DIR": str(tmp_path)}
    with pytest.raises(ConfigurationProblem, match="EVERSTEP_FAILPOINT"):
        failpoint_config(env)


def test_a_missing_directory_is_refused_by_name(tmp_path: Path) -> None:
    wanted = {"EVERSTEP_FAILPOINT": "activity:x:1:before_body:kill"}
    for env in (wanted, {**wanted, "EVERSTEP_FAILPOINT_DIR": str(tmp_path / "absent")}):
        with pytest.raises(ConfigurationProblem, match="EVERSTEP_FAILPOINT_DIR"):
            failpoint_config(env)
