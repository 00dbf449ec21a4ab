"""Rules of attribution that start from the ranks and the reach of machines.

Each answers a finding when it fits, and None when it does not. Not here: their order
(``attribution``), and what probes saw (``machine_rules``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from everstep.decide.evidence import Evidence, named_machines, named_ranks
from everstep.decide.faults import FaultKind, crashed, describe, kind_of_end, signal_name, signal_of
from everstep.decide.machine_rules import doomed_of
from everstep.decide.reports import Finding, RankReport
from everstep.decide.words import Action, Cause, Confidence, LogClass, Side, Symptom

_EVIDENT_CLASSES = frozenset(
    {LogClass.PYTHON_EXCEPTION, LogClass.OUT_OF_MEMORY, LogClass.DISK_FULL, LogClass.IMPORT_FAILED}
)
"""What a log shows clearly enough to blame a rank that could not end by itself."""


def _finding(
    symptom: Symptom,
    side: Side,
    cause: Cause,
    confidence: Confidence,
    reason: str,
    *,
    ranks: Iterable[RankReport] = (),
    suspects: Iterable[str] = (),
    rule: str = "",
    action: Action | None = None,
) -> Finding:
    return Finding(
        symptom=symptom,
        side=side,
        cause=cause,
        confidence=confidence,
        rule=rule,
        reason=reason,
        culprit_ranks=tuple(r.rank for r in ranks),
        suspects=tuple(suspects),
        action=action,
    )


# --- machines


def planned_stop(evidence: Evidence) -> Finding | None:
    """An agent stopped its ranks on request."""
    if not evidence.planned or evidence.lost:
        return None
    said = "; ".join(f"{machine}: {why}" for machine, why in evidence.planned)
    return _finding(
        Symptom.PREEMPTION, Side.EXTERNAL, Cause.PLANNED, Confidence.HIGH, f"planned stop of {said}"
    )


def machine_lost(evidence: Evidence) -> Finding | None:
    """A machine stayed away while training had stopped."""
    if not evidence.lost:
        return None
    return _finding(
        Symptom.KERNEL_PANIC,
        Side.INFRASTRUCTURE,
        Cause.INFRASTRUCTURE,
        Confidence.HIGH,
        f"{named_machines(evidence.lost)} did not come back while training had stopped",
        ranks=evidence.ranks_on(evidence.lost),
        suspects=(*evidence.lost, *evidence.dirty, *(f.machine_id for f in doomed_of(evidence))),
    )


def teardown_not_clean(evidence: Evidence) -> Finding | None:
    """Processes of the run could not be ended."""
    if not evidence.dirty:
        return None
    return _finding(
        Symptom.UNKNOWN,
        Side.INFRASTRUCTURE,
        Cause.INFRASTRUCTURE,
        Confidence.HIGH,
        f"processes of the run could not be ended on {named_machines(evidence.dirty)}",
        suspects=evidence.dirty,
    )


def processes_vanished(evidence: Evidence) -> Finding | None:
    """A machine's processes are gone without exit records."""
    if not evidence.vanished:
        return None
    return _finding(
        Symptom.UNKNOWN,
        Side.INFRASTRUCTURE,
        Cause.INFRASTRUCTURE,
        Confidence.LOW,
        f"all processes of the run are gone from {named_machines(evidence.vanished)} without an "
        "exit record (restarted, or killed from outside)",
        ranks=evidence.ranks_on(evidence.vanished),
    )


# --- ranks that failed by themselves


def nonfinite(evidence: Evidence) -> Finding | None:
    """A loss or gradient norm was not finite."""
    if not evidence.nonfinite_seen:
        return None
    step, ranks = evidence.nonfinite_step, () if evidence.own else evidence.nonfinite_alone
    where = f" at step {step}" if step is not None else ""
    whose = f" on {named_ranks(ranks)} and on no other" if ranks else ""
    return _finding(
        Symptom.NAN_VALUE,
        Side.UNCLEAR,
        Cause.UNCLEAR,
        Confidence.HIGH,
        f"loss or gradients are not finite{where}{whose}",
        ranks=ranks,
    )


def rank_fault(evidence: Evidence) -> Finding | None:
    """A rank failed by itself: the weightiest kind of fault is the finding."""
    if not evidence.own:
        return None
    kind = max((k for _, k in evidence.own), key=lambda k: (k.weight, k.name))
    ranks = [r for r, k in evidence.own if k is kind]
    return _fault_finding(evidence, kind, ranks, sure=len({k.name for _, k in evidence.own}) == 1)


def _fault_finding(
    evidence: Evidence, kind: FaultKind, ranks: Sequence[RankReport], *, sure: bool
) -> Finding:
    side, cause = kind.side, kind.cause
    machines = {r.machine_id for r in ranks}
    if kind.symptom is Symptom.ENVIRONMENT_MISMATCH and machines != evidence.machines_with_ranks:
        # The same code loads on the other machines: not clearly the owner's fault.
        side, cause = Side.UNCLEAR, Cause.UNCLEAR
    evicts = kind.action is Action.EVICT_MACHINE and kind.confidence is Confidence.HIGH
    first = evidence.first_of([r.rank for r in ranks])
    shown = next((r for r in ranks if r.rank == first), ranks[0])
    return _finding(
        kind.symptom,
        side,
        cause,
        kind.confidence if sure else Confidence.LOW,
        f"{named_ranks(ranks)} on {named_machines(sorted(machines))} {describe(shown, kind)}",
        ranks=ranks,
        rule=kind.name,
        # One machine's own fault; what several report at once is none of theirs alone.
        suspects=machines if kind.machine_specific and evicts and len(machines) == 1 else (),
        action=kind.action,
    )


def witness_crashed(evidence: Evidence) -> Finding | None:
    """Only witnesses are left, but one of them was ended by a signal: that is more than a word."""
    if evidence.unreachable:
        return None
    ranks = [r for r in evidence.witnesses if crashed(r)]
    if not ranks or len(ranks) == len(evidence.witnesses) > 1:
        return None
    names = sorted({signal_name(signal_of(r) or 0) for r in ranks})
    return _finding(
        Symptom.UNKNOWN,
        Side.UNCLEAR,
        Cause.UNCLEAR,
        Confidence.LOW,
        f"{named_ranks(ranks)} ended by {', '.join(names)}; the others only lost their peers",
        ranks=ranks,
    )


# --- ranks that did not move


def frozen(evidence: Evidence) -> Finding | None:
    """A rank was stopped by a signal."""
    if not evidence.frozen:
        return None
    states = ", ".join(sorted({r.process_state or "?" for r in evidence.frozen}))
    return _hang(
        f"{named_ranks(evidence.frozen)} stopped (process state {states}), the others waited",
        ranks=evidence.frozen,
        confidence=Confidence.HIGH,
    )


def exited_early(evidence: Evidence) -> Finding | None:
    """A rank ended with 0 while others still had to do."""
    done = evidence.exited_early
    if not done:
        return None
    return _finding(
        Symptom.USER_CODE,
        Side.USER_CODE,
        Cause.USER_CODE,
        Confidence.HIGH,
        f"{named_ranks(done)} ended with exit code 0 while others still trained",
        ranks=done,
    )


def stuck_after_error(evidence: Evidence) -> Finding | None:
    """A rank whose log shows its own error but which could not end, so that we had to stop it."""
    if not (evidence.stalled or evidence.witnesses):
        return None
    ranks = [r for r in evidence.alive if r.log_class in _EVIDENT_CLASSES]
    if not evidence.few(ranks):
        return None  # what most ranks log in the end is how they take a SIGTERM
    kinds = {kind_of_end(replace(r, signal=None, exit_code=1)) for r in ranks}
    kind = max(kinds, key=lambda k: (k.weight, k.name))
    mine = [r for r in ranks if kind_of_end(replace(r, signal=None, exit_code=1)) is kind]
    return _fault_finding(evidence, kind, mine, sure=False)


def hang_by_stacks(evidence: Evidence) -> Finding | None:
    """Where the stacks lead. The group's machines are named, but a stack makes none a suspect."""
    found = evidence.stacks
    if found is None or not evidence.hang_seen or not found.outliers:
        return None
    odd = frozenset(c.rank for c in found.culprits) or frozenset(found.outliers)
    where = f"; their {found.axis} group: {named_machines(evidence.stack_machines)}"
    return replace(
        _hang(
            f"{found.reason}{where if found.axis else ''} ({found.rule})",
            ranks=[r for r in evidence.ranks if r.rank in odd],
        ),
        action=Action.OVER_EVICT_GROUP if found.axis else None,
    )


def hang_with_culprit(evidence: Evidence) -> Finding | None:
    """No progress, and few ranks stand out."""
    if not evidence.hang_seen:
        return None
    found = evidence.odd_one_out()
    if found is None:
        return None
    ranks, how = found
    return _hang(f"{named_ranks(ranks)} {how}", ranks=ranks)


def hang_without_culprit(evidence: Evidence) -> Finding | None:
    """No progress, and none stands out."""
    if not evidence.hang_seen:
        return None
    return _hang("no rank made progress, and none stands out", ranks=())


def _hang(
    reason: str, *, ranks: Iterable[RankReport], confidence: Confidence = Confidence.LOW
) -> Finding:
    return _finding(Symptom.HANG, Side.UNCLEAR, Cause.UNCLEAR, confidence, reason, ranks=ranks)


# --- little or nothing is known


def only_witnesses(evidence: Evidence) -> Finding | None:
    """Ranks lost their peers, and nobody failed first."""
    if not evidence.witnesses:
        return None
    found = [r.log_finding for r in evidence.witnesses if r.log_finding is not None]
    network = next((f for f in found if f.side is Side.INFRASTRUCTURE), None)
    if network is not None:
        # Nobody failed first, and what ranks saw of their connection names the network itself.
        return _finding(
            network.symptom,
            Side.INFRASTRUCTURE,
            Cause.INFRASTRUCTURE,
            Confidence.LOW,
            f"{named_ranks(evidence.witnesses)} lost a connection: {network.why}",
            rule=network.rule,
            action=network.action,
        )
    silent = (
        f"; no word from {named_machines(evidence.unreachable)}" if evidence.unreachable else ""
    )
    return _finding(
        Symptom.NETWORK_NCCL,
        Side.UNCLEAR,
        Cause.UNCLEAR,
        Confidence.LOW,
        f"{named_ranks(evidence.witnesses)} lost a connection, but no rank failed first{silent}",
    )


def out_of_reach(evidence: Evidence) -> Finding | None:
    """A machine could not be reached: unknown."""
    if not evidence.unreachable:
        return None
    return _finding(
        Symptom.UNKNOWN,
        Side.UNCLEAR,
        Cause.UNCLEAR,
        Confidence.LOW,
        f"{named_machines(evidence.unreachable)} could not be reached, which says nothing about it",
    )


def unknown(evidence: Evidence) -> Finding | None:
    """Nothing is known."""
    said = f": {evidence.triggers[0].reason}" if evidence.triggers else ""
    return _finding(
        Symptom.UNKNOWN,
        Side.UNCLEAR,
        Cause.UNCLEAR,
        Confidence.LOW,
        f"the run stopped without evidence of a cause{said}",
    )
