"""The agent's memory of commands: every accepted ``command_id`` with its first answer.

A controller that was killed repeats its commands; the journal is why a repeated one does nothing
and gets the first answer, also after the agent was restarted. A command is written down before it
takes effect and its answer after; one without an answer was cut short by a crash, and ``commands``
looks at the current state before doing anything about it. Refusals are not kept: they had no
effect.

SQLite in WAL, synchronous to the disk, bounded by count and by size. When the disk is full nothing
is accepted (``JournalUnavailable``), except by callers that choose to act without memory. A damaged
file is put aside. Not here: what a command means, and what it asked for (only a digest is kept).
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

COMMANDS_MAX = 4096
ANSWERS_BYTES_MAX = 32 * 1024 * 1024
RECENT_MAX = 256
"""Answers that are also kept in memory: they hold when the disk is full."""
_TRIM_EVERY = 64
_WAL_BYTES_MAX = 4 * 1024 * 1024

_SCHEMA = """
CREATE TABLE IF NOT EXISTS commands (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    command_id TEXT NOT NULL UNIQUE,
    digest TEXT NOT NULL,
    answer TEXT,
    answer_bytes INTEGER NOT NULL DEFAULT 0
)
"""

log = structlog.get_logger(__name__)


class JournalUnavailable(Exception):
    """A command cannot be written down; the text says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One accepted command."""

    command_id: str
    digest: str
    """Of what was asked for, without the envelope's clock: the same id must mean the same."""
    answer: str | None = None
    """None: accepted, and not known to have ended."""


class Journal:
    """The journal of one agent. Every method may be called from any thread, and blocks."""

    def __init__(
        self,
        path: Path,
        *,
        commands_max: int = COMMANDS_MAX,
        answers_bytes_max: int = ANSWERS_BYTES_MAX,
    ) -> None:
        self._path = path
        self._bounds = (commands_max, answers_bytes_max)
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, Entry] = OrderedDict()
        self._connection: sqlite3.Connection | None = None
        self._accepted = 0
        try:
            self._open()
        except JournalUnavailable as problem:
            log.warning("commands cannot be journaled", problem=str(problem))

    def find(self, command_id: str) -> Entry | None:
        """The entry of a command, or None when it was never accepted.

        Raises:
            JournalUnavailable: that cannot be said.
        """
        with self._lock:
            if command_id in self._recent:
                return self._recent[command_id]
            with self._ready() as connection:
                row = connection.execute(
                    "SELECT digest, answer FROM commands WHERE command_id = ?", (command_id,)
                ).fetchone()
        return Entry(command_id, row[0], row[1]) if row else None

    def accept(self, command_id: str, digest: str) -> None:
        """Write down that a command is about to take effect.

        Raises:
            JournalUnavailable: it is not on disk.
        """
        with self._lock, self._ready() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO commands (command_id, digest) VALUES (?, ?)",
                (command_id, digest),
            )
            self._accepted += 1
            if self._accepted % _TRIM_EVERY == 1:
                self._trim(connection)

    def finish(self, command_id: str, digest: str, answer: str) -> None:
        """Keep the answer: on disk if that is possible, in memory always."""
        with self._lock:
            self._remember(Entry(command_id, digest, answer))
            try:
                with self._ready() as connection:
                    connection.execute(
                        "INSERT INTO commands (command_id, digest, answer, answer_bytes) "
                        "VALUES (?, ?, ?, ?) ON CONFLICT (command_id) DO UPDATE SET "
                        "answer = excluded.answer, answer_bytes = excluded.answer_bytes",
                        (command_id, digest, answer, len(answer)),
                    )
            except JournalUnavailable as problem:
                # The effect is there; after a crash it is found by looking at the current state.
                log.warning("an answer is kept in memory only", problem=str(problem))

    def forget(self, command_id: str) -> None:
        """Take back ``accept``: the command had no effect."""
        with self._lock, contextlib.suppress(JournalUnavailable), self._ready() as connection:
            connection.execute(
                "DELETE FROM commands WHERE command_id = ? AND answer IS NULL", (command_id,)
            )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _remember(self, entry: Entry) -> None:
        self._recent[entry.command_id] = replace(entry)
        self._recent.move_to_end(entry.command_id)
        while len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)

    @contextlib.contextmanager
    def _ready(self) -> Iterator[sqlite3.Connection]:
        """A transaction that is on disk when the block is left."""
        if self._connection is None:
            self._open()
        connection = self._connection
        if connection is None:
            raise JournalUnavailable(f"{self._path}: is not open")
        try:
            with connection:
                yield connection
        except sqlite3.DatabaseError as error:
            if _damaged(error):
                connection.close()
                self._connection = None
                self._put_aside(error)
            raise JournalUnavailable(f"{self._path}: {error}") from None

    def _open(self) -> None:
        for attempt in (1, 2):
            try:
                self._connection = self._connect()
            except sqlite3.DatabaseError as error:
                if attempt == 1 and _damaged(error):
                    self._put_aside(error)
                    continue
                raise JournalUnavailable(f"{self._path}: {error}") from None
            return

    def _connect(self) -> sqlite3.Connection:
        # Made before SQLite does, which would ask the umask.
        with contextlib.suppress(OSError):
            self._path.touch(mode=0o600)
        connection = sqlite3.connect(self._path, timeout=2.0, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES_MAX}")
            with connection:
                connection.execute(_SCHEMA)
            connection.execute("SELECT COUNT(*) FROM commands WHERE answer IS NULL").fetchone()
        except sqlite3.DatabaseError:
            connection.close()
            raise
        return connection

    def _put_aside(self, error: sqlite3.DatabaseError) -> None:
        log.error(
            "the journal of commands is damaged and made anew; commands of before are answered by "
            "looking at the current state",
            file=str(self._path),
            problem=str(error),
        )
        with contextlib.suppress(OSError):
            self._path.replace(self._path.with_name(self._path.name + ".damaged"))
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(OSError):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def _trim(self, connection: sqlite3.Connection) -> None:
        commands_max, answers_bytes_max = self._bounds
        connection.execute(
            "DELETE FROM commands WHERE number <= "
            "(SELECT number FROM commands ORDER BY number DESC LIMIT 1 OFFSET ?)",
            (commands_max,),
        )
        connection.execute(
            "DELETE FROM commands WHERE number IN (SELECT number FROM (SELECT number, "
            "SUM(answer_bytes) OVER (ORDER BY number DESC) AS total FROM commands) "
            "WHERE total > ?)",
            (answers_bytes_max,),
        )


def _damaged(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
