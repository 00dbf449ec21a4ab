"""The SDK for code without an event loop: the methods of ``everstep.client.Client``, blocking.

    with Client.sync() as client:
        client.launch("job.yaml")
        print(client.wait("my-job").phase)

Not here: any behaviour. Every method runs the asynchronous one in an event loop of its own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from everstep.client import WAIT_POLL_S, Client, Launched, Sighting
from everstep.connect import Places
from everstep.spec import messages as m
from everstep.spec.job import JobSpec


class SyncClient:
    """See ``Client`` for what each method does and raises."""

    def __init__(self, places: Places | None = None, *, address: str | None = None) -> None:
        """Start the thread and connect."""
        self._running: AbstractContextManager[BlockingPortal] = start_blocking_portal()
        self._portal = self._running.__enter__()
        try:
            self._client = self._portal.call(partial(Client.connect, places, address=address))
        except BaseException:
            self._running.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        """Nothing more to open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """See ``close``."""
        self.close()

    def close(self) -> None:
        """End the thread."""
        try:
            self._portal.call(self._client.close)
        finally:
            self._running.__exit__(None, None, None)

    def launch(
        self, spec: JobSpec | Mapping[str, Any] | str | Path, *, adopt: bool = False
    ) -> Launched:
        """Start a job, or find that it is there."""
        return self._portal.call(partial(self._client.launch, spec, adopt=adopt))

    def adopt(self, job_id: str) -> Launched:
        """Start a workflow for a job that the ledger knows."""
        return self._portal.call(self._client.adopt, job_id)

    def status(self, job_id: str) -> m.JobStatus:
        """The job's own answer about where it is."""
        return self._portal.call(self._client.status, job_id)

    def wait(
        self,
        job_id: str,
        on_sight: Callable[[Sighting], None] | None = None,
        *,
        timeout_s: float | None = None,
        poll_s: float = WAIT_POLL_S,
    ) -> m.JobResult:
        """Wait until the job has ended; ``on_sight`` is called in the client's own thread."""
        wait = partial(self._client.wait, job_id, on_sight, timeout_s=timeout_s, poll_s=poll_s)
        return self._portal.call(wait)

    def incidents(self, job_id: str) -> tuple[m.IncidentSummary, ...]:
        """The job's most recent incidents, newest first."""
        return self._portal.call(self._client.incidents, job_id)

    def history(self, job_id: str) -> str:
        """The workflow's recorded history as JSON."""
        return self._portal.call(self._client.history, job_id)

    def pause(self, job_id: str, *, reason: str = "", by: str = "") -> m.UpdateAnswer:
        """Stop the ranks and keep the machines until ``resume``."""
        return self._portal.call(partial(self._client.pause, job_id, reason=reason, by=by))

    def resume(self, job_id: str, *, note: str = "", by: str = "") -> m.UpdateAnswer:
        """Go on."""
        return self._portal.call(partial(self._client.resume, job_id, note=note, by=by))

    def cancel(self, job_id: str, *, reason: str = "", by: str = "") -> m.UpdateAnswer:
        """End the job."""
        return self._portal.call(partial(self._client.cancel, job_id, reason=reason, by=by))

    def roll(self, job_id: str, *, reason: str = "") -> None:
        """Ask the workflow to continue as new at its next safe point."""
        self._portal.call(partial(self._client.roll, job_id, reason=reason))
