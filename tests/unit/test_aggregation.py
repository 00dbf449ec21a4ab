"""Aggregation: the right suspects, none without a reason, and the same whatever the order."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.aggregation import judge_hang, judge_reports, merge
from everstep.decide.fail_slow import flagged, judge_slow, judge_slow_reports
from everstep.decide.stack_report import (
    MissedStacks,
    ProcessRole,
    StackGroup,
    StackReport,
    StackSource,
    Wait,
    ranks_of,
    spans_of,
)
from everstep.decide.stacks import fingerprint, frame
from everstep.decide.topology import Topology, topology
from everstep.decide.words import Confidence

ORDER = ("tp", "cp", "ep", "dp", "pp")
PAPER = topology({"tp": 2, "pp": 4, "dp": 4}, ("tp", "pp", "dp"), 2)
"""The paper's worked hang: 16 machines of 2 GPUs, machines 12 to 15 are one pipeline."""
REPLICAS = topology({"dp": 8}, ("dp",), 2)
REDUCE, SYNC, ELSEWHERE, DATA = "all_reduce", "synchronize", "user_sleep", "next_batch"
WAITS = {
    REDUCE: Wait.PEERS,
    "isend": Wait.PEERS,
    "irecv": Wait.PEERS,
    "all_gather": Wait.PEERS,
    SYNC: Wait.DEVICE,
    DATA: Wait.DATA,
    "save_checkpoint": Wait.CHECKPOINT,
}


def group(place: str, ranks: Iterable[int], **changes: object) -> StackGroup:
    numbers = sorted(ranks)
    made = StackGroup(
        role=ProcessRole.RANK,
        fingerprint=fingerprint([frame(place, "train.py", 1)]),
        frames=(f"{place} (train.py:1)",),
        source=StackSource.PY_SPY,
        waits_for=WAITS.get(place, Wait.NOTHING),
        spans=spans_of(numbers),
        processes=len(numbers),
        pids=tuple(1000 + rank for rank in numbers[:8]),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def groups(places: Mapping[int, str]) -> list[StackGroup]:
    """The groups of ranks by where they are."""
    return [
        group(place, [rank for rank, at in places.items() if at == place])
        for place in sorted(set(places.values()))
    ]


def everywhere(t: Topology, place: str, **odd: Iterable[int]) -> dict[int, str]:
    found = dict.fromkeys(range(t.world_size), place)
    for where, ranks in odd.items():
        found |= dict.fromkeys(ranks, where)
    return found


# --- hangs


def test_the_papers_worked_hang() -> None:
    """Figure 7: outliers 12 to 15, of which each is in another place, are one pipeline."""
    places = everywhere(PAPER, REDUCE, irecv=(24, 25, 26, 27), isend=(28, 29), all_gather=(30, 31))
    finding = judge_hang(groups(places), PAPER)
    assert (finding.rule, finding.axis, finding.machines) == (
        "stack_outliers",
        "pp",
        (12, 13, 14, 15),
    )
    assert finding.outliers == tuple(range(24, 32))
    assert finding.culprits == ()


def test_a_rank_outside_of_the_collective_is_the_culprit() -> None:
    finding = judge_hang(groups(everywhere(REPLICAS, REDUCE, user_sleep=(5,))), REPLICAS)
    assert (finding.rule, finding.confidence) == ("stack_outside_collective", Confidence.HIGH)
    assert [(c.rank, c.role) for c in finding.culprits] == [(5, ProcessRole.RANK)]
    assert (finding.machines, finding.axis) == ((2,), None)
    assert "user_sleep (train.py:1)" in finding.reason


def test_a_downstream_pipeline_leads_to_the_rank_that_holds_it_up() -> None:
    """The rest of its pipeline waits for it too, in other places than the other replicas."""
    places = everywhere(PAPER, REDUCE, next_batch=(24,), irecv=range(25, 32))
    finding = judge_hang(groups(places), PAPER)
    assert [c.rank for c in finding.culprits] == [24]
    assert finding.machines == (12,)


def test_two_ranks_are_enough_when_one_waits_for_the_other() -> None:
    pair = topology({"dp": 2}, ("dp",), 1)
    finding = judge_hang(groups({0: SYNC, 1: ELSEWHERE}), pair)
    assert [c.rank for c in finding.culprits] == [1]
    assert finding.confidence is Confidence.LOW, "the device may wait for something else"


@pytest.mark.parametrize(
    "waits, role",
    [(DATA, ProcessRole.DATA_LOADER), ("save_checkpoint", ProcessRole.CHECKPOINT_HELPER)],
)
def test_a_helper_that_its_rank_waits_for_is_named(waits: str, role: ProcessRole) -> None:
    case = groups(everywhere(REPLICAS, REDUCE, **{waits: (3,)}))
    idle = group("loop", range(8), role=role, waits_for=Wait.WORK)
    stuck = group("read_shard", [3], role=role, pids=(77,))
    finding = judge_hang([idle, *case, stuck], REPLICAS)
    assert [(c.rank, c.role, c.pids) for c in finding.culprits] == [(3, role, (77,))]
    assert "read_shard" in finding.reason
    alone = judge_hang([idle, *case], REPLICAS)
    assert [(c.rank, c.role) for c in alone.culprits] == [(3, ProcessRole.RANK)], "all are idle"


def test_a_checkpoint_helper_may_stand_out_where_no_rank_does() -> None:
    case = groups(everywhere(REPLICAS, REDUCE))
    stuck = group("write_shard", [6], role=ProcessRole.CHECKPOINT_HELPER, pids=(78,))
    finding = judge_hang([*case, stuck], REPLICAS)
    assert (finding.rule, finding.confidence) == ("stack_helper_stuck", Confidence.LOW)
    assert [(c.rank, c.pids) for c in finding.culprits] == [(6, (78,))]
    writing = judge_hang([*case, replace(stuck, moving=True)], REPLICAS)
    assert writing.culprits == (), "it moves, so it is not stuck"


def test_a_stopped_process_is_the_culprit_wherever_it_is() -> None:
    case = [group(REDUCE, [0, 1, 2, 3, 4, 5, 6]), group(REDUCE, [7], state="T")]
    finding = judge_hang(case, REPLICAS)
    assert (finding.rule, [c.rank for c in finding.culprits]) == ("stack_stopped", [7])
    all_stopped = judge_hang([group(REDUCE, range(8), state="T")], REPLICAS)
    assert all_stopped.machines == (), "somebody stopped the job: no machine did"


def test_stages_that_differ_by_nature_are_not_outliers() -> None:
    t = topology({"tp": 2, "pp": 4, "dp": 2}, ("tp", "pp", "dp"), 2)
    places = {r: f"stage_{t.coordinates(r)['pp']}" for r in range(t.world_size)}
    assert judge_hang(groups(places), t).rule == "stack_alike"
    waiting = {r: "irecv" if t.coordinates(r)["pp"] else DATA for r in range(t.world_size)}
    finding = judge_hang(groups(waiting), t)
    assert (finding.culprits, finding.machines) == ((), ()), "all first stages wait for data"


def test_first_ranks_of_tensor_groups_differ_by_nature() -> None:
    """Only tp rank 0 reads data, and broadcasts it: an eighth of the job, on every machine."""
    t = topology({"tp": 8, "dp": 4}, ("tp", "dp"), 8)
    places = everywhere(t, REDUCE, next_batch=range(0, 32, 8))
    finding = judge_hang(groups(places), t)
    assert (finding.culprits, finding.outliers, finding.machines) == ((), (), ())
    odd = everywhere(t, REDUCE, next_batch=(16,))
    assert judge_hang(groups(odd), t).machines == (2,)


def test_outliers_that_no_group_covers_suspect_nobody() -> None:
    places = everywhere(PAPER, REDUCE, all_gather=(0, 21))
    finding = judge_hang(groups(places), PAPER)
    assert (finding.rule, finding.machines, finding.axis) == ("stack_no_group", (), None)
    assert finding.outliers == (0, 21)
    scattered = judge_hang(groups(everywhere(REPLICAS, REDUCE, user_sleep=(1, 6))), REPLICAS)
    assert [c.rank for c in scattered.culprits] == [1, 6], "they are named all the same"
    assert scattered.machines == (), "the only group that holds them is the whole job"


def test_a_run_that_moves_has_no_suspects() -> None:
    case = [
        group(REDUCE, [0, 1, 2, 3, 4, 5]),
        group(ELSEWHERE, [6]),
        group("forward", [7], moving=True),
    ]
    finding = judge_hang(case, REPLICAS)
    assert (finding.rule, finding.machines, finding.culprits) == ("stack_moves", (), ())


def test_what_is_unknown_is_never_an_outlier() -> None:
    kernel = group("futex_wait", [3, 4], source=StackSource.PROC)
    finding = judge_hang([group(REDUCE, [0, 1, 2, 5, 6, 7]), kernel], REPLICAS)
    assert (finding.rule, finding.unknown_ranks, finding.outliers) == ("stack_alike", 2, ())
    few = judge_hang([group(REDUCE, [0, 1]), group(ELSEWHERE, [2])], REPLICAS)
    assert (few.rule, few.unknown_ranks, few.machines) == ("stack_unknown", 5, ())
    assert judge_hang([], REPLICAS).rule == "stack_unknown"


def test_ranks_that_the_run_does_not_have_do_not_matter() -> None:
    finding = judge_hang([group(REDUCE, range(8)), group(ELSEWHERE, [99])], REPLICAS)
    assert finding.rule == "stack_alike"


def test_what_machines_send_together_is_judged_by_their_own_layout() -> None:
    reports = [
        StackReport(
            machine_id=f"m{machine}",
            groups=(group(ELSEWHERE if machine == 3 else REDUCE, REPLICAS.ranks_of(machine)),),
            axes=REPLICAS.axes,
            ranks_per_machine=2,
        )
        for machine in range(4)
    ]
    finding = judge_reports(reports)
    assert finding is not None
    assert ([c.rank for c in finding.culprits], finding.machines) == ([6, 7], (3,))
    assert judge_reports([]) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"axes": ()},
        {"axes": (("dp", 0),)},
        {"axes": (("dp", 2), ("dp", 2))},
        {"axes": (("dp", 10**9),)},
        {"ranks_per_machine": 0},
    ],
)
def test_a_layout_that_makes_no_sense_is_not_judged(changes: dict[str, Any]) -> None:
    report = StackReport(machine_id="m1", groups=(group(REDUCE, [0]),), axes=REPLICAS.axes)
    assert judge_reports([replace(report, **changes)]) is None


def test_spans_that_no_run_has_are_passed_over() -> None:
    endless = replace(group(ELSEWHERE, [0]), spans=((0, 10**12),))
    report = StackReport(machine_id="m1", groups=(endless,), axes=REPLICAS.axes)
    finding = judge_reports([report])
    assert finding is not None
    assert finding.rule == "stack_unknown"


# --- properties


TOPOLOGIES = st.builds(
    topology,
    st.fixed_dictionaries({axis: st.integers(1, 3) for axis in ORDER}),
    st.permutations(ORDER),
    st.integers(1, 4),
)


@st.composite
def cases(draw: Any) -> tuple[Topology, list[StackGroup]]:
    t = draw(TOPOLOGIES)
    kinds = st.sampled_from([REDUCE, REDUCE, SYNC, "irecv", ELSEWHERE, DATA])
    places = draw(st.dictionaries(st.integers(0, t.world_size - 1), kinds))
    found = groups(places)
    for role in (ProcessRole.DATA_LOADER, ProcessRole.CHECKPOINT_HELPER):
        ranks = draw(st.sets(st.integers(0, t.world_size - 1), max_size=3))
        if ranks:
            found.append(group("read_shard", ranks, role=role))
    stopped: bool = draw(st.booleans())
    if found and stopped:
        found[0] = replace(found[0], state="T")
    return t, found


@given(cases(), st.randoms(use_true_random=False))
def test_order_and_merging_do_not_matter(
    case: tuple[Topology, list[StackGroup]], dice: random.Random
) -> None:
    t, found = case
    split = [
        replace(g, spans=((r, r),), processes=1, pids=()) for g in found for r in ranks_of(g.spans)
    ]
    plain = [replace(g, pids=()) for g in found]
    shuffled = dice.sample(split, len(split))
    reports = [StackReport(machine_id=str(n), groups=(g,)) for n, g in enumerate(shuffled)]
    expected = judge_hang(plain, t)
    assert judge_hang(merge(reports).groups, t) == expected
    assert judge_hang(shuffled, t) == expected
    assert flagged(shuffled, t) == flagged(plain, t)


@given(cases())
def test_suspects_come_from_outliers_and_outliers_from_the_run(
    case: tuple[Topology, list[StackGroup]],
) -> None:
    t, found = case
    finding = judge_hang(found, t)
    assert {c.rank for c in finding.culprits} <= set(finding.outliers)
    assert set(finding.outliers) <= {r for g in found for r in ranks_of(g.spans)}
    assert 2 * len(finding.outliers) <= t.world_size, "the majority is never the fault"
    if finding.machines:
        assert set(t.machines_of(finding.outliers)) <= set(finding.machines)
        assert len(finding.machines) < t.machines
        assert finding.axis is not None or len(finding.machines) == 1
    assert finding.reason.isprintable()


@given(TOPOLOGIES, st.sampled_from([REDUCE, SYNC, ELSEWHERE, DATA]))
def test_where_all_are_alike_nobody_is_suspected(t: Topology, place: str) -> None:
    case = groups(everywhere(t, place))
    for finding in (judge_hang(case, t), judge_slow([case] * 5, t)):
        assert (finding.culprits, finding.outliers, finding.machines) == ((), (), ())


@given(TOPOLOGIES, st.data())
def test_where_all_replicas_are_alike_nobody_is_suspected(t: Topology, data: st.DataObject) -> None:
    if dict(t.axes)["dp"] < 2:
        return
    kinds = st.sampled_from([REDUCE, SYNC, "irecv", ELSEWHERE, DATA])
    place_of: dict[tuple[tuple[str, int], ...], str] = {}
    places = {}
    for rank in range(t.world_size):
        at = tuple(sorted(item for item in t.coordinates(rank).items() if item[0] != "dp"))
        if at not in place_of:
            place_of[at] = data.draw(kinds)
        places[rank] = place_of[at]
    finding = judge_hang(groups(places), t)
    assert (finding.culprits, finding.outliers, finding.machines) == ((), (), ())


def machines_of_a_big_job(ranks: int) -> tuple[Topology, list[StackReport]]:
    t = topology({"tp": 8, "pp": 5, "dp": ranks // 40}, ("tp", "pp", "dp"), 8)
    reports = []
    for machine in range(t.machines):
        mine = t.ranks_of(machine)
        found = groups({r: f"stage_{t.coordinates(r)['pp']}" for r in mine})
        found = [replace(g, waits_for=Wait.PEERS) for g in found]
        reports.append(StackReport(machine_id=f"m{machine}", groups=tuple(found)))
    last = reports[-1]
    reports[-1] = replace(last, groups=(group(ELSEWHERE, ranks_of(last.groups[0].spans)[:1]),))
    return t, reports


def test_ten_thousand_ranks_cost_little_more_than_a_thousand_for_each() -> None:
    def seconds(ranks: int) -> float:
        t, reports = machine_case[ranks]
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            finding = judge_hang(merge(reports).groups, t)
            best = min(best, time.process_time() - began)
            assert len(finding.machines) == 1
        return best

    machine_case = {ranks: machines_of_a_big_job(ranks) for ranks in (1000, 10_000)}
    assert seconds(10_000) < 30 * seconds(1000), "linear is 10, quadratic 100"


def test_a_merged_report_is_as_small_as_it_has_different_stacks() -> None:
    _, reports = machines_of_a_big_job(10_000)
    merged = merge(reports)
    assert len(merged.groups) <= 6
    assert sum(len(g.frames) for g in merged.groups) <= 6
    pure = [StackReport(machine_id=str(r), groups=(group(REDUCE, [r]),)) for r in range(10_000)]
    assert merge(pure).groups[0].spans == ((0, 9999),)


def test_missed_stacks_are_merged_by_reason() -> None:
    def miss(rank: int, reason: str) -> StackReport:
        one = MissedStacks(reason=reason, role=ProcessRole.RANK, spans=((rank, rank),))
        return StackReport(machine_id=str(rank), missed=(one,), processes=1, took_s=rank / 10)

    merged = merge([miss(2, "refused"), miss(0, "refused"), miss(1, "late")])
    assert [(m.reason, m.spans, m.processes) for m in merged.missed] == [
        ("late", ((1, 1),), 1),
        ("refused", ((0, 0), (2, 2)), 2),
    ]
    assert (merged.processes, merged.took_s) == (3, 0.2)


@given(st.sets(st.integers(0, 200)))
def test_spans_are_ranks(ranks: set[int]) -> None:
    spans = spans_of(ranks)
    assert set(ranks_of(spans)) == ranks
    assert all(b[0] > a[1] + 1 for a, b in pairwise(spans)), "as few as can be"


# --- slow runs


def round_of(t: Topology, **odd: Iterable[int]) -> list[StackGroup]:
    return groups(everywhere(t, REDUCE, **odd))


def test_one_slow_rank_is_named_after_enough_rounds() -> None:
    quiet = round_of(REPLICAS)
    slow = round_of(REPLICAS, user_sleep=(4,))
    finding = judge_slow([slow, slow, quiet, slow, slow], REPLICAS)
    assert (finding.rule, finding.machines, finding.axis) == ("stack_slow", (2,), None)
    assert [c.rank for c in finding.culprits] == [4]
    assert "4 of 5 rounds" in finding.reason
    assert judge_slow([slow, slow, quiet, quiet, quiet], REPLICAS).culprits == ()


def test_a_slow_pipeline_is_one_group() -> None:
    slow = round_of(PAPER, irecv=(24, 25, 26, 27), isend=(28, 29), all_gather=(30, 31))
    noise = [round_of(PAPER, user_sleep=(n,)) for n in (3, 17)]
    finding = judge_slow([slow, noise[0], slow, slow, noise[1], slow], PAPER)
    assert (finding.rule, finding.axis, finding.machines) == ("stack_slow", "pp", (12, 13, 14, 15))


def test_slow_ranks_that_no_group_covers_suspect_nobody() -> None:
    slow = round_of(PAPER, user_sleep=(0, 21))
    finding = judge_slow([slow] * 5, PAPER)
    assert (finding.rule, finding.machines) == ("stack_no_group", ())
    assert [c.rank for c in finding.culprits] == [0, 21]


@pytest.mark.parametrize("ranks", [4, 64, 1024])
def test_noise_names_nobody(ranks: int) -> None:
    """Each rank is behind in one look of twenty, at random: no more than chance allows is named."""
    t = topology({"dp": ranks}, ("dp",), 1)
    dice = random.Random(ranks)
    named = 0
    for _ in range(40):
        rounds = [
            round_of(t, user_sleep=[r for r in range(ranks) if dice.random() < 0.05])
            for _ in range(5)
        ]
        named += bool(judge_slow(rounds, t).culprits)
    assert named <= 4


def test_no_rounds_say_nothing() -> None:
    assert judge_slow([], REPLICAS).rule == "stack_no_laggard"
    assert judge_slow([[]] * 5, REPLICAS).unknown_ranks == 8


def test_rounds_of_reports_are_judged_by_the_layout_that_one_of_them_names() -> None:
    slow = StackReport(
        machine_id="b",
        groups=tuple(round_of(REPLICAS, user_sleep=(4,))),
        axes=REPLICAS.axes,
        ranks_per_machine=REPLICAS.ranks_per_machine,
    )
    wild = replace(slow, machine_id="a", axes=(("dp", 0),))
    larger = replace(slow, machine_id="a", axes=(("dp", 80),))
    finding = judge_slow_reports([[wild]] + [[wild, larger, slow]] * 5, (4, 2))
    assert finding is not None
    assert [c.rank for c in finding.culprits] == [4]
    assert judge_slow_reports([[wild], [larger]], (4, 2)) is None
    assert judge_slow_reports([], (4, 2)) is None
