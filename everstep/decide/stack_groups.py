"""From the stacks of single processes to the groups that a machine reports.

Not here: text and frames (``stacks``), what the groups of all machines say (``aggregation``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from everstep.decide.stack_outliers import WITNESS_WAITS
from everstep.decide.stack_report import (
    MissedStacks,
    ProcessRole,
    StackGroup,
    StackReport,
    StackSource,
    Wait,
    spans_of,
)
from everstep.decide.stack_waits import helper_waits_for, waits_for
from everstep.decide.stacks import Frame, fingerprint, shown, steady, without_lines

PIDS_SHOWN_MAX = 8
COMPACT_FRAMES_MAX = 8
COMPACT_GROUPS_MAX = 24
GROUPS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStack:
    """What the looks at one process gave."""

    pid: int
    rank: int | None
    """The rank that it is, or that it belongs to."""
    role: ProcessRole
    source: StackSource
    looks: tuple[tuple[Frame, ...], ...]
    """One or two stacks, innermost frame first."""
    state: str = ""
    kernel: str = ""


def group_stacks(
    stacks: Iterable[ProcessStack], *, lines: bool
) -> tuple[tuple[StackGroup, ...], tuple[MissedStacks, ...]]:
    """Groups of processes with one role and one stack, and what is above ``GROUPS_MAX`` of them.

    Args:
        stacks: in any order.
        lines: whether the lines within functions count: yes for a hang, no for running processes.
    """
    found: dict[tuple[object, ...], list[tuple[ProcessStack, tuple[Frame, ...], Wait]]]
    found = defaultdict(list)
    for stack in sorted(stacks, key=lambda s: s.pid):
        frames, waits, moving = _settled(stack, lines=lines)
        key = (stack.role, fingerprint(frames), stack.source, stack.state, moving)
        found[key].append((stack, frames, waits))
    groups = []
    for group_key, same in found.items():
        stack, frames, waits = same[0]
        groups.append(
            StackGroup(
                role=stack.role,
                fingerprint=fingerprint(frames),
                frames=shown(frames),
                source=stack.source,
                waits_for=waits,
                state=stack.state,
                moving=group_key[-1] is True,
                kernel=stack.kernel,
                spans=spans_of(s.rank for s, _, _ in same if s.rank is not None),
                processes=len(same),
                pids=tuple(s.pid for s, _, _ in same[:PIDS_SHOWN_MAX]),
            )
        )
    # Ranks first: where there are too many different stacks, theirs are the ones that count.
    groups.sort(key=lambda g: (g.role is not ProcessRole.RANK, -g.processes, g.fingerprint))
    missed = [
        MissedStacks(
            reason=f"more than {GROUPS_MAX} different stacks",
            role=group.role,
            spans=group.spans,
            processes=group.processes,
        )
        for group in groups[GROUPS_MAX:]
    ]
    return tuple(groups[:GROUPS_MAX]), merge_missed(missed)


def compact(report: StackReport) -> StackReport:
    """A report as it travels with a machine's evidence: innermost frames of the main groups."""
    return replace(
        report,
        groups=tuple(
            replace(group, frames=group.frames[:COMPACT_FRAMES_MAX])
            for group in report.groups[:COMPACT_GROUPS_MAX]
        ),
        missed=report.missed[:COMPACT_GROUPS_MAX],
    )


def _settled(stack: ProcessStack, *, lines: bool) -> tuple[tuple[Frame, ...], Wait, bool]:
    """The frames that stayed, what they wait for, and whether the process moves."""
    ask = waits_for if stack.role is ProcessRole.RANK else helper_waits_for
    looks = [look if lines else without_lines(look) for look in stack.looks]
    frames, changed = looks[0], False
    for look in looks[1:]:
        frames, changed = steady(frames, look)
    waits = ask(frames)
    if stack.role is not ProcessRole.RANK:
        return frames, waits, changed
    # A rank that polls, or retries in vain, changes too; what tells is a wait that ended.
    asked: Sequence[Wait] = (*(ask(look) for look in looks), waits)
    return frames, waits, len(set(asked)) > 1 and not WITNESS_WAITS.isdisjoint(asked)


def merge_missed(missed: Iterable[MissedStacks]) -> tuple[MissedStacks, ...]:
    """One line for each reason and role."""
    same: dict[tuple[str, ProcessRole], list[MissedStacks]] = defaultdict(list)
    for each in missed:
        same[each.reason, each.role].append(each)
    return tuple(
        MissedStacks(
            reason=reason,
            role=role,
            spans=spans_of(rank for m in found for a, b in m.spans for rank in range(a, b + 1)),
            processes=sum(m.processes for m in found),
        )
        for (reason, role), found in sorted(same.items())
    )
