"""The ``everstep up`` command: start, say where things are, wait for Ctrl-C, end in order.

Not here: what is started and how (``workers.embedded``).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from everstep.short_lived import REST_BEFORE_CLOSE_S
from workers.embedded import Embedded, EmbeddedOptions

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run_up(options: EmbeddedOptions) -> int:
    """Run until a signal; answers the exit code: 0 after SIGTERM, 130 after Ctrl-C."""
    embedded = Embedded(options)
    ended = asyncio.Event()
    signals: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        signals.append(number)
        if len(signals) > 1:
            embedded.hurry.set()
            _say("ending by force")
        ended.set()

    loop = asyncio.get_running_loop()
    for number in _ENDING:
        loop.add_signal_handler(number, on_signal, number)
    try:
        starting = asyncio.create_task(embedded.start())
        interrupted = asyncio.create_task(ended.wait())
        await asyncio.wait({starting, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
        else:
            interrupted.cancel()
            starting.result()
            _announce(embedded)
            await ended.wait()
            _say("ending: controllers, machines with their ranks, then the server")
        await embedded.stop()
    finally:
        for number in _ENDING:
            loop.remove_signal_handler(number)
        await asyncio.sleep(REST_BEFORE_CLOSE_S)
    return 130 if signals and signals[0] is signal.SIGINT else 0


def _announce(embedded: Embedded) -> None:
    up, options = embedded.addresses, embedded.options
    machines = len(embedded.machine_ids)
    _say(
        f"Everstep is up: {machines} machines x {options.slots} ranks, "
        f"{options.controllers} controller{'s' if options.controllers > 1 else ''}\n"
        f"  Temporal UI  {up.ui}\n"
        f"  Temporal     {up.temporal}\n"
        f"  state, logs  {options.state}\n"
        f"  launch a job with `everstep launch job.yaml`; Ctrl-C ends everything"
    )


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
