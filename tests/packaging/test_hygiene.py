"""The watchdog of tests/conftest.py bites: a session that leaves something behind fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import psutil

CONFTEST = Path(__file__).parents[1] / "conftest.py"

CLEAN = """
import subprocess, sys, tempfile

def test_cleans_up(tmp_path):
    (tmp_path / "kept by pytest").touch()
    with tempfile.NamedTemporaryFile():
        subprocess.run([sys.executable, "-c", ""], check=True)
"""
MESSY = """
import subprocess, sys, tempfile
from pathlib import Path

children = []
DETACHED = (
    "import subprocess;"
    "subprocess.Popen(['sleep', '%d'], start_new_session=True, stdout=subprocess.DEVNULL, %s)"
)

def test_leaves_a_child():
    children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_leaves_an_orphan_in_a_session_of_its_own():
    subprocess.run([sys.executable, "-c", DETACHED % (601, "")], check=True)

def test_leaves_an_orphan_without_environment(tmp_path):
    subprocess.run([sys.executable, "-c", DETACHED % (602, "env={}")], check=True, cwd=tmp_path)

def test_leaves_a_file():
    tempfile.mkstemp(prefix="stray-")

def test_leaves_shared_memory():
    Path("/dev/shm/everstep-hygiene-self-test").touch()
"""


def session(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the real conftest on one test."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_it.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder)]
    command += ["-p", "no:randomly", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def test_a_clean_session_passes(tmp_path: Path) -> None:
    result = session(tmp_path, CLEAN)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 passed in")


def test_a_session_that_leaves_something_fails_and_names_it(tmp_path: Path) -> None:
    result = session(tmp_path, MESSY)
    assert result.returncode == 1, result.stdout
    assert "5 passed, 1 error" in result.stdout.splitlines()[-1]
    complaint = result.stdout.partition("the tests left behind:\n")[2].partition("\n\n")[0]
    for named in (
        "-c input()",
        "sleep 601",
        "sleep 602",
        "/stray-",
        "shared memory: /dev/shm/everstep-hygiene-self-test",
    ):
        assert named in complaint

    # ... and cleans it up all the same.
    assert not Path("/dev/shm/everstep-hygiene-self-test").exists()
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    assert not {"sleep 601", "sleep 602"} & set(lines)
