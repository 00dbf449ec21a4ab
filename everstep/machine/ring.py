"""The agent's event ring: what happened on this machine, kept until it is overwritten.

Controllers follow an agent's events over a stream and resume with a cursor ``<ring_id>:<seq>``. The
ring is why nothing is lost when a controller is replaced or the agent restarts: the newest events
stand in a preallocated file (``everstep.machine.slots``), and in memory, from where streams read.

A cursor is good while its ring is the same one and its next event is still there; otherwise the
reader gets a *gap* and must look at the current state of its run. A ring does not outlive the boot
of the machine: no rank does either. Not here: the lines of a stream (``everstep.machine.stream``).
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from everstep.machine.slots import SlotFile, SlotShape
from everstep.spec.agent_api import EventKind

RING = SlotShape(kind=b"everstep-ring", slots=2048, slot_bytes=2048)
TEXT_CHARACTERS_MAX = 300
_CURSOR = re.compile(r"([0-9a-f]{16}):([0-9]{1,18})")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingEvent:
    """One fact, with the instant on the machine's monotonic clock at which it was noticed."""

    seq: int
    kind: EventKind
    monotonic_s: float
    job_id: str | None = None
    run_id: str | None = None
    generation: int | None = None
    rank: int | None = None
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """Events after a position, oldest first; ``gap`` when some before them are gone."""

    events: tuple[RingEvent, ...]
    gap: bool


def parse_cursor(cursor: str) -> tuple[str, int] | None:
    """Ring id and last sequence number seen, or None when it is not a cursor."""
    match = _CURSOR.fullmatch(cursor)
    return (match.group(1), int(match.group(2))) if match else None


class EventRing:
    """The ring of one agent. ``emit`` may be called from any thread; the rest from the loop's."""

    def __init__(self, path: Path, shape: SlotShape = RING) -> None:
        self._file = SlotFile(path, shape, keep_over_reboot=False)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._events: deque[RingEvent] = deque(maxlen=shape.slots)
        self._told_problem: str | None = None
        self.next_seq = 1
        if self._file.renewed:
            log.warning("event ring made anew", file=str(path), reason=self._file.renewed)
        self._read_back()
        self._tell_problem()

    @property
    def ring_id(self) -> str:
        """Changes when the events of before are gone."""
        return self._file.file_id

    @property
    def oldest_seq(self) -> int:
        """Sequence number of the oldest event that is still there (``next_seq`` when none is)."""
        return self._events[0].seq if self._events else self.next_seq

    @property
    def problem(self) -> str | None:
        """Why events are not kept on disk at the moment; streams go on without."""
        return self._file.problem

    def emit(
        self,
        kind: EventKind,
        *,
        job_id: str | None = None,
        run_id: str | None = None,
        generation: int | None = None,
        rank: int | None = None,
        reason: str = "",
        data: dict[str, Any] | None = None,
        at_monotonic: float | None = None,
    ) -> None:
        """Keep a fact and wake the streams; never raises for a disk that does not want it."""
        with self._lock:
            event = RingEvent(
                seq=self.next_seq,
                kind=kind,
                monotonic_s=time.monotonic() if at_monotonic is None else at_monotonic,
                job_id=job_id,
                run_id=run_id,
                generation=generation,
                rank=rank,
                reason=reason[:TEXT_CHARACTERS_MAX],
                data=data or {},
            )
            event, payload = _fitting(event, self._file.shape.payload_bytes_max)
            self._file.write(event.seq % self._file.shape.slots, payload, sync=False)
            self._events.append(event)
            self.next_seq += 1
        self._tell_problem()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def read(self, after_seq: int, events_max: int = 64) -> Reading:
        """The next events after ``after_seq``."""
        with self._lock:
            newest, oldest = self.next_seq - 1, self.oldest_seq
            if after_seq >= newest:
                # A position ahead of us was never given out by this ring: its reader is told.
                return Reading((), gap=after_seq > newest)
            skip = max(0, after_seq + 1 - oldest)
            # Sequence numbers are dense except where a damaged slot was dropped, so this is at
            # most that many too far.
            start = min(skip, len(self._events))
            while start > 0 and self._events[start - 1].seq > after_seq:
                start -= 1
            found = tuple(
                self._events[index]
                for index in range(start, min(start + events_max, len(self._events)))
            )
        expected = range(after_seq + 1, after_seq + 1 + len(found))
        dense = all(event.seq == seq for event, seq in zip(found, expected, strict=True))
        return Reading(found, gap=not dense)

    async def wait(self, after_seq: int, timeout_s: float) -> bool:
        """Wait until there is something after ``after_seq``; False when the time is over."""
        self._loop = asyncio.get_running_loop()
        if self.next_seq - 1 > after_seq:
            return True
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            # Looked at again: an event from another thread may have come before the line above.
            if self.next_seq - 1 <= after_seq:
                async with asyncio.timeout(timeout_s):
                    await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return self.next_seq - 1 > after_seq

    def wake_all(self) -> None:
        """Let every ``wait`` return (the agent ends)."""
        self._wake()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _tell_problem(self) -> None:
        problem = self._file.problem
        if problem != self._told_problem:
            self._told_problem = problem
            if problem is not None:
                log.error("events are not kept on disk, only in memory", problem=problem)

    def _read_back(self) -> None:
        found = {}
        for index, payload in self._file.entries():
            event = _decoded(payload)
            if event is not None and event.seq % self._file.shape.slots == index:
                found[event.seq] = event
        if not found:
            return
        newest = max(found)
        self._events.extend(
            found[seq] for seq in sorted(found) if seq > newest - self._file.shape.slots
        )
        self.next_seq = newest + 1


SHRINK: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
    lambda data: {key: _shortened(value) for key, value in data.items()},
    lambda data: {
        "cut": True,
        **{k: v for k, v in data.items() if isinstance(v, (int, float, bool)) or v is None},
    },
    lambda _data: {"cut": True},
)
"""What is tried, in order, with the data of an event that is larger than a slot."""


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value[:TEXT_CHARACTERS_MAX]
    if isinstance(value, (list, tuple)):
        return [_shortened(item) for item in value[-3:]]
    return value


def _fitting(event: RingEvent, bytes_max: int) -> tuple[RingEvent, bytes]:
    """The event as it will be read back, and its payload, cut so that it fits into a slot."""
    data = event.data
    for shrink in (lambda unchanged: unchanged, *SHRINK):
        data = shrink(data)
        payload = json.dumps(
            {**asdict(event), "data": data}, separators=(",", ":"), default=str
        ).encode("ascii")
        if len(payload) <= bytes_max:
            break
    else:
        # Ids are shorter than this anywhere else; here nothing may rely on that.
        event = replace(
            event,
            job_id=event.job_id and event.job_id[:200],
            run_id=event.run_id and event.run_id[:200],
            reason="",
            data={"cut": True},
        )
        payload = json.dumps(asdict(event), separators=(",", ":")).encode("ascii")
    return _decoded(payload) or event, payload


def _decoded(payload: bytes) -> RingEvent | None:
    try:
        fields = json.loads(payload)
        return RingEvent(**{**fields, "kind": EventKind(fields["kind"])})
    except (ValueError, TypeError, KeyError):
        return None
