"""What activities need from the ledger and from agents, and how they call both.

The protocols are what the real clients (``everstep.ledger``, ``everstep.machine.client``) are used
for, and all that a test has to fake. Two rules live here, in one place each: a ledger that does not
answer is a temporary failure and one that is wrong a permanent one; and an agent that cannot be
reached is *unknown*, while one that answers "no" is a fact.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import structlog
from temporalio import activity

from activities.failures import one_line, permanent, temporary
from everstep.decide.stack_report import StackReport
from everstep.ledger.errors import LedgerError, LedgerUnavailable
from everstep.machine.client import AgentRefused, AgentUnreachable
from everstep.spec import agent_api as api
from everstep.spec import messages as m

T = TypeVar("T")

HEARTBEAT_INTERVAL_S = 0.4
"""Five heartbeats within the timeout of a shard's activity (2 s)."""
LOCATIONS_FRESH_S = 0.5
"""How long looked-up addresses serve a whole shard that reconnects at once."""
AT_ONCE_MAX = 256
"""Machines that one activity talks to at once: a whole shard."""

CANCEL_AGAIN_S = 0.2
CANCELS_MAX = 10

log = structlog.get_logger(__name__)

Line = api.HelloLine | api.EventLine | api.HeartbeatLine | api.GapLine


async def ledger_call(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call the (blocking) ledger in a thread.

    Raises:
        ApplicationError: the ledger does not answer (temporary) or is wrong (permanent).
    """
    try:
        return await asyncio.to_thread(function, *arguments, **named)
    except LedgerUnavailable as error:
        raise temporary(str(error)) from None
    except LedgerError as error:
        raise permanent(str(error)) from None


class Agent(Protocol):
    """What activities ask of one agent (``everstep.machine.client.AgentClient``)."""

    async def info(self) -> api.MachineInfo:
        """The machine and its agent's clock."""

    async def run_state(self, job_id: str, generation: int) -> api.RunState:
        """The present state of a run."""

    async def log_tail(self, job_id: str, generation: int, rank: int, tail_bytes: int = ...) -> str:
        """The last part of a rank's log."""

    async def stacks(
        self, job_id: str, generation: int, *, looks: int = ..., lines: bool = ...
    ) -> StackReport:
        """What all processes of a run are doing now."""

    def stream(self, after: str | None = None) -> AsyncIterator[Line]:
        """Lines of the event stream from a cursor on."""

    async def prepare_run(
        self,
        *,
        job_id: str,
        generation: int,
        command_id: str,
        validity_s: float,
        timeout_s: float | None = ...,
    ) -> api.PreparedRun:
        """Reserve a rendezvous port."""

    async def start_run(
        self,
        *,
        job_id: str,
        generation: int,
        command_id: str,
        validity_s: float,
        run: api.RunPlan,
        timeout_s: float | None = ...,
    ) -> api.StartedRun:
        """Start the machine's ranks."""

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
        timeout_s: float | None = ...,
    ) -> api.StoppedRun:
        """Evidence, then the verified end of the machine's ranks."""

    async def materialise_code(
        self,
        *,
        job_id: str,
        generation: int,
        command_id: str,
        validity_s: float,
        code_version: str,
        source: str,
        timeout_s: float | None = ...,
    ) -> api.MaterialisedCode:
        """Copy a code version to the machine."""


class Agents(Protocol):
    """All agents (``everstep.machine.client.AgentPool``)."""

    def client(self, base_url: str, machine_id: str | None = ...) -> Agent:
        """The client for a machine's agent at an address."""


class LooksUpMachines(Protocol):
    """The part of the ledger that knows where agents are."""

    def machine_locations(self, machine_ids: Sequence[str]) -> Mapping[str, str]:
        """URL of each agent that is registered."""


class Reach:
    """The agents of a shard's machines, their addresses looked up together."""

    def __init__(self, ledger: LooksUpMachines, agents: Agents, machine_ids: Sequence[str]) -> None:
        self._ledger = ledger
        self._agents = agents
        self._machine_ids = tuple(machine_ids)
        self._urls: Mapping[str, str] = {}
        self._looked_up_at: float | None = None
        self._lock = asyncio.Lock()
        self.out_of_date = False
        """True while the ledger does not answer: where a silent agent is now, nobody knows."""

    async def find_all(self) -> None:
        """Look up where all agents are, before anything is said about their machines.

        Raises:
            ApplicationError: the ledger does not answer, which says nothing about any machine.
        """
        self._urls = await ledger_call(self._ledger.machine_locations, self._machine_ids)
        self._looked_up_at = time.monotonic()

    async def agent(self, machine_id: str) -> Agent:
        """The machine's agent, where it is now.

        Raises:
            AgentUnreachable: the ledger does not say, or does not answer.
        """
        async with self._lock:
            now = time.monotonic()
            if self._looked_up_at is None or now - self._looked_up_at > LOCATIONS_FRESH_S:
                try:
                    self._urls = await asyncio.to_thread(
                        self._ledger.machine_locations, self._machine_ids
                    )
                except LedgerUnavailable as error:
                    self.out_of_date = True
                    # Agents rarely move: an address that was right a while ago serves meanwhile.
                    if machine_id not in self._urls:
                        raise AgentUnreachable(one_line(error, 200)) from None
                else:
                    self._looked_up_at = now
                    self.out_of_date = False
        try:
            url = self._urls[machine_id]
        except KeyError:
            raise AgentUnreachable("no agent of this machine is registered") from None
        return self._agents.client(url, machine_id)


def command_for(command_id: str, machine_id: str) -> str:
    """The id of a shard's command for one machine of it (the same after every retry)."""
    return f"{command_id}/{machine_id}"[-200:]


def why(error: Exception) -> str:
    """One line about an agent's refusal or silence."""
    if isinstance(error, AgentRefused):
        return one_line(error, 300)
    if isinstance(error, AgentUnreachable):
        return one_line(str(error) or "cannot be reached", 300)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    # An answer that makes no sense says nothing about the machine, only about who answers there.
    return one_line(f"its answer cannot be understood ({type(error).__name__})", 300)


@asynccontextmanager
async def heartbeating(details: Callable[[], object] | None = None) -> AsyncIterator[None]:
    """Heartbeat while the body runs, with what ``details`` says then."""

    async def beat() -> None:
        while True:
            activity.heartbeat(*(() if details is None else (details(),)))
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        await end_tasks([task])


async def end_tasks(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, without waiting for ever for one that resists.

    ``asyncio.wait_for`` of Python 3.11 can swallow a cancellation that comes just as its time is
    up, and libraries use it; so a task is told again.
    """
    left = {task for task in tasks if not task.done()}
    for _ in range(CANCELS_MAX):
        for task in left:
            task.cancel()
        if not left:
            return
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
    log.error("tasks resist their cancellation", tasks=len(left))


async def on_each(
    machines: Sequence[m.MachineRef], action: Callable[[m.MachineRef], Awaitable[T]]
) -> list[T]:
    """``action`` on all machines at once (within ``AT_ONCE_MAX``), results in their order."""
    gate = asyncio.Semaphore(AT_ONCE_MAX)

    async def one(machine: m.MachineRef) -> T:
        async with gate:
            return await action(machine)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(machine)) for machine in machines]
    return [task.result() for task in tasks]
