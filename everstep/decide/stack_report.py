"""What the stacks of a run's processes look like: the input and the output of their aggregation.

Plain records, because they cross process borders inside of pydantic models. A machine sends groups
and not stacks: processes with the same role and the same normalised stack are one group with one
exemplar, and ranks stand in spans, so that ten thousand ranks that wait in one place are one line.

Not here: how a stack is taken (``everstep.machine.stacks``), normalised (``stacks``) and judged
(``aggregation``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from everstep.decide.words import Confidence


class ProcessRole(StrEnum):
    """What a process is to its run."""

    RANK = "rank"
    DATA_LOADER = "data_loader"
    CHECKPOINT_HELPER = "checkpoint_helper"
    LAUNCHER = "launcher"
    """Stands above ranks: the shim, a shell, an elastic agent."""
    OTHER = "other"


class StackSource(StrEnum):
    """How a stack was taken, from the best to the poorest."""

    PY_SPY = "py_spy"
    FAULTHANDLER = "faulthandler"
    PROC = "proc"
    """No Python stack: only what ``/proc`` says about the process."""


class Wait(StrEnum):
    """What a stack shows its process to be waiting for."""

    PEERS = "peers"
    """A collective or a message of other ranks."""
    DEVICE = "device"
    """The device or the backward pass, which may in turn wait for other ranks."""
    DATA = "data"
    """The data loader, its own or one in processes of its own."""
    CHECKPOINT = "checkpoint"
    CHILD = "child"
    """A child process, whatever that is for."""
    WORK = "work"
    """Something to do: a helper that is idle."""
    NOTHING = "nothing"
    """Nothing that is known here: it computes, or is stuck on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Processes of one role with one stack, on one machine or on many."""

    role: ProcessRole
    fingerprint: str
    """16 hexadecimal digits over the frames; equal stacks have equal ones on all machines."""
    frames: tuple[str, ...]
    """The exemplar, innermost first: ``function (file.py:12)``, or without the line where it
    changed while we looked; cut in length and number."""
    source: StackSource
    waits_for: Wait = Wait.NOTHING
    state: str = ""
    """``T`` when the processes are stopped, ``D`` when they are blocked in the kernel."""
    moving: bool = False
    """Between two looks a rank went into or out of a wait for its peers, so the run moves; or a
    helper's stack changed, so it is not stuck."""
    kernel: str = ""
    """Where the exemplar waits in the kernel, where the machine tells."""
    spans: tuple[tuple[int, int], ...] = ()
    """First and last of each run of owning ranks; empty for processes that belong to no rank."""
    processes: int = 1
    pids: tuple[int, ...] = ()
    """A few of them; empty once groups of several machines are merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissedStacks:
    """Processes whose stack could not be taken; *unknown*, never an outlier."""

    reason: str
    """One line."""
    role: ProcessRole
    spans: tuple[tuple[int, int], ...] = ()
    processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StackReport:
    """The stacks of one run on one machine (or, with an empty name, of several machines)."""

    machine_id: str
    groups: tuple[StackGroup, ...] = ()
    missed: tuple[MissedStacks, ...] = ()
    processes: int = 0
    """Found; what is above the limit, or came too late, is among the missed ones."""
    took_s: float = 0.0
    axes: tuple[tuple[str, int], ...] = ()
    """Parallel axes of the run and their sizes, in the order of its ranks."""
    ranks_per_machine: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StackCulprit:
    """The process that the others wait for."""

    rank: int
    role: ProcessRole
    reason: str
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFinding:
    """What the stacks of a run say together."""

    rule: str
    """Stable, like the rules of attribution: ``stack_stopped``, ``stack_outliers``, ..."""
    reason: str
    """One sentence for a person."""
    confidence: Confidence
    culprits: tuple[StackCulprit, ...] = ()
    outliers: tuple[int, ...] = ()
    """Ranks that differ from their peers, the culprits' among them."""
    axis: str | None = None
    """Axis of the smallest parallel group that covers the outliers; None when they are on one
    machine, or when no group covers them."""
    machines: tuple[int, ...] = ()
    """Suspects, by index in the run (group rank); empty: evict nobody on this evidence."""
    unknown_ranks: int = 0
    """Ranks without a stack."""


def spans_of(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ranks as spans, both ends included; ``ranks_of`` is the inverse."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return tuple(spans)


def ranks_of(spans: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The ranks in some spans, sorted, each once."""
    return tuple(sorted({rank for first, last in spans for rank in range(first, last + 1)}))
