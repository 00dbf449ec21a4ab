"""A tiny workflow whose tasks and activities the failpoint tests count."""

from __future__ import annotations

from datetime import timedelta

from temporalio import activity, workflow

with workflow.unsafe.imports_passed_through():
    from activities.failpoints import after_effect


@activity.defn(name="make_effect")
async def make_effect(number: int) -> int:
    """An effect and a result."""
    after_effect()
    return number + 1


@workflow.defn(name="TwoSteps")
class TwoSteps:
    """Two activities, one after the other: three workflow tasks."""

    @workflow.run
    async def run(self) -> int:
        """Count to two."""
        number = 0
        for _ in range(2):
            number = await workflow.execute_activity(
                make_effect, number, start_to_close_timeout=timedelta(seconds=10)
            )
        return number
