"""Which processes a run has on this machine, what each is to it, and whose.

A process belongs to the rank it descends from, or in whose session it is, or that its environment
names. Of a rank's processes one trains: the one the trainer library reported, else the first that
is Python, going down from the one the shim started (which may be a shell or a launcher).

Not here: finding the run's processes (``everstep.machine.proc``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.decide.stack_report import ProcessRole
from everstep.machine.proc import Process

_READ_MAX = 65536
_ELASTIC = re.compile(rb"(^|/)(torchrun|torch\.distributed\.(run|launch)|accelerate|deepspeed)$")
_PYTHON = re.compile(r"^(python|pypy)")


@dataclass(frozen=True, slots=True)
class Looks:
    """What a process looks like from outside."""

    comm: str
    command_line: tuple[bytes, ...]
    is_python: bool
    rank: int | None
    """``RANK`` in the environment it was started with."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a run."""

    process: Process
    looks: Looks
    rank: int | None
    role: ProcessRole
    """OTHER for what only its stack can tell apart."""


def look(pid: int) -> Looks:
    """Read it from ``/proc``; what cannot be read is empty."""
    environ = _read(pid, "environ").split(b"\0")
    rank = next((item[5:] for item in environ if item.startswith(b"RANK=")), b"")
    return Looks(
        comm=_read(pid, "comm").decode("utf-8", "replace").strip(),
        command_line=tuple(part for part in _read(pid, "cmdline").split(b"\0") if part),
        is_python=_is_python(pid),
        rank=int(rank) if re.fullmatch(rb"[0-9]{1,9}", rank) else None,
    )


def _read(pid: int, name: str) -> bytes:
    try:
        with Path(f"/proc/{pid}/{name}").open("rb") as file:
            return file.read(_READ_MAX)
    except OSError:
        return b""


def _is_python(pid: int) -> bool:
    try:
        program = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return True  # not ours to see: let the attempt say so
    return bool(_PYTHON.match(program)) or b"/libpython3" in _read_all(pid, "maps")


def _read_all(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def classify(
    processes: Mapping[int, Process],
    leaders: Mapping[int, int],
    training: Collection[int],
    look_at: Callable[[int], Looks] = look,
) -> tuple[Member, ...]:
    """Every process with its rank and role, ranks first.

    Args:
        processes: all live ones of the run, by pid.
        leaders: pid to rank, of the processes that the shim has started.
        training: pids that the trainer library has reported as training.
        look_at: reads what a process looks like.
    """
    looks = {pid: look_at(pid) for pid in processes}
    owners = {pid: _owner(pid, processes, leaders, looks) for pid in processes}
    trainers = _trainers(processes, leaders, set(training), looks, owners)
    above = {pid for trainer in trainers for pid in _ancestors(trainer, processes)}
    members = []
    for pid, process in processes.items():
        role = ProcessRole.OTHER
        if pid in trainers:
            role = ProcessRole.RANK
        elif pid in above:
            role = ProcessRole.LAUNCHER
        members.append(Member(process, looks[pid], owners[pid], role))
    return tuple(sorted(members, key=lambda m: (m.role is not ProcessRole.RANK, m.process.pid)))


def _ancestors(pid: int, processes: Mapping[int, Process]) -> list[int]:
    """Parents that belong to the run, nearest first."""
    found: list[int] = []
    parent = processes[pid].parent
    while parent in processes and parent not in found:
        found.append(parent)
        parent = processes[parent].parent
    return found


def _owner(
    pid: int,
    processes: Mapping[int, Process],
    leaders: Mapping[int, int],
    looks: Mapping[int, Looks],
) -> int | None:
    line = [pid, *_ancestors(pid, processes)]
    own = looks[pid].rank
    if own is not None and any(_is_elastic(looks[p]) for p in line):
        return own  # a launcher within the rank has given out numbers of its own
    for each in line:
        if each in leaders:
            return leaders[each]
    session = processes[pid].session
    return leaders.get(session, own)


def _is_elastic(looks: Looks) -> bool:
    return any(_ELASTIC.search(part) for part in looks.command_line[:5])


def _trainers(
    processes: Mapping[int, Process],
    leaders: Mapping[int, int],
    reported: Collection[int],
    looks: Mapping[int, Looks],
    owners: Mapping[int, int | None],
) -> set[int]:
    """One pid for each rank: reported, else the outermost that is Python and no launcher.

    A rank without any Python process is what the shim has started.
    """
    chosen: dict[int, tuple[bool, int, int]] = {}
    for pid in processes:
        owner = owners[pid]
        if owner is None or not looks[pid].is_python or _is_elastic(looks[pid]):
            continue
        depth = len(_ancestors(pid, processes))
        related = pid in leaders or depth > 0
        if pid not in reported and not related:
            continue  # an orphan of the rank is not the rank
        key = (pid not in reported, depth, pid)
        if owner not in chosen or key < chosen[owner]:
            chosen[owner] = key
    bare = {pid for pid, rank in leaders.items() if pid in processes and rank not in chosen}
    return bare | {pid for _, _, pid in chosen.values()}
