"""The agent that is attacked, and how a test knows that the attack did nothing.

``agent`` is a real one, as installed, with one real run on it; ``served`` is the same application
with a machine behind it that only remembers, for attacks that a right token would let through.
Every test ends with ``unharmed``: nothing was executed and the rightful controller is served.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everstep.machine.api import AgentParts, create_app
from everstep.machine.code import CodeStore
from everstep.machine.commands import CommandDesk, Machine
from everstep.machine.fences import Fences
from everstep.machine.guard import Doors
from everstep.machine.journal import Journal
from everstep.machine.ring import EventRing
from everstep.machine.stream import Streams
from everstep.machine.wire import hardened_server
from everstep.spec.agent_api import ErrorCode
from tests.agents import AgentProcess, FakeRuns, make_plan, processes_of, running_agent, wait_for

CONTROLLER = "controller-token-of-the-tests"
METRICS = "metrics-token-of-the-tests"


@dataclass
class Target:
    """A real agent with one run, and what was there before the attack."""

    process: AgentProcess
    processes: set[int]
    files: set[str]

    @property
    def address(self) -> tuple[str, int]:
        """Where to connect."""
        return ("127.0.0.1", self.process.port)

    @property
    def url(self) -> str:
        """Base URL."""
        return self.process.url

    @property
    def token(self) -> str:
        """The controller's token."""
        return self.process.secrets.controller


def run_folders(state: Path) -> set[str]:
    """What the machine has of runs and code versions."""
    return {str(path) for name in ("runs", "code") for path in (state / name).glob("*/*")}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One agent for a module; its run stays live through all attacks."""
    with running_agent(tmp_path_factory.mktemp("agent")) as process:

        async def start() -> None:
            async with process.client() as client:
                await client.start_run(
                    job_id="job", generation=7, command_id="c7", validity_s=30.0, run=make_plan()
                )

        asyncio.run(start())
        yield Target(process, set(processes_of(process.state)), run_folders(process.state))


@pytest.fixture
def target(started: Target) -> Iterator[Target]:
    """The agent; afterwards it must be as if the test had not been."""
    yield started
    unharmed(started)


def unharmed(target: Target) -> None:
    """Nothing was executed, nothing was ended, and the controller gets its answer quickly."""

    async def ask() -> None:
        async with target.process.client(machine_id="m1") as client, asyncio.timeout(10):
            info = await client.info()
            assert [(run.job_id, run.generation, run.live_ranks) for run in info.runs] == [
                ("job", 7, 1)
            ]
            first = await anext(client.stream())
            assert first.type == "hello"

    asyncio.run(ask())
    assert target.process.process.poll() is None
    assert set(processes_of(target.process.state)) == target.processes
    assert run_folders(target.process.state) == target.files
    assert "Traceback" not in target.process.log
    for token in _tokens(target.process):
        assert token not in target.process.log


def _tokens(process: AgentProcess) -> tuple[str, ...]:
    own = process.secrets
    return (own.enrol, own.controller, own.peer, own.metrics)


def refused(status: int, content: bytes, *codes: ErrorCode) -> None:
    """The answer is a refusal: an error status and one JSON line with one of the codes."""
    assert 400 <= status < 500
    assert content.endswith(b"\n")
    assert content.count(b"\n") == 1
    body = json.loads(content)
    assert set(body) == {"code", "message"}
    assert not codes or body["code"] in {code.value for code in codes}
    assert 0 < len(body["message"]) <= 400
    for leak in ("Traceback", "File ", ".py", "/home", "site-packages"):
        assert leak not in body["message"]


def raw(address: tuple[str, int], request: bytes, limit_s: float = 10.0) -> tuple[int, bytes]:
    """Send bytes as they are; status and body of the answer (0 when there was none)."""
    with socket.create_connection(address, timeout=limit_s) as connection:
        connection.sendall(request)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body, up to its length or the end of the connection."""
    received = b""
    try:
        while True:
            head, found, body = received.partition(b"\r\n\r\n")
            if found:
                lengths = [
                    int(line.partition(b":")[2])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ]
                if lengths and len(body) >= lengths[0]:
                    break
            chunk = connection.recv(65536)
            if not chunk:
                break
            received += chunk
    except (ConnectionError, TimeoutError):
        pass
    head, _, body = received.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def head(method: str, path: str, token: str | None = None, **headers: str) -> bytes:
    """The head of a request."""
    lines = [f"{method} {path} HTTP/1.1", "host: agent"]
    if token is not None:
        lines.append(f"authorization: Bearer {token}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("utf-8")


@dataclass
class Served:
    """The application in this process, on a real port, before a machine that only remembers."""

    url: str
    address: tuple[str, int]
    runs: FakeRuns
    desk: CommandDesk
    ring: EventRing
    streams: Streams
    boot_id: str
    call: Callable[[Callable[[], Any]], Any]
    """Do something in the server's event loop."""
    connections: Callable[[], int]
    """How many the server has."""
    strangers: Callable[[], Sized]
    """Connections that have not shown a token."""
    stopped: list[str]
    """One entry for each shutdown that was carried out."""

    def envelope(self, **changes: Any) -> dict[str, Any]:
        """A right envelope."""
        return {
            "job_id": "job",
            "generation": 1,
            "command_id": "c1",
            "agent_boot_id": self.boot_id,
            "not_after_s": time.monotonic() + 60,
        } | changes


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A fresh one for each test."""
    with serving(tmp_path) as one:
        yield one


class serving:  # noqa: N801 - used as a context manager
    """Runs the application in a thread of its own."""

    def __init__(self, folder: Path, **stream_options: Any) -> None:
        self._folder = folder
        self._options = {"heartbeat_interval_s": 0.2, "send_max_s": 1.0} | stream_options
        self._ready: threading.Event = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._served: Served | None = None
        self._server: Any = None

    def __enter__(self) -> Served:
        self._thread.start()
        wait_for(lambda: self._served is not None and self._server.started, "the server")
        assert self._served is not None
        return self._served

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        runs, stopped = FakeRuns(), list[str]()
        machine = Machine(machine_id="m1", agent_boot_id="boot", address="127.0.0.1", slots=4)
        ring = EventRing(self._folder / "ring")
        streams = Streams(
            ring, machine_id="m1", agent_boot_id="boot", summaries=runs.summaries, **self._options
        )
        journal, fences = Journal(self._folder / "journal"), Fences(self._folder / "fences")

        async def shut_down(reason: str) -> dict[str, int]:
            stopped.append(reason)
            return {}

        desk = CommandDesk(
            machine,
            runs=runs,
            journal=journal,
            fences=fences,
            code=CodeStore(self._folder / "code"),
            code_in_use=lambda: (),
            shut_down=shut_down,
        )
        parts = AgentParts(
            machine=machine,
            runs=runs,
            desk=desk,
            ring=ring,
            streams=streams,
            doors=Doors(controller=CONTROLLER, metrics=METRICS),
        )
        self._server = hardened_server(create_app(parts), exit_grace_s=1)
        with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
            address = listener.getsockname()

            def call(function: Callable[[], Any]) -> Any:
                async def inside() -> Any:
                    return function()

                return asyncio.run_coroutine_threadsafe(inside(), loop).result(30)

            self._served = Served(
                url=f"http://127.0.0.1:{address[1]}",
                address=address,
                runs=runs,
                desk=desk,
                ring=ring,
                streams=streams,
                boot_id="boot",
                call=call,
                strangers=lambda: self._server.config.http_protocol_class.strangers,
                connections=lambda: len(self._server.server_state.connections),
                stopped=stopped,
            )
            await self._server.serve(sockets=[listener])
        await streams.flush_and_close(1.0)
        ring.close()
        journal.close()
        fences.close()
