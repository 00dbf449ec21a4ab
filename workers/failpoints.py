"""Failpoints of a controller: named places where a test may kill or freeze it.

``EVERSTEP_FAILPOINT="<name>:<action>"`` strikes once, at the first time the place is reached in any
process that shares ``EVERSTEP_FAILPOINT_DIR``; a controller that is started again goes on past it.
Actions: ``kill`` (SIGKILL to itself), ``freeze`` (SIGSTOP to itself), and, without a name,
``record:<file>``, which writes down the name of every place that is reached.

Names::

    activity:<type>:<n>:before_body | after_effect | after_return
    workflow_task:<workflow type>:<n>:before_completion | after_completion

``<n>`` counts the executions of that activity type, or the tasks of that workflow type, over the
life of the directory: the n-th one has the same number after a retry or in another process, because
who was seen first is kept in the directory. A job without faults, or with the same ones, meets the
same names in the same order, as long as only one job runs there.

Not here: choosing failpoints and judging outcomes (``scripts``, ``tests/sweep``). Without the
variable nothing of this is installed.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog
from temporalio import activity
from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    Worker,
)

from activities import failpoints as hook
from everstep.errors import ConfigurationProblem

FAILPOINT_ENV = "EVERSTEP_FAILPOINT"
DIRECTORY_ENV = "EVERSTEP_FAILPOINT_DIR"
_ACTIONS = ("kill", "freeze")
_KINDS = ("activity:", "workflow_task:")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailpointConfig:
    """What ``EVERSTEP_FAILPOINT`` asks for."""

    action: Literal["kill", "freeze", "record"]
    name: str
    """The failpoint's name, or the file to record names in."""
    directory: Path


def failpoint_config(env: Mapping[str, str]) -> FailpointConfig | None:
    """What the environment asks for; None, the normal case, when it asks for nothing.

    Raises:
        ConfigurationProblem: it asks for something that does not exist.
    """
    wanted = env.get(FAILPOINT_ENV, "")
    if not wanted:
        return None
    directory = env.get(DIRECTORY_ENV, "")
    if not directory or not Path(directory).is_dir():
        raise ConfigurationProblem(
            f"{DIRECTORY_ENV}={directory}: {FAILPOINT_ENV} needs a directory there, shared by all "
            "controllers of the test"
        )
    if wanted.startswith("record:") and len(wanted) > len("record:"):
        return FailpointConfig(
            action="record", name=wanted.removeprefix("record:"), directory=Path(directory)
        )
    name, _, action = wanted.rpartition(":")
    if action not in _ACTIONS or not name.startswith(_KINDS):
        raise ConfigurationProblem(
            f"{FAILPOINT_ENV}={wanted}: expected <name>:kill, <name>:freeze or record:<file>, with "
            "a name like activity:evict_machines:1:before_body"
        )
    return FailpointConfig(
        action="kill" if action == "kill" else "freeze", name=name, directory=Path(directory)
    )


def _signal_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


class Failpoints:
    """Counts places and strikes at the one that was asked for."""

    def __init__(
        self,
        config: FailpointConfig,
        strike: Callable[[signal.Signals], None] = _signal_self,
    ) -> None:
        self._config = config
        self._strike = strike

    def number(self, kind: str, identity: str) -> int:
        """Which one of its kind ``identity`` is, counted from 1 in order of first appearance."""
        path = self._config.directory / f"seen.{kind.replace(':', '.')}"
        with path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            seen = file.read().splitlines()
            if identity in seen:
                return seen.index(identity) + 1
            file.write(identity + "\n")
            return len(seen) + 1

    def reached(self, name: str) -> None:
        """A place is reached: record it, or strike if it is the one and has not struck yet."""
        if self._config.action == "record":
            with Path(self._config.name).open("a", encoding="utf-8") as file:
                file.write(name + "\n")
            return
        if name != self._config.name:
            return
        marker = self._config.directory / f"struck.{name.replace(':', '.')}"
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
        log.warning("failpoint", name=name, action=self._config.action, pid=os.getpid())
        self._strike(signal.SIGKILL if self._config.action == "kill" else signal.SIGSTOP)

    # --- activities

    def interceptor(self) -> Interceptor:
        """Reaches ``before_body`` and ``after_return`` of every activity."""
        return _ActivityFailpoints(self)

    def activity_reached(self, where: str) -> None:
        """Called in an activity's own context."""
        info = activity.info()
        kind = f"activity:{info.activity_type}"
        number = self.number(kind, f"{info.workflow_run_id}/{info.activity_id}")
        self.reached(f"{kind}:{number}:{where}")

    def install(self, workers: list[Worker]) -> None:
        """Reach ``after_effect`` in this process and both places around every workflow task."""
        hook.set_hook(lambda: self.activity_reached("after_effect"))
        for worker in workers:
            wrap_bridge(worker, self)


class _ActivityFailpoints(Interceptor):
    def __init__(self, failpoints: Failpoints) -> None:
        self._failpoints = failpoints

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:  # noqa: A002 - the SDK's name
        return _ActivityInbound(next, self._failpoints)


class _ActivityInbound(ActivityInboundInterceptor):
    def __init__(self, following: ActivityInboundInterceptor, failpoints: Failpoints) -> None:
        super().__init__(following)
        self._failpoints = failpoints

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:  # noqa: A002 - the SDK's name
        self._failpoints.activity_reached("before_body")
        result = await super().execute_activity(input)
        self._failpoints.activity_reached("after_return")
        return result


# --- workflow tasks

BRIDGE_ATTRIBUTE = "_bridge_worker"
"""Private in the SDK; ``tests/activity/test_failpoints.py`` fails when it changes."""


def wrap_bridge(worker: Worker, failpoints: Failpoints) -> None:
    """Put ``BridgeFailpoints`` between a worker and the SDK's core.

    Raises:
        RuntimeError: the SDK has changed under us.
    """
    bridge = getattr(worker, BRIDGE_ATTRIBUTE, None)
    for method in ("poll_workflow_activation", "complete_workflow_activation"):
        if not callable(getattr(bridge, method, None)):
            raise RuntimeError(  # noqa: TRY004 - not a wrong type of ours: another SDK
                f"this Temporal SDK has no Worker.{BRIDGE_ATTRIBUTE}.{method}"
            )
    setattr(worker, BRIDGE_ATTRIBUTE, BridgeFailpoints(bridge, failpoints))


class BridgeFailpoints:
    """Sees every activation of a workflow come in, and its completion go out."""

    def __init__(self, bridge: Any, failpoints: Failpoints) -> None:
        self._bridge = bridge
        self._failpoints = failpoints
        self._types: dict[str, str] = {}
        self._open: dict[str, str] = {}
        """Workflow run to the kind and number of its task that is being worked on."""

    def __getattr__(self, name: str) -> Any:
        """Everything else is the bridge's."""
        return getattr(self._bridge, name)

    async def poll_workflow_activation(self) -> WorkflowActivation:
        """Note which workflow a task is of."""
        activation: WorkflowActivation = await self._bridge.poll_workflow_activation()
        jobs = [job.WhichOneof("variant") for job in activation.jobs]
        for job in activation.jobs:
            if job.HasField("initialize_workflow"):
                self._types[activation.run_id] = job.initialize_workflow.workflow_type
        workflow_type = self._types.get(activation.run_id)
        # Replays, evictions and queries are not tasks whose completion changes anything.
        passive = {"remove_from_cache", "query_workflow"}
        if workflow_type and not activation.is_replaying and set(jobs) - passive:
            kind = f"workflow_task:{workflow_type}"
            identity = f"{activation.run_id}/{activation.history_length}"
            self._open[activation.run_id] = f"{kind}:{self._failpoints.number(kind, identity)}"
        return activation

    async def complete_workflow_activation(self, completion: WorkflowActivationCompletion) -> None:
        """Reach the places before and after the completion is handed to the SDK's core."""
        place = self._open.pop(completion.run_id, None)
        if place is None:
            await self._bridge.complete_workflow_activation(completion)
            return
        self._failpoints.reached(f"{place}:before_completion")
        await self._bridge.complete_workflow_activation(completion)
        self._failpoints.reached(f"{place}:after_completion")
