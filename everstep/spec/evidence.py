"""Reports of machines within a number of bytes: a payload of Temporal ends at two megabytes.

A crash of ten thousand ranks brings ten thousand reports with log lines. What goes first depends on
the reader: attribution counts ranks and can do without lines (``FACTS_FIRST``), people want the
lines of ranks that failed and can do without those that were only stopped (``LINES_FIRST``). What
was left out is said in words, so that nobody takes the rest for everything.

Not here: what is kept in the ledger (``everstep.ledger.bounds``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from everstep.decide.faults import is_witness
from everstep.decide.reports import MachineReport, RankReport, Seen
from everstep.decide.stack_report import StackReport
from everstep.decide.words import Action

_REPORT = TypeAdapter(MachineReport)

SHARD_BYTES_MAX = 1_500_000
"""Reports in the result of one activity: some twenty ranks on each of 256 machines, without log
lines. The limit of the server is 2 MiB for the whole result."""
ROUND_BYTES_MAX = 1_500_000
"""Reports of all shards in the input of a round, and of what it asks activities for."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One thing that can be left out."""

    what: str
    """In words."""
    rank: Callable[[RankReport], RankReport | None]
    """A rank's report without it; None: the whole report is left out."""
    one_stays: bool = False
    """A machine of which no rank would be left keeps the one that ended first."""
    observation: Callable[[Seen], Seen | None] = lambda seen: seen
    """What a probe saw, without it; None: left out."""
    stacks: Callable[[StackReport], StackReport | None] = lambda stacks: stacks
    """The stacks without it; None: left out."""

    def applied(self, report: MachineReport) -> MachineReport:
        """A machine's report without it."""
        ranks = tuple(kept for rank in report.ranks if (kept := self.rank(rank)) is not None)
        if self.one_stays and report.ranks and not ranks:
            ranks = (max(report.ranks, key=lambda r: (r.exited_ago_s or 0.0, -r.rank)),)
        seen = tuple(s for one in report.observations if (s := self.observation(one)) is not None)
        stacks = report.stacks and self.stacks(report.stacks)
        return replace(report, ranks=ranks, observations=seen, stacks=stacks)


def _silent(rank: RankReport) -> RankReport:
    found = rank.log_finding
    bare = None if found is None else replace(found, why="", evidence=())
    return replace(rank, log_lines=(), log_finding=bare)


def _frameless(stacks: StackReport) -> StackReport:
    """Judging needs no more than what a stack waits for and where it is."""
    groups = tuple(replace(group, frames=group.frames[:2]) for group in stacks.groups)
    return replace(stacks, groups=groups)


def _figureless(seen: Seen) -> Seen:
    return replace(seen, observation=replace(seen.observation, values={}))


def _telling(seen: Seen) -> Seen | None:
    """Only what calls for the machine's eviction may decide something by itself."""
    return seen if seen.observation.action is Action.EVICT_MACHINE else None


FIGURES = Cut("figures of what probes saw", lambda rank: rank, observation=_figureless)
SMALL_OBSERVATIONS = Cut(
    "what probes saw and calls for no eviction", lambda rank: rank, observation=_telling
)
FRAMES = Cut("all but the innermost frames of stacks", lambda rank: rank, stacks=_frameless)
STACKS = Cut("stacks", lambda rank: rank, stacks=lambda _: None)
STOPPED_LINES = Cut("log lines of stopped ranks", lambda r: _silent(r) if r.stopped_by_us else r)
WITNESS_LINES = Cut(
    "log lines of ranks that only lost their peers", lambda r: _silent(r) if is_witness(r) else r
)
STOPPED_RANKS = Cut("ranks that were stopped", lambda r: None if r.stopped_by_us else r)
OLDER_LINES = Cut("all but the last log line", lambda r: replace(r, log_lines=r.log_lines[-1:]))
LINES = Cut("log lines", _silent)
MOST_STOPPED = Cut(
    "ranks that were stopped but one of a machine",
    lambda r: None if r.stopped_by_us else r,
    one_stays=True,
)
MOST_WITNESSES = Cut(
    "ranks that only lost their peers but one of a machine",
    lambda r: None if is_witness(r) else r,
    one_stays=True,
)
MOST_RANKS = Cut("all ranks but one of a machine", lambda _: None, one_stays=True)

FACTS_FIRST = (
    STOPPED_LINES,
    WITNESS_LINES,
    FRAMES,
    OLDER_LINES,
    FIGURES,
    LINES,
    SMALL_OBSERVATIONS,
    STACKS,
    MOST_STOPPED,
    MOST_WITNESSES,
    MOST_RANKS,
)
LINES_FIRST = (
    STOPPED_LINES,
    STOPPED_RANKS,
    FRAMES,
    OLDER_LINES,
    FIGURES,
    STACKS,
    LINES,
    SMALL_OBSERVATIONS,
)


def within(
    reports: Sequence[MachineReport], bytes_max: int, cuts: Sequence[Cut] = FACTS_FIRST
) -> tuple[tuple[MachineReport, ...], tuple[str, ...]]:
    """``reports`` cut down to ``bytes_max`` of JSON, and what was left out of them.

    Every machine keeps its own report; where that is too much, nothing more is left out here.
    """
    kept, left_out = tuple(reports), []
    for cut in cuts:
        if size(kept) <= bytes_max:
            break
        kept = tuple(cut.applied(report) for report in kept)
        left_out.append(cut.what)
    return kept, tuple(left_out)


def size(reports: Sequence[MachineReport]) -> int:
    """Bytes of the reports as JSON."""
    return sum(len(_REPORT.dump_json(report)) + 1 for report in reports)
