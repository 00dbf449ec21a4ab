"""The event stream of an agent: NDJSON lines, resumable, at the pace of its reader.

A stream has no queue of its own. It remembers one number, the last event it sent, and takes the
next ones from the ring when the connection accepts more; so a reader that does not read costs one
connection buffer. When a line cannot be sent for ``SEND_MAX_S`` the connection is dropped and the
reader may resume from its cursor. The number of streams is bounded: the newest displaces the
oldest, so whoever holds many open cannot keep the controller out.

Lines: ``hello``, then ``gap`` if the cursor is not good, then events as they are and come, with a
``heartbeat`` every interval. Not here: who may open one (``everstep.machine.guard``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from everstep.machine.ring import EventRing, RingEvent, parse_cursor
from everstep.machine.wire import SCOPE_KEY
from everstep.spec.agent_api import (
    API_VERSION,
    EventLine,
    GapLine,
    HeartbeatLine,
    HelloLine,
    RunSummary,
)
from everstep.spec.base import Message

STREAMS_MAX = 32
SEND_MAX_S = 10.0
EVENTS_A_SEND = 64

log = structlog.get_logger(__name__)


class Streams:
    """All event streams of one agent."""

    def __init__(
        self,
        ring: EventRing,
        *,
        machine_id: str,
        agent_boot_id: str,
        summaries: Callable[[], tuple[RunSummary, ...]],
        heartbeat_interval_s: float,
        streams_max: int = STREAMS_MAX,
        send_max_s: float = SEND_MAX_S,
    ) -> None:
        self.ring = ring
        self.machine_id = machine_id
        self.agent_boot_id = agent_boot_id
        self.summaries = summaries
        self.heartbeat_interval_s = heartbeat_interval_s
        self.send_max_s = send_max_s
        self.closing = False
        self.displaced_total = 0
        self._streams_max = streams_max
        self._open: dict[EventStream, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, cursor: str | None) -> EventStream:
        """A response that streams from ``cursor`` on (from the oldest event when it is None)."""
        return EventStream(self, cursor)

    def enter(self, stream: EventStream) -> None:
        """Count a stream that begins; the oldest one ends when there are too many."""
        self._open[stream] = None
        if len(self._open) > self._streams_max:
            oldest = next(iter(self._open))
            self.displaced_total += 1
            log.warning("too many event streams: the oldest is closed", streams=len(self._open))
            self._open.pop(oldest)
            oldest.drop()

    def leave(self, stream: EventStream) -> None:
        """A stream has ended."""
        self._open.pop(stream, None)

    async def flush_and_close(self, wait_max_s: float) -> None:
        """End all streams, each once it has sent what the ring holds (or the time is over)."""
        self.closing = True
        self.ring.wake_all()
        deadline = time.monotonic() + wait_max_s
        while self._open and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - time.monotonic()):
                    await asyncio.gather(*(stream.ended.wait() for stream in self._open))
        for stream in list(self._open):
            stream.drop()


class EventStream(Response):
    """One open stream."""

    media_type = "application/x-ndjson"

    def __init__(self, streams: Streams, cursor: str | None) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        # There is no length, and no end that could be known.
        del self.headers["content-length"]
        self.ended = asyncio.Event()
        self._streams = streams
        self._cursor = cursor
        self._scope: Scope | None = None
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the reader leaves, is too slow, or the agent ends."""
        self._scope = scope
        self._streams.enter(self)
        self._task = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({self._task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done() and not self._task.cancelled():
                self._task.result()
        except TimeoutError:
            log.info("event stream closed: its reader does not read", cursor=self._cursor)
            self._abort_connection()
        finally:
            self._streams.leave(self)
            for task in (self._task, gone):
                task.cancel()
            await asyncio.gather(self._task, gone, return_exceptions=True)
            self.ended.set()

    def drop(self) -> None:
        """End the stream at once."""
        if self._task is not None:
            self._task.cancel()
        self._abort_connection()

    def _abort_connection(self) -> None:
        connection = (self._scope or {}).get(SCOPE_KEY)
        if connection is not None:
            connection.abort()

    async def _send_all(self, send: Send) -> None:
        streams, ring = self._streams, self._streams.ring

        async def push(body: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(streams.send_max_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": self.raw_headers,
            }
        )
        position, gap = self._start()
        await push(_line(self._hello()) + (_line(self._gap()) if gap else b""))
        heartbeat_at = time.monotonic()
        while True:
            reading = ring.read(position, EVENTS_A_SEND)
            if reading.gap:
                await push(_line(self._gap()))
            if reading.events:
                position = reading.events[-1].seq
                await push(b"".join(_line(_event_line(event)) for event in reading.events))
            elif streams.closing:
                await push(b"", more=False)
                return
            if time.monotonic() >= heartbeat_at:
                await push(_line(self._heartbeat()))
                heartbeat_at = time.monotonic() + streams.heartbeat_interval_s
            if not reading.events:
                await ring.wait(position, max(0.0, heartbeat_at - time.monotonic()))

    def _start(self) -> tuple[int, bool]:
        """Position to read after, and whether the reader has to be told of a gap."""
        ring = self._streams.ring
        before_all = ring.oldest_seq - 1
        if self._cursor is None:
            return before_all, False
        parsed = parse_cursor(self._cursor)
        if parsed is None or parsed[0] != ring.ring_id or parsed[1] >= ring.next_seq:
            return before_all, True
        return max(parsed[1], before_all), parsed[1] < before_all

    def _hello(self) -> HelloLine:
        ring = self._streams.ring
        return HelloLine(
            machine_id=self._streams.machine_id,
            agent_boot_id=self._streams.agent_boot_id,
            api_version=API_VERSION,
            monotonic_s=time.monotonic(),
            ring_id=ring.ring_id,
            oldest_seq=ring.oldest_seq,
            next_seq=ring.next_seq,
        )

    def _gap(self) -> GapLine:
        return GapLine(ring_id=self._streams.ring.ring_id, oldest_seq=self._streams.ring.oldest_seq)

    def _heartbeat(self) -> HeartbeatLine:
        return HeartbeatLine(monotonic_s=time.monotonic(), runs=self._streams.summaries())


def _event_line(event: RingEvent) -> EventLine:
    return EventLine(
        seq=event.seq,
        kind=event.kind,
        job_id=event.job_id,
        run_id=event.run_id,
        generation=event.generation,
        rank=event.rank,
        age_s=max(0.0, time.monotonic() - event.monotonic_s),
        reason=event.reason,
        data=event.data,
    )


def _line(message: Message) -> bytes:
    return message.model_dump_json().encode("utf-8") + b"\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
