"""What the agent looks at for a run: progress files, logs, and the machine's RDMA counters.

If looking fails, whatever the reason, nothing is seen: exits, adoption and teardown ask for a look
first, and must go on.

Not here: what it means (``monitor``), and exits, which come by themselves (``processes``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

import structlog

from everstep.machine import rdma
from everstep.machine.folder import RunFolder, RunRecord
from everstep.machine.framework_log_reader import LogReading, RunLogs
from everstep.machine.monitor import NS, Observed, RunMonitor
from everstep.machine.progress import Progress, ProgressReader

log = structlog.get_logger(__name__)


class Senses:
    """The open files of one run."""

    def __init__(self, folder: RunFolder, record: RunRecord) -> None:
        self._readers = {rank: ProgressReader(folder.progress(rank)) for rank in record.ranks}
        self._paths = {rank: folder.log(rank) for rank in record.ranks}
        self._pattern = record.plan.progress_pattern
        self._logs = RunLogs({})
        self._rdma = rdma.Watch()
        self._folder = folder.path
        self._blind = False

    def follow_logs(self, *, fresh: bool) -> None:
        """Begin with logs: from their start when this agent has started the run."""
        self._logs = RunLogs(self._paths, pattern=self._pattern, fresh=fresh)

    def look(
        self,
        monitor: RunMonitor,
        now_ns: int,
        running: Collection[int],
        *,
        judged: Collection[int],
        process_state: Callable[[int], str | None],
    ) -> list[Observed]:
        """One look; ranks that are not ``running`` write no more. Never raises."""
        try:
            return self._look(monitor, now_ns, running, judged, process_state)
        except Exception as error:  # noqa: BLE001 - see above
            if not self._blind:
                self._blind = True  # it is said once: this is called ten times a second
                with contextlib.suppress(OSError):
                    log.warning(
                        "looking at progress failed", folder=str(self._folder), error=repr(error)
                    )
            return []

    def _look(
        self,
        monitor: RunMonitor,
        now_ns: int,
        running: Collection[int],
        judged: Collection[int],
        process_state: Callable[[int], str | None],
    ) -> list[Observed]:
        progress: dict[int, Progress | None] = {
            rank: reader.read(final=rank not in running) for rank, reader in self._readers.items()
        }
        logs: dict[int, LogReading] | None = None
        if not monitor.library_steps:  # who reports steps by the library pays nothing for logs
            logs = self._logs.look(frozenset(self._paths) - frozenset(running))
        return monitor.observe(now_ns, progress, judged, process_state, logs)

    def traffic(self, monitor: RunMonitor, now_ns: int) -> list[Observed]:
        """What the last look at RDMA counters says, once it is there."""
        total = self._rdma.total_bytes(now_ns / NS)
        return [] if total is None else monitor.traffic(now_ns, total)

    def close(self) -> None:
        """Give all descriptors back."""
        for reader in self._readers.values():
            reader.close()
        self._logs.close()
