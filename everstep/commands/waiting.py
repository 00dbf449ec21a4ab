"""``--wait``: a live line in a terminal, plain lines of what changed elsewhere, then the end."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from everstep.client import Client, Sighting
from everstep.commands.common import Output, console, emit
from everstep.decide.words import JobPhase
from everstep.errors import EverstepError, JobFailed
from everstep.render import progress_line, status_table
from everstep.spec.messages import JobStatus

REPEAT_LINE_S = 10.0
"""Without a terminal, a job that only trains says so this often."""


class _PlainLines:
    """Lines for logs: one whenever something but the step has changed, else one now and then."""

    def __init__(self) -> None:
        self._shown: tuple[Any, ...] | None = None
        self._at = -REPEAT_LINE_S
        self._line = ""

    def __call__(self, sighting: Sighting) -> None:
        status = sighting.status
        line = progress_line(status) if status else f"waiting: {sighting.problem}"
        key = (status.phase, status.generation, status.incidents_total) if status else (line,)
        now = time.monotonic()
        if key == self._shown and (line == self._line or now - self._at < REPEAT_LINE_S):
            return
        self._shown, self._at, self._line = key, now, line
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


async def wait_and_show(client: Client, job_id: str, output: Output, *, first: str = "") -> int:
    """Wait for a job and show it at its end; answers the exit code."""
    if first:
        sys.stderr.write(first + "\n")
    failure = ""
    with contextlib.ExitStack() as stack:
        on_sight: Any = _PlainLines()
        if sys.stderr.isatty():
            live = stack.enter_context(console(stderr=True).status("looking"))

            def on_sight(sighting: Sighting) -> None:
                shown = sighting.status
                live.update(progress_line(shown) if shown else f"waiting: {sighting.problem}")

        try:
            await client.wait(job_id, on_sight)
        except JobFailed as error:
            failure = str(error)
    status = await _last_status(client, job_id)
    if status is None:
        if failure:
            raise JobFailed(failure)
        emit(output, {"job_id": job_id}, f"{job_id} has ended")
        return 0
    emit(output, status.model_dump(mode="json"), status_table(status))
    return 0 if status.phase is JobPhase.SUCCEEDED else 1


async def _last_status(client: Client, job_id: str) -> JobStatus | None:
    try:
        return await client.status(job_id)
    except EverstepError:
        return None
