"""One transaction at a time, the same on SQLite and PostgreSQL, with bounded retries.

SQLite: WAL and ``BEGIN IMMEDIATE``, so a writer never fails half-way for lack of the lock.
PostgreSQL: READ COMMITTED, constraints, and advisory locks that order the writers which must not
overlap. Busy, deadlocked, serialisation and lost-connection errors are tried again within
``patience_s``; that is safe after a lost COMMIT because every operation here is idempotent.

Not here: what the transactions do (``machines``, ``runs``, ``incidents``...), and the schema.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import quote

import structlog
from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlmodel import Session
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from everstep.ledger.errors import LedgerConflict, LedgerError, LedgerUnavailable
from everstep.ledger.files import MOUNTINFO, check_place

T = TypeVar("T")
log = structlog.get_logger(__name__)

PATIENCE_S = 6.0
"""Below the ten seconds that a ledger activity has, so that it ends with a reason."""
BUSY_TIMEOUT_S = 2.0
POOL_SIZE = 4
POOL_OVERFLOW = 28
"""Together the most threads that ``asyncio.to_thread`` uses."""
JOURNAL_BYTES_MAX = 64 * 2**20
_LOCK_SPACE = 0x45565354  # "EVST": keeps our advisory locks apart from other users of the database

_SQLITE_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_SQLITE_LATER = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM})
_POSTGRES_OPTIONS = (
    # A controller that is frozen inside a transaction must not hold the others up.
    "-c lock_timeout=3s",
    "-c statement_timeout=8s",
    "-c idle_in_transaction_session_timeout=10s",
)
"""Before what the URL says itself, which then wins."""
_POSTGRES_AGAIN = frozenset({"40001", "40P01", "55P03"})
_POSTGRES_LATER = ("08", "53", "57", "58", "25006", "25P03")

Lock = tuple[int, int]


def lock_of(kind: str, key: str = "") -> Lock:
    """The advisory lock for ``kind`` and ``key``. Locks are always taken in sorted order."""
    return (_LOCK_SPACE, zlib.crc32(f"{kind}:{key}".encode()) - 2**31)


FLEET: Lock = (_LOCK_SPACE - 1, 0)
"""Taken by everything that leases, evicts or releases machines. Sorts before all others."""


class Database:
    """A SQLite file or a PostgreSQL database, and how to run a transaction in it."""

    def __init__(
        self, url: str, *, mountinfo: Path = MOUNTINFO, patience_s: float = PATIENCE_S
    ) -> None:
        """Read the URL; nothing is opened yet.

        Raises:
            LedgerError: the URL is not one of a SQLite file or a PostgreSQL database.
        """
        self._mountinfo = mountinfo
        self._patience_s = patience_s
        try:
            parsed = make_url(url)
        except ArgumentError:
            # Not repeated in the message: what cannot be parsed may hold a password.
            raise LedgerError(f"ledger: not a database URL; {_ACCEPTED}") from None
        backend = parsed.get_backend_name()
        self.path: Path | None = None
        if backend == "sqlite":
            if not parsed.database or parsed.database == ":memory:" or parsed.query:
                raise LedgerError(f"ledger {url}: SQLite needs a file; {_ACCEPTED}")
            self.path = Path(parsed.database).absolute()
            self.where = str(self.path)
            self._engine = self._sqlite_engine("rw")
        elif backend in {"postgresql", "postgres"}:
            parsed = parsed.set(drivername="postgresql+psycopg")
            self.where = parsed.set(
                drivername="postgresql", username=None, password=None, query={}
            ).render_as_string()
            self._engine = self._postgres_engine(parsed)
        else:
            raise LedgerError(f"ledger: {backend} is not supported; {_ACCEPTED}")
        self._reader = self._engine
        if self.path is None:
            self._reader = self._engine.execution_options(isolation_level="REPEATABLE READ")
        self._writer = self._engine.execution_options(everstep_begin="BEGIN IMMEDIATE")
        self._durable = self._writer.execution_options(everstep_synchronous="FULL")

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    def read(self, work: Callable[[Session], T]) -> T:
        """Run ``work`` on one consistent view of the ledger."""
        return self.attempt(lambda: self._transact(self._reader, work, ()))

    def write(
        self,
        work: Callable[[Session], T],
        *,
        locks: Iterable[Lock] = (),
        durable: bool = False,
    ) -> T:
        """Run ``work`` as one transaction that writes.

        Args:
            work: is run again from the start after a transient error, so it touches nothing else.
            locks: PostgreSQL's writers with a lock in common run one after another (SQLite's
                always do).
            durable: survive a power cut, not just a crash of the process: for transactions that
                hand out a generation or a machine.
        """
        engine = self._durable if durable else self._writer
        return self.attempt(lambda: self._transact(engine, work, sorted(set(locks))))

    def _transact(self, engine: Engine, work: Callable[[Session], T], locks: Iterable[Lock]) -> T:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            if self.path is None:
                for space, key in locks:
                    session.connection().execute(
                        text("SELECT pg_advisory_xact_lock(:space, :key)"),
                        {"space": space, "key": key},
                    )
            return work(session)

    def create(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` in a transaction that excludes all other ``create`` calls, in any process.

        Makes the SQLite file when there is none.
        """
        if self.path is None:
            return self.attempt(lambda: self._create(self._engine, work))
        check_place(self.path, self._mountinfo)
        engine = self._sqlite_engine("rwc")
        try:
            self.attempt(lambda: self._use_wal(engine))
            return self.attempt(
                lambda: self._create(
                    engine.execution_options(
                        everstep_begin="BEGIN IMMEDIATE", everstep_synchronous="FULL"
                    ),
                    work,
                )
            )
        finally:
            engine.dispose()

    def _create(self, engine: Engine, work: Callable[[Connection], T]) -> T:
        with engine.begin() as connection:
            if self.path is None:
                space, key = lock_of("migrate")
                connection.execute(
                    text("SELECT pg_advisory_xact_lock(:space, :key)"), {"space": space, "key": key}
                )
            return work(connection)

    def check_place(self) -> None:
        """Refuse a SQLite file that is missing or lies where it must not."""
        if self.path is None:
            return
        check_place(self.path, self._mountinfo)
        if not self.path.exists():
            raise LedgerError(
                f"ledger {self.where}: there is none yet; the controller makes it when it starts"
            )

    # --- errors ------------------------------------------------------------------------------

    def attempt(self, call: Callable[[], T]) -> T:
        """Run ``call`` until it works, fails for good, or ``patience_s`` is over."""
        retrying = Retrying(
            retry=retry_if_exception(_is_transient),
            wait=wait_random_exponential(multiplier=0.02, max=0.5),
            stop=stop_after_delay(self._patience_s),
            before_sleep=_log_retry,
            reraise=True,
        )
        try:
            return retrying(call)
        except (DBAPIError, PoolTimeout) as error:
            self._raise(error)

    def _raise(self, error: DBAPIError | PoolTimeout) -> NoReturn:
        """``error`` as one of ours, in one line."""
        cause: BaseException = error
        if isinstance(error, DBAPIError) and error.orig is not None:
            cause = error.orig
        line = f"ledger {self.where}: {' '.join(str(cause).split())[:400]}"
        if isinstance(error, IntegrityError):
            raise LedgerConflict(f"{line} (an invariant of the ledger)") from error
        if isinstance(cause, sqlite3.Error):
            kind = _sqlite_kind(cause)
            if kind in _SQLITE_BUSY | _SQLITE_LATER:
                raise LedgerUnavailable(line) from error
            if kind == sqlite3.SQLITE_CANTOPEN:
                self.check_place()
            if kind in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}:
                line += "; restore it from a backup or name another file"
            raise LedgerError(line) from error
        if _is_transient(error) or _postgres_state(cause).startswith(_POSTGRES_LATER):
            raise LedgerUnavailable(line) from error
        raise LedgerError(line) from error

    # --- engines -----------------------------------------------------------------------------

    def _sqlite_engine(self, mode: str) -> Engine:
        address = f"file:{quote(str(self.path))}?mode={mode}"

        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(
                address,
                uri=True,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,  # transactions begin where the "begin" event below says
                check_same_thread=False,  # the pool hands a connection to one thread at a time
            )
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute(f"PRAGMA journal_size_limit={JOURNAL_BYTES_MAX}")
            return connection

        engine = create_engine(
            "sqlite://",
            creator=connect,
            poolclass=QueuePool,
            pool_size=POOL_SIZE,
            max_overflow=POOL_OVERFLOW,
            pool_timeout=BUSY_TIMEOUT_S,
        )
        event.listen(engine, "begin", _sqlite_begin)
        return engine

    def _postgres_engine(self, url: URL) -> Engine:
        written = url.query.get("options", "")
        options = [*_POSTGRES_OPTIONS, *([written] if isinstance(written, str) else written)]
        try:
            return create_engine(
                url.difference_update_query(["options"]),
                pool_size=POOL_SIZE,
                max_overflow=POOL_OVERFLOW,
                pool_timeout=BUSY_TIMEOUT_S,
                pool_pre_ping=True,
                isolation_level="READ COMMITTED",
                connect_args={
                    "application_name": "everstep",
                    "connect_timeout": url.query.get("connect_timeout", "2"),
                    "options": " ".join(options),
                },
            )
        except ModuleNotFoundError:
            raise LedgerError(
                f"ledger {self.where}: the PostgreSQL driver is not installed; "
                "install everstep[postgres]"
            ) from None

    @staticmethod
    def _use_wal(engine: Engine) -> None:
        """Switch the file to write-ahead logging; it stays so for every later connection."""
        raw = engine.raw_connection()
        try:
            row = raw.cursor().execute("PRAGMA journal_mode=WAL").fetchone()
        except sqlite3.Error as error:
            raise DBAPIError.instance("PRAGMA", None, error, sqlite3.Error) from error
        finally:
            raw.close()
        if row is None or row[0] != "wal":
            raise LedgerError("ledger: this file system does not support SQLite's write-ahead log")


_ACCEPTED = "write sqlite:////absolute/path/ledger.db or postgresql://user@host/database"


def _sqlite_begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    # Outside the transaction, where alone it can be changed.
    connection.exec_driver_sql(
        f"PRAGMA synchronous={options.get('everstep_synchronous', 'NORMAL')}"
    )
    connection.exec_driver_sql(options.get("everstep_begin", "BEGIN"))


def _sqlite_kind(error: sqlite3.Error) -> int:
    """Primary result code; 0 when the error did not come from SQLite itself."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def _postgres_state(error: BaseException) -> str:
    """SQLSTATE of a driver's error; empty when it has none."""
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) else ""


def _is_transient(error: BaseException) -> bool:
    """True when the same transaction may work if it is run again at once."""
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, DBAPIError):
        return False
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        return _sqlite_kind(cause) in _SQLITE_BUSY
    if cause is None:
        return False
    state = _postgres_state(cause)
    if state:
        return state in _POSTGRES_AGAIN or state.startswith(("08", "57P"))
    # Without a SQLSTATE the server was not reached, or went away.
    return error.connection_invalidated or type(cause).__name__ == "OperationalError"


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    log.debug(
        "ledger transaction is tried again",
        attempt=state.attempt_number,
        reason=" ".join(str(getattr(error, "orig", error)).split())[:200],
    )
