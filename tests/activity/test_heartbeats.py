"""Quick activities heartbeat without knowing it; the others are left to their own details."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput

from activities import contracts
from workers.heartbeats import QuickHeartbeats


class Body(ActivityInboundInterceptor):
    """An activity that ends once it has been heartbeated for, or after a few turns of the loop."""

    def __init__(self, beaten: asyncio.Event) -> None:
        self._beaten = beaten

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:  # noqa: A002 - the SDK's name
        del input
        for _ in range(20):
            if self._beaten.is_set():
                break
            await asyncio.sleep(0)
        return "done"


@pytest.mark.parametrize(
    ("name", "beats"),
    [("open_run", True), ("evict_machines", True), ("watch_run", False), ("stop_ranks", False)],
)
async def test_only_quick_activities_are_heartbeated_for(name: str, beats: bool) -> None:
    assert (contracts.OPTIONS[name] is contracts.QUICK) is beats
    beaten = asyncio.Event()
    env = ActivityEnvironment()
    env.info = dataclasses.replace(env.info, activity_type=name)
    env.on_heartbeat = lambda *_: beaten.set()
    inbound = QuickHeartbeats().intercept_activity(Body(beaten))
    argument: Any = None
    assert await env.run(inbound.execute_activity, argument) == "done"
    assert beaten.is_set() is beats
