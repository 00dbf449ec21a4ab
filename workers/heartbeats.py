"""Heartbeats for activities that are one quick step.

So a killed controller is noticed in two seconds instead of at the activity's own limit.

Activities that work on many machines heartbeat themselves, with details from which another
controller goes on; a heartbeat from here would wipe those out, so they are left alone.
"""

from __future__ import annotations

from typing import Any

from temporalio import activity
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from activities import contracts
from activities.clients import heartbeating


class QuickHeartbeats(Interceptor):
    """Heartbeats while the body of a quick activity runs."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:  # noqa: A002 - the SDK's name
        """Put it around every activity."""
        return _Inbound(next)


class _Inbound(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:  # noqa: A002 - the SDK's name
        if contracts.OPTIONS.get(activity.info().activity_type) is not contracts.QUICK:
            return await super().execute_activity(input)
        async with heartbeating():
            return await super().execute_activity(input)
