"""Which ranks differ from those that should be where they are.

A rank is compared with the ranks of its pipeline stage, and with its *peers*: the ranks that have
its coordinates on every axis but dp, so that they do the same thing in another replica. Stages, and
the first ranks of tensor-parallel groups, differ by nature; replicas do not.

All is linear in the number of ranks. Not here: what follows (``aggregation``, ``fail_slow``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from everstep.decide.stack_report import ProcessRole, StackGroup, StackSource, Wait, ranks_of
from everstep.decide.topology import Topology

STOPPED = "T"
NAMES_SHOWN_MAX = 8
WITNESS_WAITS = frozenset({Wait.PEERS, Wait.DEVICE})

RankStacks = Mapping[int, StackGroup]
"""The group that the main process of each rank is in; ranks without a stack are absent."""


def rank_stacks(groups: Iterable[StackGroup], world_size: int) -> RankStacks:
    """The stack of each rank's main process, where it is known and can be compared.

    What only ``/proc`` tells of a process is no Python stack: such ranks count as unknown.
    """
    found: dict[int, StackGroup] = {}
    for group in sorted(groups, key=group_order):
        if group.role is ProcessRole.RANK and group.source is not StackSource.PROC:
            for rank in ranks_of(group.spans):
                if 0 <= rank < world_size:
                    found.setdefault(rank, group)
    return dict(sorted(found.items()))


def group_order(group: StackGroup) -> tuple[str, int, str, str, bool]:
    """Sorts groups by role, then the largest first, and the same way every time."""
    return (group.role, -group.processes, group.fingerprint, group.state, group.moving)


def is_witness(group: StackGroup) -> bool:
    """Whether it shows that its ranks wait for others."""
    return group.waits_for in WITNESS_WAITS and group.state != STOPPED


def outside(stacks: RankStacks, topology: Topology) -> tuple[int, ...]:
    """The few ranks that are elsewhere while all others wait for their peers; else none.

    None either when one of them only does what half of its peers do.
    """
    elsewhere = [rank for rank, group in stacks.items() if not is_witness(group)]
    if not few(elsewhere, len(stacks)):
        return ()
    peers = _Peers({rank: str(is_witness(group)) for rank, group in stacks.items()}, topology)
    return () if any(peers.share(rank) for rank in elsewhere) else tuple(elsewhere)


def find_outliers(stacks: RankStacks, topology: Topology) -> tuple[int, ...]:
    """Ranks whose stack is neither usual in their pipeline stage nor shared by their peers.

    In a stage the largest group of equal stacks is usual, and so is every other that is more than
    half as large. A rank is like its peers when at least half of them have its stack.
    """
    stage_of = _Axis(topology, "pp").at
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for rank, group in stacks.items():
        counts[stage_of(rank)][group.fingerprint] += 1
    usual = {
        stage: {key for key, n in seen.items() if 2 * n > max(seen.values())}
        for stage, seen in counts.items()
    }
    peers = _Peers({rank: group.fingerprint for rank, group in stacks.items()}, topology)
    return tuple(
        rank
        for rank, group in stacks.items()
        if group.fingerprint not in usual[stage_of(rank)] and not peers.share(rank)
    )


class _Axis:
    """Arithmetic along one axis, for many ranks; an axis that is not there has size 1."""

    def __init__(self, topology: Topology, axis: str) -> None:
        self._stride, self._size = 1, 1
        stride = 1
        for name, size in topology.axes:
            if name == axis:
                self._stride, self._size = stride, size
            stride *= size

    def at(self, rank: int) -> int:
        """Coordinate of a rank."""
        return rank // self._stride % self._size

    def first(self, rank: int) -> int:
        """The first rank of the group that a rank is in."""
        return rank - self.at(rank) * self._stride


class _Peers:
    """How many of a rank's peers are like it, by some key of each."""

    def __init__(self, keys: Mapping[int, str], topology: Topology) -> None:
        self._keys = keys
        self._place_of = _Axis(topology, "dp").first
        self._counts: dict[int, Counter[str]] = defaultdict(Counter)
        self._known: Counter[int] = Counter()
        for rank, key in keys.items():
            self._counts[self._place_of(rank)][key] += 1
            self._known[self._place_of(rank)] += 1

    def share(self, rank: int) -> bool:
        """Whether there are known peers, and at least half of them have this rank's key."""
        place = self._place_of(rank)
        others = self._known[place] - 1
        return others > 0 and 2 * (self._counts[place][self._keys[rank]] - 1) >= others


def few(ranks: Collection[object], total: int) -> bool:
    """Some, and at most half: the majority is never the fault."""
    return bool(ranks) and 2 * len(ranks) <= total


def named(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 1, 2 and 9 more``."""
    return listed("rank", [str(rank) for rank in sorted(ranks)])


def listed(noun: str, names: Sequence[str]) -> str:
    """A few names with their noun, and how many more there are."""
    shown = ", ".join(names[:NAMES_SHOWN_MAX])
    more = len(names) - NAMES_SHOWN_MAX
    return f"{noun}{'s' if len(names) > 1 else ''} {shown}" + (
        f" and {more} more" if more > 0 else ""
    )
