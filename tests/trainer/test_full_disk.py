"""A save that finds no room fails cleanly: one line, nothing left behind, training goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.machine import checkpoints
from tests.trainer.kit import Job, run_python


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(where)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"root, but may not mount a file system: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.mark.root
def test_a_full_disk_costs_one_line_and_no_checkpoint(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path / "job", keep=2)
    job.checkpoints = small_disk / "checkpoints"
    session = job.session()
    assert session.save(1, {"blob": b"1" * 700_000})
    filler = small_disk / "filler"
    filler.write_bytes(b"\0" * 1_000_000)
    before = job.files()

    failed = [session.save(step, {"blob": b"2" * 700_000}) for step in (2, 3)]

    assert [result.ok for result in failed] == [False, False]
    assert failed[0].error is not None
    assert failed[0].error.startswith("No space left on device (ENOSPC) while writing ")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "everstep_trainer: rank 0: save of step 2 failed: No space left on device" in lines[0]
    assert lines[0].endswith("older checkpoints are intact, training goes on")
    assert job.files() == before
    block = job.progress()
    assert (block["failed"], block["committed"]) == (3, 1)
    assert "ENOSPC" in block["error"]
    assert block["flags"] & 16
    found = checkpoints.scan(job.checkpoints, job_id="tests").complete
    assert [checkpoint.id.step for checkpoint in found] == [1]
    assert checkpoints.damage(found[0]) is None

    filler.unlink()
    session.step(4, loss=1.0)
    assert session.save(4, {"blob": b"4" * 700_000}).complete
    assert job.progress()["committed"] == 4


@pytest.mark.root
def test_a_disk_without_room_for_the_progress_file_does_not_kill_the_rank(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mapping a hole on a full disk would be a SIGBUS at the first step."""
    filler = small_disk / "filler"
    hole = small_disk / "progress.bin"
    with hole.open("wb") as file:
        file.truncate(4096)
    with filler.open("wb") as file, pytest.raises(OSError, match="No space left"):
        os.posix_fallocate(file.fileno(), 0, 4 << 20)
    for _ in range(1024):
        if not shutil.disk_usage(small_disk).free:
            break
        with filler.open("ab") as file:
            file.write(b"\0" * 4096)
    assert shutil.disk_usage(small_disk).free == 0
    from everstep_trainer import Session

    session = Session(Job(tmp_path / "job").environ(EVERSTEP_PROGRESS_FILE=str(hole)))
    session.step(1, loss=1.0)
    assert "progress is not reported: No space left on device" in capsys.readouterr().err


def test_a_limit_on_file_sizes_is_such_a_failure_too(tmp_path: Path) -> None:
    """For everyone: the kernel refuses with EFBIG what would make a file larger."""
    job = Job(tmp_path)
    code = """
import resource, everstep_trainer
session = everstep_trainer.attach()
assert session.save(1, {"blob": b"1" * 100_000}).complete
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
for step in (2, 3):
    session.step(step, loss=1.0)
    result = session.save(step, {"blob": b"2" * 100_000})
    assert not result.ok and not result, result
    print(result.error)
assert session.save(4, {"blob": b"4"}).complete
"""
    done = run_python("-c", code, env=job.environ())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("File too large (EFBIG)") == 2
    assert done.stderr.count("\n") == 1
    assert job.folders() == [f"step-{step:012d}.g000001" for step in (1, 4)]
    assert not [name for name in job.files() if name.endswith(".tmp")]
    found = checkpoints.scan(job.checkpoints, job_id="tests").complete
    assert sorted(checkpoint.id.step for checkpoint in found) == [1, 4]
    block = job.progress()
    assert (block["step"], block["failed"], block["committed"]) == (3, 3, 4)
