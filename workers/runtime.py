"""Connections to the Temporal server and workers with measured options.

Why each option has its value is in ``docs/temporal.md``. Not here: which activities there are and
what they are given (``workers.controller``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.envconfig import ClientConfig
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.worker import Interceptor, Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from everstep.errors import ConfigurationProblem
from everstep.spec import messages as m
from workers.telemetry import Telemetry
from workflows.incident import Incident
from workflows.training_job import TrainingJob

WORKFLOWS: tuple[type, ...] = (TrainingJob, Incident)

STICKY_TIMEOUT = timedelta(seconds=1)
"""After a controller is killed, a workflow task waits this long for it before another gets it."""
GRACE_ON_SHUTDOWN = timedelta(milliseconds=500)
"""Activities that are nearly done may finish; watches are handed over at once after it."""
HEARTBEAT_THROTTLE = timedelta(milliseconds=400)
"""The SDK would send heartbeats every 0.8 x timeout: one late one, and a watch changes hands."""
WATCHES_MAX = 10_000
ACTIVITIES_MAX = 200

PASSED_THROUGH = (
    "activities",
    "annotated_types",
    "durationpy",
    "everstep",
    "pydantic",
    "pydantic_core",
    "temporalio.contrib.pydantic",
    "typing_extensions",
    "typing_inspection",
    "workflows",
)
"""Own modules and pydantic are loaded once. The sandbox does not watch them; what they may import
is checked by the import contracts instead."""


def workflow_runner() -> SandboxedWorkflowRunner:
    """The sandbox that workers and history replays share."""
    return SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules(*PASSED_THROUGH)
    )


def new_runtime(telemetry: Telemetry | None = None) -> Runtime:
    """A runtime of the SDK's core; with ``telemetry``, its metrics go to that buffer."""
    return Runtime(
        telemetry=TelemetryConfig(
            logging=LoggingConfig(TelemetryFilter(core_level="ERROR", other_level="ERROR")),
            metrics=telemetry.buffer if telemetry else None,
        ),
        # One operating system thread and one call a minute for each worker, for a listing that is
        # stale after a crash anyway.
        worker_heartbeat_interval=None,
    )


async def connect(
    address: str | None, namespace: str | None, *, runtime: Runtime, identity: str | None = None
) -> Client:
    """Connect once.

    Address and namespace that are not given, TLS and API keys come from Temporal's own client
    configuration (``TEMPORAL_*`` variables, ``TEMPORAL_CONFIG_FILE``).

    Raises:
        ConfigurationProblem: that configuration cannot be read.
        RuntimeError: the server cannot be reached.
    """
    try:
        options: dict[str, Any] = dict(ClientConfig.load_client_connect_config())
    except (RuntimeError, ValueError, OSError, TypeError) as error:
        raise ConfigurationProblem(
            f"Temporal's client configuration (TEMPORAL_* variables, its file) cannot be read: "
            f"{' '.join(str(error).split())}"
        ) from None
    if address:
        options["target_host"] = address
    if namespace:
        options["namespace"] = namespace
    options.setdefault("target_host", "127.0.0.1:7233")
    return await Client.connect(
        **options,
        data_converter=pydantic_data_converter,
        runtime=runtime,
        identity=identity,
    )


def control_worker(
    client: Client,
    activities: Sequence[Callable[..., Any]],
    *,
    interceptors: Sequence[Interceptor] = (),
    **overrides: Any,
) -> Worker:
    """The worker of workflows and of all activities but watches."""
    options: dict[str, Any] = {
        "task_queue": m.TASK_QUEUE,
        "workflows": WORKFLOWS,
        "activities": activities,
        "workflow_runner": workflow_runner(),
        "interceptors": interceptors,
        "sticky_queue_schedule_to_start_timeout": STICKY_TIMEOUT,
        "graceful_shutdown_timeout": GRACE_ON_SHUTDOWN,
        "max_concurrent_activities": ACTIVITIES_MAX,
        "max_heartbeat_throttle_interval": HEARTBEAT_THROTTLE,
        "default_heartbeat_throttle_interval": HEARTBEAT_THROTTLE,
    }
    return Worker(client, **(options | overrides))


def watch_worker(
    client: Client,
    activities: Sequence[Callable[..., Any]],
    *,
    interceptors: Sequence[Interceptor] = (),
    **overrides: Any,
) -> Worker:
    """The worker of watches, which run for hours and must not fill the other one's slots."""
    options: dict[str, Any] = {
        "task_queue": m.WATCH_QUEUE,
        "activities": activities,
        "interceptors": interceptors,
        "graceful_shutdown_timeout": timedelta(0),
        "max_concurrent_activities": WATCHES_MAX,
        "max_heartbeat_throttle_interval": HEARTBEAT_THROTTLE,
        "default_heartbeat_throttle_interval": HEARTBEAT_THROTTLE,
    }
    return Worker(client, **(options | overrides))
