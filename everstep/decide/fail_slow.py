"""Who makes a run slow, from several rounds of stacks (paper, section 6: five, ten seconds apart).

A slow rank is where the fast ones are not: they wait for it. One look shows that only by chance, so
each round flags the ranks that are behind, and the ranks with the most flags are named - if noise
could not have flagged them as often.

The paper flags the parallel group with the most outliers in each round. A rank is in several groups
at once, and the largest of them collects the most outliers of any kind; so here ranks collect the
flags, and the smallest group that covers the leaders is the suspect.

Not here: taking stacks (``everstep.machine.stacks``), waiting between the rounds and telling it
(``activities.diagnosis``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil, comb

from everstep.decide.aggregation import groups_of, layout_of
from everstep.decide.stack_outliers import (
    few,
    find_outliers,
    is_witness,
    named,
    outside,
    rank_stacks,
)
from everstep.decide.stack_report import (
    ProcessRole,
    StackCulprit,
    StackFinding,
    StackGroup,
    StackReport,
)
from everstep.decide.topology import Topology
from everstep.decide.words import Confidence

FLAGGED_SHARE_MIN = 0.6
"""A leader is flagged in at least this share of the rounds."""
NOISE_MAX = 0.05
"""Greatest probability that noise, at the rate of all other ranks, flags any rank as often."""


def flagged(groups: Sequence[StackGroup], topology: Topology) -> tuple[int, ...]:
    """The ranks that are behind in one round; their stacks should have no lines.

    Those that are elsewhere while all others wait for them. Else those that differ from their
    peers: of these, the ones that do not wait themselves, or all of them where all wait (a
    pipeline that is slow as a whole).
    """
    stacks = rank_stacks(groups, topology.world_size)
    if 2 * len(stacks) <= topology.world_size:
        return ()
    late = outside(stacks, topology)
    if late:
        return late
    outliers = find_outliers(stacks, topology)
    if not few(outliers, len(stacks)):
        return ()
    busy = tuple(rank for rank in outliers if not is_witness(stacks[rank]))
    return busy or outliers


def judge_slow_reports(
    rounds: Sequence[Sequence[StackReport]], shape: tuple[int, int]
) -> StackFinding | None:
    """``judge_slow`` of what the machines of a run have sent, a sequence for each round.

    Args:
        rounds: the reports of each round, in any order.
        shape: machines of the run, and ranks of each.

    Returns:
        None when no round has a report of such a run that makes sense.
    """
    layout = layout_of((report for reports in rounds for report in reports), shape)
    if layout is None:
        return None
    return judge_slow([groups_of(reports, layout) for reports in rounds], layout)


def judge_slow(
    rounds: Sequence[Sequence[StackGroup]],
    topology: Topology,
    *,
    share_min: float = FLAGGED_SHARE_MIN,
    noise_max: float = NOISE_MAX,
) -> StackFinding:
    """Who was behind in most of the rounds.

    Args:
        rounds: the groups of all machines, once for each round.
        topology: the run's ranks.
        share_min: see ``FLAGGED_SHARE_MIN``.
        noise_max: see ``NOISE_MAX``.
    """
    seen = [len(rank_stacks(groups, topology.world_size)) for groups in rounds]
    unknown = topology.world_size - max(seen, default=0)
    flags = Counter(rank for groups in rounds for rank in flagged(groups, topology))
    leaders = _leaders(flags, len(rounds), topology.world_size, share_min, noise_max)
    if not few(leaders, topology.world_size):
        return StackFinding(
            rule="stack_no_laggard",
            reason=f"no rank was behind in more of {len(rounds)} rounds than chance explains",
            confidence=Confidence.LOW,
            unknown_ranks=unknown,
        )
    cover = topology.cover(leaders)
    counts = sorted({flags[rank] for rank in leaders})
    often = "-".join(str(n) for n in (counts[0], counts[-1])[: len(counts)])
    beyond = "" if cover else "; no machine or parallel group below the whole job holds them all"
    return StackFinding(
        rule="stack_slow" if cover or topology.machines == 1 else "stack_no_group",
        reason=f"{named(leaders)} behind in {often} of {len(rounds)} rounds{beyond}",
        confidence=Confidence.LOW,
        culprits=tuple(
            StackCulprit(
                rank=rank,
                role=ProcessRole.RANK,
                reason=f"behind in {flags[rank]} of {len(rounds)} rounds",
            )
            for rank in leaders
        ),
        outliers=leaders,
        axis=cover.axis if cover else None,
        machines=cover.machines if cover else (),
        unknown_ranks=unknown,
    )


def _leaders(
    flags: Counter[int], rounds: int, world_size: int, share_min: float, noise_max: float
) -> tuple[int, ...]:
    """The ranks that stand out by their flags.

    Of all cuts through the counts that noise does not explain, the one with the widest gap below.
    """
    best: tuple[int, int] | None = None
    leaders: tuple[int, ...] = ()
    for cut in sorted(set(flags.values())):
        if cut < max(2, ceil(share_min * rounds)):
            continue
        above = tuple(sorted(rank for rank, n in flags.items() if n >= cut))
        below = [n for n in flags.values() if n < cut]
        # One flag more than was seen, so that silence of few ranks is no proof that they are quiet.
        rate = (sum(below) + 1) / ((world_size - len(above)) * rounds + 2)
        if world_size * _at_least(cut, rounds, rate) > noise_max:
            continue
        key = (cut - max(below, default=0), cut)
        if best is None or key > best:
            best, leaders = key, above
    return leaders


def _at_least(count: int, trials: int, rate: float) -> float:
    """Probability of ``count`` or more hits in ``trials`` at ``rate``."""
    rate = min(rate, 1.0)
    return sum(
        comb(trials, n) * rate**n * (1 - rate) ** (trials - n) for n in range(count, trials + 1)
    )
