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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from everstep.decide import machine_rules
from everstep.decide import rank_rules as ranks
from everstep.decide.evidence import Evidence, gather, named_machines
from everstep.decide.faults import describe
from everstep.decide.machine_rules import ruled_out
from everstep.decide.reports import Finding, MachineReport, RankReport, Trigger
from everstep.decide.words import Cause, Symptom

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


RULES: tuple[Rule, ...] = (
    Rule(
        "planned_stop",
        "an agent stopped its ranks on request, and no machine is lost",
        ranks.planned_stop,
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
    Rule(
        "machine_lost",
        "a machine stayed unreachable while training had stopped",
        ranks.machine_lost,
    ),
    Rule(
        "teardown_not_clean",
        "processes of the run could not be ended",
        ranks.teardown_not_clean,
    ),
    Rule(
        "nonfinite",
        "a rank reported a loss or gradient norm that is not finite",
        ranks.nonfinite,
    ),
    Rule(
        "processes_vanished",
        "a machine's processes are gone without exit records",
        ranks.processes_vanished,
    ),
    Rule(
        "explained_by_machine",
        "a rank failed by itself, and a fault of its machine explains how (a table names the rule)",
        machine_rules.explained_by_machine,
    ),
    Rule(
        "rank_fault",
        "a rank failed by itself (the table of faults names the rule)",
        ranks.rank_fault,
    ),
    Rule("frozen", "a rank was stopped by a signal (process state T)", ranks.frozen),
    Rule("exited_early", "a rank ended with 0 while others failed or waited", ranks.exited_early),
    Rule(
        "stuck_after_error",
        "a rank logged its own error and then did not end",
        ranks.stuck_after_error,
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
        ranks.hang_by_stacks,
    ),
    Rule(
        "hang_with_culprit",
        "no progress, and few ranks are behind, elsewhere or silent",
        ranks.hang_with_culprit,
    ),
    Rule(
        "hang_without_culprit",
        "no progress, and no rank stands out",
        ranks.hang_without_culprit,
    ),
    Rule(
        "witness_crashed",
        "only witnesses, but one was ended by a signal",
        ranks.witness_crashed,
    ),
    Rule(
        "only_witnesses",
        "ranks lost their peers, and nobody failed first",
        ranks.only_witnesses,
    ),
    Rule(
        "out_of_reach",
        "a machine could not be reached, and nothing else is known",
        ranks.out_of_reach,
    ),
    Rule("unknown", "always", ranks.unknown),
)
"""In order: the first rule that fits is the finding."""
