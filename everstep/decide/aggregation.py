"""Who is at fault when a run hangs, from the stacks of all its processes.

The idea is the paper's (section 6): under one fault the healthy processes share few stacks, so
those that differ lead to the fault. Three refinements keep it from blaming what differs by nature:

- a rank differs only if it differs from its pipeline stage *and* from its data-parallel peers;
- a rank that waits for its peers is a witness; the one that is elsewhere while all others wait for
  it is the culprit, and its helpers tell which process of it;
- suspects are the machines of one machine's or one parallel group's size. Outliers that no such
  part covers suspect nobody.

Everything is linear in the number of ranks. Not here: taking stacks (``everstep.machine.stacks``),
comparing them (``stack_outliers``), and runs that are slow (``fail_slow``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from everstep.decide.stack_groups import merge_missed
from everstep.decide.stack_outliers import (
    STOPPED,
    RankStacks,
    few,
    find_outliers,
    group_order,
    is_witness,
    named,
    outside,
    rank_stacks,
)
from everstep.decide.stack_report import (
    MissedStacks,
    ProcessRole,
    StackCulprit,
    StackFinding,
    StackGroup,
    StackReport,
    StackSource,
    Wait,
    ranks_of,
    spans_of,
)
from everstep.decide.topology import Topology
from everstep.decide.words import Confidence

RANKS_MAX = 1_000_000
_HELPERS = {
    Wait.DATA: (ProcessRole.DATA_LOADER,),
    Wait.CHECKPOINT: (ProcessRole.CHECKPOINT_HELPER,),
    Wait.CHILD: (ProcessRole.CHECKPOINT_HELPER, ProcessRole.DATA_LOADER, ProcessRole.OTHER),
}
"""Whose process a rank may be waiting for, by what its own stack shows."""
_DOING = {
    Wait.DATA: "waits for data",
    Wait.CHECKPOINT: "is in its checkpoint",
    Wait.CHILD: "waits for a child process",
}


def merge(reports: Iterable[StackReport]) -> StackReport:
    """The reports of several machines as one, in which equal groups are one group.

    The size of the result depends on how many different stacks there are, and only through spans
    on how many ranks. The order of the reports does not matter.
    """
    groups: dict[tuple[object, ...], list[StackGroup]] = defaultdict(list)
    missed: list[MissedStacks] = []
    processes, took_s = 0, 0.0
    for report in reports:
        processes += report.processes
        took_s = max(took_s, report.took_s)
        for group in report.groups:
            key = (group.role, group.fingerprint, group.source, group.state, group.moving)
            groups[key].append(group)
        missed += report.missed
    return StackReport(
        machine_id="",
        groups=tuple(sorted((_merged(same) for same in groups.values()), key=group_order)),
        missed=merge_missed(missed),
        processes=processes,
        took_s=took_s,
    )


def _merged(same: Sequence[StackGroup]) -> StackGroup:
    exemplar = min(same, key=lambda g: (g.spans, g.pids, g.kernel, g.frames))
    return replace(
        exemplar,
        spans=_merged_spans(g.spans for g in same),
        processes=sum(g.processes for g in same),
        pids=exemplar.pids if len(same) == 1 else (),
    )


def _merged_spans(spans: Iterable[tuple[tuple[int, int], ...]]) -> tuple[tuple[int, int], ...]:
    return spans_of(rank for each in spans for rank in ranks_of(each))


def judge_reports(reports: Sequence[StackReport]) -> StackFinding | None:
    """``judge_hang`` of what the machines of a run have sent; None when nothing makes sense."""
    layout = layout_of(reports)
    return None if layout is None else judge_hang(groups_of(reports, layout), layout)


def layout_of(
    reports: Iterable[StackReport], shape: tuple[int, int] | None = None
) -> Topology | None:
    """The layout that the first report names, by machine; all have it from one plan.

    What machines send is not trusted to make sense: a decision must not fail, nor take for ever.

    Args:
        reports: of some or all machines, in any order.
        shape: machines of the run and ranks of each, where that is known; another layout is
            nonsense then.
    """
    for report in sorted(reports, key=lambda r: r.machine_id):
        if _makes_sense(report):
            layout = Topology(report.axes, report.ranks_per_machine)
            if shape in (None, (layout.machines, layout.ranks_per_machine)):
                return layout
    return None


def groups_of(reports: Iterable[StackReport], layout: Topology) -> list[StackGroup]:
    """The groups of all reports that make sense, without those of ranks that the run has not."""
    return [
        group
        for report in reports
        if _makes_sense(report)
        for group in report.groups
        if all(0 <= first <= last < layout.world_size for first, last in group.spans)
    ]


def _makes_sense(report: StackReport) -> bool:
    sizes = [size for _, size in report.axes]
    names = {axis for axis, _ in report.axes}
    return (
        len(names) == len(sizes) > 0
        and min(sizes) >= 1
        and prod(sizes) <= RANKS_MAX
        and report.ranks_per_machine >= 1
    )


def judge_hang(groups: Sequence[StackGroup], topology: Topology) -> StackFinding:
    """What the stacks of a run that makes no progress say about who holds it up.

    Asked about a run that trains well, it may name whoever happened to be last: ask only when there
    is no progress.

    Args:
        groups: of all machines, merged or not, in any order.
        topology: the run's ranks; replicas along its dp axis are what is compared.
    """
    whole = merge([StackReport(machine_id="", groups=tuple(groups))])
    case = _Case(whole.groups, topology)
    for rule in (_stopped, _too_few, _moves, _outside, _helpers, _outliers):
        finding = rule(case)
        if finding is not None:
            return finding
    return case.finding("stack_alike", "no rank stands out among those that should be alike", ())


@dataclass(frozen=True)
class _Case:
    groups: Sequence[StackGroup]
    topology: Topology

    @cached_property
    def stacks(self) -> RankStacks:
        """Ranks that can be compared."""
        return rank_stacks(self.groups, self.topology.world_size)

    @cached_property
    def helpers(self) -> Mapping[tuple[int, ProcessRole], list[StackGroup]]:
        """Groups of processes that belong to a rank and are not its main one."""
        found: dict[tuple[int, ProcessRole], list[StackGroup]] = defaultdict(list)
        for group in sorted(self.groups, key=group_order):
            if group.role not in (ProcessRole.RANK, ProcessRole.LAUNCHER):
                for rank in self.ranks(group):
                    found[rank, group.role].append(group)
        return found

    def ranks(self, group: StackGroup) -> list[int]:
        """Ranks of a group that the run has."""
        return [rank for rank in ranks_of(group.spans) if 0 <= rank < self.topology.world_size]

    def finding(
        self,
        rule: str,
        reason: str,
        outliers: Collection[int],
        *,
        culprits: Sequence[StackCulprit] = (),
        confidence: Confidence = Confidence.LOW,
    ) -> StackFinding:
        """A finding whose suspects are the smallest part of the job that holds its outliers."""
        cover = self.topology.cover(outliers)
        if outliers and cover is None:
            reason += "; no machine or parallel group below the whole job holds them all"
        return StackFinding(
            rule=rule,
            reason=reason,
            confidence=confidence,
            culprits=tuple(culprits),
            outliers=tuple(sorted(outliers)),
            axis=cover.axis if cover is not None else None,
            machines=cover.machines if cover is not None else (),
            unknown_ranks=self.topology.world_size - len(self.stacks),
        )

    def blame(
        self, rule: str, culprits: Sequence[StackCulprit], confidence: Confidence, rest: str = ""
    ) -> StackFinding:
        """A finding that names processes."""
        ranks = sorted({c.rank for c in culprits})
        culprits = sorted(culprits, key=lambda c: (c.rank, c.role, c.pids))
        first = culprits[0]
        whose = "" if first.role is ProcessRole.RANK else f"{first.role.value} of "
        text = f"{whose}{named(ranks)}: {first.reason}{rest}"
        return self.finding(rule, text, ranks, culprits=culprits, confidence=confidence)


def _stopped(case: _Case) -> StackFinding | None:
    """Processes that somebody has stopped hold up whatever waits for them."""
    culprits = [
        StackCulprit(
            rank=rank,
            role=group.role,
            reason=f"stopped by a signal (state {STOPPED})",
            pids=_pids_if_alone(group),
        )
        for group in sorted(case.groups, key=group_order)
        if group.state == STOPPED and group.role is not ProcessRole.LAUNCHER
        for rank in case.ranks(group)
    ]
    if not few({c.rank for c in culprits}, case.topology.world_size):
        return None
    return case.blame("stack_stopped", culprits, Confidence.HIGH)


def _too_few(case: _Case) -> StackFinding | None:
    known, total = len(case.stacks), case.topology.world_size
    if 2 * known > total:
        return None
    return case.finding("stack_unknown", f"stacks of only {known} of {total} ranks are known", ())


def _moves(case: _Case) -> StackFinding | None:
    """A rank that went on after it had waited for its peers: then this is no hang."""
    moving = [rank for rank, group in case.stacks.items() if group.moving]
    if not moving:
        return None
    text = f"{named(moving)} got or gave what was waited for between two looks: the run moves"
    return case.finding("stack_moves", text, ())


def _outside(case: _Case) -> StackFinding | None:
    """Few ranks are elsewhere while all others wait for their peers: those wait for these."""
    odd = outside(case.stacks, case.topology)
    if not odd:
        return None
    waiting = [case.stacks[rank] for rank in case.stacks.keys() - set(odd)]
    sure = all(group.waits_for is Wait.PEERS for group in waiting)
    return case.blame(
        "stack_outside_collective",
        [_culprit_of(case, rank) for rank in odd],
        Confidence.HIGH if sure else Confidence.LOW,
        f"; the other {len(waiting)} ranks wait for their peers",
    )


def _culprit_of(case: _Case, rank: int) -> StackCulprit:
    """The process of a rank that holds it up: a helper it waits for, else its own."""
    own = case.stacks[rank]
    doing = _DOING.get(own.waits_for, f"is in {_where(own)}")
    for role in _HELPERS.get(own.waits_for, ()):
        stuck = [g for g in case.helpers.get((rank, role), ()) if g.waits_for is not Wait.WORK]
        if stuck:
            return StackCulprit(
                rank=rank,
                role=role,
                reason=f"{doing}, and that process is in {_where(stuck[0])}",
                pids=_pids_if_alone(stuck[0]),
            )
    return StackCulprit(rank=rank, role=ProcessRole.RANK, reason=doing, pids=_pids_if_alone(own))


def _helpers(case: _Case) -> StackFinding | None:
    """All ranks wait in one place, and the checkpoint helper of few of them is stuck."""
    if len({group.fingerprint for group in case.stacks.values()}) != 1:
        return None
    if not all(is_witness(group) for group in case.stacks.values()):
        return None
    culprits = [
        StackCulprit(
            rank=rank,
            role=role,
            reason=f"is still in {_where(stuck[0])} while all ranks wait in one place",
            pids=_pids_if_alone(stuck[0]),
        )
        for (rank, role), groups in sorted(case.helpers.items())
        if role is ProcessRole.CHECKPOINT_HELPER and (stuck := [g for g in groups if _is_stuck(g)])
    ]
    if not few(culprits, len(case.stacks)):
        return None
    return case.blame("stack_helper_stuck", culprits, Confidence.LOW)


def _is_stuck(group: StackGroup) -> bool:
    has_stack = group.source is not StackSource.PROC
    return has_stack and group.waits_for is not Wait.WORK and not group.moving


def _outliers(case: _Case) -> StackFinding | None:
    outliers = find_outliers(case.stacks, case.topology)
    if not few(outliers, len(case.stacks)):
        return None
    text = f"{named(outliers)} differ from their stage and from their peers in other replicas"
    finding = case.finding("stack_outliers", text, outliers)
    return finding if finding.machines else replace(finding, rule="stack_no_group")


def _where(group: StackGroup) -> str:
    return " called by ".join(group.frames[:2]) or "code without a Python stack"


def _pids_if_alone(group: StackGroup) -> tuple[int, ...]:
    """Pids of a group name a process only where the group is that process."""
    return group.pids if len(group.pids) == group.processes == 1 else ()
