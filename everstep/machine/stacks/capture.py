"""All stacks of a run on this machine, within a time: find, look, look again, group.

Each way to a stack has a poorer one behind it: py-spy, then faulthandler, then what ``/proc`` says.
What could not be had is named with its reason and counts as unknown.

Not here: which processes there are (``members``), and what equal stacks are (``decide.stacks``).
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.decide.stack_groups import ProcessStack, group_stacks, merge_missed
from everstep.decide.stack_report import MissedStacks, ProcessRole, StackReport, StackSource
from everstep.decide.stack_waits import role_of_child
from everstep.decide.stacks import Frame
from everstep.machine.proc import Scope, find_members, read_process
from everstep.machine.stacks import py_spy, signalled
from everstep.machine.stacks.members import Member, classify
from everstep.machine.stacks.py_spy import NoStack, NotPermitted

_KERNEL_FRAMES_MAX = 12
_KERNEL_FRAME = re.compile(r"^\[<[0-9a-fx]+>\] ([\w.]+)")


def parallel_looks() -> int:
    """How many looks at a time do not disturb the ranks: half of the cores, at most eight."""
    return max(1, min(8, (os.cpu_count() or 2) // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTarget:
    """The run whose stacks are wanted."""

    machine_id: str
    scope: Scope
    ranks: Mapping[int, int]
    """Pid of each process that the shim has started, to its rank."""
    training_pids: tuple[int, ...] = ()
    """Pids that the trainer library has reported."""
    stack_files: Mapping[int, Path] = field(default_factory=dict)
    """Where each rank writes when it is asked for its stack."""
    axes: tuple[tuple[str, int], ...] = ()
    ranks_per_machine: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureLimits:
    """How much a capture may cost."""

    total_s: float = 5.0
    """Time for all of it; what is not there by then is left out."""
    process_s: float = 2.0
    """Time for one look at one process."""
    looks: int = 2
    """Two tell what stands still from what moves; one is enough for a round of many."""
    gap_s: float = 0.3
    """Least time between the two looks at a process."""
    parallel: int = field(default_factory=parallel_looks)
    processes_max: int = 512
    lines: bool = True
    """Whether lines within functions count: yes for a hang, no for processes that run."""


async def capture(
    target: StackTarget, limits: CaptureLimits | None = None, *, program: Path | None = None
) -> StackReport:
    """The stacks of every process of a run, grouped.

    Args:
        target: the run.
        limits: see there.
        program: py-spy, where it is not the installed one.
    """
    return await _Capture(target, limits or CaptureLimits(), program or py_spy.find_py_spy()).run()


class _Capture:
    def __init__(self, target: StackTarget, limits: CaptureLimits, program: Path | None) -> None:
        self._target = target
        self._limits = limits
        self._program = program
        self._began = time.monotonic()
        self._turns = asyncio.Semaphore(limits.parallel)
        self._files: dict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._refused = "" if program is not None else "py-spy is not installed"
        self._missed: dict[int, MissedStacks] = {}

    async def run(self) -> StackReport:
        """Never raises for what is wrong with a process."""
        try:
            members = await asyncio.wait_for(asyncio.to_thread(self._find), self._left_s)
        except TimeoutError:
            reason = f"looking at processes took over {self._limits.total_s:g} s"
            ranks = tuple(sorted(set(self._target.ranks.values())))
            return self._report((), len(ranks), reason, ranks)
        for member in members[self._limits.processes_max :]:
            self._miss(member, f"more than {self._limits.processes_max} processes")
        chosen = members[: self._limits.processes_max]
        first = await self._look_at(chosen)
        second: Sequence[ProcessStack | None] = ()
        if self._limits.looks > 1:
            await asyncio.sleep(min(self._limits.gap_s, self._left_s))
            again = [
                m if s is not None and s.looks else None for m, s in zip(chosen, first, strict=True)
            ]
            second = await self._look_at(again)
        stacks = [
            _both(one, two)
            for one, two in zip(first, second or [None] * len(first), strict=True)
            if one is not None
        ]
        return self._report(stacks, len(members))

    def _find(self) -> tuple[Member, ...]:
        processes = find_members(self._target.scope)
        return classify(processes, self._target.ranks, self._target.training_pids)

    @property
    def _left_s(self) -> float:
        return max(0.0, self._began + self._limits.total_s - time.monotonic())

    def _report(
        self,
        stacks: Sequence[ProcessStack],
        processes: int,
        reason: str = "",
        ranks: tuple[int, ...] = (),
    ) -> StackReport:
        groups, above = group_stacks(stacks, lines=self._limits.lines)
        lost = [
            MissedStacks(reason=reason, role=ProcessRole.RANK, spans=((rank, rank),))
            for rank in ranks
        ]
        return StackReport(
            machine_id=self._target.machine_id,
            groups=groups,
            missed=merge_missed([*self._missed.values(), *above, *lost]),
            processes=processes,
            took_s=round(time.monotonic() - self._began, 3),
            axes=self._target.axes,
            ranks_per_machine=self._target.ranks_per_machine,
        )

    async def _look_at(self, members: Sequence[Member | None]) -> list[ProcessStack | None]:
        async def one(member: Member | None) -> ProcessStack | None:
            if member is None:
                return None
            async with self._turns:
                return await self._look(member)

        return await asyncio.gather(*(one(member) for member in members))

    async def _look(self, member: Member) -> ProcessStack | None:
        """One look; None when the process has ended meanwhile."""
        pid = member.process.pid
        seen = read_process(pid)
        if seen is None or not seen.alive or seen.start_ticks != member.process.start_ticks:
            return None
        frames, source = await self._frames(member, seen.state)
        if source is StackSource.PROC and read_process(pid) is None:
            return None
        return ProcessStack(
            pid=pid,
            rank=member.rank,
            role=self._role(member, frames if source is not StackSource.PROC else ()),
            source=source,
            looks=(frames,),
            state=_state(seen.state),
            kernel=_wait_channel(pid),
        )

    async def _frames(self, member: Member, state: str) -> tuple[tuple[Frame, ...], StackSource]:
        if member.looks.is_python:
            reason = self._refused or f"not within {self._limits.total_s:g} s"
            if not self._refused and self._left_s > 0 and self._program is not None:
                limit_s = min(self._limits.process_s, self._left_s)
                try:
                    frames = await py_spy.dump(self._program, member.process.pid, limit_s)
                    return frames, StackSource.PY_SPY
                except NotPermitted as refusal:
                    self._refused = reason = str(refusal)  # the same for all: not tried again
                except NoStack as problem:
                    reason = str(problem)
            try:
                return await self._ask(member, state), StackSource.FAULTHANDLER
            except NoStack as problem:
                self._miss(member, f"{reason}; asked by signal: {problem}")
        return _kernel_frames(member.process.pid), StackSource.PROC

    async def _ask(self, member: Member, state: str) -> tuple[Frame, ...]:
        file = self._target.stack_files.get(member.rank) if member.rank is not None else None
        if file is None:
            raise NoStack("the run has no file for it")
        if self._left_s <= 0:
            raise NoStack("no time was left")
        if state in "Tt":
            raise NoStack("it is stopped, so it cannot answer")
        async with self._files[file]:  # a rank's children write into the same file
            limit_s = min(self._limits.process_s, self._left_s)
            return await signalled.dump(member.process, file, limit_s)

    def _role(self, member: Member, frames: Sequence[Frame]) -> ProcessRole:
        if member.role is not ProcessRole.OTHER:
            return member.role
        line = b" ".join(member.looks.command_line[:6]).decode("utf-8", "replace")
        forked = _forked(frames)
        return role_of_child(member.looks.comm, "" if forked else line[:500], frames)

    def _miss(self, member: Member, reason: str) -> None:
        spans = () if member.rank is None else ((member.rank, member.rank),)
        role = self._role(member, ())
        self._missed[member.process.pid] = MissedStacks(reason=reason[:300], role=role, spans=spans)


def _forked(frames: Sequence[Frame]) -> bool:
    """Whether a process is a function of its parent's program: its command line is not its own."""
    return bool(frames) and frames[-1].function == "_bootstrap"


def _both(first: ProcessStack, second: ProcessStack | None) -> ProcessStack:
    """Two looks as one; a state counts only if it was there both times."""
    if second is None or second.source is not first.source:
        return first
    return ProcessStack(
        pid=first.pid,
        rank=first.rank,
        role=first.role,
        source=first.source,
        looks=first.looks + second.looks if first.source is not StackSource.PROC else first.looks,
        state=first.state if first.state == second.state else "",
        kernel=first.kernel if first.kernel == second.kernel else "",
    )


def _state(letter: str) -> str:
    return {"T": "T", "t": "T", "D": "D"}.get(letter, "")


def _wait_channel(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return name.strip()[:80].replace("\0", "") if name.strip() != "0" else ""


def _kernel_frames(pid: int) -> tuple[Frame, ...]:
    """Where the kernel has the process, as far as this account may see it."""
    try:
        text = Path(f"/proc/{pid}/stack").read_text(encoding="ascii", errors="replace")
    except OSError:
        text = ""
    names = [found[1] for line in text.splitlines() if (found := _KERNEL_FRAME.match(line))]
    if not names and (channel := _wait_channel(pid)):
        names = [channel]
    return tuple(Frame(name, "<kernel>", None) for name in names[:_KERNEL_FRAMES_MAX])
