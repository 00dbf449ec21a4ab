"""Topology: ranks, coordinates and groups are one and the same, seen from three sides."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.topology import Cover, Topology, topology
from everstep.spec.job import AXES, Layout

TOPOLOGIES = st.builds(
    topology,
    st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES}),
    st.permutations(AXES),
    st.integers(1, 5),
)


def test_the_papers_example_of_placement() -> None:
    """Paper, section 9: TP=2, PP=4, DP=2; rank 8 = (tp0, pp0, dp1) in the order tp-pp-dp."""
    example = topology({"tp": 2, "pp": 4, "dp": 2}, ("tp", "pp", "dp"), 2)

    assert example.coordinates(8) == {"tp": 0, "pp": 0, "dp": 1}
    assert example.coordinates(2) == {"tp": 0, "pp": 1, "dp": 0}


def test_the_papers_example_of_a_hang() -> None:
    """Paper, section 6: TP=2, PP=4, DP=4 on 16 machines: machines 12 to 15 are one PP group."""
    example = topology({"tp": 2, "pp": 4, "dp": 4}, ("tp", "pp", "dp"), 2)
    last_stage = example.ranks_of(15)

    assert example.machines == 16
    assert {12, 13, 14, 15} == set(example.machines_of(example.group("pp", last_stage[0])))


@given(TOPOLOGIES)
def test_ranks_and_coordinates_are_a_bijection(t: Topology) -> None:
    seen = set()
    for rank in range(t.world_size):
        coordinates = t.coordinates(rank)
        assert rank == t.rank_at(coordinates)
        seen.add(tuple(sorted(coordinates.items())))

    assert t.world_size == len(seen)


@given(TOPOLOGIES, st.sampled_from(AXES))
def test_groups_divide_the_ranks_and_share_all_other_coordinates(t: Topology, axis: str) -> None:
    groups = t.groups(axis)

    assert list(range(t.world_size)) == sorted(rank for group in groups for rank in group)
    for group in groups:
        others = [{k: v for k, v in t.coordinates(r).items() if k != axis} for r in group]
        assert all(other == others[0] for other in others)
        assert all(t.group(axis, rank) == group for rank in group)


@given(TOPOLOGIES)
def test_machines_hold_consecutive_ranks_and_every_rank_once(t: Topology) -> None:
    ranks = [rank for machine in range(t.machines) for rank in t.ranks_of(machine)]

    assert list(range(t.world_size)) == ranks
    for machine in range(t.machines):
        assert (machine,) == t.machines_of(t.ranks_of(machine))
        assert len(t.ranks_of(machine)) <= t.ranks_per_machine


def test_the_first_axis_of_the_order_has_adjacent_ranks() -> None:
    for order in permutations(("tp", "dp")):
        t = topology({"tp": 2, "dp": 3}, order, 1)
        assert t.group(order[0], 0)[:2] == (0, 1)


def test_a_layouts_sizes_and_order_fit() -> None:
    layout = Layout(tp=2, pp=2)
    t = topology(layout.sizes(8), layout.order, 4)

    assert (t.world_size, t.machines) == (8, 2)
    assert len(t.group("dp", 0)) == 2


@pytest.mark.parametrize(
    "sizes, order, per_machine, message",
    [
        ({"tp": 2}, ("dp",), 1, "order must name each of tp exactly once"),
        ({"tp": 2}, ("tp", "tp"), 1, "order must name each of tp exactly once"),
        ({"tp": 0}, ("tp",), 1, "must be 1 or more"),
        ({"tp": 1}, ("tp",), 0, "must be 1 or more"),
    ],
)
def test_impossible_topologies(
    sizes: dict[str, int], order: tuple[str, ...], per_machine: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        topology(sizes, order, per_machine)


def test_positions_outside_are_refused() -> None:
    t = topology({"tp": 2, "dp": 2}, ("tp", "dp"), 2)

    for call in (
        lambda: t.coordinates(4),
        lambda: t.machine_of(-1),
        lambda: t.ranks_of(2),
        lambda: t.rank_at({"tp": 2}),
        lambda: t.rank_at({"pp": 0}),
        lambda: t.group("pp", 0),
    ):
        with pytest.raises(ValueError, match=r"not in 0\.\.|no such axis"):
            call()


# --- the smallest part that covers some ranks


def test_the_papers_outliers_are_covered_by_their_pipeline() -> None:
    example = topology({"tp": 2, "pp": 4, "dp": 4}, ("tp", "pp", "dp"), 2)

    assert example.cover(range(24, 32)) == Cover("pp", (12, 13, 14, 15))
    assert example.cover([24, 31]) == Cover("pp", (12, 13, 14, 15))
    assert example.cover([24, 25]) == Cover(None, (12,)), "one machine is enough"
    assert example.cover([0, 8, 16]) == Cover("dp", (0, 4, 8, 12))
    assert example.cover([0, 10]) is None, "another stage in another replica"
    assert example.cover([]) is None


def test_the_whole_job_covers_nothing() -> None:
    replicas = topology({"dp": 8}, ("dp",), 2)

    assert replicas.cover([0, 7]) is None
    assert replicas.cover([4]) == Cover(None, (2,))
    assert topology({"dp": 8}, ("dp",), 8).cover([1, 2]) is None, "there is no other machine"


@given(TOPOLOGIES, st.data())
def test_a_cover_holds_the_ranks_and_no_smaller_group_does(
    t: Topology, data: st.DataObject
) -> None:
    ranks = data.draw(st.sets(st.integers(0, t.world_size - 1), min_size=1, max_size=4))
    wanted = set(t.machines_of(ranks))
    found = t.cover(ranks)
    parts = [set(t.machines_of(group)) for axis in AXES for group in t.groups(axis)]
    fitting = [len(part) for part in parts if wanted <= part and len(part) < t.machines]
    if t.machines > 1 and len(wanted) == 1:
        fitting.append(1)

    if found is None:
        assert not fitting
    else:
        assert wanted <= set(found.machines)
        assert len(found.machines) == min(fitting)
