"""The one way to run a coroutine for a short command.

A program that talks to Temporal and ends at once can be aborted by the SDK's own threads while the
interpreter shuts down: the command did its work and the shell sees 134. Letting the event loop rest
for a moment before it closes gives those threads time to end by themselves, and leaving without
Python's own teardown, after everything is written, removes what is left of the race.

Long-running processes (controller, agent, ``up``) need only ``leave``, at their very end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

REST_BEFORE_CLOSE_S = 0.05
"""How long the loop rests before it closes."""


def run_short(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main()`` in a new event loop that rests before it closes, also after an error."""
    import asyncio  # `leave` serves commands that have no loop and start without it

    async def with_rest() -> T:
        try:
            return await main()
        finally:
            await asyncio.sleep(REST_BEFORE_CLOSE_S)

    return asyncio.run(with_rest())


def leave(code: int) -> NoReturn:
    """End the process with ``code`` after everything is written, skipping the teardown race."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # The reader went away (a closed pipe): nobody is left to be told.
            continue
    os._exit(code)
