"""Which generations of a job may still act on this machine.

For every job two numbers are kept: the highest generation that a command has named, and the lowest
one that may run (set by ``fence_job`` and by the answer to a registration). A command of an older
generation comes from a controller that was cut off or frozen, and is refused. Both only ever rise,
are on disk before anything is done because of them, and stand in a preallocated file, so that a
full disk does not keep an old run alive.

Stopping is judged by the first number only: after a job was fenced, whoever ends its last run may
still ask this machine for the evidence. Not here: stopping the older ranks (``commands``).
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

import structlog

from everstep.machine.slots import SlotFile, SlotShape

FENCES = SlotShape(kind=b"everstep-fences", slots=4096, slot_bytes=256)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Fence:
    """The state of one job."""

    highest_seen: int = 0
    lowest_allowed: int = 0


class Fences:
    """The fences of one machine; when the file is full, the job not heard of longest is dropped."""

    def __init__(self, path: Path, shape: SlotShape = FENCES) -> None:
        self._file = SlotFile(path, shape, keep_over_reboot=True)
        self._lock = threading.Lock()
        self._fences: dict[str, Fence] = {}
        """In order of last change, oldest first."""
        self._slot: dict[str, int] = {}
        self._unsaved: set[str] = set()
        self._changes = 0
        if self._file.renewed:
            log.warning("fences made anew", file=str(path), reason=self._file.renewed)
        self._read_back()

    @property
    def problem(self) -> str | None:
        """Why fences are not kept on disk at the moment (they hold in memory)."""
        return self._file.problem

    def fence(self, job_id: str) -> Fence:
        """The state of a job (zeros when it was never named here)."""
        return self._fences.get(job_id, Fence())

    def older(self, job_id: str, generation: int, *, stopping: bool = False) -> int | None:
        """The generation that has replaced ``generation``, or None when it may act."""
        fence = self.fence(job_id)
        bound = fence.highest_seen if stopping else max(fence.highest_seen, fence.lowest_allowed)
        return bound if generation < bound else None

    def saw(self, job_id: str, generation: int) -> bool:
        """Note a generation; False when it holds in memory only."""
        fence = self.fence(job_id)
        return self._raise(job_id, Fence(max(fence.highest_seen, generation), fence.lowest_allowed))

    def allow_from(self, job_id: str, generation: int) -> bool:
        """Refuse everything older from now on; False when it holds in memory only."""
        fence = self.fence(job_id)
        return self._raise(job_id, Fence(fence.highest_seen, max(fence.lowest_allowed, generation)))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _raise(self, job_id: str, fence: Fence) -> bool:
        with self._lock:
            if self._fences.get(job_id) == fence and job_id not in self._unsaved:
                return True
            slot = self._slot.get(job_id)
            if slot is None:
                slot = self._free_slot()
            self._fences.pop(job_id, None)
            self._fences[job_id] = fence
            self._slot[job_id] = slot
            self._changes += 1
            payload = json.dumps(
                [job_id, fence.highest_seen, fence.lowest_allowed, self._changes]
            ).encode("ascii")
            saved = self._file.write(slot, payload, sync=True)
            (self._unsaved.discard if saved else self._unsaved.add)(job_id)
            return saved

    def _free_slot(self) -> int:
        if len(self._slot) < self._file.shape.slots:
            taken = set(self._slot.values())
            return next(index for index in range(self._file.shape.slots) if index not in taken)
        oldest = next(iter(self._fences))
        del self._fences[oldest]
        return self._slot.pop(oldest)

    def _read_back(self) -> None:
        found: dict[str, tuple[int, int, Fence]] = {}
        for index, payload in self._file.entries():
            try:
                job_id, highest, lowest, change = json.loads(payload)
            except ValueError:
                continue
            if job_id not in found or change > found[job_id][0]:
                found[job_id] = (change, index, Fence(highest, lowest))
        for job_id, (change, index, fence) in sorted(found.items(), key=lambda item: item[1][0]):
            self._fences[job_id] = fence
            self._slot[job_id] = index
            self._changes = change
