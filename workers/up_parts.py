"""One child process of ``everstep up``: started, watched, started again when it dies.

Children get a session of their own (Ctrl-C in the terminal reaches only the supervisor, which ends
them in order) and SIGTERM when the supervisor dies by force, so that nothing runs on for long
without it. Not here: which processes there are and in which order (``workers.embedded``).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from everstep.errors import ConfigurationProblem

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 5.0
SETTLED_AFTER_S = 10.0
"""A part that lived this long starts its next backoff afresh."""
FAILED_STARTS_MAX = 3
"""A part that ends this often before it was ever ready will not get ready by itself."""
LOG_BYTES_MAX = 20 * 1024 * 1024
_CONFIGURATION_EXIT = 3
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

log = structlog.get_logger("everstep.up")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """What to run."""

    name: str
    argv: tuple[str, ...]
    log_path: Path
    ready: Callable[[], Awaitable[bool]]
    env: Mapping[str, str] = field(default_factory=dict)


class Part:
    """A process that is kept running until it is stopped or held."""

    def __init__(self, spec: PartSpec) -> None:
        """Nothing is started yet."""
        self.spec = spec
        self.starts = 0
        """How often the process has been started."""
        self.was_ready = asyncio.Event()
        """Set when the first start, or the newest one since ``expect_ready``, answered."""
        self.failure: ConfigurationProblem | None = None
        """Why it cannot be started; set only before it was ever ready."""
        self._process: asyncio.subprocess.Process | None = None
        self._released = asyncio.Event()
        self._released.set()
        self._stopping = False
        self._ever_ready = False
        self._keeper: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The part's name."""
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        """Begin to keep it running."""
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def until_ready(self) -> None:
        """Wait until it answers.

        Raises:
            ConfigurationProblem: it ended before it answered, and trying again did not help.
        """
        keeper = self._keeper
        if keeper is None:
            raise RuntimeError("start() comes first")
        waiter = asyncio.create_task(self.was_ready.wait())
        try:
            await asyncio.wait({waiter, keeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if self.failure is not None:
            raise self.failure
        if keeper.done():
            keeper.result()

    def kill(self, number: signal.Signals) -> int | None:
        """Send a signal; answers the process id it went to, or None if it was not running."""
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid

    def hold(self) -> None:
        """Do not start it again after its next end, until ``release``."""
        self._released.clear()

    def release(self) -> None:
        """Undo ``hold``."""
        self._released.set()

    def expect_ready(self) -> None:
        """Forget that it was ready, so that ``was_ready`` tells of the next start."""
        self.was_ready.clear()

    async def stop(self, *, grace_s: float, hurry: asyncio.Event | None = None) -> None:
        """End it for good: SIGTERM, then SIGKILL after ``grace_s`` or when ``hurry`` is set."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            self.kill(signal.SIGTERM)
            # A part that a test or a person froze would not hear SIGTERM.
            self.kill(signal.SIGCONT)
            await _first_of(process.wait(), grace_s, hurry)
            if process.returncode is None:
                self.kill(signal.SIGKILL)
                await process.wait()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self) -> None:
        backoff_s = BACKOFF_MIN_S
        while True:
            await self._released.wait()
            began = time.monotonic()
            code = await self._once()
            lived_s = time.monotonic() - began
            if self._stopping or self._cannot_start(code):
                return
            backoff_s = BACKOFF_MIN_S if lived_s >= SETTLED_AFTER_S else backoff_s
            if self._ever_ready:
                log.warning("part ended", part=self.name, code=code, lived_s=round(lived_s, 2))
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)

    def _cannot_start(self, code: int) -> bool:
        """Whether to give up: only a part that never got ready is given up."""
        if self._ever_ready:
            return False
        if code == _CONFIGURATION_EXIT or self.starts >= FAILED_STARTS_MAX:
            self.failure = ConfigurationProblem(
                f"{self.name} cannot be started: {last_line(self.spec.log_path)} "
                f"(log: {self.spec.log_path})"
            )
            return True
        return False

    async def _once(self) -> int:
        """Run it to its end; answers its exit code."""
        self.starts += 1
        with _open_log(self.spec.log_path) as output:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "NO_COLOR": "1", **self.spec.env},
                cwd="/",
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        watcher = asyncio.create_task(self._watch_ready())
        try:
            return await self._process.wait()
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch_ready(self) -> None:
        while not await self.spec.ready():  # noqa: ASYNC110 - another process has no event for us
            await asyncio.sleep(0.05)
        self._ever_ready = True
        self.was_ready.set()


def _die_with(parent: int) -> Callable[[], None]:
    """What a child does before it becomes the program: ask for SIGTERM at the parent's death."""

    def before_exec() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            # The parent died between fork and prctl.
            os._exit(1)

    return before_exec


async def _first_of(wait: Awaitable[object], limit_s: float, hurry: asyncio.Event | None) -> None:
    tasks = {asyncio.ensure_future(wait)}
    if hurry is not None:
        tasks.add(asyncio.ensure_future(hurry.wait()))
    _, open_tasks = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    for task in open_tasks:
        task.cancel()
    await asyncio.gather(*open_tasks, return_exceptions=True)


@contextlib.contextmanager
def _open_log(path: Path) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_suffix(".log.1"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def last_line(path: Path) -> str:
    """The last line with something on it, for an error message."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "it left no log"
    text = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return text.removeprefix("error: ")[:400]
