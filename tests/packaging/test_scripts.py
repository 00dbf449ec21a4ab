"""The developer's scripts answer mistakes with one line, and do nothing when nothing is to be done.

That a fresh clone bootstraps itself is proved by every run of ``.ci/run``, which starts as one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.conftest import CHECKOUT

SCRIPTS = sorted(
    path for path in (CHECKOUT / "scripts").iterdir() if path.is_file() and path.suffix == ""
)


def run(*command: str, cwd: Path = CHECKOUT, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def copy_of_scripts(folder: Path) -> Path:
    """A checkout without an environment."""
    shutil.copytree(CHECKOUT / "scripts", folder / "scripts")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(CHECKOUT / name, folder)
    return folder


def fake_python(folder: Path, answer: str) -> str:
    """An interpreter that ends like one that is too old, or broken."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ncat >/dev/null\n{answer}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_can_be_run_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert run("sh", "-n", str(script)).returncode == 0


def test_nothing_is_done_when_the_environment_is_current() -> None:
    # `make test` has just made it current, but a person may have started pytest by hand.
    python = str((CHECKOUT / ".venv" / "bin" / "python").resolve())
    if run("scripts/bootstrap", "--check", PYTHON=python).returncode != 0:
        pytest.skip("NOT CHECKED: .venv is not current; run scripts/test")
    stamp = CHECKOUT / ".venv" / ".everstep-stamp"
    before = stamp.stat().st_mtime_ns
    done = run("scripts/bootstrap", PYTHON=python)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert stamp.stat().st_mtime_ns == before


def test_a_changed_lock_makes_the_environment_stale(tmp_path: Path) -> None:
    folder = copy_of_scripts(tmp_path)
    for name in ("everstep", "pytest", "python"):
        program = folder / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.symlink_to("/bin/true")

    def current() -> bool:
        return run("scripts/bootstrap", "--check", cwd=folder).returncode == 0

    assert not current()
    wanted = run("sh", "-x", "scripts/bootstrap", "--check", cwd=folder).stderr
    (line,) = [line for line in wanted.splitlines() if line.startswith("+ wanted=")]
    (folder / ".venv" / ".everstep-stamp").write_text(line.removeprefix("+ wanted=") + "\n")
    assert current()
    with (folder / "constraints.txt").open("a") as lock:
        lock.write("more==1.0\n")
    assert not current()


def test_a_missing_interpreter_is_one_line() -> None:
    done = run("scripts/bootstrap", PYTHON="no-such-python")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("bootstrap: PYTHON=no-such-python: not found; name an interpreter of ")


def test_an_old_interpreter_is_one_line(tmp_path: Path) -> None:
    old = shutil.which("python3.10") or shutil.which("python3.9")
    if old is None or run(old, "--version").returncode != 0:
        pytest.skip("NOT CHECKED: no interpreter older than 3.11 is here")
    done = run("scripts/bootstrap", cwd=copy_of_scripts(tmp_path), PYTHON=old)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "Everstep needs 3.11 or newer: set PYTHON to one" in line
    assert not (tmp_path / ".venv").exists()


def test_an_interpreter_that_fails_is_not_taken_for_a_current_environment(tmp_path: Path) -> None:
    folder = copy_of_scripts(tmp_path)
    done = run("scripts/bootstrap", cwd=folder, PYTHON=fake_python(tmp_path, "exit 1"))
    assert done.returncode == 2


def test_an_unknown_tier_is_one_line_with_those_there_are() -> None:
    done = run("scripts/test", "unti")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("scripts/test: unti: no such tier; there are: quick all ")
    assert " packaging " in line


def test_an_unknown_benchmark_is_one_line() -> None:
    done = run("scripts/bench", "nosuch")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "scripts/bench: there is no benchmarks/bench_nosuch.py"


def test_make_lists_its_targets() -> None:
    done = run("make", "--no-print-directory")
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("make ")} == {
        "demo",
        "test",
        "check",
        "bench",
        "sweep",
        "clean",
    }
