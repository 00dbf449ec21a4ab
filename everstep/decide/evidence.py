"""What reports and triggers say together, sorted into the groups that the rules ask for.

Everything is sorted by machine and rank, so the order in which reports came in does not matter.

Not here: conclusions (``everstep.decide.attribution``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.decide.aggregation import judge_reports
from everstep.decide.faults import (
    WITNESS_CLASSES,
    FaultKind,
    ended_badly,
    fault_of,
    is_witness,
)
from everstep.decide.machine_faults import MachineFault, faults_of
from everstep.decide.reports import MachineReport, RankReport, Trigger
from everstep.decide.stack_outliers import listed, named
from everstep.decide.stack_report import StackFinding
from everstep.decide.words import LogClass, RankState

_STOPPED_STATES = frozenset({"T", "t"})
_BLOCKED_STATE = "D"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The groups; a rank may be in several."""

    ranks: tuple[RankReport, ...]
    triggers: tuple[Trigger, ...]
    planned: tuple[tuple[str, str], ...]
    """Machine and what it said, for planned stops."""
    lost: tuple[str, ...]
    """Lost machines that had not announced a planned stop."""
    unreachable: tuple[str, ...]
    """Could not be asked, and not lost: unknown."""
    dirty: tuple[str, ...]
    vanished: tuple[str, ...]
    own: tuple[tuple[RankReport, FaultKind], ...]
    """Ranks that failed by themselves."""
    witnesses: tuple[RankReport, ...]
    alive: tuple[RankReport, ...]
    """Ranks that had not ended by themselves: running, or stopped by us."""
    collateral: tuple[RankReport, ...]
    """Ranks that we stopped."""
    frozen: tuple[RankReport, ...]
    stalled: tuple[int, ...]
    finished: tuple[RankReport, ...]
    """Ranks that ended with 0 by themselves."""
    stacks: StackFinding | None
    """What the stacks of all machines say together; None: none were taken."""
    stack_machines: tuple[str, ...]
    """The machines that it leads to: the smallest part of the job that holds the outliers."""
    nonfinite_seen: bool
    nonfinite_step: int | None
    faults: tuple[MachineFault, ...] = ()
    """What probes saw and is faulty."""
    healthy_probes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Machine to the probes that found nothing wrong there."""

    @property
    def machines_with_ranks(self) -> set[str]:
        """Machines that reported about ranks."""
        return {r.machine_id for r in self.ranks}

    @property
    def step(self) -> int | None:
        """Highest step any rank reported."""
        return max((r.step for r in self.ranks if r.step is not None), default=None)

    @property
    def hang_seen(self) -> bool:
        """True when somebody waited too long, by the agent's or by the collective's limit."""
        timeouts = any(r.log_class is LogClass.COLLECTIVE_TIMEOUT for r in self.witnesses)
        return bool(self.stalled) or (timeouts and not self.unreachable)

    @property
    def nonfinite_alone(self) -> tuple[RankReport, ...]:
        """Ranks with the first bad step, if others have passed that step with finite values."""
        step = self.nonfinite_step
        if step is None:
            return ()
        clean = any(
            r.nonfinite_step is None and r.step is not None and r.step >= step for r in self.ranks
        )
        return tuple(r for r in self.ranks if r.nonfinite_step == step) if clean else ()

    @property
    def exited_early(self) -> tuple[RankReport, ...]:
        """Ranks that ended with 0 although the others had still to do.

        Ranks that are ahead of those that stayed, or that are the majority, did not end early: the
        others came late, which is a hang of theirs.
        """
        left = [r for r in self.ranks if r not in self.finished]
        told = any(t.kind == "early_exit" for t in self.triggers)
        if not self.finished or not left or not (self.witnesses or self.stalled or told):
            return ()
        steps = [r.step for r in left if r.step is not None]
        behind = [r for r in self.finished if r.step is not None and steps and r.step < max(steps)]
        if behind:
            return tuple(behind)
        ahead = [r for r in self.finished if r.step is not None and steps and r.step > max(steps)]
        if len(ahead) == len(self.finished) or len(self.finished) > len(left):
            return ()
        return self.finished

    def ranks_on(self, machines: Collection[str]) -> tuple[RankReport, ...]:
        """The ranks of some machines, without those whose end is explained by something else."""
        explained = {r.rank for r in (*self.collateral, *self.witnesses)}
        return tuple(r for r in self.ranks if r.machine_id in machines and r.rank not in explained)

    def few(self, ranks: Sequence[RankReport]) -> bool:
        """True for some ranks, but not most of them: only a minority stands out."""
        return bool(ranks) and 2 * len(ranks) <= len(self.ranks)

    def first_of(self, culprits: Sequence[int]) -> int | None:
        """Which of the ranks failed first, where one machine's own clock can tell."""
        mine = [r for r in self.ranks if r.rank in culprits]
        if len(culprits) == 1:
            return culprits[0]
        if not mine or len({r.machine_id for r in mine}) > 1:
            return None
        if any(r.exited_ago_s is None for r in mine):
            return None
        return min(mine, key=lambda r: (-(r.exited_ago_s or 0.0), r.rank)).rank

    def odd_one_out(self) -> tuple[tuple[RankReport, ...], str] | None:
        """Few ranks that differ from all others while nobody moves, and how they differ."""
        newest = self.step
        asked: tuple[tuple[Callable[[RankReport], bool], str], ...] = (
            (
                lambda r: newest is not None and r.step is not None and r.step < newest,
                f"behind: the others had finished step {newest}",
            ),
            (self._elsewhere, "in another section than the others"),
            (lambda r: r.process_state == _BLOCKED_STATE, "blocked in the kernel (state D)"),
            (self._silent, "silent while the others waited for a collective"),
        )
        for differs, how in asked:
            odd = tuple(r for r in self.alive if differs(r))
            if self.few(odd):
                return odd, how
        return None

    def _elsewhere(self, rank: RankReport) -> bool:
        sections = Counter(r.section for r in self.alive)
        usual, count = sections.most_common(1)[0]
        return 2 * count > len(self.alive) and rank.section != usual

    def _silent(self, rank: RankReport) -> bool:
        return bool(self.witnesses) and rank.log_class not in WITNESS_CLASSES


def gather(reports: Sequence[MachineReport], triggers: Sequence[Trigger] = ()) -> Evidence:
    """Sort reports and triggers into groups."""
    machines = sorted(reports, key=lambda m: m.machine_id)
    ranks = tuple(
        sorted((r for m in machines for r in m.ranks), key=lambda r: (r.rank, r.machine_id))
    )
    told = tuple(
        sorted(triggers, key=lambda t: (t.kind, t.machine_id or "", t.rank or 0, t.reason))
    )
    planned = {t.machine_id: t.reason for t in told if t.kind == "planned_stop" and t.machine_id}
    planned |= {m.machine_id: m.planned_stop for m in machines if m.planned_stop is not None}
    vanished = {t.machine_id for t in told if t.kind == "processes_vanished" and t.machine_id}
    vanished |= {m.machine_id for m in machines if m.processes_vanished}
    lost = {m.machine_id for m in machines if m.lost}
    alive = tuple(r for r in ranks if r.stopped_by_us or r.state is RankState.RUNNING)
    stalled = {r.rank for r in ranks if r.stalled_for_s is not None}
    stalled |= {t.rank for t in told if t.kind == "rank_stalled" and t.rank is not None}
    nonfinite = [r.nonfinite_step for r in ranks if r.nonfinite_step is not None]
    nonfinite += [t.step for t in told if t.kind == "nonfinite" and t.step is not None]
    faults = [(r, fault_of(r)) for r in ranks]
    stacks = judge_reports([m.stacks for m in machines if m.stacks is not None])
    return Evidence(
        ranks=ranks,
        triggers=told,
        planned=tuple(sorted(planned.items())),
        lost=tuple(sorted(lost - planned.keys())),
        unreachable=tuple(m.machine_id for m in machines if not m.reachable and not m.lost),
        dirty=tuple(m.machine_id for m in machines if m.reachable and not m.teardown_clean),
        vanished=tuple(sorted(vanished - lost - planned.keys())),
        own=tuple((r, kind) for r, kind in faults if kind is not None),
        witnesses=tuple(r for r in ranks if is_witness(r)),
        alive=alive,
        collateral=tuple(r for r in ranks if r.stopped_by_us),
        frozen=tuple(r for r in alive if r.process_state in _STOPPED_STATES),
        stalled=tuple(sorted(stalled)),
        finished=tuple(
            r
            for r in ranks
            if r.state is RankState.EXITED
            and not r.stopped_by_us
            and not ended_badly(r)
            and r.exit_code == 0
        ),
        stacks=stacks,
        stack_machines=_machines_at(stacks, machines),
        nonfinite_seen=bool(nonfinite) or any(t.kind == "nonfinite" for t in told),
        nonfinite_step=min(nonfinite, default=None),
        faults=faults_of(machines, told),
        healthy_probes={m.machine_id: m.healthy_probes for m in machines if m.healthy_probes},
    )


def _machines_at(found: StackFinding | None, machines: Sequence[MachineReport]) -> tuple[str, ...]:
    """Names of machines that a finding has by their index in the run."""
    if found is None:
        return ()
    names = {
        r.rank // m.stacks.ranks_per_machine: m.machine_id
        for m in machines
        if m.stacks is not None and m.stacks.ranks_per_machine > 0
        for r in m.ranks
    }
    return tuple(names[index] for index in found.machines if index in names)


def all_succeeded(reports: Sequence[MachineReport], world_size: int) -> bool:
    """True when every rank of the run ended with 0 by itself and with finite numbers.

    Then there is nothing to recover: a machine that was away at the end looks like trouble until
    its report is in.
    """
    ranks = [rank for report in reports for rank in report.ranks]
    return len({rank.rank for rank in ranks}) == world_size and all(
        rank.state is RankState.EXITED
        and rank.exit_code == 0
        and not rank.stopped_by_us
        and rank.nonfinite_step is None
        for rank in ranks
    )


def named_ranks(ranks: Iterable[RankReport]) -> str:
    """``rank 3``, or ``ranks 1, 2 and 9 more``."""
    return named({r.rank for r in ranks})


def named_machines(machines: Iterable[str]) -> str:
    """``machine m-1``, or ``machines m-1, m-2``."""
    return listed("machine", list(machines))
