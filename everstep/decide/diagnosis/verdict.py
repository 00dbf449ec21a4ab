"""The verdict about a failed job from all of its logs: the first failure, not the loudest one.

Order of judgement, each step only when the ones before it named nothing:

1. roots by weight: a lost GPU, a full disk or memory that ran out explains everything else;
   then other known faults; then any exception or end of a process that is not an echo;
2. witnesses: ranks that complain about their peers; who is missing is read from their counters;
3. how processes ended (exit codes have protocols, ``endings``);
4. the figures of step lines (``series``), and notes;
5. what the job outlived, as a warning.

Within one file earlier lines come first. Clocks of two machines are never compared: across files
weight decides, then the launcher's word, then the catalogue's order.

Not here: reading files (``everstep.logfiles``), signatures (``config/log_signatures.yaml``).
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep.decide.diagnosis import endings
from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.collective import waiting
from everstep.decide.diagnosis.flight import FlightFinding
from everstep.decide.diagnosis.hits import Hit, Item, hits_of, items_of
from everstep.decide.diagnosis.launchers import End, ends_of, normal
from everstep.decide.diagnosis.prefix import printable
from everstep.decide.diagnosis.series import trend_of
from everstep.decide.diagnosis.types import (
    Diagnosis,
    EvidenceLine,
    LogSource,
    RankEnd,
    Role,
    Signature,
    Weight,
)
from everstep.decide.words import Action, Confidence, Symptom

EVIDENCE_MAX = 8
EVIDENCE_CHARS_MAX = 400
WITNESSES_MAX = 64
_WEIGHTS = (Weight.STRONG, Weight.NORMAL, Weight.WEAK)
_DEVICE = re.compile(r"\bGPU (\d{1,2})(?: has a total capacity|; [\d.]+ GiB total)")
_VICTIM = re.compile(r"[Kk]ill(?:ed)? process (\d+),? \(?([\w./:-]*)")
_PID = re.compile(r"\(pid: (\d+)\)")
_PYTHON = re.compile(r"^$|python|^pt_|torch|train|ray|^total-vm")
_NUMBERS = re.compile(r"\d+")
_ATTEMPT = re.compile(r"^(.*?)(?:^|[/_-])attempt[_-]?(\d{1,6})(?:[/_.-]|$)", re.IGNORECASE)
_ALIKE = frozenset(
    {
        Symptom.ENVIRONMENT_MISMATCH,
        Symptom.CONFIG_ERROR,
        Symptom.CHECKPOINT_ERROR,
        Symptom.DATA_ERROR,
        Symptom.USER_CODE,
    }
)
"""What several ranks meet at the same place; the first of them is chance."""
_OWN_SIGNALS = frozenset(
    {
        signal.SIGKILL.value,
        signal.SIGSEGV.value,
        signal.SIGBUS.value,
        signal.SIGILL.value,
        signal.SIGFPE.value,
    }
)


@dataclass(frozen=True, slots=True)
class _Case:
    """Everything that was read of a job."""

    catalogue: Catalogue
    sources: Sequence[LogSource]
    items: Sequence[Sequence[Item]]
    hits: Sequence[Hit]
    ends: Sequence[End]
    given: Sequence[RankEnd]
    flight: FlightFinding | None


def diagnose(
    catalogue: Catalogue,
    sources: Sequence[LogSource],
    ends: Sequence[RankEnd] = (),
    flight: FlightFinding | None = None,
) -> Diagnosis:
    """The verdict about one failed job.

    Args:
        catalogue: the signatures.
        sources: what was read of each log file.
        ends: how processes ended, where the caller knows it (exit codes as the system gives them:
            137 and -9 are both signal 9).
        flight: what the flight recorder's dumps say, where there are any.
    """
    items = [items_of(source, index) for index, source in enumerate(sources)]
    hits = [hit for lines in items for hit in hits_of(catalogue, lines)]
    reported = [end for lines in items for end in ends_of(lines)]
    given = _given(ends)
    hits, reported = _that_count(sources, hits, reported, given)
    case = _Case(catalogue, sources, items, hits, reported, given, flight)
    for step in (_by_root, _by_witness, _by_end, _by_mild, _by_figures, _by_note, _by_survived):
        found = step(case)
        if found is not None:
            return found
    return _nothing(case)


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


# --- roots


def _by_root(case: _Case) -> Diagnosis | None:
    live = [h for h in _live(case, Role.ROOT) if not h.echo]
    for weight in _WEIGHTS[:2]:
        chosen = _first(case, [hit for hit in live if hit.signature.weight is weight])
        if chosen is not None and _killed_another(case, chosen):
            row = replace(chosen.signature, confidence=Confidence.LOW)
            return _answer(case, chosen, row, rank=None)
        if chosen is not None:
            return _answer(case, chosen, chosen.signature, rank=_rank_of(case, chosen))
    crash = _own_crash(case)
    if crash is not None:
        return crash
    chosen = _first(case, [hit for hit in live if hit.signature.weight is Weight.WEAK])
    if chosen is None:
        return None
    return _answer(case, chosen, chosen.signature, rank=_rank_of(case, chosen))


def _live(case: _Case, role: Role) -> list[Hit]:
    """What a process did not go on after, as far as anybody knows."""
    return [h for h in case.hits if h.signature.role is role and not h.survived and not h.mild]


def _first(case: _Case, hits: Sequence[Hit]) -> Hit | None:
    """The first failure among hits of equal weight."""
    if not hits:
        return None
    named = _launcher_rank(case)
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


def _killed_another(case: _Case, hit: Hit) -> bool:
    """The kernel's line names a process that none of the ends reported is about."""
    victim = _VICTIM.search(hit.item.text)
    if victim is None:
        return False
    ended = {m[1] for end in case.ends if (m := _PID.search(end.item.text)) is not None}
    known = bool(ended) and victim[1] not in ended
    return known or _PYTHON.search(victim[2]) is None


def _own_crash(case: _Case) -> Diagnosis | None:
    """A process that a signal ended which it does not send to itself, and nobody else sent."""
    if any(h.signature.role is Role.TEARDOWN and not h.survived for h in case.hits):
        return None
    crashed = [end for end in case.ends if end.signal in _OWN_SIGNALS]
    crashed.sort(key=lambda end: (not end.root, end.item.source, end.item.position))
    for end in crashed:
        lines = case.items[end.item.source][: end.item.position]
        signature = endings.meaning(end.code, end.signal, lines)
        if signature is not None:
            rank = end.rank if end.rank is not None else _launcher_rank(case)
            hit = Hit(end.item, signature)
            return _answer(case, hit, signature, rank=rank, machine=end.machine)
    return None


def _launcher_rank(case: _Case) -> int | None:
    """The rank that a launcher names as the first failure, if it can know."""
    roots = [e for e in case.ends if e.root and not e.collateral and e.rank is not None]
    if roots:
        return roots[0].rank
    own = [e for e in case.ends if e.rank is not None and not e.collateral and not e.victim]
    ranks = {end.rank for end in own}
    return own[0].rank if len(ranks) == 1 else None


def _rank_of(case: _Case, hit: Hit) -> int | None:
    """The rank of a root: by its own line, by its twins', else by the launcher's word."""
    if _met_by_many(case, hit):
        return None
    if hit.rank is not None:
        return hit.rank
    twins = {h.rank for h in case.hits if h.signature.name == hit.signature.name}
    twins.discard(None)
    if len(twins) == 1:
        return twins.pop()
    named = _launcher_rank(case)
    if named is not None:
        return named
    given = [end.rank for end in case.given if end.rank is not None and not end.stopped_by_us]
    if len(given) == 1:
        return given[0]
    return _rank_of_device(case, hit)


def _met_by_many(case: _Case, hit: Hit) -> bool:
    if hit.signature.symptom not in _ALIKE:
        return False
    text = _NUMBERS.sub("#", hit.item.text)
    ranks = {
        h.rank
        for h in case.hits
        if h.signature.name == hit.signature.name and _NUMBERS.sub("#", h.item.text) == text
    }
    return len(ranks - {None}) > 1


def _rank_of_device(case: _Case, hit: Hit) -> int | None:
    """On one machine the number of the GPU that a line names is the rank, by common custom."""
    device = _DEVICE.search(hit.item.text)
    machines = {item.machine for lines in case.items for item in lines} - {None}
    return int(device[1]) if device is not None and len(machines) <= 1 else None


# --- witnesses


def _by_witness(case: _Case) -> Diagnosis | None:
    live, teardown = _live(case, Role.WITNESS), _live(case, Role.TEARDOWN)
    if not live:
        chosen = _first(case, [h for h in teardown if h.signature.symptom is not Symptom.UNKNOWN])
        return None if chosen is None else _answer(case, chosen, chosen.signature, rank=None)
    planned = _first(case, [h for h in teardown if h.signature.symptom is not Symptom.UNKNOWN])
    if planned is not None:
        return _answer(case, planned, planned.signature, rank=None)
    chosen = None
    for weight in _WEIGHTS:
        chosen = _first(case, [hit for hit in live if hit.signature.weight is weight])
        if chosen is not None:
            break
    if chosen is None:
        return None
    if chosen.signature.symptom is Symptom.UNKNOWN:
        ended = _by_end(case)
        if ended is not None and ended.symptom is not Symptom.UNKNOWN:
            return ended
    if chosen.signature.symptom not in (Symptom.HANG, Symptom.UNKNOWN):
        return _answer(case, chosen, chosen.signature, rank=_quiet_rank(case, live))
    return _by_hang(case, chosen, live)


def _by_hang(case: _Case, chosen: Hit, live: Sequence[Hit]) -> Diagnosis:
    """A collective timed out: who is missing from it?"""
    signature = chosen.signature
    if case.flight is not None and case.flight.ranks:
        rank = case.flight.ranks[0] if len(case.flight.ranks) == 1 else None
        signature = replace(signature, why=f"{signature.why}; {case.flight.why}")
        return _answer(case, chosen, signature, rank=rank, also=live)
    said = waiting([item for lines in case.items for item in lines])
    if said.start_up:
        signature = replace(
            signature,
            name="first_barrier_timeout",
            side=START_UP.side,
            action=START_UP.action,
            why=START_UP.why,
        )
    if said.missing is not None:
        signature = replace(signature, why=f"{signature.why}; {said.missing.why}")
        return _answer(case, chosen, signature, rank=said.missing.rank, also=live)
    return _answer(case, chosen, signature, rank=_quiet_rank(case, live), also=live)


def _quiet_rank(case: _Case, live: Sequence[Hit]) -> int | None:
    """The one rank that a launcher reports and that does not complain about others."""
    named = _launcher_rank(case)
    complaining = {hit.rank for hit in live}
    return named if named is not None and named not in complaining else None


# --- ends, figures, notes


def _by_end(case: _Case) -> Diagnosis | None:
    end, signature, rank = _reported_end(case)
    for given in case.given:
        if given.stopped_by_us:
            continue
        everything = [item for lines in case.items for item in lines]
        known = endings.meaning(given.exit_code, given.signal, everything)
        vague = known in (endings.FAILED, endings.SIGNALS[signal.SIGABRT.value])
        if known is not None and (signature is None or (signature is endings.FAILED and not vague)):
            signature, rank = known, rank if rank is not None else given.rank
    if signature is None:
        return None
    if signature is endings.FAILED:
        other = _by_mild(case) or _by_figures(case)
        if other is None or (other.role is Role.NOTE and other.symptom is not Symptom.NAN_VALUE):
            other = _by_survived(case)
        if other is not None:
            return other
    told = _by_mild(case)
    if told is not None and told.symptom is signature.symptom:
        return told  # a line that says the same, and more
    rank = rank if rank is not None else _launcher_rank(case)
    hit = _last_line(case, signature) if end is None else Hit(end.item, signature)
    machine = None if end is None else end.machine
    return _answer(case, hit, signature, rank=rank, machine=machine)


def _reported_end(case: _Case) -> tuple[End | None, Signature | None, int | None]:
    for end in sorted(case.ends, key=lambda e: (not e.root, e.collateral, e.victim)):
        lines = case.items[end.item.source][: end.item.position]
        signature = endings.meaning(end.code, end.signal, lines)
        if signature is not None:
            return end, signature, end.rank
    return None, None, None


def _last_line(case: _Case, signature: Signature) -> Hit | None:
    for lines in case.items:
        for item in reversed(lines):
            if item.text.strip():
                return Hit(item, signature)
    return None


def _by_mild(case: _Case) -> Diagnosis | None:
    """What was logged below the level of an error: a guess, when nothing else is there."""
    mild = [h for h in case.hits if h.mild and not h.survived and not h.echo]
    for role in (Role.ROOT, Role.WITNESS):
        for weight in _WEIGHTS:
            chosen = _first(
                case, [h for h in mild if h.signature.role is role and h.signature.weight is weight]
            )
            if chosen is not None and chosen.signature.symptom is Symptom.HANG:
                return _by_hang(case, chosen, mild)
            if chosen is not None:
                return _answer(
                    case, chosen, _doubtful(chosen.signature), rank=_rank_of(case, chosen)
                )
    return None


def _doubtful(signature: Signature) -> Signature:
    """The same, but nobody loses a machine by it."""
    evicts = signature.action in (Action.EVICT_MACHINE, Action.OVER_EVICT_GROUP)
    action = Action.STOP_TIME_CHECK if evicts else signature.action
    return replace(signature, action=action, confidence=Confidence.LOW)


def _by_figures(case: _Case) -> Diagnosis | None:
    for lines in case.items:
        trend = trend_of(lines)
        if trend is not None:
            hits = [Hit(item, trend.signature) for item in trend.items]
            return _answer(case, hits[0], trend.signature, rank=None, also=hits)
    return None


def _by_note(case: _Case) -> Diagnosis | None:
    notes = [hit for hit in case.hits if hit.signature.role is Role.NOTE and not hit.echo]
    chosen = _first(case, notes)
    return None if chosen is None else _answer(case, chosen, chosen.signature, rank=chosen.rank)


def _by_survived(case: _Case) -> Diagnosis | None:
    """What the job outlived: worth a record, never an eviction."""
    failed = any(end.exit_code or end.signal for end in case.given)
    lived = [
        h
        for h in case.hits
        if h.survived
        and not h.echo
        and h.signature.symptom is not Symptom.USER_CODE
        and (failed or not h.mild or h.signature.weight is Weight.STRONG)
    ]
    for weight in _WEIGHTS:
        chosen = _first(case, [hit for hit in lived if hit.signature.weight is weight])
        if chosen is not None:
            action = chosen.signature.action if failed else Action.WARN_ONLY
            if action in (Action.EVICT_MACHINE, Action.OVER_EVICT_GROUP):
                action = Action.STOP_TIME_CHECK
            why = f"{chosen.signature.why}; the job went on after it"
            row = replace(
                chosen.signature, action=action, why=why, confidence=endings.FAILED.confidence
            )
            return _answer(case, chosen, row, rank=chosen.rank)
    return None


def _nothing(case: _Case) -> Diagnosis:
    echoes = [hit for hit in case.hits if not hit.survived]
    if echoes:
        return _answer(case, echoes[0], endings.FAILED, rank=echoes[0].rank)
    return _answer(case, None, endings.HEALTHY, rank=None)


# --- the answer


def _answer(
    case: _Case,
    hit: Hit | None,
    signature: Signature,
    *,
    rank: int | None,
    machine: str | None = None,
    also: Sequence[Hit] = (),
) -> Diagnosis:
    lines = [] if hit is None else [*hit.context, hit.item]
    lines += [other.item for other in also]
    if hit is not None and not also:
        same = [h for h in case.hits if h.signature.name == signature.name and h is not hit]
        lines += [other.item for other in same]
    witnesses = {
        h.rank
        for h in case.hits
        if h.signature.role is Role.WITNESS and h.rank is not None and h.rank != rank
    }
    return Diagnosis(
        symptom=signature.symptom,
        side=signature.side,
        action=signature.action,
        confidence=signature.confidence,
        rule=signature.name,
        why=signature.why,
        first_failed_rank=rank,
        machines=_machines(case, hit, signature, rank, machine),
        evidence=_evidence(case, lines),
        witnesses=tuple(sorted(witnesses)[:WITNESSES_MAX]),
        role=signature.role,
        machine_specific=signature.machine_specific,
    )


def _machines(
    case: _Case, hit: Hit | None, signature: Signature, rank: int | None, machine: str | None
) -> tuple[str, ...]:
    """Machines under suspicion: only where the fault is one of a machine, or a rank is named."""
    if not signature.machine_specific and rank is None:
        return ()
    if machine is not None:
        return (machine,)
    if hit is not None and hit.item.machine is not None:
        return (hit.item.machine,)
    named = [
        end.machine for end in case.ends if end.rank == rank and end.machine and rank is not None
    ]
    if named:
        return (named[0],)
    hosts = Counter(
        item.machine
        for lines in case.items
        for item in lines
        if item.machine is not None and (rank is None or item.rank == rank)
    )
    return tuple(hosts) if len(hosts) == 1 else ()


def _evidence(case: _Case, lines: Sequence[Item]) -> tuple[EvidenceLine, ...]:
    out: list[EvidenceLine] = []
    for item in dict.fromkeys((line.source, line.position) for line in lines):
        source = case.sources[item[0]]
        raw = source.lines[item[1]]
        text = printable(raw.text[:EVIDENCE_CHARS_MAX])
        out.append(EvidenceLine(file=source.file, line=raw.number, text=text))
    return tuple(out[:EVIDENCE_MAX])


START_UP = replace(
    endings.FAILED,
    name="first_barrier_timeout",
    symptom=Symptom.HANG,
    side=endings.KILLED_UNDER_MEMORY_PRESSURE.side,
    action=Action.FIX_CONFIG_GIVE_UP,
    why="the first barrier of the job timed out: one rank prepares something (a download, "
    "tokenization, a compilation) for longer than the timeout, which has to be raised",
)
