"""A Temporal server of a test's own, started by the SDK on a port that was free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from temporalio.testing import WorkflowEnvironment

from workers.embedded import SERVER_FLAGS, find_temporal

STARTS_MAX = 3


async def dev_server(
    flags: Sequence[str] = SERVER_FLAGS, *, time_skipping: bool = False, **options: Any
) -> WorkflowEnvironment:
    """Start the embedded server's program, by default with its flags.

    The SDK takes a free port and lets it go before the server binds it, so a neighbour may be
    quicker: then another one is tried.

    Raises:
        RuntimeError: it could not be started on any of several ports.
    """
    start = (
        WorkflowEnvironment.start_time_skipping_v2
        if time_skipping
        else WorkflowEnvironment.start_local
    )
    for attempts_left in reversed(range(STARTS_MAX)):
        try:
            return await start(
                dev_server_existing_path=find_temporal(),
                dev_server_extra_args=list(flags),
                **options,
            )
        except RuntimeError:
            if not attempts_left:
                raise
    raise AssertionError("unreachable")
