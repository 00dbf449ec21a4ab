"""Who is missing from a collective, by the dumps of PyTorch's flight recorder.

Each rank dumps the collectives that it has enqueued, by process group. In a group, the ranks that
have not enqueued the last collective that others wait in are the ones that are missing; among ranks
that all have enqueued it, those that never started it while others did are late.

Not here: reading dump files safely (``everstep.logfiles.flight_files``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RANKS_MAX = 100_000
ENTRIES_MAX = 200_000
SHOWN_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightDump:
    """What one rank's dump says, by process group."""

    rank: int
    last_enqueued: Mapping[str, int]
    """Group -> number of the last collective that was enqueued."""
    last_completed: Mapping[str, int]
    """Group -> number of the last one that completed; -1: none."""
    started: Mapping[str, int]
    """Group -> number of the last one that had started on the device; -1: none."""
    members: Mapping[str, tuple[int, ...]]
    """Group -> its global ranks, where the dump says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightFinding:
    """Who is missing from which collective."""

    ranks: tuple[int, ...]
    """Missing ranks, lowest first; empty: the dumps blame nobody."""
    group: str
    collective: int
    why: str


def dump_of(rank: int, data: Any) -> FlightDump | None:
    """Read one dump; None when it is not one. Never raises: anybody may have written the data."""
    if not isinstance(data, Mapping) or not isinstance(data.get("entries"), Sequence):
        return None
    enqueued: dict[str, int] = {}
    completed: dict[str, int] = {}
    started: dict[str, int] = {}
    for entry in data["entries"][-ENTRIES_MAX:]:
        if not isinstance(entry, Mapping) or entry.get("is_p2p") is True:
            continue
        number = _whole(entry.get("collective_seq_id", entry.get("seq_id")))
        group = _group(entry)
        if number is None or group is None:
            continue
        state = entry.get("state")
        enqueued[group] = max(enqueued.get(group, -1), number)
        if state == "completed":
            completed[group] = max(completed.get(group, -1), number)
        if state in ("started", "completed"):
            started[group] = max(started.get(group, -1), number)
    return FlightDump(
        rank=rank,
        last_enqueued=enqueued,
        last_completed=completed,
        started=started,
        members=_members(data.get("pg_config")),
    )


def missing_ranks(dumps: Sequence[FlightDump]) -> FlightFinding | None:
    """Who is missing, in the first group (by name) in which somebody is; None: nobody waits."""
    by_rank = {dump.rank: dump for dump in dumps}
    groups = sorted({group for dump in dumps for group in dump.last_enqueued})
    waits: FlightFinding | None = None
    for group in groups:
        members = _of_group(group, dumps)
        numbers = {r: by_rank[r].last_enqueued.get(group, -1) for r in members if r in by_rank}
        done = [by_rank[r].last_completed.get(group, -1) for r in numbers]
        if not numbers or max(numbers.values()) <= max(done):
            continue
        collective = max(done) + 1
        absent = [r for r in members if r not in by_rank]
        late = [r for r, number in numbers.items() if number < collective]
        if not late:
            begun = {r for r in numbers if by_rank[r].started.get(group, -1) >= collective}
            late = [r for r in numbers if r not in begun] if begun else []
        if not late and absent:
            late = absent
        if late and len(late) < len(members):
            return _finding(sorted(late), group, collective)
        waits = waits or _finding([], group, collective)
    return waits


def _finding(ranks: list[int], group: str, collective: int) -> FlightFinding:
    shown = ", ".join(map(str, ranks[:SHOWN_MAX])) + (", ..." if len(ranks) > SHOWN_MAX else "")
    what = (
        f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} missing from it"
        if ranks
        else "all of its ranks are in it"
    )
    why = f"by the flight recorder, collective {collective} of group {group} hangs, and {what}"
    return FlightFinding(ranks=tuple(ranks), group=group, collective=collective, why=why)


def _of_group(group: str, dumps: Sequence[FlightDump]) -> list[int]:
    named = next((d.members[group] for d in dumps if d.members.get(group)), None)
    if named:
        return sorted(set(named))[:RANKS_MAX]
    return sorted(dump.rank for dump in dumps if group in dump.last_enqueued)


def _group(entry: Mapping[str, Any]) -> str | None:
    name = entry.get("process_group", entry.get("pg_name"))
    if isinstance(name, (list, tuple)) and name:
        name = name[0]
    if name is None:
        name = entry.get("pg_id")
    return str(name) if isinstance(name, (str, int)) else None


def _members(config: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(config, Mapping):
        return {}
    out: dict[str, tuple[int, ...]] = {}
    for name, described in config.items():
        ranks = described.get("ranks") if isinstance(described, Mapping) else None
        if isinstance(ranks, str):
            ranks = [part for part in ranks.strip("[]() ").split(",") if part.strip().isdigit()]
        if isinstance(ranks, (list, tuple)):
            whole = [_whole(rank) for rank in ranks[:RANKS_MAX]]
            out[str(name)] = tuple(rank for rank in whole if rank is not None)
    return out


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if 0 <= value < 2**62 else None
    if isinstance(value, str) and value.strip().isdigit() and len(value) < 19:
        return int(value)
    return None
