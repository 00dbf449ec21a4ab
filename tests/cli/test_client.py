"""The SDK against a real server: one launch is one job, and every failure has its own error.

The workflow here only answers; what a real one does is tested with the workflows.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everstep.client import Client, Sighting
from everstep.connect import find_places
from everstep.decide.words import JobPhase
from everstep.errors import (
    ConfigurationProblem,
    ControllerUnreachable,
    JobFailed,
    JobNotFound,
    Refused,
    SameNameOtherSpec,
    ServerUnreachable,
)
from everstep.spec import messages as m
from tests.support.server import dev_server

SPEC: dict[str, Any] = {"name": "job", "command": "true", "machines": 2}


async def test_the_same_spec_twice_is_one_job(client: Client, worker: None) -> None:
    first = await client.launch(SPEC)
    again = await client.launch({**SPEC, "command": ["true"]})
    assert (first.already, again.already) == (False, True)
    assert again.phase is JobPhase.RUNNING
    handle = client.temporal.get_workflow_handle("job-job")
    description = await handle.describe()
    assert description.run_id == description.raw_description.workflow_execution_info.first_run_id


async def test_another_spec_under_the_same_name_is_refused(client: Client, worker: None) -> None:
    await client.launch(SPEC)
    with pytest.raises(SameNameOtherSpec, match="different spec"):
        await client.launch({**SPEC, "machines": 3})


async def test_a_job_started_by_another_tool_is_compared_by_its_input(
    client: Client, worker: None
) -> None:
    await client.temporal.start_workflow(
        m.TRAINING_JOB, SPEC, id="job-job", task_queue=m.TASK_QUEUE
    )
    assert (await client.launch(SPEC)).already
    with pytest.raises(SameNameOtherSpec):
        await client.launch({**SPEC, "machines": 3})


async def test_an_ended_job_stays_ended(client: Client, worker: None) -> None:
    await client.launch(SPEC)
    await client.cancel("job", reason="succeeded")
    assert (await client.wait("job")).phase is JobPhase.SUCCEEDED
    again = await client.launch(SPEC)
    assert (again.already, again.phase) == (True, JobPhase.SUCCEEDED)
    assert not (await client.launch(SPEC, adopt=True)).already


async def test_a_refused_start_was_never_a_job(client: Client, worker: None) -> None:
    await client.temporal.start_workflow(
        m.TRAINING_JOB,
        {**SPEC, "command": ["refused"]},
        id="job-job",
        task_queue=m.TASK_QUEUE,
    )
    with pytest.raises(JobFailed, match="layout: no"):
        await client.wait("job")
    assert not (await client.launch(SPEC)).already


async def test_waiting_shows_what_is_seen_and_ends_with_the_reason(
    client: Client, worker: None
) -> None:
    await client.launch(SPEC)
    seen: list[Sighting] = []

    def look(sighting: Sighting) -> None:
        seen.append(sighting)

    waiting = asyncio.create_task(client.wait("job", look, poll_s=0.05))
    async with asyncio.timeout(20):
        while len(seen) < 2:
            await asyncio.sleep(0.02)
    await client.cancel("job", reason="failed")
    with pytest.raises(JobFailed, match="does not heal"):
        await waiting
    assert seen[0].status is not None
    with pytest.raises(TimeoutError, match="goes on"):
        await _waits_in_vain(client)


async def _waits_in_vain(client: Client) -> None:
    await client.launch({**SPEC, "name": "other"})
    await client.wait("other", timeout_s=0.2, poll_s=0.05)


async def test_updates_answer_or_say_why_not(client: Client, worker: None) -> None:
    await client.launch(SPEC)
    assert (await client.pause("job", reason="lunch", by="ann")).message == "lunch by ann"
    with pytest.raises(Refused, match="cannot pause now"):
        await client.pause("job", reason="no")
    await client.cancel("job", reason="succeeded")
    await client.wait("job")
    with pytest.raises(Refused, match="already"):
        await client.pause("job")


async def test_a_job_that_is_not_there_is_not_found(client: Client, worker: None) -> None:
    for ask in (client.status, client.pause, client.cancel, client.wait, client.history):
        with pytest.raises(JobNotFound, match="nobody"):
            await ask("nobody")


async def test_without_a_controller_the_job_is_unknown_not_gone(client: Client) -> None:
    assert not (await client.launch(SPEC)).already
    assert (await client.launch(SPEC)).phase is None
    from datetime import timedelta

    with pytest.raises(ControllerUnreachable, match="no controller"):
        await client.status("job", limit=timedelta(seconds=1))


async def test_bad_specs_never_reach_the_server(client: Client) -> None:
    with pytest.raises(ConfigurationProblem, match="command"):
        await client.launch({"name": "x"})
    with pytest.raises(ConfigurationProblem, match="hang_min"):
        await client.launch({**SPEC, "policy": {"detection": {"hang_min": 5}}})
    with pytest.raises(JobNotFound):
        await client.status("x")


async def test_a_server_that_is_away_is_named(tmp_path: Any) -> None:
    with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:1, from --temporal"):
        await Client.connect(find_places(temporal="127.0.0.1:1", env={"HOME": str(tmp_path)}))


async def test_a_namespace_that_was_not_prepared_is_explained() -> None:
    async with await dev_server(flags=()) as bare:
        address = bare.client.service_client.config.target_host
        client = await Client.connect(find_places(temporal=address, env={}))
        with pytest.raises(ConfigurationProblem, match="search attributes"):
            await client.launch(SPEC)


async def test_the_blocking_client_does_the_same(client: Client, worker: None) -> None:
    address = client.temporal.service_client.config.target_host

    def work() -> tuple[bool, JobPhase]:
        with Client.sync(find_places(temporal=address, env={})) as blocking:
            launched = blocking.launch(SPEC)
            blocking.cancel("job", reason="succeeded")
            return launched.already, blocking.wait("job").phase

    assert await asyncio.to_thread(work) == (False, JobPhase.SUCCEEDED)
