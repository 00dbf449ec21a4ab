"""Commands to this machine: each takes effect at most once, in time, and only from its generation.

Every command passes the same gate: a repeated id gets its first answer; another agent boot, an
expired instant or an older generation is refused; the id is on disk before the effect and its
answer after. Expiry is looked at again right before the effect, since writing may have taken long.
An id that was accepted by an agent that then crashed is never carried out blindly: its effect is
looked for first (``_start_run``), or is harmless to repeat (all others).

A full disk stops everything that cannot be remembered, except stopping. Not here: the HTTP side
(``api``), processes (``runs``), the files behind the gate (``journal``, ``fences``).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
import weakref
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import structlog
from pydantic import ValidationError

from everstep.decide.attribution import MachineReport
from everstep.machine.code import CodeProblem, CodeStore
from everstep.machine.fences import Fences
from everstep.machine.guard import Refusal, one_line, told
from everstep.machine.journal import Entry, Journal, JournalUnavailable
from everstep.machine.plans import plan_problem, wait_problem
from everstep.spec.agent_api import (
    Command,
    ErrorBody,
    ErrorCode,
    FenceJob,
    MaterialiseCode,
    MaterialisedCode,
    PreparedRun,
    PrepareRun,
    RunPlan,
    RunState,
    Shutdown,
    ShutdownDone,
    StartedRun,
    StartRun,
    StoppedRun,
    StopRun,
)
from everstep.spec.base import Message

log = structlog.get_logger(__name__)


class Runs(Protocol):
    """What commands need of ``everstep.machine.runs.RunManager``."""

    async def prepare(self, job_id: str, generation: int) -> int:
        """Reserve a rendezvous port."""

    async def start(self, job_id: str, generation: int, plan: RunPlan) -> dict[int, int]:
        """Start the ranks."""

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
        """Capture evidence and end the ranks."""

    async def stop_older(self, job_id: str, generation: int) -> None:
        """End every run of the job that is older."""

    def state(self, job_id: str, generation: int) -> RunState | None:
        """The state of one run."""

    def live_jobs(self) -> dict[str, int]:
        """Jobs with live ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What commands need to know about the machine itself."""

    machine_id: str
    agent_boot_id: str
    address: str
    slots: int


ANSWERS: dict[type[Command], type[Message]] = {
    PrepareRun: PreparedRun,
    StartRun: StartedRun,
    StopRun: StoppedRun,
    FenceJob: Message,
    MaterialiseCode: MaterialisedCode,
    Shutdown: ShutdownDone,
}
"""Every command and its answer."""


class CommandDesk:
    """Takes commands. ``evicted`` is set by the registration, ``ending`` when the agent ends."""

    def __init__(
        self,
        machine: Machine,
        *,
        runs: Runs,
        journal: Journal,
        fences: Fences,
        code: CodeStore,
        code_in_use: Callable[[], Collection[str] | None],
        shut_down: Callable[[str], Awaitable[dict[str, int]]],
    ) -> None:
        self.evicted = False
        self.ending = False
        self._machine = machine
        self._runs = runs
        self._journal = journal
        self._fences = fences
        self._code = code
        self._code_in_use = code_in_use
        self._shut_down = shut_down
        self._running: dict[str, tuple[str, asyncio.Task[Message]]] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def handle(self, command: Command) -> Message:
        """Carry a command out, or answer as the first time.

        Raises:
            Refusal: it is not carried out.
        """
        digest = _digest(command)
        running = self._running.get(command.command_id)
        if running is None:
            task = asyncio.create_task(self._carry_out(command, digest))
            self._running[command.command_id] = (digest, task)
            task.add_done_callback(lambda done: self._ended(command.command_id, done))
        else:
            _same_command(digest, running[0])
            task = running[1]
        # The command goes on when its sender leaves: the sender will ask again.
        return await asyncio.shield(task)

    async def apply_fence(self, job_id: str, generation: int) -> None:
        """Refuse everything of the job that is older and end its ranks, also on a full disk."""
        kept = await asyncio.to_thread(self._fences.allow_from, job_id, generation)
        if not kept:
            log.error("a fence holds in memory only", job_id=job_id, problem=self._fences.problem)
        await self._runs.stop_older(job_id, generation)

    def _ended(self, command_id: str, task: asyncio.Task[Message]) -> None:
        self._running.pop(command_id, None)
        if not task.cancelled():
            task.exception()  # seen: its sender may have left

    async def _carry_out(self, command: Command, digest: str) -> Message:
        entry = await self._find(command)
        if entry is not None:
            _same_command(digest, entry.digest)
            if entry.answer is not None:
                return _stored(type(command), entry.answer)
        self._check(command)
        # Nothing may keep a stop waiting: ``runs`` lets one overtake whatever it has to end.
        in_turn = isinstance(command, (PrepareRun, StartRun))
        async with self._lock(command.job_id) if in_turn else contextlib.nullcontext():
            self._check(command)
            await self._remember(command, digest)
            try:
                answer = await self._effect(command, cut_short=entry is not None)
            except Refusal as refusal:
                await self._keep_failure(command, digest, refusal)
                raise
        await asyncio.to_thread(
            self._journal.finish, command.command_id, digest, answer.model_dump_json()
        )
        return answer

    async def _find(self, command: Command) -> Entry | None:
        try:
            return await asyncio.to_thread(self._journal.find, command.command_id)
        except JournalUnavailable as problem:
            if _must_work_without_memory(command):
                return None
            raise Refusal(
                ErrorCode.FAILED, f"the agent cannot look up the command: {problem}"
            ) from None

    def _check(self, command: Command) -> None:
        if command.agent_boot_id != self._machine.agent_boot_id:
            raise Refusal(
                ErrorCode.WRONG_BOOT,
                "the command was made for another start of this agent; the present one is "
                f"{self._machine.agent_boot_id}",
            )
        self._check_time(command)
        stopping = isinstance(command, StopRun)
        newer = self._fences.older(command.job_id, command.generation, stopping=stopping)
        if newer is not None:
            raise Refusal(
                ErrorCode.OLDER_GENERATION,
                f"generation {command.generation} of job {command.job_id} is over on this machine; "
                f"the lowest that may act is {newer}",
            )
        if isinstance(command, (PrepareRun, StartRun)):
            if self.evicted:
                text = f"machine {self._machine.machine_id} is evicted: no run may start on it"
                raise Refusal(ErrorCode.EVICTED, text)
            if self.ending:
                raise Refusal(ErrorCode.BUSY, "the agent is about to end: no run may start")

    @staticmethod
    def _check_time(command: Command) -> None:
        # Written so that a NaN is expired too.
        if not time.monotonic() <= command.not_after_s:
            raise Refusal(ErrorCode.EXPIRED, "the command came too late and was not carried out")

    async def _remember(self, command: Command, digest: str) -> None:
        """Have the command and its generation on disk, or refuse (except for stops)."""
        lenient = _must_work_without_memory(command)
        try:
            await asyncio.to_thread(self._journal.accept, command.command_id, digest)
        except JournalUnavailable as problem:
            if not lenient:
                raise Refusal(
                    ErrorCode.FAILED, f"the agent cannot write the command down: {problem}"
                ) from None
            log.warning("a stop is carried out without a journal", problem=str(problem))
        try:
            self._check_time(command)
            # A fence names the next generation, and the evidence of the last one may still be
            # asked for; so it raises only the bound that is its own.
            if not isinstance(command, FenceJob):
                kept = await asyncio.to_thread(self._fences.saw, command.job_id, command.generation)
                if not kept and not lenient:
                    raise Refusal(
                        ErrorCode.FAILED,
                        f"the agent cannot write the generation down: {self._fences.problem}",
                    )
            self._check_time(command)
        except Refusal:
            await asyncio.to_thread(self._journal.forget, command.command_id)
            raise

    async def _keep_failure(self, command: Command, digest: str, refusal: Refusal) -> None:
        """A start that failed stays failed under its id; everything else may be tried again."""
        if isinstance(command, StartRun) and refusal.code is ErrorCode.FAILED:
            body = ErrorBody(code=refusal.code, message=refusal.message)
            kept = json.dumps({"refused": body.model_dump(mode="json")})
            await asyncio.to_thread(self._journal.finish, command.command_id, digest, kept)
        else:
            await asyncio.to_thread(self._journal.forget, command.command_id)

    async def _effect(self, command: Command, *, cut_short: bool) -> Message:
        if isinstance(command, Shutdown) and cut_short and not self._runs.live_jobs():
            # The agent that took the command has ended with all its runs; somebody started this
            # one since, and does not want it gone.
            return ShutdownDone()
        effects: dict[type[Command], Callable[..., Awaitable[Message]]] = {
            PrepareRun: self._prepare_run,
            StartRun: self._start_run,
            StopRun: self._stop_run,
            FenceJob: self._fence_job,
            MaterialiseCode: self._materialise_code,
            Shutdown: self._shutdown,
        }
        try:
            return await effects[type(command)](command)
        except Refusal:
            raise
        except Exception as error:  # noqa: BLE001 - one answer for whatever it is
            log.error(  # noqa: TRY400 - see ``told``
                "command failed",
                command=type(command).__name__,
                job_id=command.job_id,
                **told(error),
            )
            text = one_line(str(error)) or type(error).__name__
            raise Refusal(ErrorCode.FAILED, text) from None

    async def _prepare_run(self, command: PrepareRun) -> PreparedRun:
        port = await self._runs.prepare(command.job_id, command.generation)
        return PreparedRun(master_addr=self._machine.address, master_port=port)

    async def _start_run(self, command: StartRun) -> StartedRun:
        problem = plan_problem(command.run, self._machine.slots)
        if problem is not None:
            raise Refusal(ErrorCode.BAD_REQUEST, problem)
        present = self._runs.state(command.job_id, command.generation)
        if present is not None:
            if present.run_id != command.run.run_id:
                raise Refusal(
                    ErrorCode.BUSY,
                    f"generation {command.generation} of job {command.job_id} is run "
                    f"{present.run_id} on this machine",
                )
            # Started before: by a command whose answer was lost, or one that was cut short.
            return StartedRun(machine_id=self._machine.machine_id, pids=present.pids)
        await self._runs.stop_older(command.job_id, command.generation)
        self._check_time(command)
        pids = await self._runs.start(command.job_id, command.generation, command.run)
        return StartedRun(machine_id=self._machine.machine_id, pids=pids)

    async def _stop_run(self, command: StopRun) -> StoppedRun:
        for name, value in (("grace_s", command.grace_s), ("kill_wait_s", command.kill_wait_s)):
            problem = wait_problem(name, value)
            if problem is not None:
                raise Refusal(ErrorCode.BAD_REQUEST, problem)
        report = await self._runs.stop(
            command.job_id,
            command.generation,
            reason=one_line(command.reason),
            grace_s=command.grace_s,
            kill_wait_s=command.kill_wait_s,
            planned=False,
        )
        return StoppedRun(report=report)

    async def _fence_job(self, command: FenceJob) -> Message:
        kept = await asyncio.to_thread(self._fences.allow_from, command.job_id, command.generation)
        await self._runs.stop_older(command.job_id, command.generation)
        if not kept:
            raise Refusal(
                ErrorCode.FAILED,
                f"older ranks are stopped, but the fence holds in memory only: "
                f"{self._fences.problem}",
            )
        return Message()

    async def _materialise_code(self, command: MaterialiseCode) -> MaterialisedCode:
        try:
            path = await self._code.materialise(
                command.code_version, command.source, self._code_in_use
            )
        except CodeProblem as problem:
            raise Refusal(ErrorCode.BAD_REQUEST, str(problem)) from None
        return MaterialisedCode(path=str(path))

    async def _shutdown(self, command: Shutdown) -> ShutdownDone:
        del command  # the envelope is all there is
        return ShutdownDone(stopped=await self._shut_down("asked to shut down"))

    def _lock(self, job_id: str) -> asyncio.Lock:
        lock = self._locks.get(job_id)
        if lock is None:
            lock = self._locks[job_id] = asyncio.Lock()
        return lock


def _must_work_without_memory(command: Command) -> bool:
    return isinstance(command, (StopRun, FenceJob, Shutdown))


def _digest(command: Command) -> str:
    """What was asked for: everything but the clock part of the envelope, which a repeat renews."""
    asked = command.model_dump_json(exclude={"agent_boot_id", "not_after_s", "command_id"})
    return hashlib.sha256(f"{type(command).__name__} {asked}".encode()).hexdigest()


def _same_command(digest: str, earlier: str) -> None:
    if digest != earlier:
        raise Refusal(
            ErrorCode.BAD_REQUEST, "command_id: was used for another command on this machine"
        )


def _stored(kind: type[Command], answer: str) -> Message:
    try:
        fields = json.loads(answer)
        if "refused" in fields:
            refused = ErrorBody.model_validate(fields["refused"])
            raise Refusal(refused.code, refused.message)
        return ANSWERS[kind].model_validate(fields)
    except (ValueError, ValidationError):
        raise Refusal(
            ErrorCode.FAILED, "the command was carried out, but its answer cannot be read back"
        ) from None
