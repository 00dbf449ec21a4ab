"""The play: start everything, break the main job fault by fault, let it finish, compare, clean up.

Not here: the faults themselves (``faults``, ``side_jobs``) and what the report looks like.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from everstep.commands.common import console
from everstep.decide.words import JobPhase
from everstep.demo import jobs, side_jobs
from everstep.demo.baseline import Baseline
from everstep.demo.disk import SmallDisk
from everstep.demo.faults import main_faults
from everstep.demo.report import Report, Row
from everstep.demo.stage import DemoFailed, Stage
from everstep.errors import ConfigurationProblem, EverstepError, UsageProblem
from everstep.short_lived import REST_BEFORE_CLOSE_S
from workers.embedded import Embedded, EmbeddedOptions

MACHINES = 3
STEPS = 420
QUICK_STEPS = 300
STEP_MS = 400
OUTAGE_S = 60.0
QUICK_OUTAGE_S = 10.0
END_LIMIT_S = 600.0
SIDE_KEYS = ("user-error", "bad-spec", "plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What ``everstep demo`` was asked for."""

    report: Path | None = None
    state: Path | None = None
    keep: bool = False
    quick: bool = False
    only: frozenset[str] = frozenset()


async def run_demo(options: DemoOptions) -> int:
    """Run the demo; answers 0 when everything was as it had to be."""
    _check(options)
    out = console()
    began = time.monotonic()
    report = Report()
    with _folder(options) as folder, _interruptible():
        disk = SmallDisk(folder / "small-disk")
        try:
            await Play(options, folder, disk, report, out).run()
        finally:
            disk.unmount()
            await asyncio.sleep(REST_BEFORE_CLOSE_S)
        out.print()
        out.print(report.table())
        for line in report.verdict():
            out.print(line)
        out.print(f"took {time.monotonic() - began:.0f} s")
        if options.keep or options.state is not None:
            out.print(f"kept: {folder} (`everstep incidents --state {folder / 'state'}`)")
        if options.report is not None:
            report.write(options.report)
    return 0 if report.passed else 1


class Play:
    """One performance."""

    def __init__(
        self,
        options: DemoOptions,
        folder: Path,
        disk: SmallDisk,
        report: Report,
        out: Console,
    ) -> None:
        """Nothing is started yet."""
        self.options = options
        self.folder = folder
        self.disk = disk
        self.report = report
        self.out = out
        self.steps = QUICK_STEPS if options.quick else STEPS
        self.embedded = Embedded(
            EmbeddedOptions(state=folder / "state", machines=MACHINES, slots=jobs.RANKS_PER_MACHINE)
        )
        self.code = folder / "code"
        self.baseline = Baseline(folder, code=self.code, steps=self.steps)

    async def run(self) -> None:
        """Everything, and whatever happens, an end to all that was started."""
        mounted = self.disk.mount()
        if not mounted:
            self.report.skipped["disk full while saving"] = self.disk.why_not
        try:
            await asyncio.to_thread(jobs.copy_examples, self.code)
            await self.embedded.start()
            self.out.print(f"Temporal UI: {self.embedded.addresses.ui}")
            await self.baseline.start()
            await self._main(self.disk.path if mounted else None)
            await self._side()
            await self._compare()
        except EverstepError as error:
            self.report.problems.append(str(error))
        finally:
            await self.baseline.stop()
            await self.embedded.stop()

    async def _main(self, small_disk: Path | None) -> None:
        outage = QUICK_OUTAGE_S if self.options.quick else OUTAGE_S
        faults = main_faults(outage_s=outage, small_disk=small_disk)
        async with self._stage(jobs.MAIN) as stage:
            spec = jobs.main_job(
                code=self.code,
                steps=self.steps,
                step_ms=STEP_MS,
                checkpoints=small_disk or self.folder / "checkpoints",
                orders=stage.orders,
                out=self.folder / "main.sha256",
            )
            await stage.client.launch(spec)
            self.out.print(f"job {jobs.MAIN}: launched, and beside it the one nobody touches")
            for fault in faults:
                if self._wanted(fault.key):
                    await self._show(fault.name, lambda f=fault: f.play(stage, f.name))  # type: ignore[misc]
            self.out.print("no more faults: the job may finish")
            result = await stage.client.wait(jobs.MAIN, timeout_s=END_LIMIT_S, poll_s=0.5)
            self.report.ettr = result.ettr
            if result.phase is not JobPhase.SUCCEEDED:
                raise DemoFailed(f"{jobs.MAIN} has {result.phase}: {result.reason}")
            self.report.final_sha256 = _hash(self.folder / "main.sha256")

    async def _side(self) -> None:
        plays: dict[str, tuple[str, str, Callable[[Stage], Awaitable[Row]]]] = {
            "bad-spec": (jobs.BAD_SPEC, "bad job spec", side_jobs.bad_spec),
            "user-error": (
                jobs.USER_ERROR,
                "user error",
                lambda stage: side_jobs.user_error(stage, self.code),
            ),
            "plain": (
                jobs.PLAIN,
                "plain torchrun script",
                lambda stage: side_jobs.plain_torchrun(stage, self.code, self.folder),
            ),
        }
        for key, (job_id, name, play) in plays.items():
            if self._wanted(key):
                async with self._stage(job_id) as stage:
                    await self._show(name, lambda p=play, s=stage: p(s))  # type: ignore[misc]

    async def _compare(self) -> None:
        if self.baseline.running():
            self.out.print("waiting for the job nobody touches")
        self.report.baseline_sha256 = await self.baseline.sha256()

    async def _show(self, name: str, play: Callable[[], Awaitable[Row]]) -> None:
        """Play one fault; a fault that cannot be played is a row with its problem."""
        self.out.print(f"  {name} ... ", end="")
        try:
            row = await play()
        except EverstepError as error:
            self.out.print("[red]failed[/red]")
            raise DemoFailed(f"{name}: {error}") from None
        self.report.rows.append(row)
        if row.problem:
            self.out.print(f"[red]{row.problem}[/red]")
        else:
            took = f", {row.recover_s:.1f} s" if row.recover_s is not None else ""
            self.out.print(f"{row.action}{took}")

    @contextlib.asynccontextmanager
    async def _stage(self, job_id: str) -> AsyncIterator[Stage]:
        client = await self.embedded.client()
        stage = Stage(self.embedded, client, job_id, self.folder / f"orders-{job_id}")
        try:
            yield stage
        finally:
            await stage.close()

    def _wanted(self, key: str) -> bool:
        return not self.options.only or key in self.options.only


def _hash(path: Path) -> str:
    """The hash that rank 0 wrote at the end."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise DemoFailed(f"{path}: the job left no hash of its weights: {error}") from None


def _check(options: DemoOptions) -> None:
    """Everything that can be wrong before anything is started."""
    known = {fault.key for fault in main_faults(outage_s=1, small_disk=Path("x"))} | set(SIDE_KEYS)
    unknown = sorted(options.only - known)
    if unknown:
        raise UsageProblem(f"--only {unknown[0]}: accepted are {', '.join(sorted(known))}")
    if options.report is not None and not options.report.absolute().parent.is_dir():
        raise ConfigurationProblem(f"{options.report}: its directory does not exist")
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ConfigurationProblem(
            "the demo trains with PyTorch, which is not installed: pip install 'everstep[demo]'"
        ) from None


@contextlib.contextmanager
def _folder(options: DemoOptions) -> Iterator[Path]:
    """The demo's folder; a temporary one is removed at the end."""
    if options.state is not None:
        folder = options.state.absolute()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ConfigurationProblem(f"{folder}: not empty; the demo begins with nothing")
        except OSError as error:
            raise ConfigurationProblem(f"{folder}: {error.strerror}") from None
        yield folder
        return
    folder = Path(tempfile.mkdtemp(prefix="everstep-demo-"))
    try:
        yield folder
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the demo like Ctrl-C does: cancelled, with everything cleaned up."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def end() -> None:
        sys.stderr.write("ending the demo\n")
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    try:
        yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
