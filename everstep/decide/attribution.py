"""Who failed first, and whose fault is it: from what is left of a run to one finding.

Secondary failures are the normal case: one dead rank makes every other rank report a broken
connection. So attribution goes by *class* first (a rank that complains about its peers is a
witness, one that we killed is collateral), by silence second, by time last, and never by comparing
the clocks of two machines (ages are durations measured by one machine's own monotonic clock).

``RULES`` is an ordered table; the first rule that fits is the finding, and ``docs/ladder.md`` shows
it. Machines become suspects only by evidence about the machine itself: it was lost, or it would not
give up the processes of the run.

Not here: the kinds of a rank's own faults (``faults``), reading logs (``logs``), talking to
machines (``activities.detection``), and what to do about a finding (``ladder``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from everstep.decide import machine_rules
from everstep.decide.evidence import Evidence, gather, named_machines, named_ranks
from everstep.decide.faults import FaultKind, crashed, describe, kind_of_end, signal_name, signal_of
from everstep.decide.machine_rules import doomed_of, ruled_out
from everstep.decide.reports import Finding, MachineReport, RankReport, Trigger
from everstep.decide.words import Action, Cause, Confidence, LogClass, Side, Symptom

__all__ = [
    "RULES",
    "Finding",
    "MachineReport",
    "RankReport",
    "Rule",
    "Trigger",
    "attribute",
]

REASON_CHARS_MAX = 500

_EVIDENT_CLASSES = frozenset(
    {LogClass.PYTHON_EXCEPTION, LogClass.OUT_OF_MEMORY, LogClass.DISK_FULL, LogClass.IMPORT_FAILED}
)
"""What a log shows clearly enough to blame a rank that could not end by itself."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    name: str
    when: str
    """When it fits, for people."""
    find: Callable[[Evidence], Finding | None]


def attribute(reports: Sequence[MachineReport], *, triggers: Sequence[Trigger] = ()) -> Finding:
    """The finding of the first rule that fits.

    Args:
        reports: one for each machine of the run, in any order.
        triggers: what was observed before the run was stopped, for what reports cannot say.
    """
    evidence = gather(reports, triggers)
    for rule in RULES:
        finding = rule.find(evidence)
        if finding is not None:
            return _completed(finding, rule.name, evidence)
    raise AssertionError("the last rule fits always")


def _completed(finding: Finding, rule: str, evidence: Evidence) -> Finding:
    culprits = tuple(sorted(set(finding.culprit_ranks)))
    first = finding.first_failed_rank
    if first is None:
        first = evidence.first_of(culprits)
    return replace(
        finding,
        rule=finding.rule or rule,
        reason=_cut(finding.reason + _beside(finding, evidence)),
        culprit_ranks=culprits,
        first_failed_rank=first,
        suspects=tuple(sorted(set(finding.suspects))),
        witnesses=tuple(r.rank for r in evidence.witnesses if r.rank not in culprits),
        step=evidence.step,
        nonfinite_step=evidence.nonfinite_step,
        ruled_out=ruled_out(finding, evidence),
    )


def _beside(finding: Finding, evidence: Evidence) -> str:
    """Independent faults that are not this finding's own, so that none is forgotten."""
    notes = []
    lost = [m for m in evidence.lost if m not in finding.suspects]
    if lost and finding.cause is not Cause.PLANNED:
        notes.append(f"{named_machines(lost)} lost")
    if evidence.nonfinite_step is not None and finding.symptom is not Symptom.NAN_VALUE:
        notes.append(f"loss or gradients not finite at step {evidence.nonfinite_step}")
    for rank, kind in evidence.own:
        if rank.rank not in finding.culprit_ranks:
            notes.append(f"rank {rank.rank} {describe(rank, kind)}")
    notes += [
        f"rank {rank.rank} is stopped (state {rank.process_state})"
        for rank in evidence.frozen
        if rank.rank not in finding.culprit_ranks
    ]
    return f"; also: {'; '.join(notes)}" if notes else ""


def _cut(text: str) -> str:
    return text if len(text) <= REASON_CHARS_MAX else f"{text[: REASON_CHARS_MAX - 3]}..."


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


def _planned_stop(evidence: Evidence) -> Finding | None:
    if not evidence.planned or evidence.lost:
        return None
    said = "; ".join(f"{machine}: {why}" for machine, why in evidence.planned)
    return _finding(
        Symptom.PREEMPTION, Side.EXTERNAL, Cause.PLANNED, Confidence.HIGH, f"planned stop of {said}"
    )


def _machine_lost(evidence: Evidence) -> Finding | None:
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


def _teardown_not_clean(evidence: Evidence) -> Finding | None:
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


def _processes_vanished(evidence: Evidence) -> Finding | None:
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


def _nonfinite(evidence: Evidence) -> Finding | None:
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


def _rank_fault(evidence: Evidence) -> Finding | None:
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


def _witness_crashed(evidence: Evidence) -> Finding | None:
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


def _frozen(evidence: Evidence) -> Finding | None:
    if not evidence.frozen:
        return None
    states = ", ".join(sorted({r.process_state or "?" for r in evidence.frozen}))
    return _hang(
        f"{named_ranks(evidence.frozen)} stopped (process state {states}), the others waited",
        ranks=evidence.frozen,
        confidence=Confidence.HIGH,
    )


def _exited_early(evidence: Evidence) -> Finding | None:
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


def _stuck_after_error(evidence: Evidence) -> Finding | None:
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


def _hang_by_stacks(evidence: Evidence) -> Finding | None:
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


def _hang_with_culprit(evidence: Evidence) -> Finding | None:
    if not evidence.hang_seen:
        return None
    found = evidence.odd_one_out()
    if found is None:
        return None
    ranks, how = found
    return _hang(f"{named_ranks(ranks)} {how}", ranks=ranks)


def _hang_without_culprit(evidence: Evidence) -> Finding | None:
    if not evidence.hang_seen:
        return None
    return _hang("no rank made progress, and none stands out", ranks=())


def _hang(
    reason: str, *, ranks: Iterable[RankReport], confidence: Confidence = Confidence.LOW
) -> Finding:
    return _finding(Symptom.HANG, Side.UNCLEAR, Cause.UNCLEAR, confidence, reason, ranks=ranks)


# --- little or nothing is known


def _only_witnesses(evidence: Evidence) -> Finding | None:
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


def _out_of_reach(evidence: Evidence) -> Finding | None:
    if not evidence.unreachable:
        return None
    return _finding(
        Symptom.UNKNOWN,
        Side.UNCLEAR,
        Cause.UNCLEAR,
        Confidence.LOW,
        f"{named_machines(evidence.unreachable)} could not be reached, which says nothing about it",
    )


def _unknown(evidence: Evidence) -> Finding | None:
    said = f": {evidence.triggers[0].reason}" if evidence.triggers else ""
    return _finding(
        Symptom.UNKNOWN,
        Side.UNCLEAR,
        Cause.UNCLEAR,
        Confidence.LOW,
        f"the run stopped without evidence of a cause{said}",
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "planned_stop",
        "an agent stopped its ranks on request, and no machine is lost",
        _planned_stop,
    ),
    Rule(
        "shared_outage",
        "probes of several machines see the same trouble with something that they share",
        machine_rules.shared_outage,
    ),
    Rule(
        "machine_fault",
        "a probe is sure that a machine has to go (the probe names the rule)",
        machine_rules.machine_fault,
    ),
    Rule("machine_lost", "a machine stayed unreachable while training had stopped", _machine_lost),
    Rule("teardown_not_clean", "processes of the run could not be ended", _teardown_not_clean),
    Rule("nonfinite", "a rank reported a loss or gradient norm that is not finite", _nonfinite),
    Rule(
        "processes_vanished",
        "a machine's processes are gone without exit records",
        _processes_vanished,
    ),
    Rule(
        "explained_by_machine",
        "a rank failed by itself, and a fault of its machine explains how (a table names the rule)",
        machine_rules.explained_by_machine,
    ),
    Rule("rank_fault", "a rank failed by itself (the table of faults names the rule)", _rank_fault),
    Rule("frozen", "a rank was stopped by a signal (process state T)", _frozen),
    Rule("exited_early", "a rank ended with 0 while others failed or waited", _exited_early),
    Rule(
        "stuck_after_error", "a rank logged its own error and then did not end", _stuck_after_error
    ),
    Rule(
        "stands_beside_fault",
        "all wait for somebody, and one machine alone is not well",
        machine_rules.stands_beside_fault,
    ),
    Rule(
        "slow_machine",
        "steps take longer, and one machine alone is known to be slowed down",
        machine_rules.slow_machine,
    ),
    Rule(
        "loss_spike",
        "loss or gradient norm far above its baseline, and no rank failed",
        machine_rules.loss_spike,
    ),
    Rule(
        "hang_by_stacks",
        "no progress, and stacks lead to few ranks (`docs/diagnose-stacks.md` names the rule)",
        _hang_by_stacks,
    ),
    Rule(
        "hang_with_culprit",
        "no progress, and few ranks are behind, elsewhere or silent",
        _hang_with_culprit,
    ),
    Rule("hang_without_culprit", "no progress, and no rank stands out", _hang_without_culprit),
    Rule("witness_crashed", "only witnesses, but one was ended by a signal", _witness_crashed),
    Rule("only_witnesses", "ranks lost their peers, and nobody failed first", _only_witnesses),
    Rule(
        "out_of_reach", "a machine could not be reached, and nothing else is known", _out_of_reach
    ),
    Rule("unknown", "always", _unknown),
)
"""In order: the first rule that fits is the finding."""
