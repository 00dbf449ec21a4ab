"""The two signals that ask one of our processes to end, taken by its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def end_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Call ``handle`` with the number of each SIGTERM and SIGINT while the body runs."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
