"""The watchdog of tests/conftest.py bites: a session that leaves something behind fails.

And it bites nobody else: what another session of the same moment has is not touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import psutil
import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SHM = Path("/dev/shm")

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

def test_leaves_shared_memory_with_the_mark_in_its_name():
    mark = Path(tempfile.gettempdir()).parent.name
    Path(f"/dev/shm/{mark}-named").touch()
"""
HOLDER = """
import mmap, os, sys

descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(descriptor, 4096)
memory = mmap.mmap(descriptor, 4096)
os.close(descriptor)
print("made", flush=True)
sys.stdin.read()
"""
"""A process that has a segment mapped, as a rank has, and leaves it there when it is killed."""

MAKER = f"""
import os, subprocess, sys, time
import conftest, pytest

SEGMENT = os.environ["SEGMENT"]

def holder():
    command = [sys.executable, "-c", {HOLDER!r}, SEGMENT]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "made\\n"
    return started

def kill(process):
    process.kill()
    process.communicate()

@pytest.fixture
def held():
    process = holder()
    yield
    kill(process)
"""
KILLS_AFTER_THE_TEST = """
def test_makes_shared_memory(held):
    assert os.path.exists(SEGMENT)
"""
KILLS_IN_THE_TEST = """
def test_kills_what_it_made(request):
    process = holder()
    watch = request.config.stash[conftest.HYGIENE].shm
    deadline = time.monotonic() + 30
    while all(one.path != conftest.Path(SEGMENT) for one in watch._seen.copy()):
        assert time.monotonic() < deadline, "nobody looked"
        time.sleep(0.01)
    kill(process)
"""
STANDS_BY = """
def test_stands_by():
    print("here", flush=True)
    input()
"""
LOOKS_INTO_THE_OTHER = """
onlookers = []

def test_looks_into_the_directory_of_another_session():
    other = input()
    sleep = [sys.executable, "-c", "input()"]
    for command, cwd in ((sleep, other), ([*sleep, other + "/log"], "/")):
        onlookers.append(subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE))
    print("onlookers", *(process.pid for process in onlookers), flush=True)
    input()
    assert [process.poll() for process in onlookers] == [None, None]
    for process in onlookers:
        kill(process)
"""


def prepared(folder: Path, body: str) -> list[str]:
    """The command that runs pytest with the real conftest on one test file."""
    folder.mkdir(exist_ok=True)
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_it.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder)]
    return [*command, "-p", "no:randomly", "-p", "no:cacheprovider", str(folder)]


def session(folder: Path, body: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a session to its end."""
    command = prepared(folder, body)
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, check=False, env=os.environ | environ
    )


@contextmanager
def beside(folder: Path, body: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A session that goes on beside; its tests print to it and wait for lines."""
    with subprocess.Popen(
        [*prepared(folder, body), "-s"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | environ,
    ) as process:
        yield process
        process.kill()


def said(process: subprocess.Popen[str], word: str) -> str:
    """The rest of the line in which the session says the word."""
    assert process.stdout is not None
    for line in process.stdout:
        _, found, rest = line.partition(word)
        if found:
            return rest.strip()
    raise AssertionError(f"the session ended without saying {word}")


def tell(process: subprocess.Popen[str], line: str) -> None:
    """What the session's test waits for."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


@pytest.fixture
def segment() -> Iterator[Path]:
    """A name that says nothing about who made the segment."""
    path = SHM / f"everstep-self-test-{secrets.token_hex(4)}"
    yield path
    path.unlink(missing_ok=True)


def test_a_clean_session_passes(tmp_path: Path) -> None:
    result = session(tmp_path, CLEAN)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 passed in")


def test_a_session_that_leaves_something_fails_and_names_it(tmp_path: Path) -> None:
    result = session(tmp_path, MESSY)
    assert result.returncode == 1, result.stdout
    assert "5 passed, 1 error" in result.stdout.splitlines()[-1]
    after = result.stdout.partition("the tests left behind:\n")[2].splitlines()
    # Only these: pytest repeats the whole in its summary where CI is set.
    complaint = list(takewhile(lambda line: line.startswith("  "), after))
    for named in (
        "-c input()",
        "sleep 601",
        "sleep 602",
        "/stray-",
        "-named",
    ):
        assert any(named in line for line in complaint), complaint

    # ... and cleans it up all the same.
    (named,) = [line for line in complaint if "shared memory: " in line]
    assert not Path(named.partition("shared memory: ")[2]).exists()
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    assert not {"sleep 601", "sleep 602"} & set(lines)


@pytest.mark.parametrize(
    "killed", [KILLS_AFTER_THE_TEST, KILLS_IN_THE_TEST], ids=["after the test", "in the test"]
)
def test_a_segment_of_a_killed_process_is_its_sessions(
    tmp_path: Path, segment: Path, killed: str
) -> None:
    result = session(tmp_path, MAKER + killed, SEGMENT=str(segment))

    assert result.returncode == 1, result.stdout
    assert f"shared memory: {segment}" in result.stdout
    assert not segment.exists()


def test_a_session_that_ends_first_leaves_the_others_segment(tmp_path: Path, segment: Path) -> None:
    with beside(tmp_path / "first", STANDS_BY) as first:
        said(first, "here")
        body = MAKER + KILLS_AFTER_THE_TEST + STANDS_BY
        with beside(tmp_path / "second", body, SEGMENT=str(segment)) as second:
            # Made while both run, and held by nobody any more.
            said(second, "here")
            assert segment.exists()

            first.communicate("go on\n")
            assert first.returncode == 0
            assert segment.exists()

            output, _ = second.communicate("go on\n")
            assert second.returncode == 1, output
            assert f"shared memory: {segment}" in output
            assert not segment.exists()


def test_a_session_that_ends_first_leaves_who_looks_into_its_directory(
    tmp_path: Path, segment: Path
) -> None:
    told = STANDS_BY.replace('"here"', '"here", os.environ["TMPDIR"]')
    with beside(tmp_path / "first", "import os\n" + told) as first:
        body = MAKER + LOOKS_INTO_THE_OTHER
        with beside(tmp_path / "second", body, SEGMENT=str(segment)) as second:
            tell(second, said(first, "here"))
            onlookers = [int(pid) for pid in said(second, "onlookers").split()]
            assert len(onlookers) == 2

            first.communicate("go on\n")
            assert first.returncode == 0
            assert all(psutil.pid_exists(pid) for pid in onlookers)

            output, _ = second.communicate("go on\n")
            assert second.returncode == 0, output
