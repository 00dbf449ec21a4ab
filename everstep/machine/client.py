"""How a controller (or a command line) talks to agents.

``AgentClient`` speaks to one agent: it reads the agent's boot id and monotonic clock, fills the
envelope of every command with them, and turns whatever goes wrong into ``AgentUnreachable`` or
``AgentRefused`` (``everstep.machine.conversation``).

The clock is read once and carried forward on our own monotonic clock, at most ``CLOCK_MAX_S`` long;
both clocks are only ever compared with themselves. ``AgentPool`` keeps one client an agent, each
with connections of its own, over one TLS context: one shared client searches its whole pool for
every request and was measured fifteen times slower with a thousand agents.

Not here: which agent a machine is at (the ledger knows), and what to do about errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

import httpx
from pydantic import Field, TypeAdapter, ValidationError

from everstep.decide.stack_report import StackReport
from everstep.machine.conversation import (
    AgentRefused,
    AgentUnreachable,
    ClientTimeouts,
    Conversation,
)
from everstep.spec.agent_api import (
    API_VERSION,
    Command,
    ErrorCode,
    EventLine,
    FenceJob,
    GapLine,
    HeartbeatLine,
    HelloLine,
    MachineInfo,
    MaterialiseCode,
    MaterialisedCode,
    PreparedRun,
    PrepareRun,
    RunPlan,
    RunStacks,
    RunState,
    Shutdown,
    ShutdownDone,
    StartedRun,
    StartRun,
    StoppedRun,
    StopRun,
)
from everstep.spec.base import Message

__all__ = [
    "AgentClient",
    "AgentPool",
    "AgentRefused",
    "AgentUnreachable",
    "ClientTimeouts",
    "StreamLine",
    "shared_ssl_context",
]

CLOCK_MAX_S = 60.0
LOG_TAIL_BYTES = 64 * 1024
CLIENTS_MAX = 4096
"""Agents move; clients for addresses that nobody asks for any more are closed at last."""
PATHS: dict[type[Command], str] = {
    PrepareRun: "/v1/commands/prepare_run",
    StartRun: "/v1/commands/start_run",
    StopRun: "/v1/commands/stop_run",
    FenceJob: "/v1/commands/fence_job",
    MaterialiseCode: "/v1/commands/materialise_code",
    Shutdown: "/v1/commands/shutdown",
}

M = TypeVar("M", bound=Message)
StreamLine = HelloLine | EventLine | HeartbeatLine | GapLine
_LINE: TypeAdapter[StreamLine] = TypeAdapter(Annotated[StreamLine, Field(discriminator="type")])


@dataclass(frozen=True, slots=True)
class _Clock:
    """The agent's monotonic clock, as it was when its answer arrived here."""

    agent_boot_id: str
    agent_s: float
    here_s: float

    def at(self, here_s: float) -> float:
        """The agent's clock when ours shows ``here_s``."""
        return self.agent_s + (here_s - self.here_s)


class AgentClient:
    """One agent. Close it with ``aclose`` or use it as an async context manager."""

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        ssl_context: ssl.SSLContext | None = None,
        timeouts: ClientTimeouts | None = None,
        machine_id: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Make a client; nothing is sent yet.

        Args:
            base_url: where the agent is.
            token: the controller token.
            ssl_context: shared by all clients of a pool; None makes one.
            timeouts: limits of one request.
            machine_id: the machine that has to answer; another one counts as unreachable.
            transport: for tests without a network.
        """
        self.base_url = base_url
        self._machine_id = machine_id
        self._timeouts = timeouts or ClientTimeouts()
        self._clock: _Clock | None = None
        context = ssl_context if ssl_context is not None else shared_ssl_context()
        self._talk = Conversation(base_url, token, context, self._timeouts, transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._talk.aclose()

    # --- looking

    async def info(self) -> MachineInfo:
        """The machine, its agent, and its clock."""
        info = self._talk.parsed(MachineInfo, (await self._request("GET", "/v1/machine")).content)
        self._check_identity(info.machine_id, info.api_version)
        self._clock = _Clock(info.agent_boot_id, info.monotonic_s, time.monotonic())
        return info

    async def run_state(self, job_id: str, generation: int) -> RunState:
        """The present state of a run; refused with ``not_found`` when the machine has none."""
        answer = await self._request("GET", f"/v1/runs/{job_id}/{generation}")
        return self._talk.parsed(RunState, answer.content)

    async def stacks(
        self, job_id: str, generation: int, *, looks: int = 2, lines: bool = True
    ) -> StackReport:
        """What all processes of a run are doing now; takes a few seconds at most."""
        answer = await self._request(
            "GET",
            f"/v1/runs/{job_id}/{generation}/stacks",
            params={"looks": looks, "lines": lines},
        )
        return self._talk.parsed(RunStacks, answer.content).report

    async def log_tail(
        self, job_id: str, generation: int, rank: int, tail_bytes: int = LOG_TAIL_BYTES
    ) -> str:
        """The last part of a rank's log; bytes that are no UTF-8 are replaced."""
        _, _, content = await self.log_part(job_id, generation, rank, tail_bytes=tail_bytes)
        return content.decode("utf-8", "replace")

    async def log_part(
        self,
        job_id: str,
        generation: int,
        rank: int,
        *,
        tail_bytes: int = LOG_TAIL_BYTES,
        offset: int | None = None,
    ) -> tuple[int, int, bytes]:
        """Offset, length of the whole log, and content: from ``offset``, or the last part."""
        parameters = {"tail_bytes": tail_bytes} | ({} if offset is None else {"offset": offset})
        path = f"/v1/runs/{job_id}/{generation}/ranks/{rank}/log"
        answer = await self._request("GET", path, params=parameters)
        try:
            start = int(answer.headers["everstep-log-offset"])
            size = int(answer.headers["everstep-log-bytes"])
        except (KeyError, ValueError):
            raise self._talk.not_an_agent() from None
        return start, size, answer.content

    async def stream(self, after: str | None = None) -> AsyncIterator[StreamLine]:
        """Lines of the event stream, from the cursor ``after`` on; ends only by an error.

        Raises:
            AgentUnreachable: the stream broke or fell silent; resume with the last cursor.
            AgentRefused: the agent does not open it.
        """
        parameters = {} if after is None else {"after": after}
        async with self._talk.lines("/v1/events", parameters) as lines:
            async for text in lines:
                line = self._line(text)
                if isinstance(line, HelloLine):
                    self._check_identity(line.machine_id, line.api_version)
                    self._clock = _Clock(line.agent_boot_id, line.monotonic_s, time.monotonic())
                yield line
        raise AgentUnreachable(f"{self.base_url}: the agent ended the event stream")

    # --- commands. ``timeout_s`` is how long the answer may take.

    async def prepare_run(
        self,
        *,
        job_id: str,
        generation: int,
        command_id: str,
        validity_s: float,
        timeout_s: float | None = None,
    ) -> PreparedRun:
        """Reserve a fresh rendezvous port."""
        fields = _envelope(job_id, generation, command_id)
        return await self._command(PrepareRun, fields, PreparedRun, validity_s, timeout_s)

    async def start_run(
        self,
        *,
        job_id: str,
        generation: int,
        command_id: str,
        validity_s: float,
        run: RunPlan,
        timeout_s: float | None = None,
    ) -> StartedRun:
        """Start the machine's ranks (older ones are ended first)."""
        fields = _envelope(job_id, generation, command_id) | {"run": run}
        return await self._command(StartRun, fields, StartedRun, validity_s, timeout_s)

    async def stop_run(
        self,
        *,
        job_id: str,
        generation: int,
        command_id: str,
        validity_s: float,
        reason: str,
        grace_s: float,
        kill_wait_s: float,
        timeout_s: float | None = None,
    ) -> StoppedRun:
        """Evidence, then the verified end of the machine's ranks."""
        fields = _envelope(job_id, generation, command_id) | {
            "reason": reason,
            "grace_s": grace_s,
            "kill_wait_s": kill_wait_s,
        }
        if timeout_s is None:
            timeout_s = self._timeouts.answer_s + grace_s + kill_wait_s
        return await self._command(StopRun, fields, StoppedRun, validity_s, timeout_s)

    async def fence_job(
        self,
        *,
        job_id: str,
        generation: int,
        command_id: str,
        validity_s: float,
        timeout_s: float | None = None,
    ) -> None:
        """Refuse everything older from now on, and end older ranks."""
        fields = _envelope(job_id, generation, command_id)
        await self._command(FenceJob, fields, Message, validity_s, timeout_s)

    async def materialise_code(
        self,
        *,
        job_id: str,
        generation: int,
        command_id: str,
        validity_s: float,
        code_version: str,
        source: str,
        timeout_s: float | None = None,
    ) -> MaterialisedCode:
        """Copy a code version to the machine."""
        fields = _envelope(job_id, generation, command_id) | {
            "code_version": code_version,
            "source": source,
        }
        return await self._command(MaterialiseCode, fields, MaterialisedCode, validity_s, timeout_s)

    async def shutdown(
        self,
        *,
        job_id: str,
        generation: int,
        command_id: str,
        validity_s: float,
        timeout_s: float | None = None,
    ) -> ShutdownDone:
        """Stop all runs of the machine as a planned stop, and end its agent."""
        fields = _envelope(job_id, generation, command_id)
        return await self._command(Shutdown, fields, ShutdownDone, validity_s, timeout_s)

    # --- inside

    async def _command(
        self,
        kind: type[Command],
        fields: dict[str, Any],
        answer: type[M],
        validity_s: float,
        timeout_s: float | None,
    ) -> M:
        """Send a command; once more when the clock we had of the agent was not right any more."""
        deadline = time.monotonic() + validity_s
        for last in (False, True):
            clock = await self._fresh_clock()
            command = kind(
                agent_boot_id=clock.agent_boot_id, not_after_s=clock.at(deadline), **fields
            )
            try:
                response = await self._request(
                    "POST",
                    PATHS[kind],
                    content=command.model_dump_json(),
                    headers={"content-type": "application/json"},
                    timeout_s=timeout_s,
                )
            except AgentRefused as refusal:
                self._clock = None
                stale = refusal.code is ErrorCode.WRONG_BOOT or (
                    refusal.code is ErrorCode.EXPIRED and time.monotonic() < deadline
                )
                if last or not stale:
                    raise
                continue
            return self._talk.parsed(answer, response.content)
        raise AssertionError("unreachable")

    async def _fresh_clock(self) -> _Clock:
        clock = self._clock
        if clock is None or time.monotonic() - clock.here_s > CLOCK_MAX_S:
            await self.info()
            clock = self._clock
        if clock is None or not math.isfinite(clock.agent_s):
            raise AgentUnreachable(f"{self.base_url}: does not say what its clock shows")
        return clock

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return await self._talk.request(method, path, **options)
        except AgentUnreachable:
            # The agent may be another one when it answers again.
            self._clock = None
            raise

    def _check_identity(self, machine_id: str, api_version: int) -> None:
        if self._machine_id is not None and machine_id != self._machine_id:
            raise AgentUnreachable(
                f"{self.base_url}: the agent of machine {machine_id} answers there, not the one "
                f"of {self._machine_id}"
            )
        if api_version != API_VERSION:
            raise AgentRefused(
                ErrorCode.API_VERSION,
                f"the agent of {machine_id} speaks API version {api_version}, we speak "
                f"{API_VERSION}",
            )

    def _line(self, text: str) -> StreamLine:
        try:
            return _LINE.validate_json(text)
        except ValidationError:
            raise self._talk.not_an_agent() from None


class AgentPool:
    """One client for each agent, over one TLS context. Used from one event loop."""

    def __init__(
        self,
        token: str,
        *,
        ssl_context: ssl.SSLContext | None = None,
        timeouts: ClientTimeouts | None = None,
    ) -> None:
        self._token = token
        self._ssl_context = ssl_context if ssl_context is not None else shared_ssl_context()
        self._timeouts = timeouts
        self._clients: dict[tuple[str, str | None], AgentClient] = {}
        """The one used longest ago first."""
        self._closing: set[asyncio.Task[None]] = set()

    def client(self, base_url: str, machine_id: str | None = None) -> AgentClient:
        """The client for the agent at ``base_url``.

        With ``machine_id`` an agent of another machine, which may have taken over the address,
        counts as unreachable.
        """
        key = (base_url, machine_id)
        known = self._clients.pop(key, None)
        if known is None:
            known = AgentClient(
                base_url,
                self._token,
                ssl_context=self._ssl_context,
                timeouts=self._timeouts,
                machine_id=machine_id,
            )
        self._clients[key] = known
        if len(self._clients) > CLIENTS_MAX:
            self._close_soon(self._clients.pop(next(iter(self._clients))))
        return known

    def _close_soon(self, client: AgentClient) -> None:
        task = asyncio.create_task(client.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close all clients."""
        clients, self._clients = list(self._clients.values()), {}
        with contextlib.suppress(Exception):
            await asyncio.gather(
                *(client.aclose() for client in clients), *self._closing, return_exceptions=True
            )


@functools.cache
def shared_ssl_context(ca_file: str | None = None) -> ssl.SSLContext:
    """The TLS context of all clients: the system's certificates, or only ``ca_file``.

    One for the whole process, since reading the system's certificates takes some 25 ms.
    """
    return ssl.create_default_context(cafile=ca_file)


def _envelope(job_id: str, generation: int, command_id: str) -> dict[str, Any]:
    return {"job_id": job_id, "generation": generation, "command_id": command_id}
