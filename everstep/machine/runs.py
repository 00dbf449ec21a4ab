"""All runs of this machine: starting, adopting, stopping, and remembering what must not start.

``RunManager`` is what the agent's API calls. It keeps one ``Run`` per run folder, ticks their
monitors, and holds the rules between runs: one run of a job at a time, a stopped generation never
starts (also when the stop came first), the newest folders are kept. Everything it knows lies in the
state directory, so a new agent goes on where a killed one was.

Not here: fencing by the controller's word and command ids (``commands``), and one run's life
(``run``).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path
from weakref import WeakSet

import structlog

from everstep.decide.attribution import MachineReport
from everstep.decide.stack_report import StackReport
from everstep.machine import proc
from everstep.machine.folder import RunFolder, RunRecord, run_folders
from everstep.machine.guard import Refusal
from everstep.machine.health import Health, NoProbes
from everstep.machine.launch import Launcher, StateUnusable, find_user
from everstep.machine.ports import Ports
from everstep.machine.report import machine_report, run_state, run_summary
from everstep.machine.reporter import Emit
from everstep.machine.run import Run
from everstep.machine.stacks import CaptureLimits
from everstep.machine.stacks.of_run import capture_run
from everstep.spec.agent_api import ErrorCode, RunPlan, RunState, RunSummary
from everstep.spec.base import NAME_PATTERN

_TICK_S = 0.1
_HALF_STARTED_MAX_S = 3.0
_LOOK_AGAIN_MAX_S = 1.0
_STOPPED_FILE = "stopped"

log = structlog.get_logger(__name__)


class RunManager:
    """The runs of one machine."""

    def __init__(
        self,
        *,
        state_dir: Path,
        machine_id: str,
        emit: Emit,
        rank_user: str | None = None,
        address: str = "127.0.0.1",
        health: Health | None = None,
    ) -> None:
        self._machine_id = machine_id
        self._health = health if health is not None else NoProbes()
        self._emit = emit
        self._runs_dir = state_dir.absolute() / "runs"
        self._runs: dict[tuple[str, int], Run] = {}
        self._capturing = asyncio.Lock()
        self._failed: WeakSet[Run] = WeakSet()
        """Runs for whose failure the probes have looked."""
        self._looks: set[asyncio.Task[None]] = set()
        self._stopped: dict[str, int] = {}
        """Job to the highest generation that was stopped here."""
        self._locks: dict[str, asyncio.Lock] = {}
        self._ticker: asyncio.Task[None] | None = None
        try:
            self._runs_dir.mkdir(parents=True, exist_ok=True)
            self._launcher = Launcher(
                self._runs_dir, machine_id=machine_id, emit=emit, user=find_user(rank_user)
            )
        except OSError as error:
            raise StateUnusable(f"state directory {state_dir}: {error}") from None
        self._ports = Ports(state_dir / "ports.json", address)

    # --- taking over, letting go ----------------------------------------------------------------

    async def adopt(self) -> None:
        """Take over what an agent before us has left, and report what happened meanwhile."""
        try:
            found = run_folders(self._runs_dir)
        except OSError as error:
            raise StateUnusable(f"state directory {self._runs_dir}: {error}") from None
        self._recall_stopped()
        for job_id, generation, folder in found:
            record = folder.read_plan()
            if record is None or (record.job_id, record.generation) != (job_id, generation):
                log.warning(
                    "a run folder cannot be read and is left alone", folder=str(folder.path)
                )
                continue
            await self._adopt_one(folder, record)
        self._start_ticking()

    def _recall_stopped(self) -> None:
        for path in self._runs_dir.glob(f"*/{_STOPPED_FILE}"):
            with contextlib.suppress(OSError, ValueError):
                self._stopped[path.parent.name] = int(path.read_text("ascii"))

    async def _adopt_one(self, folder: RunFolder, record: RunRecord) -> None:
        try:
            run = Run(folder, record, self._emit)
        except OSError as error:
            log.warning("a run folder cannot be used", folder=str(folder.path), error=str(error))
            return
        if run.is_live and not await self._was_started(folder, record):
            # The agent before us died before it started anything: it never said that it did.
            await asyncio.to_thread(folder.remove)
            return
        run.attach(fresh=False)
        self._runs[record.job_id, record.generation] = run

    @staticmethod
    async def _was_started(folder: RunFolder, record: RunRecord) -> bool:
        """Whether a shim has started here; one that is just starting its ranks may finish that."""
        until = time.monotonic() + _HALF_STARTED_MAX_S
        while len(folder.read_starts()) < len(record.ranks):
            if record.boot_id != proc.boot_id() or time.monotonic() > until:
                break
            if not proc.command_line_mentions(str(folder.path)):
                break
            await asyncio.sleep(_TICK_S)
        return folder.read_shim() is not None or bool(folder.read_starts())

    def _start_ticking(self) -> None:
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for run in list(self._runs.values()):
                if run.is_live:
                    self._look_at_failure(run)
                    try:
                        run.tick(time.monotonic_ns())
                    except Exception as error:  # noqa: BLE001 - one run must not blind the others
                        run.reporter.note("looking at progress failed", error=repr(error))

    def _look_at_failure(self, run: Run) -> None:
        """What made a rank fail is read before our own teardown prints its like."""
        if not run.settling or run in self._failed:
            return
        self._failed.add(run)
        look = asyncio.get_running_loop().create_task(self._look_again())
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    async def _look_again(self) -> None:
        try:
            await self._health.look_again(_LOOK_AGAIN_MAX_S)
        except Exception as error:  # noqa: BLE001 - what it would show is worth less than a stop
            with contextlib.suppress(OSError):
                log.warning("probes could not look again", error=repr(error))

    async def close(self) -> None:
        """Stop following; ranks go on without us."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None
        for look in self._looks:
            look.cancel()
        for run in self._runs.values():
            run.detach()

    # --- starting -------------------------------------------------------------------------------

    async def prepare(self, job_id: str, generation: int) -> int:
        """A fresh free port for the run's rendezvous."""
        self._refuse_stopped(job_id, generation)
        try:
            return self._ports.fresh()
        except OSError as error:
            raise Refusal(ErrorCode.FAILED, f"no free port: {error}") from None

    async def start(self, job_id: str, generation: int, plan: RunPlan) -> dict[int, int]:
        """Start this machine's ranks and return their pids; the same run again: the same pids.

        Raises:
            Refusal: the generation is over here, or the ranks cannot be started.
        """
        if not re.fullmatch(NAME_PATTERN, job_id):
            raise Refusal(ErrorCode.BAD_REQUEST, f"{job_id!r} is not a job's name")
        # A caller that goes away must not leave half a run behind.
        return await asyncio.shield(
            asyncio.get_running_loop().create_task(self._start(job_id, generation, plan))
        )

    async def _start(self, job_id: str, generation: int, plan: RunPlan) -> dict[int, int]:
        async with self._lock(job_id):
            self._refuse_stopped(job_id, generation)
            present = self._runs.get((job_id, generation))
            if present is not None:
                if present.record.plan.run_id == plan.run_id and present.is_live:
                    return {r: start.pid for r, start in present.processes.starts.items()}
                raise Refusal(
                    ErrorCode.OLDER_GENERATION,
                    f"generation {generation} of job {job_id} has run on this machine already",
                )
            await self._stop_older(job_id, generation)
            run = await self._launcher.launch(job_id, generation, plan)
            self._runs[job_id, generation] = run
            pids = {rank: start.pid for rank, start in run.processes.starts.items()}
            self._start_ticking()
            await self._keep_newest(job_id, plan.policy.runs_kept_max)
            return pids

    def _refuse_stopped(self, job_id: str, generation: int) -> None:
        newest = max((g for job, g in self._runs if job == job_id), default=0)
        stopped = self._stopped.get(job_id, 0)
        if generation <= stopped:
            raise Refusal(
                ErrorCode.OLDER_GENERATION,
                f"generation {generation} of job {job_id} was stopped on this machine "
                f"(stopped up to {stopped})",
            )
        if generation < newest:
            raise Refusal(
                ErrorCode.OLDER_GENERATION,
                f"generation {generation} of job {job_id} is older than {newest}, which has run "
                "on this machine",
            )

    async def _keep_newest(self, job_id: str, kept_max: int) -> None:
        over = sorted(
            g for (job, g), run in self._runs.items() if job == job_id and not run.is_live
        )
        total = sum(1 for job, _ in self._runs if job == job_id)
        for generation in over[: max(0, total - kept_max)]:
            run = self._runs.pop((job_id, generation))
            run.detach()
            await asyncio.to_thread(run.folder.remove)

    # --- stopping -------------------------------------------------------------------------------

    async def stop(
        self,
        job_id: str,
        generation: int,
        *,
        reason: str,
        grace_s: float,
        kill_wait_s: float,
        planned: bool,
    ) -> MachineReport:
        """End a run, evidence first and verified. A run that has ended already: its report."""
        self._note_stopped(job_id, generation)
        async with self._lock(job_id):  # a start that is going on comes to its end first
            run = self._runs.get((job_id, generation))
        if run is None:
            return MachineReport(
                machine_id=self._machine_id,
                reachable=True,
                note="this machine has nothing of the run",
                observations=self._health.seen(),
                healthy_probes=self._health.healthy_probes(),
            )
        # What killed a rank may be younger than the last look; the teardown takes as long.
        await asyncio.gather(
            run.stop(reason=reason, grace_s=grace_s, kill_wait_s=kill_wait_s, planned=planned),
            self._look_again(),
        )
        return await asyncio.to_thread(machine_report, run, self._health)

    async def stop_older(self, job_id: str, generation: int) -> None:
        """End every run of the job that is older; none of them ever starts here again.

        Raises:
            Refusal: one of them cannot be ended.
        """
        self._note_stopped(job_id, generation - 1)
        async with self._lock(job_id):
            await self._stop_older(job_id, generation)

    async def _stop_older(self, job_id: str, generation: int) -> None:
        older = [
            run
            for (job, g), run in self._runs.items()
            if job == job_id and g < generation and (run.is_live or not run.facts.teardown_clean)
        ]
        await asyncio.gather(
            *(
                run.stop(
                    reason=f"generation {generation} takes over",
                    grace_s=run.record.plan.policy.failure_grace_s,
                    kill_wait_s=run.record.plan.policy.kill_wait_s,
                    planned=False,
                )
                for run in older
            )
        )
        for run in older:
            if run.is_live or not run.facts.teardown_clean:
                raise Refusal(
                    ErrorCode.FAILED,
                    f"generation {run.record.generation} of job {job_id} cannot be ended on "
                    f"machine {self._machine_id}: {run.facts.note or 'ranks are still there'}",
                )

    def _note_stopped(self, job_id: str, generation: int) -> None:
        if generation <= self._stopped.get(job_id, 0) or not re.fullmatch(NAME_PATTERN, job_id):
            return
        self._stopped[job_id] = generation
        path = self._runs_dir / job_id / _STOPPED_FILE
        try:
            path.parent.mkdir(exist_ok=True)
            fresh = path.with_suffix(".new")
            fresh.write_text(str(generation), encoding="ascii")
            fresh.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                log.warning("a stop is remembered in memory only", job_id=job_id, error=str(error))

    def _lock(self, job_id: str) -> asyncio.Lock:
        return self._locks.setdefault(job_id, asyncio.Lock())

    # --- looking --------------------------------------------------------------------------------

    def state(self, job_id: str, generation: int) -> RunState | None:
        """The present state of a run."""
        run = self._runs.get((job_id, generation))
        return run_state(run, self._health) if run is not None else None

    async def stacks(
        self, job_id: str, generation: int, limits: CaptureLimits
    ) -> StackReport | None:
        """What the processes of a run are doing; one look at a time, whoever asks."""
        run = self._runs.get((job_id, generation))
        if run is None:
            return None
        async with self._capturing:
            return await capture_run(run, limits)

    def summaries(self) -> tuple[RunSummary, ...]:
        """The runs that have not ended."""
        return tuple(run_summary(run) for run in self._runs.values() if run.is_live)

    def live_jobs(self) -> dict[str, int]:
        """Jobs with live ranks, and their generation."""
        jobs: dict[str, int] = {}
        for (job_id, generation), run in self._runs.items():
            if run.is_live and run.processes.live:
                jobs[job_id] = max(generation, jobs.get(job_id, 0))
        return jobs

    def places(self) -> tuple[Path, ...]:
        """Folders that live runs write into; may be called from any thread."""
        found = []
        for run in list(self._runs.values()):
            if run.is_live:
                plan = run.record.plan
                found += [run.folder.path, *map(Path, filter(None, [plan.checkpoint_dir]))]
        return tuple(found)

    def pids(self) -> tuple[int, ...]:
        """Processes of ranks that have not been seen to end; may be called from any thread."""
        return tuple(
            run.processes.starts[rank].pid
            for run in list(self._runs.values())
            if run.is_live
            for rank in list(run.processes.handles)
            if rank in run.processes.starts
        )

    def teardowns(self) -> tuple[tuple[float, float], ...]:
        """From when until when ranks were ended, monotonic seconds; from any thread."""
        times = (run.torn_down_s for run in list(self._runs.values()))
        return tuple(time_ for time_ in times if time_ is not None)

    def log_path(self, job_id: str, generation: int, rank: int) -> Path | None:
        """The log of a rank of this machine."""
        run = self._runs.get((job_id, generation))
        return run.folder.log(rank) if run is not None and rank in run.record.ranks else None
