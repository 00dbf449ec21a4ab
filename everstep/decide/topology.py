"""Where a rank is: its machine, its coordinates on the parallel axes, and its groups.

Ranks count up along the first axis of the order fastest, and machines hold consecutive ranks, which
is how torchrun, Megatron-LM and torchtitan lay them out.

Not here: which ranks are under suspicion (``aggregation``), and the spec's form of a layout
(``everstep.spec.job.Layout``, whose sizes and order are the input here).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True)
class Cover:
    """The smallest part of a job that holds some ranks."""

    axis: str | None
    """The axis of the parallel group; None: one machine is enough."""
    machines: tuple[int, ...]
    """All machines of the part, sorted."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of a job on its axes and machines; made by ``topology``."""

    axes: tuple[tuple[str, int], ...]
    """Axis and size, from the axis whose neighbours have adjacent ranks to the farthest apart."""
    ranks_per_machine: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self.axes)

    @property
    def machines(self) -> int:
        """Number of machines; the last one may be filled only in part."""
        return -(-self.world_size // self.ranks_per_machine)

    def machine_of(self, rank: int) -> int:
        """Index (group rank) of the machine that a rank is on."""
        self._check(rank)
        return rank // self.ranks_per_machine

    def ranks_of(self, machine: int) -> tuple[int, ...]:
        """The ranks of a machine."""
        if not 0 <= machine < self.machines:
            raise ValueError(f"machine {machine} is not in 0..{self.machines - 1}")
        first = machine * self.ranks_per_machine
        return tuple(range(first, min(first + self.ranks_per_machine, self.world_size)))

    def machines_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The machines of some ranks, sorted."""
        return tuple(sorted({self.machine_of(rank) for rank in ranks}))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on every axis."""
        self._check(rank)
        out = {}
        rest = rank
        for axis, size in self.axes:
            rest, out[axis] = divmod(rest, size)
        return out

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank at a position; an axis that is not given counts as 0."""
        unknown = coordinates.keys() - {axis for axis, _ in self.axes}
        if unknown:
            raise ValueError(f"no such axis: {', '.join(sorted(unknown))}")
        rank, stride = 0, 1
        for axis, size in self.axes:
            at = coordinates.get(axis, 0)
            if not 0 <= at < size:
                raise ValueError(f"{axis} = {at} is not in 0..{size - 1}")
            rank += at * stride
            stride *= size
        return rank

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that communicate with ``rank`` along ``axis``, itself among them."""
        size, stride = self._size(axis), self._stride(axis)
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(range(first, first + size * stride, stride))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along ``axis``, sorted by their first rank. Every rank is in exactly one."""
        size = self._size(axis)
        others = [(name, n) for name, n in self.axes if name != axis]
        found = []
        for position in product(*(range(n) for _, n in others)):
            fixed = dict(zip((name for name, _ in others), position, strict=True))
            found.append(tuple(self.rank_at({**fixed, axis: at}) for at in range(size)))
        return tuple(sorted(found))

    def cover(self, ranks: Iterable[int]) -> Cover | None:
        """The machine, or else the smallest parallel group, whose machines hold all of ``ranks``.

        Machines are what counts: eviction takes whole ones. The fewest machines win, then the
        group with fewer ranks, then the axis whose ranks are nearest to each other. A group that
        needs every machine of the job singles nobody out, so it covers nothing; nor does one
        machine of a job that has no other.

        Returns:
            None when there are no ranks, or when no such part holds them.
        """
        wanted = set(self.machines_of(ranks))
        if not wanted or self.machines == 1:
            return None
        if len(wanted) == 1:
            return Cover(None, tuple(wanted))
        # Every group that can cover them all has a rank on each of their machines.
        here = self.ranks_of(min(wanted))
        best: tuple[int, int, int] | None = None
        found: Cover | None = None
        for place, (axis, size) in enumerate(self.axes):
            if size == 1:
                continue
            for group in sorted({self.group(axis, rank) for rank in here}):
                machines = self.machines_of(group)
                key = (len(machines), size, place)
                better = best is None or key < best
                if better and len(machines) < self.machines and wanted.issubset(machines):
                    best, found = key, Cover(axis, machines)
        return found

    def _size(self, axis: str) -> int:
        for name, size in self.axes:
            if name == axis:
                return size
        raise ValueError(f"no such axis: {axis}")

    def _stride(self, axis: str) -> int:
        """Distance between two ranks that are neighbours along ``axis``."""
        before = [name for name, _ in self.axes].index(axis)
        return prod(size for _, size in self.axes[:before])

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in 0..{self.world_size - 1}")


def topology(sizes: Mapping[str, int], order: Sequence[str], ranks_per_machine: int) -> Topology:
    """The topology for sizes of axes, laid out in ``order``.

    Raises:
        ValueError: the order does not name every axis once, or a size is below 1.
    """
    if sorted(order) != sorted(sizes):
        raise ValueError(f"order must name each of {', '.join(sorted(sizes))} exactly once")
    if ranks_per_machine < 1 or any(size < 1 for size in sizes.values()):
        raise ValueError("sizes and ranks_per_machine must be 1 or more")
    return Topology(tuple((axis, sizes[axis]) for axis in order), ranks_per_machine)
