"""The agent: one process on every machine, wired from its parts.

It binds its port, takes the machine's state directory for itself, takes over the ranks that an
agent before it left running, and serves until a signal ends it. SIGTERM leaves the ranks alone, so
that an agent can be upgraded under a running job (``stop_ranks_on_exit`` changes that); SIGINT and
the ``shutdown`` command stop them as a planned stop, which no budget is charged for.

Not here: anything an agent *does* (``everstep.machine``), and flags (``everstep.commands``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets as random_secrets
import signal
import socket
import ssl
from pathlib import Path

import structlog

from everstep.errors import ConfigurationProblem
from everstep.machine.api import AgentParts, create_app, own_version
from everstep.machine.client import shared_ssl_context
from everstep.machine.code import CodeStore
from everstep.machine.commands import CommandDesk, Machine
from everstep.machine.fences import Fences
from everstep.machine.folder import RunFolder
from everstep.machine.guard import Doors
from everstep.machine.health import HealthBoard
from everstep.machine.journal import Journal
from everstep.machine.launch import StateUnusable
from everstep.machine.probing import MakeProbes, Probing
from everstep.machine.registration import Registrar
from everstep.machine.ring import EventRing
from everstep.machine.run_places import RunPlaces
from everstep.machine.runs import RunManager
from everstep.machine.stream import Streams
from everstep.machine.wire import Server, hardened_server
from everstep.process_log import configure_logging
from everstep.secrets import Secrets
from everstep.spec.agent_api import (
    API_VERSION,
    EventKind,
    Registration,
    RegistrationAnswer,
)
from everstep.spec.load import load_policy
from workers.agent_probes import maker
from workers.agent_start import AgentConfig, check, listening, own_state
from workers.signals import end_signals

CRASHED = 1
FLUSH_MAX_S = 2.0
"""How long event streams may take to send the last events when the agent ends."""
EXIT_GRACE_S = 3.0
"""How long requests that are under way may take then."""
HEARTBEAT_MIN_S, HEARTBEAT_MAX_S = 0.05, 60.0

__all__ = ["AgentConfig", "run_agent"]

log = structlog.get_logger(__name__)


async def run_agent(config: AgentConfig, make_probes: MakeProbes | None = None) -> int:
    """Run an agent until it is told to end; returns the process's exit code.

    Args:
        config: its settings.
        make_probes: the probes of this machine; None: those that the settings choose.

    Raises:
        ConfigurationProblem: it cannot start; one line that says why.
    """
    configure_logging("agent")
    tls = check(config)
    tokens = Secrets.load(config.secrets)
    policy = load_policy(None).policy.probes
    places = RunPlaces((config.state,))
    make = make_probes or maker(config.probe_choice, places)
    for probe in make(policy):  # a wrong name is told now, and not once the agent serves
        probe.close()
    with own_state(config.state) as folder, listening(config.listen) as listener:
        try:
            agent = Agent(config, tokens, folder, listener, tls, make)
            places.runs = agent.runs
            await agent.probing.use(policy)
            return await agent.run()
        except StateUnusable as problem:
            raise ConfigurationProblem(f"--state {config.state}: {problem}") from None


class Agent:
    """The parts of one running agent."""

    def __init__(
        self,
        config: AgentConfig,
        tokens: Secrets,
        folder: Path,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        make_probes: MakeProbes,
    ) -> None:
        self._config = config
        self._tokens = tokens
        self._listener = listener
        self._folder = folder
        self._end = asyncio.Event()
        self._stop_ranks = False
        self._stopping: asyncio.Task[dict[str, int]] | None = None
        self.machine = Machine(
            machine_id=config.machine_id,
            agent_boot_id=random_secrets.token_hex(8),
            address=config.address,
            slots=config.slots,
        )
        self.ring = EventRing(folder / "events.ring")
        self.probing = Probing(HealthBoard(folder / "health.json", self.ring.emit), make_probes)
        self.fences = Fences(folder / "fences")
        self.journal = Journal(folder / "commands.sqlite")
        self.runs = RunManager(
            state_dir=config.state,
            machine_id=config.machine_id,
            emit=self.ring.emit,
            rank_user=config.rank_user,
            address=config.address,
            health=self.probing,
        )
        self.streams = Streams(
            self.ring,
            machine_id=config.machine_id,
            agent_boot_id=self.machine.agent_boot_id,
            summaries=self.runs.summaries,
            heartbeat_interval_s=config.heartbeat_interval_s,
        )
        self.desk = CommandDesk(
            self.machine,
            runs=self.runs,
            journal=self.journal,
            fences=self.fences,
            code=CodeStore(config.state / "code", private=(config.state, config.secrets)),
            code_in_use=self._code_in_use,
            shut_down=self._shut_down,
        )
        self.server: Server = hardened_server(
            create_app(
                AgentParts(
                    machine=self.machine,
                    runs=self.runs,
                    desk=self.desk,
                    ring=self.ring,
                    streams=self.streams,
                    doors=Doors(controller=tokens.controller, metrics=tokens.metrics),
                    health=self.probing,
                )
            ),
            tls=tls,
            exit_grace_s=EXIT_GRACE_S,
        )
        port = listener.getsockname()[1]
        host = f"[{config.address}]" if ":" in config.address else config.address
        self.url = f"{'https' if tls else 'http'}://{host}:{port}"

    async def run(self) -> int:
        """Serve until the end; returns the exit code."""
        structlog.contextvars.bind_contextvars(machine_id=self.machine.machine_id)
        with end_signals(self._signalled):
            await self.runs.adopt()
            self.ring.emit(
                EventKind.AGENT_STARTED,
                reason=f"agent {own_version()} started",
                data={"agent_boot_id": self.machine.agent_boot_id, "jobs": self.runs.live_jobs()},
            )
            self._publish_address()
            serving = asyncio.create_task(self.server.serve(sockets=[self._listener]))
            registering = asyncio.create_task(self._registrar().run())
            ending = asyncio.create_task(self._end.wait())
            log.info("agent serves", url=self.url, agent_boot_id=self.machine.agent_boot_id)
            try:
                await asyncio.wait(
                    {serving, registering, ending}, return_when=asyncio.FIRST_COMPLETED
                )
                if not self._end.is_set():
                    log.error("a part of the agent ended by itself; the ranks are left alone")
                    return CRASHED
                if self._stop_ranks:
                    await self._stop_all("the agent was told to end")
                return 0
            finally:
                await self._close(serving, registering, ending)

    async def _close(self, serving: asyncio.Task[None], *others: asyncio.Task[object]) -> None:
        self.desk.ending = True
        await self.streams.flush_and_close(FLUSH_MAX_S)
        for task in others:
            task.cancel()
        self.server.should_exit = True
        await asyncio.gather(serving, *others, return_exceptions=True)
        await self.probing.close()
        await self.runs.close()
        self.ring.close()
        self.fences.close()
        self.journal.close()
        log.info("agent ends", ranks="stopped" if self._stopping else "left alone")

    # --- ending

    def _signalled(self, number: int) -> None:
        log.info("signal", signal=signal.Signals(number).name)
        if self._end.is_set():
            # Somebody is in a hurry. What is left of the ranks is found by the next agent.
            os._exit(CRASHED)
        self._stop_ranks = number == signal.SIGINT or self._config.stop_ranks_on_exit
        self._end.set()

    async def _shut_down(self, reason: str) -> dict[str, int]:
        """Stop everything, and end once the command has been answered."""
        stopped = await self._stop_all(reason)
        asyncio.get_running_loop().call_later(0.1, self._end.set)
        return stopped

    async def _stop_all(self, reason: str) -> dict[str, int]:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_all_once(reason))
        return await asyncio.shield(self._stopping)

    async def _stop_all_once(self, reason: str) -> dict[str, int]:
        self.desk.ending = True
        jobs = self.runs.live_jobs()
        # Each says ``planned_stop`` before its first rank ends, so that controllers know why.
        results = await asyncio.gather(
            *(
                self.runs.stop(
                    job_id,
                    generation,
                    reason=reason,
                    grace_s=self._config.stop_grace_s,
                    kill_wait_s=self._config.kill_wait_s,
                    planned=True,
                )
                for job_id, generation in jobs.items()
            ),
            return_exceptions=True,
        )
        for job_id, result in zip(jobs, results, strict=True):
            if isinstance(result, BaseException):
                log.error("a run could not be stopped", job_id=job_id, problem=repr(result))
        return jobs

    # --- registration

    def _registrar(self) -> Registrar:
        ca = str(self._config.tls_ca) if self._config.tls_ca else None
        return Registrar(
            self._config.controllers,
            self._tokens.enrol,
            describe=self._describe,
            apply=self._apply,
            interval_s=self._config.register_interval_s,
            ssl_context=shared_ssl_context(ca),
        )

    def _describe(self) -> Registration:
        return Registration(
            api_version=API_VERSION,
            machine_id=self.machine.machine_id,
            agent_boot_id=self.machine.agent_boot_id,
            url=self.url,
            address=self.machine.address,
            slots=self.machine.slots,
            version=own_version(),
            labels=self._config.labels,
            jobs=self.runs.live_jobs(),
        )

    async def _apply(self, answer: RegistrationAnswer) -> None:
        # At once, since ending ranks takes a while; and a refused registration releases nobody.
        evicted = answer.evicted or (self.desk.evicted and not answer.accepted)
        if evicted != self.desk.evicted:
            log.warning("evicted" if evicted else "released")
        self.desk.evicted = evicted
        await asyncio.gather(
            *(
                self.desk.apply_fence(job_id, generation)
                for job_id, generation in sorted(answer.fences.items())
            )
        )
        if answer.probes is not None:
            await self.probing.use(answer.probes)
        interval_s = answer.heartbeat_interval_s
        self.streams.heartbeat_interval_s = min(max(interval_s, HEARTBEAT_MIN_S), HEARTBEAT_MAX_S)

    # --- inside

    def _code_in_use(self) -> tuple[str, ...] | None:
        """Paths that live runs were started from; None when one of them does not say."""
        paths = []
        for job_id, generation in self.runs.live_jobs().items():
            record = RunFolder(self._config.state / "runs" / job_id / str(generation)).read_plan()
            if record is None:
                return None
            paths += [path for path in (record.plan.code_path, record.plan.working_dir) if path]
        return tuple(paths)

    def _publish_address(self) -> None:
        """For people and scripts on this machine; the port may have been chosen by the system."""
        path = self._folder / "address.json"
        temporary = path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps({"url": self.url, "pid": os.getpid()}) + "\n")
            temporary.replace(path)
