"""Wrong URLs, wrong places, wrong files: one clear line each, and nothing is harmed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from everstep.ledger import Ledger, LedgerError, LedgerUnavailable
from everstep.ledger.files import filesystem_of
from everstep.ledger.schema import HEAD
from everstep.spec.policy import PolicySnapshot
from tests.ledger.postgres import PostgresServer
from tests.ledger.support import Fleet, at, database, incident, report

ROOT = Path(__file__).resolve().parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts file systems")


def line_of(error: LedgerError) -> str:
    """The error's text, which must be one line."""
    found = str(error)
    assert "\n" not in found
    assert "Traceback" not in found
    return found


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("hello", "not a database URL"),
        ("", "not a database URL"),
        ("mysql://u:secret@h/d", "mysql is not supported"),
        ("sqlite://", "SQLite needs a file"),
        ("sqlite:///:memory:", "SQLite needs a file"),
        ("sqlite:////tmp/x.db?mode=memory", "SQLite needs a file"),
    ],
)
def test_a_url_that_is_no_ledger_is_refused(url: str, said: str) -> None:
    with pytest.raises(LedgerError, match=said) as caught:
        Ledger(url)

    assert "secret" not in line_of(caught.value)
    assert "write sqlite:////" in line_of(caught.value)


@pytest.mark.parametrize("call", ["migrate", "check", "machines"])
def test_a_missing_directory_is_named(tmp_path: Path, call: str) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/nowhere/ledger.db")

    with pytest.raises(LedgerError, match="directory .*/nowhere does not exist") as caught:
        getattr(ledger, call)()

    assert line_of(caught.value)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("call", ["check", "machines"])
def test_a_ledger_that_is_not_there_is_not_made_by_looking(tmp_path: Path, call: str) -> None:
    with pytest.raises(LedgerError, match="there is none yet"):
        getattr(Ledger(f"sqlite:///{tmp_path}/ledger.db"), call)()

    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is a directory"):
        Ledger(f"sqlite:///{tmp_path}").migrate()


@pytest.mark.parametrize("call", ["migrate", "check", "machines"])
def test_a_file_that_is_no_database_is_left_as_it_is(tmp_path: Path, call: str) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"these are my notes, not a database\n" * 200)
    before = path.read_bytes()

    with pytest.raises(LedgerError, match="file is not a database") as caught:
        getattr(Ledger(f"sqlite:///{path}"), call)()

    assert str(path) in line_of(caught.value)
    assert path.read_bytes() == before


def test_a_database_of_something_else_is_refused(empty_url: str) -> None:
    ledger = Ledger(empty_url)
    database(ledger).create(
        lambda connection: connection.execute(text("CREATE TABLE invoices (id INTEGER)"))
    )

    for call in (ledger.migrate, ledger.check):
        with pytest.raises(LedgerError, match=r"tables of something else \(invoices\)"):
            call()
    ledger.close()


def test_a_ledger_without_tables_is_migrated_only_when_asked(empty_url: str) -> None:
    ledger = Ledger(empty_url)
    database(ledger).create(lambda connection: connection.execute(text("SELECT 1")))

    with pytest.raises(LedgerError, match="has no tables yet"):
        ledger.check()
    assert ledger.migrate() == ledger.migrate() == ledger.check()
    ledger.close()


def test_a_newer_schema_is_refused_and_left_as_it_is(ledger: Ledger) -> None:
    with database(ledger)._engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))

    try:
        for call in (ledger.check, ledger.migrate):
            with pytest.raises(
                LedgerError, match="newer version of Everstep .schema 9999"
            ) as caught:
                call()
            assert line_of(caught.value)
    finally:
        with database(ledger)._engine.begin() as connection:
            connection.execute(text(f"UPDATE alembic_version SET version_num = '{HEAD}'"))


def test_damage_is_found_and_said(
    tmp_path: Path, migrated_file: Path, policy: PolicySnapshot
) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(migrated_file.read_bytes())
    ledger = Ledger(f"sqlite:///{path}")
    Fleet(ledger, policy).machines(*(f"m{number}" for number in range(200)))
    with database(ledger)._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    ledger.close()
    content = bytearray(path.read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 64] = b"\xa5" * 64  # headers of all pages but the first
    path.write_bytes(content)

    calls: list[Callable[[Ledger], object]] = [
        Ledger.migrate,
        lambda ledger: ledger.check(thorough=True),
        Ledger.machines,
    ]
    for call in calls:
        broken = Ledger(f"sqlite:///{path}")
        with pytest.raises(LedgerError, match=r"damaged|malformed") as caught:
            call(broken)
        assert not isinstance(caught.value, LedgerUnavailable)
        assert "restore it from a backup" in line_of(caught.value)
        broken.close()


def mountinfo(path: Path, *mounts: tuple[str, str]) -> Path:
    """A table of mounts in the kernel's format."""
    lines = [
        f"{number} 1 0:{number} / {where} rw,relatime shared:{number} - {kind} source rw"
        for number, (where, kind) in enumerate((("/", "ext4"), *mounts), start=20)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "fuse.sshfs", "lustre"])
def test_a_network_file_system_is_refused(tmp_path: Path, kind: str) -> None:
    mounts = mountinfo(tmp_path / "mounts", (str(tmp_path), kind))

    for call in ("migrate", "check"):
        ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db", mountinfo=mounts)
        with pytest.raises(
            LedgerError, match=rf"network file system \({re.escape(kind)}\)"
        ) as error:
            getattr(ledger, call)()
        assert "PostgreSQL" in line_of(error.value)
    assert not (tmp_path / "ledger.db").exists()


def test_the_mount_that_counts_is_the_last_of_the_longest(tmp_path: Path) -> None:
    spaced = tmp_path / "a b"
    spaced.mkdir()
    (tmp_path / "link").symlink_to(spaced)
    mounts = mountinfo(
        tmp_path / "mounts",
        (str(tmp_path), "nfs"),
        (str(spaced).replace(" ", r"\040"), "ext4"),
        (str(spaced).replace(" ", r"\040"), "tmpfs"),
    )

    assert filesystem_of(tmp_path / "x", mounts) == "nfs"
    assert filesystem_of(spaced / "x", mounts) == "tmpfs"
    assert filesystem_of(tmp_path / "link" / "x", mounts) == "tmpfs"
    assert filesystem_of(Path("/elsewhere"), mounts) == "ext4"
    assert filesystem_of(Path("/elsewhere"), tmp_path / "absent") is None
    assert filesystem_of(Path("/")) is not None, "the kernel's own table can be read"


AS_NOBODY = """
import os, sys
from everstep.ledger import Ledger, LedgerError

if os.geteuid() == 0:  # root may write everywhere
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    getattr(Ledger(sys.argv[1]), sys.argv[2])()
except LedgerError as error:
    print(error)
"""


@pytest.mark.parametrize("call", ["migrate", "check"])
@pytest.mark.parametrize(
    ("closed", "said"), [("folder", "directory .* cannot be written"), ("file", "read and written")]
)
def test_a_place_that_cannot_be_written_is_refused(
    tmp_path: Path, migrated_file: Path, closed: str, said: str, call: str
) -> None:
    folder = tmp_path / "shut"
    folder.mkdir()
    path = folder / "ledger.db"
    path.write_bytes(migrated_file.read_bytes())
    folder.chmod(0o555 if closed == "folder" else 0o777)
    path.chmod(0o444)
    for parent in folder.parents:  # the session's own folder lets nobody in
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)

    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, f"sqlite:///{path}", call],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )

    assert re.search(said, done.stdout), done.stdout + done.stderr
    assert done.stdout.count("\n") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
@needs_root
def test_a_full_disk_refuses_what_does_not_fit_and_keeps_the_rest(
    small_disk: Path, policy: PolicySnapshot
) -> None:
    ledger = Ledger(f"sqlite:///{small_disk}/ledger.db", patience_s=0.2)
    ledger.migrate()
    fleet = Fleet(ledger, policy)
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    written = 0

    def fill() -> None:
        nonlocal written
        for number in range(1, 200):
            ledger.record_incident(
                incident(
                    incident_id=f"train-{number}",
                    number=number,
                    reports=(report(ranks=8, log_lines=("x" * 300,) * 20),),
                )
            )
            written = number

    with pytest.raises(LedgerUnavailable) as caught:
        fill()

    assert "full" in line_of(caught.value) or "I/O" in line_of(caught.value)
    assert written > 0
    ledger.close()
    again = Ledger(f"sqlite:///{small_disk}/ledger.db")
    assert again.check()
    assert len(again.incidents()) == written
    again.close()


@pytest.mark.root
@needs_root
def test_a_read_only_file_system_is_refused(small_disk: Path, policy: PolicySnapshot) -> None:
    ledger = Ledger(f"sqlite:///{small_disk}/ledger.db")
    ledger.migrate()
    ledger.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    opened = Ledger(f"sqlite:///{small_disk}/ledger.db", patience_s=0.2)
    with pytest.raises(LedgerError, match="cannot be written"):
        opened.check()
    with pytest.raises(LedgerError) as caught:
        Fleet(opened, policy).machine("m1")
    assert line_of(caught.value)
    opened.close()


def test_a_server_that_is_not_there_is_unavailable_and_its_password_unsaid() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        ledger = Ledger(f"postgresql://ann:s3cret@127.0.0.1:{port}/ledger", patience_s=0.2)

        with pytest.raises(LedgerUnavailable) as caught:
            ledger.check()

    assert "s3cret" not in line_of(caught.value)
    assert f"127.0.0.1:{port}/ledger" in line_of(caught.value)
    assert "s3cret" not in ledger.where
    ledger.close()


@pytest.mark.postgres
def test_a_server_that_takes_no_writes_is_unavailable_for_writers(postgres: PostgresServer) -> None:
    url = postgres.url("everstep_migrated")
    ledger = Ledger(f"{url}&options=-c%20default_transaction_read_only%3Don", patience_s=0.2)

    assert ledger.check(), "a standby can be read"
    with pytest.raises(LedgerUnavailable, match="read-only"):
        ledger.note_notification("k", now=at(0))
    ledger.close()
