"""The agent's HTTP API: paths, and nothing that decides.

``create_app`` puts the parts of an agent behind the paths of ``everstep.spec.agent_api``; the guard
in front of it has checked token and body before anything here runs. ``docs/agent-api.md`` is the
readable form, ``GET /openapi.json`` (with the controller's token) the machine's. Not here: fencing
(``commands``), streams (``stream``), the server (``wire``).
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib import metadata
from pathlib import Path as FilePath
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    generate_latest,
)
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from everstep.decide.stack_report import StackReport
from everstep.machine.commands import CommandDesk, Machine
from everstep.machine.guard import (
    STATUS,
    Doors,
    Guard,
    Refusal,
    Refusals,
    one_line,
    refusal_body,
)
from everstep.machine.health import Health as MachineHealth
from everstep.machine.health import NoProbes
from everstep.machine.plans import RANKS_MAX
from everstep.machine.ring import EventRing, parse_cursor
from everstep.machine.stacks import CaptureLimits
from everstep.machine.stream import Streams
from everstep.spec.agent_api import (
    API_VERSION,
    Command,
    ErrorBody,
    ErrorCode,
    FenceJob,
    MachineInfo,
    MaterialiseCode,
    MaterialisedCode,
    PreparedRun,
    PrepareRun,
    RunStacks,
    RunState,
    RunSummary,
    Shutdown,
    ShutdownDone,
    StartedRun,
    StartRun,
    StoppedRun,
    StopRun,
)
from everstep.spec.base import NAME_PATTERN, Message

LOG_TAIL_BYTES = 64 * 1024
LOG_TAIL_BYTES_MAX = 1024 * 1024

JobId = Annotated[str, Path(pattern=NAME_PATTERN)]
GenerationNumber = Annotated[int, Path(ge=1, le=2**31 - 1)]
RankNumber = Annotated[int, Path(ge=0, lt=RANKS_MAX)]
Cursor = Annotated[str | None, Query(pattern="^[0-9a-f]{16}:[0-9]{1,18}$")]
A = TypeVar("A", bound=Message)


class RunViews(Protocol):
    """What the API shows of ``everstep.machine.runs.RunManager``."""

    def state(self, job_id: str, generation: int) -> RunState | None:
        """The state of one run."""

    def summaries(self) -> tuple[RunSummary, ...]:
        """All runs, small."""

    def log_path(self, job_id: str, generation: int, rank: int) -> FilePath | None:
        """Where a rank's output is."""

    async def stacks(
        self, job_id: str, generation: int, limits: CaptureLimits
    ) -> StackReport | None:
        """What the processes of a run are doing."""


@cache
def own_version() -> str:
    """Which Everstep this is, for people."""
    try:
        return metadata.version("everstep")
    except metadata.PackageNotFoundError:
        return "unknown"


class Health(Message):
    """``GET /healthz``: the agent answers. Nothing else, since anybody may ask."""

    ok: bool = True


class Metrics:
    """What ``GET /metrics`` shows."""

    def __init__(self, ring: EventRing, streams: Streams, runs: RunViews) -> None:
        self.registry = CollectorRegistry()
        self.refusals = Counter(
            "everstep_agent_refusals", "Requests refused", ["code"], registry=self.registry
        )
        self.commands = Counter(
            "everstep_agent_commands", "Commands carried out", ["command"], registry=self.registry
        )
        readings: dict[str, tuple[str, Callable[[], float]]] = {
            "streams": ("Open event streams", lambda: len(streams)),
            "streams_displaced": ("Streams closed for a newer", lambda: streams.displaced_total),
            "events": ("Sequence number of the newest event", lambda: ring.next_seq - 1),
            "events_on_disk": ("1 when events are kept on disk", lambda: ring.problem is None),
            "live_ranks": ("Ranks running", lambda: sum(r.live_ranks for r in runs.summaries())),
        }
        for name, (text, read) in readings.items():
            Gauge(f"everstep_agent_{name}", text, registry=self.registry).set_function(read)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParts:
    """What an agent is made of, for ``create_app``."""

    machine: Machine
    runs: RunViews
    desk: CommandDesk
    ring: EventRing
    streams: Streams
    doors: Doors
    health: MachineHealth = field(default_factory=NoProbes)


def create_app(parts: AgentParts) -> ASGIApp:
    """The whole application, guard included."""
    metrics = Metrics(parts.ring, parts.streams, parts.runs)
    app = FastAPI(
        title="Everstep agent",
        version=str(API_VERSION),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": {"model": ErrorBody, "description": "Refused: one line"}},
    )
    _add_views(app, parts, metrics)
    _add_stacks(app, parts.runs)
    _add_commands(app, parts.desk, metrics)
    _add_refusals(app, metrics)
    _describe_tokens(app, parts.doors)
    refusals = Refusals(lambda code: metrics.refusals.labels(code.value).inc())
    return Guard(app, parts.doors, refusals)


def _add_views(app: FastAPI, parts: AgentParts, metrics: Metrics) -> None:
    machine, runs = parts.machine, parts.runs

    @app.get("/healthz")
    async def healthz() -> Health:
        return Health()

    @app.get("/v1/machine")
    async def show_machine() -> MachineInfo:
        return MachineInfo(
            machine_id=machine.machine_id,
            agent_boot_id=machine.agent_boot_id,
            api_version=API_VERSION,
            monotonic_s=time.monotonic(),
            slots=machine.slots,
            address=machine.address,
            version=own_version(),
            runs=runs.summaries(),
            observations=parts.health.seen(),
            healthy_probes=parts.health.healthy_probes(),
        )

    @app.get(
        "/v1/events",
        response_class=Response,
        responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
    )
    async def stream_events(
        after: Cursor = None,
    ) -> Response:
        if after is not None and parse_cursor(after) is None:
            raise Refusal(ErrorCode.BAD_REQUEST, "after: must be RING_ID:SEQ")
        return parts.streams.open(after)

    @app.get("/v1/runs/{job_id}/{generation}")
    async def show_run(job_id: JobId, generation: GenerationNumber) -> RunState:
        state = runs.state(job_id, generation)
        if state is None:
            raise Refusal(ErrorCode.NOT_FOUND, "there is no such run on this machine")
        return state

    @app.get(
        "/v1/runs/{job_id}/{generation}/ranks/{rank}/log",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def show_log(
        job_id: JobId,
        generation: GenerationNumber,
        rank: RankNumber,
        tail_bytes: Annotated[int, Query(ge=0, le=LOG_TAIL_BYTES_MAX)] = LOG_TAIL_BYTES,
        offset: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    ) -> Response:
        path = runs.log_path(job_id, generation, rank)
        if path is None:
            raise Refusal(ErrorCode.NOT_FOUND, "there is no such rank on this machine")
        start, size, content = await asyncio.to_thread(_read_log, path, tail_bytes, offset)
        return Response(
            content,
            media_type="text/plain; charset=utf-8",
            headers={"everstep-log-offset": str(start), "everstep-log-bytes": str(size)},
        )

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_stacks(app: FastAPI, runs: RunViews) -> None:
    @app.get("/v1/runs/{job_id}/{generation}/stacks")
    async def show_stacks(
        job_id: JobId,
        generation: GenerationNumber,
        looks: Annotated[int, Query(ge=1, le=2)] = 2,
        lines: Annotated[bool, Query()] = True,
    ) -> RunStacks:
        report = await runs.stacks(job_id, generation, CaptureLimits(looks=looks, lines=lines))
        if report is None:
            raise Refusal(ErrorCode.NOT_FOUND, "there is no such run on this machine")
        return RunStacks(report=report)


def _add_commands(app: FastAPI, desk: CommandDesk, metrics: Metrics) -> None:
    async def carry_out(command: Command, answer: type[A]) -> A:
        result = await desk.handle(command)
        metrics.commands.labels(type(command).__name__).inc()
        if not isinstance(result, answer):
            raise TypeError(f"{type(command).__name__} was answered with {type(result).__name__}")
        return result

    @app.post("/v1/commands/prepare_run")
    async def prepare_run(command: PrepareRun) -> PreparedRun:
        return await carry_out(command, PreparedRun)

    @app.post("/v1/commands/start_run")
    async def start_run(command: StartRun) -> StartedRun:
        return await carry_out(command, StartedRun)

    @app.post("/v1/commands/stop_run")
    async def stop_run(command: StopRun) -> StoppedRun:
        return await carry_out(command, StoppedRun)

    @app.post("/v1/commands/fence_job")
    async def fence_job(command: FenceJob) -> Message:
        return await carry_out(command, Message)

    @app.post("/v1/commands/materialise_code")
    async def materialise_code(command: MaterialiseCode) -> MaterialisedCode:
        return await carry_out(command, MaterialisedCode)

    @app.post("/v1/commands/shutdown")
    async def shutdown(command: Shutdown) -> ShutdownDone:
        return await carry_out(command, ShutdownDone)


def _add_refusals(app: FastAPI, metrics: Metrics) -> None:
    def refuse(
        code: ErrorCode, message: str, status: int | None = None, **headers: str
    ) -> Response:
        metrics.refusals.labels(code.value).inc()
        return Response(
            refusal_body(code, message),
            status_code=status or STATUS[code],
            media_type="application/json",
            headers=headers,
        )

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return refuse(refusal.code, refusal.message)

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> Response:
        return refuse(*explain(error.errors()))

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> Response:
        # The guard logs and counts it.
        text = "internal error: the agent's log has the details"
        return Response(
            refusal_body(ErrorCode.FAILED, text),
            status_code=STATUS[ErrorCode.FAILED],
            media_type="application/json",
        )

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:
        if error.status_code == HTTPStatus.NOT_FOUND:
            version = re.match(r"/v(\d{1,9})/", request.url.path)
            if version and int(version[1]) != API_VERSION:
                text = f"this agent speaks API version {API_VERSION}, not {int(version[1])}"
                return refuse(ErrorCode.API_VERSION, text)
            return refuse(ErrorCode.NOT_FOUND, "there is no such path")
        allowed = dict(error.headers or {}).get("Allow", "")
        headers = {"allow": allowed} if allowed else {}
        text = f"{one_line(str(error.detail))}{': use ' + allowed if allowed else ''}"
        return refuse(ErrorCode.BAD_REQUEST, text, error.status_code, **headers)


def explain(errors: Sequence[Any]) -> tuple[ErrorCode, str]:
    """Code and line for what pydantic found; nothing of the input is repeated."""
    for error in errors:
        if error["loc"] and error["loc"][-1] == "api_version":
            return ErrorCode.API_VERSION, f"this agent speaks API version {API_VERSION} only"
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")[:100]
    # Names of unknown keys are the sender's; everything else in a location is ours.
    unknown = first["type"] == "extra_forbidden"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    text = "holds a key that is not known here" if unknown else first["msg"]
    return ErrorCode.BAD_REQUEST, f"{where or 'body'}: {text}{more}"


def _describe_tokens(app: FastAPI, doors: Doors) -> None:
    """Say in the OpenAPI document which paths need which token."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            document.setdefault("components", {})["securitySchemes"] = {
                name: {"type": "http", "scheme": "bearer"} for name in ("controller", "metrics")
            }
            for path, operations in document["paths"].items():
                scheme = "metrics" if path in doors.metrics_paths else "controller"
                for operation in operations.values():
                    if path not in doors.open_paths:
                        operation["security"] = [{scheme: []}]
        return app.openapi_schema or document

    app.openapi = openapi  # type: ignore[method-assign]


def _read_log(path: FilePath, tail_bytes: int, offset: int | None) -> tuple[int, int, bytes]:
    """Where the part begins, how long the log is, and the part."""
    try:
        # A rank may have put a link in its place that leads to what it cannot read itself.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Refusal(ErrorCode.NOT_FOUND, "the rank's log is not a file")
            start = max(0, status.st_size - tail_bytes) if offset is None else offset
            return start, status.st_size, os.pread(descriptor, tail_bytes, start)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Refusal(
            ErrorCode.NOT_FOUND, f"the rank's log cannot be read: {error.strerror}"
        ) from None
