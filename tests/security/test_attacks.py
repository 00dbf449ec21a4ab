"""Attacks on the wire: tokens, sizes, time, paths, floods. After each the agent is unharmed."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep.machine import guard, wire
from everstep.machine.client import AgentUnreachable
from everstep.spec.agent_api import ErrorCode, EventKind
from tests.agents import make_plan, running_agent, wait_for
from tests.security.conftest import (
    CONTROLLER,
    METRICS,
    Served,
    Target,
    head,
    raw,
    read_answer,
    refused,
    serving,
)

PATHS = [
    "/v1/machine",
    "/v1/events",
    "/v1/runs/job/7",
    "/openapi.json",
    "/metrics",
    "/nowhere",
    "/",
]


def post(path: str, token: str | None, body: Any) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = str(len(content))
    return (
        head("POST", path, token, content_type="application/json", content_length=length) + content
    )


# --- tokens


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["none", "wrong", "empty", "peer", "enrol", "other", "prefix"])
def test_no_token_a_wrong_one_or_one_of_another_kind(target: Target, path: str, kind: str) -> None:
    tokens = target.process.secrets
    token = {
        "none": None,
        "wrong": "x" * 43,
        "empty": "",
        "peer": tokens.peer,
        "enrol": tokens.enrol,
        "other": tokens.controller if path == "/metrics" else tokens.metrics,
        "prefix": tokens.controller[:-1],
    }[kind]
    status, content = raw(target.address, head("GET", path, token))
    assert status == 401
    refused(status, content, ErrorCode.UNAUTHORIZED)


@pytest.mark.parametrize(
    "header",
    [
        b"authorization: Basic %s",
        b"authorization: %s",
        b"authorization: Bearer",
        b"authorization: Bearer \xff\xfe",
        b"authorization: Bearer %s\r\nauthorization: Bearer wrong",
        b"x-authorization: Bearer %s",
        b"cookie: token=%s",
    ],
)
def test_tokens_in_another_shape(target: Target, header: bytes) -> None:
    token = target.token.encode()
    line = header % token if b"%s" in header else header
    request = b"GET /v1/machine HTTP/1.1\r\nhost: a\r\n" + line + b"\r\n\r\n"
    status, content = raw(target.address, request)
    refused(status, content, ErrorCode.UNAUTHORIZED, ErrorCode.BAD_REQUEST)
    assert token not in content


def test_a_token_in_the_query_opens_nothing(target: Target) -> None:
    for name in ("token", "access_token", "authorization"):
        request = head("GET", f"/v1/machine?{name}={target.token}")
        status, content = raw(target.address, request)
        assert status == 401
        refused(status, content)


def test_docs_are_not_served(target: Target) -> None:
    for path in ("/docs", "/redoc", "/openapi.yaml", "/static/x"):
        status, content = raw(target.address, head("GET", path, target.token))
        refused(status, content, ErrorCode.NOT_FOUND)


# --- sizes


@pytest.mark.parametrize("token", [True, False])
def test_a_declared_body_that_is_too_large_is_not_read(target: Target, token: bool) -> None:
    request = head(
        "POST",
        "/v1/commands/start_run",
        target.token if token else None,
        content_length="999999999",
    )
    status, content = raw(target.address, request)
    refused(status, content, ErrorCode.TOO_LARGE if token else ErrorCode.UNAUTHORIZED)


@pytest.mark.parametrize("token", [True, False])
def test_an_endless_chunked_body_ends_early(target: Target, token: bool) -> None:
    request = head(
        "POST",
        "/v1/commands/start_run",
        target.token if token else None,
        transfer_encoding="chunked",
    )
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    sent = 0
    before = psutil.Process(target.process.process.pid).memory_info().rss
    with socket.create_connection(target.address, timeout=10) as connection:
        connection.sendall(request)
        try:
            while sent < 64 * 1024 * 1024:
                connection.sendall(chunk)
                sent += len(chunk)
        except (ConnectionError, TimeoutError):
            pass
        status, content = read_answer(connection)
    assert sent < 32 * 1024 * 1024, "it was read to its end"
    if status:  # the answer may be lost when the connection is cut under a sender
        refused(status, content, ErrorCode.TOO_LARGE if token else ErrorCode.UNAUTHORIZED)
    assert psutil.Process(target.process.process.pid).memory_info().rss - before < 32 * 1024 * 1024


def test_a_body_of_a_stranger_is_small(target: Target) -> None:
    request = head("GET", "/healthz", content_length="100000")
    status, content = raw(target.address, request)
    refused(status, content, ErrorCode.TOO_LARGE)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /healthz HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 100_000,
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 600,
        b"NONSENSE\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
        b"GET /h\xff HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST /v1/machine HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_one_line(target: Target, request_bytes: bytes) -> None:
    status, content = raw(target.address, request_bytes)
    # An answer to a flood may be lost when the connection is cut under its sender.
    if status or len(request_bytes) < wire.HEADERS_BYTES_MAX:
        refused(status, content, ErrorCode.BAD_REQUEST, ErrorCode.UNAUTHORIZED)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"[" * 500_000,
        b'{"a":' * 100_000,
        b"\xff\xfe\x00",
        b'{"job_id": "\\ud800"}',
        b'{"generation": 1e999, "not_after_s": NaN}',
        b'{"generation": ' + b"9" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_command(target: Target, body: bytes) -> None:
    status, content = raw(target.address, post("/v1/commands/stop_run", target.token, body))
    refused(status, content, ErrorCode.BAD_REQUEST)


def test_what_was_sent_is_not_repeated(target: Target) -> None:
    secret = "hunter2-hunter2"
    body = {"job_id": secret + "_", secret: secret, "api_version": 1, "generation": secret}
    status, content = raw(target.address, post("/v1/commands/stop_run", target.token, body))
    refused(status, content, ErrorCode.BAD_REQUEST)
    assert secret.encode() not in content
    for path in (f"/v1/runs/{secret}_/1", f"/{secret}"):
        status, content = raw(target.address, head("GET", path, target.token))
        refused(status, content)
        assert secret.encode() not in content
    assert secret not in target.process.log


# --- versions


def test_another_api_version_is_refused_by_name(target: Target) -> None:
    for path in ("/v2/machine", "/v0/events", "/v10/commands/stop_run"):
        status, content = raw(target.address, head("GET", path, target.token))
        refused(status, content, ErrorCode.API_VERSION)
        assert b"version 1" in content
    body = {"api_version": 2, "new_field": True}
    status, content = raw(target.address, post("/v1/commands/shutdown", target.token, body))
    refused(status, content, ErrorCode.API_VERSION)


# --- paths

TRAVERSALS = [
    "..",
    "../..",
    "%2e%2e",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%252e%252e%252f",
    "..%5c..%5c",
    "job%00",
    "job%0a",
    "job%2f7",
    "./job",
    "JOB",
    "-job",
    "%c0%ae%c0%ae%c0%af",
    "job;x",
    "a" * 200,
    "+1",
    "1e0",
    "0x1",
    "٣",
    "-1",
    "0",
    "99999999999999999999",
]


@pytest.mark.parametrize("bad", TRAVERSALS)
def test_traversal_in_every_name(target: Target, bad: str) -> None:
    for path in (
        f"/v1/runs/{bad}/7",
        f"/v1/runs/job/{bad}",
        f"/v1/runs/{bad}/7/ranks/0/log",
        f"/v1/runs/job/{bad}/ranks/0/log",
        f"/v1/runs/job/7/ranks/{bad}/log",
        f"/v1/runs/job/7/ranks/0/{bad}",
        f"/{bad}/v1/machine",
    ):
        status, content = raw(target.address, head("GET", path, target.token))
        if status == 200:
            # "0" is a rank, and nothing else of the list is a name of anything.
            assert path == "/v1/runs/job/7/ranks/0/log"
        else:
            refused(status, content)
        assert b"root:" not in content


def test_the_log_of_a_rank_is_read_and_nothing_it_points_to(target: Target) -> None:
    """A rank may replace its log by a link to what only the agent can read."""
    log = target.process.state / "runs" / "job" / "7" / "rank-0.log"
    path = "/v1/runs/job/7/ranks/0/log"
    aside = log.with_suffix(".aside")
    log.rename(aside)
    try:
        log.symlink_to(target.process.secrets.directory / "controller.token")
        status, content = raw(target.address, head("GET", path, target.token))
        refused(status, content, ErrorCode.NOT_FOUND)
        assert target.token.encode() not in content
        log.unlink()
        subprocess.run(["mkfifo", str(log)], check=True)
        status, content = raw(target.address, head("GET", path, target.token))
        refused(status, content, ErrorCode.NOT_FOUND)
    finally:
        log.unlink(missing_ok=True)
        aside.rename(log)
    assert raw(target.address, head("GET", path, target.token))[0] == 200


# --- commands


@pytest.mark.parametrize(
    "change, code",
    [
        ({"agent_boot_id": "other"}, ErrorCode.WRONG_BOOT),
        ({"not_after_s": 0.0}, ErrorCode.EXPIRED),
        ({"generation": 6}, ErrorCode.OLDER_GENERATION),
    ],
)
@pytest.mark.parametrize("name", ["prepare_run", "start_run", "stop_run", "fence_job", "shutdown"])
def test_commands_that_are_stale_do_nothing_to_a_live_run(
    target: Target, name: str, change: dict[str, Any], code: ErrorCode
) -> None:
    """They carry the right token: they come from a controller that was frozen or cut off."""
    _, machine = raw(target.address, head("GET", "/v1/machine", target.token))
    info = json.loads(machine)
    body: dict[str, Any] = {
        "job_id": "job",
        "generation": 7,
        "command_id": f"stale-{name}-{code}",
        "agent_boot_id": info["agent_boot_id"],
        "not_after_s": info["monotonic_s"] + 30,
    } | change
    if name == "start_run":
        body["run"] = make_plan("touch", "/tmp/never").model_dump(mode="json")
    if name == "stop_run":
        body |= {"reason": "attack", "grace_s": 0, "kill_wait_s": 0}
    status, content = raw(target.address, post(f"/v1/commands/{name}", target.token, body))
    refused(status, content, code)


def test_a_replayed_command_is_answered_and_not_repeated(served: Served) -> None:
    bodies = {
        "prepare_run": served.envelope(command_id="a"),
        "start_run": served.envelope(command_id="b", run=make_plan().model_dump(mode="json")),
        "stop_run": served.envelope(command_id="c", reason="r", grace_s=0, kill_wait_s=0),
    }
    first = {}
    for name, body in bodies.items():
        first[name] = raw(served.address, post(f"/v1/commands/{name}", CONTROLLER, body))
        assert first[name][0] == 200
    done = list(served.runs.calls)
    for name, body in bodies.items():
        request = post(f"/v1/commands/{name}", CONTROLLER, body)
        assert raw(served.address, request) == first[name]
        refused(*raw(served.address, post(f"/v1/commands/{name}", None, body)))
        refused(*raw(served.address, post(f"/v1/commands/{name}", METRICS, body)))
    assert served.runs.calls == done


# --- time


def test_slow_headers_are_cut_and_keep_nobody_out(target: Target) -> None:
    """Three hundred connections that never finish their first line."""
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(target.address, timeout=15))
            for _ in range(300)
        ]
        for connection in slow:
            connection.sendall(b"GET /v1/mach")
        status, _ = raw(target.address, head("GET", "/v1/machine", target.token))
        assert status == 200
        for connection in slow:
            try:
                connection.sendall(b"i")
            except ConnectionError:
                continue
        for connection in slow:
            try:
                assert connection.recv(1) == b""
            except ConnectionError:
                continue


def test_strangers_cannot_hold_connections_against_the_controller(served: Served) -> None:
    with ExitStack() as stack:
        for _ in range(wire.STRANGERS_MAX * 2):
            stack.enter_context(socket.create_connection(served.address, timeout=10))
        assert raw(served.address, head("GET", "/v1/machine", CONTROLLER))[0] == 200
        assert served.call(served.connections) <= wire.STRANGERS_MAX + 1


def test_a_connection_that_was_proved_is_not_dropped_for_strangers(served: Served) -> None:
    with socket.create_connection(served.address, timeout=10) as friend, ExitStack() as stack:
        friend.sendall(head("GET", "/v1/machine", CONTROLLER))
        assert read_answer(friend)[0] == 200
        for _ in range(wire.STRANGERS_MAX + 50):
            stack.enter_context(socket.create_connection(served.address, timeout=10))
        wait_for(lambda: served.call(lambda: len(served.strangers())) == wire.STRANGERS_MAX, "them")
        friend.sendall(head("GET", "/v1/machine", CONTROLLER))
        assert read_answer(friend)[0] == 200


@pytest.mark.slow
def test_a_body_that_dribbles_is_cut(target: Target) -> None:
    began = time.monotonic()
    request = head("POST", "/v1/commands/stop_run", target.token, content_length="1000")
    with socket.create_connection(target.address, timeout=30) as connection:
        connection.sendall(request + b"{")
        status, content = read_answer(connection)
    refused(status, content, ErrorCode.BAD_REQUEST)
    assert time.monotonic() - began >= guard.BODY_MAX_S - 1


# --- streams


def test_streams_that_are_never_read_cost_little_and_keep_nobody_out(tmp_path: Path) -> None:
    with serving(tmp_path, streams_max=8) as one, ExitStack() as stack:
        for _ in range(40):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(10)
            connection.connect(one.address)
            stack.enter_context(connection)
            connection.sendall(head("GET", "/v1/events", CONTROLLER))
        wait_for(lambda: one.call(lambda: one.streams.displaced_total) >= 32, "old ones to go")
        assert one.call(lambda: len(one.streams)) <= 8
        wait_for(lambda: one.call(one.connections) <= 8, "their connections to be dropped")
        before = psutil.Process().memory_info().rss

        def flood() -> None:
            for _ in range(2000):
                one.ring.emit(EventKind.RANK_EXITED, job_id="job", data={"pad": "x" * 1500})

        for _ in range(10):
            one.call(flood)
        # Whoever does not read is closed in time, and the memory does not grow with the events.
        wait_for(
            lambda: one.call(lambda: len(one.streams)) == 0,
            "the stuck streams to be closed",
            limit_s=12.0,  # before the kernel would do it
        )
        assert psutil.Process().memory_info().rss - before < 100 * 1024 * 1024

        # A reader resumes where it was: everything that is still there comes, in order.
        with socket.create_connection(one.address, timeout=10) as friend:
            cursor = one.call(lambda: f"{one.ring.ring_id}:{one.ring.next_seq - 101}")
            friend.sendall(head("GET", f"/v1/events?after={cursor}", CONTROLLER))
            lines = _stream_lines(friend)
            assert next(lines)["type"] == "hello"
            seqs: list[int] = []
            while len(seqs) < 100:
                line = next(lines)
                if line["type"] == "event":
                    seqs.append(line["seq"])
            newest = one.call(lambda: one.ring.next_seq - 1)
            assert seqs == list(range(newest - 99, newest + 1))


def test_a_reader_that_falls_behind_the_ring_is_told_of_the_gap(tmp_path: Path) -> None:
    with serving(tmp_path, send_max_s=60.0) as one:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(20)
        with slow:
            slow.connect(one.address)
            slow.sendall(head("GET", "/v1/events", CONTROLLER))
            lines = _stream_lines(slow)
            assert next(lines)["type"] == "hello"

            def flood() -> None:
                for _ in range(10_000):
                    one.ring.emit(EventKind.RANK_EXITED, job_id="job", data={"pad": "x" * 1500})

            one.call(flood)
            kinds, last = [], 0
            while last < 10_000:
                line = next(lines)
                kinds.append(line["type"])
                if line["type"] == "event":
                    assert line["seq"] > last
                    last = line["seq"]
            assert "gap" in kinds


def _stream_lines(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Lines of a chunked answer (chunk sizes are told from lines by their first character)."""
    with connection.makefile("rb") as file:
        for line in file:
            if line.startswith(b"{"):
                yield json.loads(line)


# --- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subprocess.run(
        [
            *(*command.split(), "-subj", "/CN=agent", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


async def test_with_tls_plain_http_and_wrong_certificates_get_nothing(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    flags = ("--tls-cert", str(cert), "--tls-key", str(key))
    with running_agent(tmp_path, *flags) as agent:
        assert agent.url.startswith("https://")
        silent = socket.create_connection(("127.0.0.1", agent.port), timeout=20)
        assert raw(("127.0.0.1", agent.port), head("GET", "/healthz")) == (0, b"")
        trusting = ssl.create_default_context(cafile=str(cert))
        async with agent.client(ssl_context=trusting) as client:
            assert (await client.info()).machine_id == "m1"
            first = await anext(client.stream())
            assert first.type == "hello"
        async with agent.client() as client:
            with pytest.raises(AgentUnreachable, match="certificate"):
                await client.info()
        with silent:
            assert silent.recv(1) == b""  # the handshake has a deadline
