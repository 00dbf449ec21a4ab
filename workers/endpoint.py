"""The controller's small HTTP endpoint: agents register here, and health and metrics live here.

Agents hold no Temporal credentials and no access to the ledger; this is all they can reach of a
controller. The door in front (tokens, bounded bodies, one line per refusal) is the agents' own
(``everstep.machine.guard``). ``/healthz`` says "ok" only while this controller can work: it polls
both queues and the ledger answers.

Not here: what a registration means (the ledger decides, ``register_machine``).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    generate_latest,
)
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from everstep.ledger import LedgerError, LedgerUnavailable, MachineStanding
from everstep.machine.guard import STATUS, Doors, Guard, Refusal, Refusals, one_line, refusal_body
from everstep.secrets import Secrets
from everstep.spec.agent_api import API_VERSION, ErrorCode, Registration, RegistrationAnswer
from everstep.spec.base import Message
from everstep.spec.policy import ProbesPolicy

REGISTER_PATH = "/v1/agents/register"
LEDGER_MAX_S = 8.0
"""An agent gives up on a registration after some seconds and tries another controller."""

log = structlog.get_logger(__name__)


class RegisterMachine(Protocol):
    """``Ledger.register_machine``."""

    def __call__(self, request: Registration, *, now: datetime) -> MachineStanding:
        """Enter a machine, or note that it is still there."""


class Intervals(Message):
    """What the fleet's policy tells agents."""

    register_interval_s: float
    heartbeat_interval_s: float
    probes: ProbesPolicy | None = None


class Health(Message):
    """``GET /healthz``: nothing but whether it works and what does not, since anybody may ask."""

    ok: bool
    problems: tuple[str, ...] = ()


class EndpointParts:
    """What the endpoint is connected to; filled while the controller comes up."""

    def __init__(self) -> None:
        self.register: RegisterMachine | None = None
        """None until the ledger is there."""
        self.intervals: Callable[[], Intervals] | None = None
        self.problems: Callable[[], tuple[str, ...]] = lambda: ("starting",)
        self.telemetry: Collector | None = None


def create_app(parts: EndpointParts, secrets: Secrets) -> ASGIApp:
    """The whole application, door included."""
    registry = CollectorRegistry()
    refusals = Counter(
        "everstep_controller_refusals", "Requests refused", ["code"], registry=registry
    )
    registrations = Counter(
        "everstep_controller_registrations",
        "Registrations of agents",
        ["answer"],
        registry=registry,
    )
    Gauge(
        "everstep_controller_working",
        "1 while both queues are polled and the ledger answers",
        registry=registry,
    ).set_function(lambda: float(not parts.problems()))
    app = FastAPI(
        title="Everstep controller",
        version=str(API_VERSION),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )

    @app.post(REGISTER_PATH)
    async def register(registration: Registration) -> RegistrationAnswer:
        answer = await _register(parts, registration)
        registrations.labels("accepted" if answer.accepted else "refused").inc()
        return answer

    @app.get("/healthz")
    async def healthz(response: Response) -> Health:
        problems = parts.problems()
        response.status_code = 503 if problems else 200
        return Health(ok=not problems, problems=problems)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        text = generate_latest(registry)
        if parts.telemetry is not None:
            temporal = CollectorRegistry()
            temporal.register(parts.telemetry)
            text += generate_latest(temporal)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    _add_refusals(app, refusals)
    doors = Doors(controller=secrets.enrol, metrics=secrets.metrics)
    return Guard(app, doors, Refusals(lambda code: refusals.labels(code.value).inc()))


async def _register(parts: EndpointParts, registration: Registration) -> RegistrationAnswer:
    if registration.api_version != API_VERSION:
        raise Refusal(
            ErrorCode.API_VERSION,
            f"this controller speaks API version {API_VERSION}, machine {registration.machine_id} "
            f"speaks {registration.api_version}",
        )
    problem = agent_url_problem(registration.url)
    if problem is not None:
        raise Refusal(ErrorCode.BAD_REQUEST, f"url: {problem}")
    if parts.register is None or parts.intervals is None:
        raise Refusal(ErrorCode.BUSY, "this controller is starting: try again")
    try:
        async with asyncio.timeout(LEDGER_MAX_S):
            standing = await asyncio.to_thread(parts.register, registration, now=datetime.now(UTC))
    except (LedgerUnavailable, TimeoutError):
        raise Refusal(ErrorCode.BUSY, "the ledger does not answer: try again") from None
    except LedgerError as error:
        log.error(  # noqa: TRY400 - one line is all there is to know
            "registration failed", machine_id=registration.machine_id, reason=str(error)
        )
        raise Refusal(ErrorCode.FAILED, "the ledger refuses: see the controller's log") from None
    if not standing.accepted:
        log.warning(
            "registration refused", machine_id=registration.machine_id, reason=standing.message
        )
    intervals = parts.intervals()
    return RegistrationAnswer(
        accepted=standing.accepted,
        message=standing.message,
        register_interval_s=intervals.register_interval_s,
        heartbeat_interval_s=intervals.heartbeat_interval_s,
        probes=intervals.probes,
        fences=dict(standing.fences),
        evicted=standing.evicted,
    )


def agent_url_problem(url: str) -> str | None:
    """Why controllers could not call an agent back there, or None."""
    if len(url) > 300 or not re.fullmatch(r"https?://[A-Za-z0-9._\-\[\]:]+(:[0-9]{1,5})?/?", url):
        return "an address like http://10.0.0.7:7710 is needed"
    return None


def _add_refusals(app: FastAPI, counter: Counter) -> None:
    def refuse(code: ErrorCode, message: str, status: int | None = None) -> Response:
        counter.labels(code.value).inc()
        return Response(
            refusal_body(code, message),
            status_code=status or STATUS[code],
            media_type="application/json",
        )

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return refuse(refusal.code, refusal.message)

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")[:100]
        return refuse(ErrorCode.BAD_REQUEST, f"{where or 'body'}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def no_such_path(_: Request, error: HTTPException) -> Response:
        code = ErrorCode.NOT_FOUND if error.status_code == 404 else ErrorCode.BAD_REQUEST
        return refuse(code, one_line(str(error.detail)), error.status_code)
