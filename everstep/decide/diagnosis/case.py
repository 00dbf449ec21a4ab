"""What was read of a job, and how it is asked: which hits still count, and which came first.

What an attempt that was followed by another met, and what a job that ended well met, was outlived.

Not here: the order of judgement (``verdict``), and whose failure a hit is (``owners``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.flight import FlightFinding
from everstep.decide.diagnosis.hits import Hit, Item, hits_of, items_of
from everstep.decide.diagnosis.launchers import End, ends_of, normal
from everstep.decide.diagnosis.types import LogSource, RankEnd, Role

_ATTEMPT = re.compile(r"^(.*?)(?:^|[/_-])attempt[_-]?(\d{1,6})(?:[/_.-]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that was read of a job."""

    catalogue: Catalogue
    sources: Sequence[LogSource]
    items: Sequence[Sequence[Item]]
    hits: Sequence[Hit]
    ends: Sequence[End]
    given: Sequence[RankEnd]
    flight: FlightFinding | None


def case_of(
    catalogue: Catalogue,
    sources: Sequence[LogSource],
    ends: Sequence[RankEnd],
    flight: FlightFinding | None,
) -> Case:
    """Everything that these lines and ends say; arguments as ``verdict.diagnose`` has them."""
    items = [items_of(source, index) for index, source in enumerate(sources)]
    hits = [hit for lines in items for hit in hits_of(catalogue, lines)]
    reported = [end for lines in items for end in ends_of(lines)]
    given = _given(ends)
    hits, reported = _that_count(sources, hits, reported, given)
    return Case(catalogue, sources, items, hits, reported, given, flight)


def _that_count(
    sources: Sequence[LogSource], hits: list[Hit], ends: list[End], given: Sequence[RankEnd]
) -> tuple[list[Hit], list[End]]:
    """What happened in an attempt that was followed by another, or in a job that ended well."""
    attempts = [_ATTEMPT.match(source.file) for source in sources]
    last: dict[str, int] = {}
    for found in attempts:
        if found is not None:
            last[found[1]] = max(last.get(found[1], 0), int(found[2]))
    well = any(end.exit_code == 0 and end.signal is None and end.rank is None for end in given)
    over = {
        index
        for index, found in enumerate(attempts)
        if well or (found is not None and int(found[2]) < last[found[1]])
    }
    marked = [replace(hit, survived=True) if hit.item.source in over else hit for hit in hits]
    return marked, [end for end in ends if end.item.source not in over]


def _given(ends: Sequence[RankEnd]) -> list[RankEnd]:
    out = []
    for end in ends:
        code, number = normal(end.exit_code)
        out.append(replace(end, exit_code=code, signal=end.signal or number))
    return out


def live_hits(case: Case, role: Role) -> list[Hit]:
    """What a process did not go on after, as far as anybody knows."""
    return [h for h in case.hits if h.signature.role is role and not h.survived and not h.mild]


def launcher_rank(case: Case) -> int | None:
    """The rank that a launcher names as the first failure, if it can know."""
    roots = [e for e in case.ends if e.root and not e.collateral and e.rank is not None]
    if roots:
        return roots[0].rank
    own = [e for e in case.ends if e.rank is not None and not e.collateral and not e.victim]
    ranks = {end.rank for end in own}
    return own[0].rank if len(ranks) == 1 else None


def first_of(case: Case, hits: Sequence[Hit]) -> Hit | None:
    """The first failure among hits of equal weight."""
    if not hits:
        return None
    named = launcher_rank(case)
    precedence = {s.name: index for index, s in enumerate(case.catalogue.signatures)}

    def order(hit: Hit) -> tuple[bool, bool, int, int]:
        return (
            named is None or hit.rank != named,
            not hit.signature.machine_specific,
            precedence.get(hit.signature.name, len(precedence)),
            hit.item.number,
        )

    heads: dict[int, Hit] = {}
    for hit in hits:
        mine = heads.get(hit.item.source)
        if mine is None or hit.item.position < mine.item.position:
            heads[hit.item.source] = hit
    return min(heads.values(), key=order)
