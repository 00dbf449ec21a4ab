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
import fcntl
import json
import os
import pwd
import secrets as random_secrets
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from everstep.errors import ConfigurationProblem
from everstep.machine.api import AgentParts, create_app, own_version
from everstep.machine.client import new_ssl_context
from everstep.machine.code import CodeStore
from everstep.machine.commands import CommandDesk, Machine
from everstep.machine.fences import Fences
from everstep.machine.folder import RunFolder
from everstep.machine.guard import Doors
from everstep.machine.journal import Journal
from everstep.machine.registration import Registrar
from everstep.machine.ring import EventRing
from everstep.machine.runs import RunManager
from everstep.machine.stream import Streams
from everstep.machine.wire import Server, hardened_server, server_tls
from everstep.secrets import Secrets
from everstep.spec.agent_api import (
    API_VERSION,
    EventKind,
    Registration,
    RegistrationAnswer,
)
from everstep.spec.base import MachineId

CRASHED = 1
FLUSH_MAX_S = 2.0
"""How long event streams may take to send the last events when the agent ends."""
EXIT_GRACE_S = 3.0
"""How long requests that are under way may take then."""
HEARTBEAT_MIN_S, HEARTBEAT_MAX_S = 0.05, 60.0

log = structlog.get_logger(__name__)


class AgentConfig(BaseModel):
    """What an agent is started with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    machine_id: str
    state: Path
    secrets: Path
    controllers: tuple[str, ...] = ()
    listen: str = "127.0.0.1:7710"
    address: str = "127.0.0.1"
    """Where other machines reach this one; ranks meet there."""
    slots: Annotated[int, Field(ge=1, le=128)] = 8
    rank_user: str | None = None
    stop_ranks_on_exit: bool = False
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    """Certificates that controllers are checked against; default: the system's."""
    labels: dict[str, str] = Field(default_factory=dict)
    # What follows holds until the first answer of a controller, or when no policy says otherwise.
    heartbeat_interval_s: float = 2.0
    register_interval_s: float = 5.0
    stop_grace_s: float = 30.0
    kill_wait_s: float = 10.0


async def run_agent(config: AgentConfig) -> int:
    """Run an agent until it is told to end; returns the process's exit code.

    Raises:
        ConfigurationProblem: it cannot start; one line that says why.
    """
    tls = _check(config)
    tokens = Secrets.load(config.secrets)
    with _own_state(config.state) as folder, _listening(config.listen) as listener:
        agent = Agent(config, tokens, folder, listener, tls)
        return await agent.run()


class Agent:
    """The parts of one running agent."""

    def __init__(
        self,
        config: AgentConfig,
        tokens: Secrets,
        folder: Path,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
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
        self.fences = Fences(folder / "fences")
        self.journal = Journal(folder / "commands.sqlite")
        self.runs = RunManager(
            state_dir=config.state,
            machine_id=config.machine_id,
            emit=self.ring.emit,
            rank_user=config.rank_user,
            address=config.address,
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
        with _signals(self._signalled):
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
        await self.runs.close()
        self.ring.close()
        self.fences.close()
        self.journal.close()
        log.info("agent ends", ranks="stopped" if self._stopping else "left alone")

    # --- ending

    def _signalled(self, number: int) -> None:
        log.info("signal", signal=signal.Signals(number).name)
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
        run_ids = {(run.job_id, run.generation): run.run_id for run in self.runs.summaries()}
        for job_id, generation in jobs.items():
            # First, so that a controller knows why ranks end before it sees the first one end.
            self.ring.emit(
                EventKind.PLANNED_STOP,
                job_id=job_id,
                run_id=run_ids.get((job_id, generation)),
                generation=generation,
                reason=reason,
            )
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
            ssl_context=new_ssl_context(ca),
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
        for job_id, generation in sorted(answer.fences.items()):
            await self.desk.apply_fence(job_id, generation)
        if answer.evicted != self.desk.evicted:
            log.warning("evicted" if answer.evicted else "released")
        self.desk.evicted = answer.evicted
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


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int
    loopback: bool


def _check(config: AgentConfig) -> ssl.SSLContext | None:
    """Everything that can be wrong before a file is touched; the server's TLS settings."""
    where = _parse_listen(config.listen)
    try:
        TypeAdapter(MachineId).validate_python(config.machine_id)
    except ValidationError:
        raise ConfigurationProblem(
            f"--machine-id {config.machine_id!r}: must be letters, digits, dots, dashes and "
            "underscores, 128 at most, and begin and end with a letter or digit"
        ) from None
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigurationProblem("--tls-cert and --tls-key: give both or neither")
    if not where.loopback and config.tls_cert is None and not config.insecure:
        raise ConfigurationProblem(
            f"--listen {config.listen}: other machines can reach this address; give --tls-cert and "
            "--tls-key, or --insecure if the network is trusted"
        )
    for url in config.controllers:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationProblem(
                f"--controller {url}: must be http://HOST:PORT or https://HOST:PORT"
            )
    if config.tls_ca is not None and not config.tls_ca.is_file():
        raise ConfigurationProblem(f"--tls-ca {config.tls_ca}: there is no such file")
    if config.rank_user is not None:
        _check_rank_user(config.rank_user)
    if config.tls_cert is None or config.tls_key is None:
        return None
    return server_tls(config.tls_cert, config.tls_key)


def _check_rank_user(name: str) -> None:
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise ConfigurationProblem(f"--rank-user {name}: there is no such user") from None
    if os.geteuid() not in {0, user.pw_uid}:
        raise ConfigurationProblem(
            f"--rank-user {name}: only an agent that runs as root can start ranks as another user"
        )


def _parse_listen(text: str) -> _Address:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise ConfigurationProblem(
            f"--listen {text}: must be HOST:PORT, like 127.0.0.1:7710 (port 0: a free one)"
        )
    try:
        loopback = ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return _Address(host, int(port), loopback)


@contextlib.contextmanager
def _listening(text: str) -> Iterator[socket.socket]:
    """The bound port: taken before anything else is done, and found out about at once."""
    where = _parse_listen(text)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationProblem(f"--listen {text}: {error.strerror or error}") from None
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Right away: two that are bound and do not listen would not notice each other.
            listener.listen(2048)
        except OSError as error:
            raise ConfigurationProblem(f"--listen {text}: {error.strerror or error}") from None
        yield listener


@contextlib.contextmanager
def _own_state(state: Path) -> Iterator[Path]:
    """The agent's own folder in the state directory, locked against a second agent."""
    folder = state / "agent"
    try:
        state.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationProblem(
            f"--state {state}: cannot be used: {error.filename or folder}: "
            f"{error.strerror or error}"
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigurationProblem(
                f"--state {state}: another agent is using it; every machine needs a state "
                "directory of its own"
            ) from None
        yield folder
    finally:
        os.close(lock)


@contextlib.contextmanager
def _signals(handle: Callable[[int], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
