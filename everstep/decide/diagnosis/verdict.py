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

Not here: what counts at all (``case``), whose failure it is (``owners``), reading files
(``everstep.logfiles``), signatures (``config/log_signatures.yaml``).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from everstep.decide.diagnosis import endings
from everstep.decide.diagnosis.case import Case, case_of, first_of, launcher_rank, live_hits
from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.collective import waiting
from everstep.decide.diagnosis.flight import FlightFinding
from everstep.decide.diagnosis.hits import Hit, Item
from everstep.decide.diagnosis.launchers import End
from everstep.decide.diagnosis.owners import (
    killed_another,
    machines_of,
    quiet_rank,
    rank_of,
)
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
_OWN_SIGNALS = frozenset(
    {
        signal.SIGKILL.value,
        signal.SIGSEGV.value,
        signal.SIGBUS.value,
        signal.SIGILL.value,
        signal.SIGFPE.value,
    }
)


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
    case = case_of(catalogue, sources, ends, flight)
    for step in (_by_root, _by_witness, _by_end, _by_mild, _by_figures, _by_note, _by_survived):
        found = step(case)
        if found is not None:
            return found
    return _nothing(case)


# --- roots


def _by_root(case: Case) -> Diagnosis | None:
    live = [h for h in live_hits(case, Role.ROOT) if not h.echo]
    for weight in _WEIGHTS[:2]:
        chosen = first_of(case, [hit for hit in live if hit.signature.weight is weight])
        if chosen is not None and killed_another(case, chosen):
            row = replace(chosen.signature, confidence=Confidence.LOW)
            return _answer(case, chosen, row, rank=None)
        if chosen is not None:
            return _answer(case, chosen, chosen.signature, rank=rank_of(case, chosen))
    crash = _own_crash(case)
    if crash is not None:
        return crash
    chosen = first_of(case, [hit for hit in live if hit.signature.weight is Weight.WEAK])
    if chosen is None:
        return None
    return _answer(case, chosen, chosen.signature, rank=rank_of(case, chosen))


def _own_crash(case: Case) -> Diagnosis | None:
    """A process that a signal ended which it does not send to itself, and nobody else sent."""
    if any(h.signature.role is Role.TEARDOWN and not h.survived for h in case.hits):
        return None
    crashed = [end for end in case.ends if end.signal in _OWN_SIGNALS]
    crashed.sort(key=lambda end: (not end.root, end.item.source, end.item.position))
    for end in crashed:
        lines = case.items[end.item.source][: end.item.position]
        signature = endings.meaning(end.code, end.signal, lines)
        if signature is not None:
            rank = end.rank if end.rank is not None else launcher_rank(case)
            hit = Hit(end.item, signature)
            return _answer(case, hit, signature, rank=rank, machine=end.machine)
    return None


# --- witnesses


def _by_witness(case: Case) -> Diagnosis | None:
    live, teardown = live_hits(case, Role.WITNESS), live_hits(case, Role.TEARDOWN)
    if not live:
        chosen = first_of(case, [h for h in teardown if h.signature.symptom is not Symptom.UNKNOWN])
        return None if chosen is None else _answer(case, chosen, chosen.signature, rank=None)
    planned = first_of(case, [h for h in teardown if h.signature.symptom is not Symptom.UNKNOWN])
    if planned is not None:
        return _answer(case, planned, planned.signature, rank=None)
    chosen = None
    for weight in _WEIGHTS:
        chosen = first_of(case, [hit for hit in live if hit.signature.weight is weight])
        if chosen is not None:
            break
    if chosen is None:
        return None
    if chosen.signature.symptom is Symptom.UNKNOWN:
        ended = _by_end(case)
        if ended is not None and ended.symptom is not Symptom.UNKNOWN:
            return ended
    if chosen.signature.symptom not in (Symptom.HANG, Symptom.UNKNOWN):
        return _answer(case, chosen, chosen.signature, rank=quiet_rank(case, live))
    return _by_hang(case, chosen, live)


def _by_hang(case: Case, chosen: Hit, live: Sequence[Hit]) -> Diagnosis:
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
            name=START_UP.name,
            side=START_UP.side,
            action=START_UP.action,
            why=START_UP.why,
        )
    if said.missing is not None:
        signature = replace(signature, why=f"{signature.why}; {said.missing.why}")
        return _answer(case, chosen, signature, rank=said.missing.rank, also=live)
    return _answer(case, chosen, signature, rank=quiet_rank(case, live), also=live)


# --- ends, figures, notes


def _by_end(case: Case) -> Diagnosis | None:
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
    rank = rank if rank is not None else launcher_rank(case)
    hit = _last_line(case, signature) if end is None else Hit(end.item, signature)
    machine = None if end is None else end.machine
    return _answer(case, hit, signature, rank=rank, machine=machine)


def _reported_end(case: Case) -> tuple[End | None, Signature | None, int | None]:
    for end in sorted(case.ends, key=lambda e: (not e.root, e.collateral, e.victim)):
        lines = case.items[end.item.source][: end.item.position]
        signature = endings.meaning(end.code, end.signal, lines)
        if signature is not None:
            return end, signature, end.rank
    return None, None, None


def _last_line(case: Case, signature: Signature) -> Hit | None:
    for lines in case.items:
        for item in reversed(lines):
            if item.text.strip():
                return Hit(item, signature)
    return None


def _by_mild(case: Case) -> Diagnosis | None:
    """What was logged below the level of an error: a guess, when nothing else is there."""
    mild = [h for h in case.hits if h.mild and not h.survived and not h.echo]
    for role in (Role.ROOT, Role.WITNESS):
        for weight in _WEIGHTS:
            chosen = first_of(
                case, [h for h in mild if h.signature.role is role and h.signature.weight is weight]
            )
            if chosen is not None and chosen.signature.symptom is Symptom.HANG:
                return _by_hang(case, chosen, mild)
            if chosen is not None:
                return _answer(
                    case, chosen, _doubtful(chosen.signature), rank=rank_of(case, chosen)
                )
    return None


def _doubtful(signature: Signature) -> Signature:
    """The same, but nobody loses a machine by it."""
    evicts = signature.action in (Action.EVICT_MACHINE, Action.OVER_EVICT_GROUP)
    action = Action.STOP_TIME_CHECK if evicts else signature.action
    return replace(signature, action=action, confidence=Confidence.LOW)


def _by_figures(case: Case) -> Diagnosis | None:
    for lines in case.items:
        trend = trend_of(lines)
        if trend is not None:
            hits = [Hit(item, trend.signature) for item in trend.items]
            return _answer(case, hits[0], trend.signature, rank=None, also=hits)
    return None


def _by_note(case: Case) -> Diagnosis | None:
    notes = [hit for hit in case.hits if hit.signature.role is Role.NOTE and not hit.echo]
    chosen = first_of(case, notes)
    return None if chosen is None else _answer(case, chosen, chosen.signature, rank=chosen.rank)


def _by_survived(case: Case) -> Diagnosis | None:
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
        chosen = first_of(case, [hit for hit in lived if hit.signature.weight is weight])
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


def _nothing(case: Case) -> Diagnosis:
    echoes = [hit for hit in case.hits if not hit.survived]
    if echoes:
        return _answer(case, echoes[0], endings.FAILED, rank=echoes[0].rank)
    return _answer(case, None, endings.HEALTHY, rank=None)


# --- the answer


def _answer(
    case: Case,
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
        machines=machines_of(case, hit, signature, rank, machine),
        evidence=_evidence(case, lines),
        witnesses=tuple(sorted(witnesses)[:WITNESSES_MAX]),
        role=signature.role,
        machine_specific=signature.machine_specific,
    )


def _evidence(case: Case, lines: Sequence[Item]) -> tuple[EvidenceLine, ...]:
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
