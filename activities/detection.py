"""Following a run, and finding out whether a silent machine is lost.

``watch_run`` keeps one event stream per machine of a shard and hands every line to the fold in
``activities.watching``; ``confirm_machines`` keeps asking machines that did not answer. Both carry
on from their last heartbeat when another controller takes them over, and both touch nothing when
the control plane is what failed: only a cancellation that the workflow asked for is answered.

Not here: what counts as trouble (``activities.watching``), and whose fault it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import structlog
from pydantic import Field, ValidationError
from temporalio import activity

from activities.clients import (
    HEARTBEAT_INTERVAL_S,
    Agent,
    Agents,
    Line,
    LooksUpMachines,
    Reach,
    command_for,
    end_tasks,
    heartbeating,
    on_each,
    why,
)
from activities.failpoints import after_effect
from activities.stopping import stop_on_machine
from activities.watch_views import MachineView
from activities.watching import Shard
from everstep.decide.attribution import MachineReport
from everstep.machine.client import AgentRefused
from everstep.spec import messages as m
from everstep.spec.agent_api import ErrorCode
from everstep.spec.base import Message
from everstep.spec.evidence import SHARD_BYTES_MAX, within

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 2.0
SILENT_HEARTBEATS = 3
"""A stream without a line for this many heartbeat intervals is a connection that is half open."""
STATE_TIMEOUT_S = 5.0
WAKE_MIN_S = 0.01
CONFIRM_INTERVAL_S = 0.5

log = structlog.get_logger(__name__)


class WatchDetails(Message):
    """Heartbeat details of a watch: what another controller needs to go on with it.

    The Temporal UI shows them too.
    """

    cursors: dict[str, str] = Field(default_factory=dict)
    progress: m.Progress = m.Progress()
    unreachable: tuple[str, ...] = ()
    watched_s: float = 0.0
    """How long the watch has lasted already, for its milestone."""
    blind_s: float | None = None
    """How long no machine could be reached already."""


class ConfirmDetails(Message):
    """Heartbeat details of ``confirm_machines``."""

    silent_s: float = 0.0
    """Time spent asking so far. Time without a controller does not count against a machine."""


class Detection:
    """The two activities of this file."""

    def __init__(
        self,
        ledger: LooksUpMachines,
        agents: Agents,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._agents = agents
        self._clock = clock

    @activity.defn(name="watch_run")
    async def watch_run(self, request: m.WatchRun) -> m.WatchResult:
        """Follow one shard until all ranks succeeded, trouble, or the asked-for milestone."""
        now = self._clock()
        before = _details(WatchDetails)
        shard = Shard(
            request=request.model_copy(update={"cursors": request.cursors | before.cursors}),
            started_at=now - before.watched_s,
            blind_since=now - (before.blind_s or 0.0),
        )
        watch = _Watch(shard, Reach(self._ledger, self._agents, list(shard.machines)), self._clock)
        try:
            result = await watch.run()
        except asyncio.CancelledError:
            details = activity.cancellation_details()
            if details is None or not details.cancel_requested:
                # The controller stops, or Temporal lost track of us: somebody else goes on.
                raise
            result = shard.cancelled(self._clock())
        after_effect()
        return result

    @activity.defn(name="confirm_machines")
    async def confirm_machines(self, request: m.ConfirmMachines) -> m.ConfirmedMachines:
        """Wait for unreachable machines until they answer or count as lost."""
        details = {"now": _details(ConfirmDetails)}
        limit = request.policy.policy.detection.machine_lost_after.total_seconds()
        reach = Reach(self._ledger, self._agents, [ref.machine_id for ref in request.machines])
        answered: dict[str, MachineReport] = {}
        notes: dict[str, str] = {}

        async def ask(ref: m.MachineRef) -> None:
            report = await stop_on_machine(
                reach,
                ref,
                job_id=request.job_id,
                generation=request.generation,
                command_id=command_for(request.command_id, ref.machine_id),
                reason="the run has failed and this machine had not answered",
                planned=False,
                policy=request.policy.policy,
            )
            if report.reachable:
                answered[ref.machine_id] = report
            else:
                notes[ref.machine_id] = report.note

        async with heartbeating(lambda: details["now"]):
            await reach.find_all()
            while True:
                began = self._clock()
                silent = [ref for ref in request.machines if ref.machine_id not in answered]
                await on_each(silent, ask)
                silent = [ref for ref in silent if ref.machine_id not in answered]
                if not silent or (details["now"].silent_s >= limit and not reach.out_of_date):
                    break
                await asyncio.sleep(min(CONFIRM_INTERVAL_S, limit))
                # A round that took much longer than a round can take was not spent asking: this
                # process was frozen, and a machine must not pay for that.
                spent = min(self._clock() - began, _round_max_s(request))
                if reach.out_of_date:
                    spent = 0.0  # it may be well, at an address that the ledger cannot tell
                details["now"] = ConfirmDetails(silent_s=details["now"].silent_s + spent)
        after_effect()
        for ref in silent:
            log.warning("machine lost", job_id=request.job_id, machine_id=ref.machine_id)
        reports = [
            answered.get(ref.machine_id)
            or MachineReport(
                machine_id=ref.machine_id,
                reachable=False,
                lost=True,
                note=f"{notes.get(ref.machine_id, '')}; silent for {limit:g} s"[:300],
            )
            for ref in request.machines
        ]
        return m.ConfirmedMachines(reports=within(reports, SHARD_BYTES_MAX)[0])


def _round_max_s(request: m.ConfirmMachines) -> float:
    policy = request.policy.policy
    return (
        policy.machines.command_timeout + policy.teardown.failure_grace + policy.teardown.kill_wait
    ).total_seconds() + CONFIRM_INTERVAL_S


class _Watch:
    """The connections of one ``watch_run``."""

    def __init__(self, shard: Shard, reach: Reach, clock: Callable[[], float]) -> None:
        self._shard = shard
        self._reach = reach
        self._clock = clock
        self._changed = asyncio.Event()
        self._request = shard.request
        interval = self._request.policy.policy.detection.heartbeat_interval.total_seconds()
        self._silence_max_s = max(1.0, SILENT_HEARTBEATS * interval)
        self._log = log.bind(job_id=self._request.job_id, run_id=self._request.run_id)

    async def run(self) -> m.WatchResult:
        """Until the fold has something to return."""
        followers = [
            asyncio.create_task(self._follow(view)) for view in self._shard.machines.values()
        ]
        try:
            while True:
                now = self._clock()
                activity.heartbeat(self._details(now))
                result = self._shard.result(now)
                if result is not None:
                    return result
                for follower in followers:
                    if follower.done():
                        follower.result()  # a bug of ours: fail loudly, Temporal tries again
                wait_s = min(HEARTBEAT_INTERVAL_S, self._shard.next_instant(now) - now)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(WAKE_MIN_S, wait_s)):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            await end_tasks(followers)

    def _details(self, now: float) -> WatchDetails:
        shard = self._shard
        return WatchDetails(
            cursors=shard.cursors(),
            progress=shard.progress(),
            unreachable=tuple(i for i, view in shard.machines.items() if not view.reachable),
            watched_s=now - shard.started_at,
            blind_s=None if shard.blind_since is None else now - shard.blind_since,
        )

    async def _follow(self, view: MachineView) -> None:
        """Keep one machine's stream open for ever."""
        backoff_s = BACKOFF_MIN_S
        while True:
            told_at = self._clock()
            reason = await self._read_until_lost(view)
            if view.reachable:
                backoff_s = BACKOFF_MIN_S
                self._log.info(
                    "machine unknown",
                    machine_id=view.ref.machine_id,
                    reason=reason,
                    connected_s=round(self._clock() - told_at, 1),
                )
            elif reason != view.lost_reason:
                self._log.info("machine unknown", machine_id=view.ref.machine_id, reason=reason)
            self._shard.lost(view, reason, self._clock())
            self._changed.set()
            await asyncio.sleep(backoff_s * random.uniform(0.75, 1.25))  # noqa: S311 - spreads load
            backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)

    async def _read_until_lost(self, view: MachineView) -> str:
        """Read one connection to its end, and say why it ended."""
        try:
            agent = await self._reach.agent(view.ref.machine_id)
            async with _closing(agent.stream(view.cursor)) as lines:
                while True:
                    try:
                        async with asyncio.timeout(self._silence_max_s):
                            line = await anext(lines)
                    except StopAsyncIteration:
                        return "the agent ended the stream"
                    if self._shard.take(view, line, self._clock()):
                        self._changed.set()
                    if view.needs_state and view.reachable:
                        await self._ask_state(agent, view)
        except TimeoutError:
            return f"nothing came for {self._silence_max_s:g} s"
        except AgentRefused as refusal:
            if refusal.code is ErrorCode.BAD_REQUEST:
                # A cursor that the agent does not take: read the whole ring.
                view.cursor, view.needs_state = None, True
            return why(refusal)
        except Exception as error:  # noqa: BLE001 - whatever a sick agent sends makes it unknown
            return why(error)

    async def _ask_state(self, agent: Agent, view: MachineView) -> None:
        request = self._request
        view.asked_at = self._clock()
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                state = await agent.run_state(request.job_id, request.generation)
        except AgentRefused as refusal:
            if refusal.code is not ErrorCode.NOT_FOUND:
                raise
            self._shard.not_known(view, self._clock())
        else:
            self._shard.state(view, state, self._clock())
        self._changed.set()


@contextlib.asynccontextmanager
async def _closing(lines: AsyncIterator[Line]) -> AsyncGenerator[AsyncIterator[Line], None]:
    try:
        yield lines
    finally:
        if isinstance(lines, AsyncGenerator):
            # An agent that trickles must not hold up the watch's end.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1.0):
                    await lines.aclose()


def _details(kind: type[Any]) -> Any:
    """What the attempt before left, or a fresh start."""
    for details in activity.info().heartbeat_details:
        try:
            return kind.model_validate(details, from_attributes=True)
        except ValidationError:
            log.warning("heartbeat details of another version are ignored")
    return kind()
