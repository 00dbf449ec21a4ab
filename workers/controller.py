"""The controller: one process that works for the Temporal server, wired from its parts.

It comes up before its server and its ledger do, and waits for both with a line in the log. From
then on it is stateless: what must survive stands in Temporal and in the ledger, so it may be killed
at any instant and replaced by another one. When either of its workers ends by itself the process
ends too, with a code that makes a supervisor start it again: a controller that is alive and works
for nobody would be worse than none.

Not here: what activities do (``activities``), options of workers (``workers.runtime``), flags
(``everstep.commands``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import structlog
from temporalio.client import Client
from temporalio.worker import Interceptor, Worker

from activities.checkpoint_restore import CheckpointRestore
from activities.detection import Detection
from activities.diagnosis import Diagnosis
from activities.hot_update import HotUpdate
from activities.isolation import Isolation
from activities.launch import Launch
from activities.ledger import Records
from activities.notification import Notification
from activities.policy_source import FleetPolicy, apply_own_policy
from everstep.errors import ConfigurationProblem
from everstep.ledger import Ledger, LedgerError, LedgerUnavailable
from everstep.machine.client import AgentPool, shared_ssl_context
from everstep.machine.wire import hardened_server
from everstep.secrets import Secrets
from everstep.spec import messages as m
from everstep.spec.load import LoadedPolicy, SpecError, load_policy
from workers import runtime
from workers.agent_start import listening
from workers.controller_start import (
    ControllerConfig,
    check_open_to_others,
    check_tls,
    prepare_checkpoint_root,
)
from workers.endpoint import EndpointParts, Intervals, create_app
from workers.failpoints import Failpoints, failpoint_config
from workers.heartbeats import QuickHeartbeats
from workers.server_wait import prepare_namespace, wait_for_ledger, wait_for_server
from workers.signals import end_signals
from workers.telemetry import DRAIN_INTERVAL_S, Telemetry

CRASHED = 1
LEDGER_THREADS = 32
"""As many as the ledger has connections."""
SHUTDOWN_MAX_S = 1.5
LEDGER_CHECK_INTERVAL_S = 2.0
PRUNE_INTERVAL_S = 3600.0
EXPECTED_POLLS = (
    (m.TASK_QUEUE, "workflow"),
    (m.TASK_QUEUE, "activity"),
    (m.WATCH_QUEUE, "activity"),
)

__all__ = ["ControllerConfig", "run_controller"]

log = structlog.get_logger(__name__)


async def run_controller(config: ControllerConfig) -> int:
    """Run a controller until it is told to end; returns the process's exit code.

    Raises:
        ConfigurationProblem: it cannot start; one line that says why.
    """
    tls = check_tls(config)
    secrets = Secrets.load(config.secrets)
    try:
        own = load_policy(config.policy)
        ledger = Ledger(config.ledger)
    except (SpecError, LedgerError) as error:
        raise ConfigurationProblem(str(error)) from None
    prepare_checkpoint_root(config.checkpoint_root)
    wanted = failpoint_config(os.environ)
    with listening(config.listen) as listener:
        check_open_to_others(config, listener)
        controller = Controller(
            config,
            secrets,
            own,
            ledger,
            listener=listener,
            tls=tls,
            failpoints=Failpoints(wanted) if wanted else None,
        )
        return await controller.run()


class Controller:
    """The parts of one running controller."""

    def __init__(
        self,
        config: ControllerConfig,
        secrets: Secrets,
        own_policy: LoadedPolicy,
        ledger: Ledger,
        *,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        failpoints: Failpoints | None,
    ) -> None:
        self._config = config
        self._own_policy = own_policy
        self._ledger = ledger
        self._listener = listener
        self._failpoints = failpoints
        self._end = asyncio.Event()
        self._telemetry = Telemetry()
        self._policy = FleetPolicy(ledger, own_policy)
        ca_file = str(config.tls_ca) if config.tls_ca else None
        self._agents = AgentPool(secrets.controller, ssl_context=shared_ssl_context(ca_file))
        self._http = httpx.AsyncClient()
        self._workers: tuple[Worker, ...] = ()
        self._ledger_problem: str | None = None
        self._parts = EndpointParts()
        self._parts.telemetry = self._telemetry
        self._server = hardened_server(create_app(self._parts, secrets), tls=tls, exit_grace_s=1.0)

    async def run(self) -> int:
        """Work until the end; returns the exit code."""
        asyncio.get_running_loop().set_default_executor(
            ThreadPoolExecutor(LEDGER_THREADS, thread_name_prefix="ledger")
        )
        _quiet_logging()
        with end_signals(self._signalled):
            serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
            working = asyncio.create_task(self._work())
            ending = asyncio.create_task(self._end.wait())
            log.info("controller serves", listen=_address(self._listener), pid=os.getpid())
            try:
                await asyncio.wait({serving, working, ending}, return_when=asyncio.FIRST_COMPLETED)
                if self._end.is_set():
                    return 0
                if working.done():
                    working.result()
                log.error("a part of the controller ended by itself; training goes on without it")
                return CRASHED
            finally:
                await self._close(serving, working, ending)

    async def _work(self) -> None:
        """Come up step by step, then work until a worker ends."""
        config = self._config
        await wait_for_ledger(config.ledger)
        await asyncio.to_thread(
            apply_own_policy,
            self._ledger,
            self._own_policy,
            named=config.policy is not None,
            now=datetime.now(UTC),
        )
        await asyncio.to_thread(self._policy.snapshot, {})
        self._parts.register = self._ledger.register_machine
        self._parts.intervals = self._intervals
        sdk = runtime.new_runtime(self._telemetry)
        client = await wait_for_server(config.temporal, config.namespace, runtime=sdk)
        await prepare_namespace(client)
        self._workers = self._new_workers(client)
        if self._failpoints is not None:
            self._failpoints.install(list(self._workers))
        self._parts.problems = self._problems
        log.info(
            "controller works",
            temporal=client.service_client.config.target_host,
            namespace=client.namespace,
            ledger=self._ledger.where,
            policy_hash=self._policy.last_hash,
        )
        tasks = [
            asyncio.create_task(part)
            for part in (
                *(worker.run() for worker in self._workers),
                self._watch_telemetry(),
                self._watch_ledger(),
                self._prune_ledger(),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks[len(self._workers) :]:
                task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_MAX_S):
                    await asyncio.gather(*(worker.shutdown() for worker in self._workers))

    def _new_workers(self, client: Client) -> tuple[Worker, Worker]:
        control, watch = self.activities()
        interceptors: list[Interceptor] = [QuickHeartbeats()]
        if self._failpoints:
            interceptors.append(self._failpoints.interceptor())
        return (
            runtime.control_worker(client, control, interceptors=interceptors),
            runtime.watch_worker(client, watch, interceptors=interceptors),
        )

    def activities(self) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
        """What the worker of each queue carries out."""
        return all_activities(
            self._ledger, self._agents, self._policy, self._http, self._config.checkpoint_root
        )

    # --- health

    def _problems(self) -> tuple[str, ...]:
        now = asyncio.get_running_loop().time()
        found = [
            f"no poll is open for {which}"
            for which in self._telemetry.not_polling(EXPECTED_POLLS, now)
        ]
        return tuple(found + ([self._ledger_problem] if self._ledger_problem else []))

    async def _watch_telemetry(self) -> None:
        while True:
            self._telemetry.drain(asyncio.get_running_loop().time())
            await asyncio.sleep(DRAIN_INTERVAL_S)

    async def _watch_ledger(self) -> None:
        """Look whether the ledger answers, and at the fleet's policy on the way."""
        while True:
            await asyncio.sleep(LEDGER_CHECK_INTERVAL_S)
            problem = None
            try:
                await asyncio.to_thread(self._policy.snapshot, {})
            except LedgerUnavailable:
                problem = "the ledger does not answer"
            except LedgerError:
                problem = "the ledger is not usable"
            if problem != self._ledger_problem:
                log.warning(problem or "the ledger answers again", ledger=self._ledger.where)
            self._ledger_problem = problem

    async def _prune_ledger(self) -> None:
        while True:
            await asyncio.sleep(PRUNE_INTERVAL_S)
            try:
                pruned = await asyncio.to_thread(
                    self._ledger.prune, datetime.now(UTC), self._policy.last.retention
                )
            except LedgerError as error:
                log.warning("the ledger was not pruned", reason=str(error))
            else:
                log.info("ledger pruned", **pruned.model_dump())

    def _intervals(self) -> Intervals:
        policy = self._policy.last
        return Intervals(
            register_interval_s=policy.machines.register_interval.total_seconds(),
            heartbeat_interval_s=policy.detection.heartbeat_interval.total_seconds(),
            probes=policy.probes,
        )

    # --- ending

    def _signalled(self, number: int) -> None:
        log.info("signal", signal=signal.Signals(number).name)
        if self._end.is_set():
            # Somebody is in a hurry; whatever is lost is done again by the next controller.
            os._exit(CRASHED)
        self._end.set()

    async def _close(self, serving: asyncio.Task[None], *others: asyncio.Task[Any]) -> None:
        self._parts.problems = lambda: ("ending",)
        for task in others:
            task.cancel()
        self._server.should_exit = True
        await asyncio.gather(serving, *others, return_exceptions=True)
        await self._agents.aclose()
        await self._http.aclose()
        self._ledger.close()
        log.info("controller ends")


def all_activities(
    ledger: Ledger,
    agents: AgentPool,
    policy: FleetPolicy,
    http: httpx.AsyncClient,
    checkpoint_root: Path,
) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Every activity with its clients: those of the control queue, and those of the watch queue."""
    detection = Detection(ledger, agents)
    diagnosis = Diagnosis(ledger, agents)
    launch = Launch(ledger, agents, policy)
    records = Records(ledger, policy)
    control: list[Callable[..., Any]] = [
        detection.confirm_machines,
        diagnosis.diagnose_run,
        diagnosis.find_slow_ranks,
        Isolation(ledger).evict_machines,
        HotUpdate(ledger, agents).materialise_code,
        CheckpointRestore(ledger, checkpoint_root).choose_restore_point,
        launch.register_job,
        launch.open_run,
        launch.prepare_run,
        launch.start_ranks,
        launch.stop_ranks,
        launch.close_run,
        launch.close_job,
        records.record_progress,
        records.record_incident,
        records.close_incident,
        records.read_policy,
        Notification(ledger, policy, http).notify,
    ]
    return control, [detection.watch_run]


# --- the process


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


class _CancelledActivity(logging.Filter):
    """Leaves out the traceback that the SDK logs for each activity that a shutdown hands over."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a record about a cancellation."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, asyncio.CancelledError)


def _quiet_logging() -> None:
    # httpx logs whole URLs; a webhook's URL is a secret.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("temporalio.activity").addFilter(_CancelledActivity())
