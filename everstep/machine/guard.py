"""The door of the agent's API: who may come in, with what, for how long.

An ASGI layer in front of the whole application. Nothing of a request is read before its token is
known to be right, bodies are bounded in size and time (endless and chunked ones too), and whatever
goes wrong behind the door leaves as one JSON line ``{"code", "message"}`` that repeats nothing of
what was sent. Refusals are counted; at most one log line every ten seconds is spent on each kind,
so that a stranger cannot fill the disk. Not here: what a command may do (``commands``).
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep.machine.wire import SCOPE_KEY
from everstep.secrets import bearer_token, same_secret
from everstep.spec.agent_api import ErrorCode

BODY_BYTES_MAX = 1024 * 1024
STRANGERS_BODY_BYTES_MAX = 4096
"""What may be sent to a path that stands open."""
BODY_MAX_S = 10.0
LOG_INTERVAL_S = 10.0

STATUS: dict[ErrorCode, int] = {
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.OLDER_GENERATION: 409,
    ErrorCode.EXPIRED: 409,
    ErrorCode.WRONG_BOOT: 409,
    ErrorCode.API_VERSION: 400,
    ErrorCode.BUSY: 429,
    ErrorCode.EVICTED: 403,
    ErrorCode.FAILED: 500,
}
"""HTTP status of every refusal."""

log = structlog.get_logger(__name__)


class Refusal(Exception):
    """The answer is no; ``code`` and ``message`` are the body."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = one_line(message)


def one_line(text: str, characters_max: int = 400) -> str:
    """``text`` as one bounded line."""
    return " ".join(text.split())[:characters_max]


def told(error: BaseException, frames_max: int = 6) -> dict[str, str]:
    """An error for a log line: what and where.

    No values of variables, which may be secrets: renderers of tracebacks like to show them.
    """
    frames = traceback.extract_tb(error.__traceback__)[-frames_max:]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
    return {"error": f"{type(error).__name__}: {one_line(str(error))}", "where": where}


@dataclass
class Refusals:
    """Counts refusals, and keeps the log from being a stranger's to fill."""

    count: Callable[[ErrorCode], None]
    _told_at: dict[ErrorCode, float] = field(default_factory=dict)

    def note(self, code: ErrorCode, message: str) -> None:
        """Count one; log it unless one of its kind was logged just before."""
        self.count(code)
        now = time.monotonic()
        if now - self._told_at.get(code, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._told_at[code] = now
            log.warning("request refused", code=code.value, reason=message)


@dataclass(frozen=True, slots=True)
class Doors:
    """Which token opens which path; everything that is not listed needs the controller's."""

    controller: str = field(repr=False)
    metrics: str = field(repr=False)
    open_paths: frozenset[str] = frozenset({"/healthz"})
    metrics_paths: frozenset[str] = frozenset({"/metrics"})

    def token_for(self, path: str) -> str | None:
        """The token that opens ``path``, or None when it stands open."""
        if path in self.open_paths:
            return None
        return self.metrics if path in self.metrics_paths else self.controller


class Guard:
    """The ASGI layer."""

    def __init__(self, app: ASGIApp, doors: Doors, refusals: Refusals) -> None:
        self._app = app
        self._doors = doors
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            return
        state = _Answer(send)
        try:
            known = self._check_token(scope)
            body = await _whole_body(
                scope, receive, BODY_BYTES_MAX if known else STRANGERS_BODY_BYTES_MAX
            )
            await self._app(scope, _replayed(body, receive), state.send)
        except Refusal as refusal:
            self._refusals.note(refusal.code, refusal.message)
            # The body may be unread, so the connection cannot be used again.
            await state.refuse(refusal.code, refusal.message)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the sender
            log.error(  # noqa: TRY400 - see ``told``
                "request failed", method=scope["method"], path=scope["path"][:100], **told(error)
            )
            self._refusals.note(ErrorCode.FAILED, "internal error")
            await state.refuse(ErrorCode.FAILED, "internal error: the agent's log has the details")

    def _check_token(self, scope: Scope) -> bool:
        """True when a right token was shown, False when none is needed."""
        expected = self._doors.token_for(scope["path"])
        if expected is None:
            return False
        given = bearer_token(_header(scope, b"authorization"))
        if given is None:
            raise Refusal(ErrorCode.UNAUTHORIZED, "send the token as `Authorization: Bearer TOKEN`")
        if not same_secret(given, expected):
            raise Refusal(ErrorCode.UNAUTHORIZED, "this token does not open this path")
        connection = scope.get(SCOPE_KEY)
        if connection is not None:
            connection.prove()
        return True


class _Answer:
    """Passes an answer on, and knows whether it is too late for another one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False

    async def send(self, message: Message) -> None:
        self._started = self._started or message["type"] == "http.response.start"
        await self._send(message)

    async def refuse(self, code: ErrorCode, message: str) -> None:
        if self._started:
            return
        body = refusal_body(code, message)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode("ascii")),
            (b"connection", b"close"),
        ]
        if code is ErrorCode.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.send({"type": "http.response.start", "status": STATUS[code], "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def refusal_body(code: ErrorCode, message: str) -> bytes:
    """The one line of a refusal."""
    line = json.dumps({"code": code.value, "message": one_line(message)})
    return line.encode("ascii") + b"\n"


def _header(scope: Scope, name: bytes) -> str | None:
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else None


async def _whole_body(scope: Scope, receive: Receive, bytes_max: int) -> bytes:
    too_large = Refusal(ErrorCode.TOO_LARGE, f"a body may have {bytes_max} bytes at most")
    declared = _header(scope, b"content-length")
    if declared is not None and declared.isdecimal() and int(declared[:20]) > bytes_max:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_MAX_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal(ErrorCode.BAD_REQUEST, "the connection ended before the body did")
                body += message.get("body", b"")
                if len(body) > bytes_max:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Refusal(
            ErrorCode.BAD_REQUEST, f"a body must be complete within {BODY_MAX_S:g} seconds"
        ) from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read, then what comes after it (the disconnect)."""
    first = True

    async def replay() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay
