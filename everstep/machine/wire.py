"""The HTTP server under the agent's API, hardened against strangers on the network.

uvicorn's own protocol waits for ever for a request line, and cannot drop a connection whose reader
has stopped. Here every connection has a deadline for its request headers, refusals of the protocol
itself are JSON lines like all others, the number of connections that have not shown a token is
bounded (the oldest is dropped for the newest, so a flood cannot keep the controller out), a peer
that vanished is noticed by the kernel, and a handler can abort its connection through
``scope["everstep"]``. Not here: tokens and bodies (``everstep.machine.guard``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from everstep.errors import ConfigurationProblem
from everstep.spec.agent_api import ErrorCode

HEADERS_MAX_S = 5.0
"""How long a connection may take for the headers of a request, counted from its first byte, or from
the connection itself for the first request."""
HEADERS_BYTES_MAX = 16 * 1024
KEEP_ALIVE_S = 30.0
STRANGERS_MAX = 256
"""Connections that have not shown a right token yet."""
PEER_SILENT_MAX_MS = 20_000
"""Sent data that is not acknowledged for this long ends a connection (TCP_USER_TIMEOUT)."""

SCOPE_KEY = "everstep"


class Connection(H11Protocol):
    """One connection to the agent."""

    strangers: dict[Connection, None]
    """Set by ``hardened_server``: one ordered set for each server, oldest first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the headers, and make room by dropping the oldest stranger."""
        super().connection_made(transport)
        _watch_peer(transport)
        self.strangers[self] = None
        if len(self.strangers) > STRANGERS_MAX:
            next(iter(self.strangers)).abort()
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_deadline()
        self.strangers.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; headers that begin must end in time."""
        if self._deadline is None and self.conn.their_state is h11.IDLE:
            self._start_deadline()
        super().data_received(data)

    def handle_events(self) -> None:
        """As in uvicorn; a request whose headers are whole has met its deadline."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_deadline()
        if self.cycle is not None:
            # The handler's task was created above and has not run yet.
            cast("dict[str, Any]", self.cycle.scope).setdefault(SCOPE_KEY, self)

    def prove(self) -> None:
        """The connection has shown a right token: it no longer counts as a stranger's."""
        self.strangers.pop(self, None)

    def abort(self) -> None:
        """Drop the connection now, with what is still to be sent."""
        self.strangers.pop(self, None)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP with one JSON line."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            # An answer is under way already: there is no room for a second one.
            self.transport.abort()
            return
        body = json.dumps({"code": ErrorCode.BAD_REQUEST, "message": msg.rstrip(".")}) + "\n"
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode("ascii")),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body.encode("ascii")),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEADERS_MAX_S, self._deadline_passed)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _deadline_passed(self) -> None:
        self._deadline = None
        self.abort()


class Server(uvicorn.Server):
    """uvicorn's server on sockets that are bound already, with a deadline for TLS handshakes.

    It leaves signals alone: the agent decides what one means.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        config, loop = self.config, asyncio.get_running_loop()

        def connection() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state={}, _loop=loop
            )

        self.servers = [
            await loop.create_server(
                connection,
                sock=listener,
                ssl=config.ssl,
                ssl_handshake_timeout=HEADERS_MAX_S if config.ssl else None,
                backlog=config.backlog,
            )
            for listener in sockets or []
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def hardened_server(app: Any, *, tls: ssl.SSLContext | None = None, exit_grace_s: float) -> Server:
    """A server for ``app``; call ``serve(sockets=[...])`` on it."""
    # Its lines are about strangers' connections, as many as a stranger wants; ours are counted.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    protocol = type("AgentConnection", (Connection,), {"strangers": {}})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=int(max(1, exit_grace_s)),
        h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
    )
    config.load()
    config.ssl = tls
    return Server(config)


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """The TLS settings of a server.

    Raises:
        ConfigurationProblem: the files cannot be used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigurationProblem(
            f"--tls-cert {certificate} --tls-key {key}: cannot be used as a certificate and its "
            f"key in PEM: {error.strerror or error.__class__.__name__}"
        ) from None
    return context


def _watch_peer(transport: asyncio.Transport) -> None:
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_SILENT_MAX_MS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
