"""Looking closer: at what is left of a run, and at a run that has become slow.

Agents have classified the last lines already, within what fits into a report. ``diagnose_run``
reads the ranks whose report says little again, further back, and attributes the run anew with what
that told. ``find_slow_ranks`` looks at the stacks of all ranks of a live run in several rounds; it
stops nothing.

Not here: the classes of log lines, the rules of attribution, and who is behind
(``everstep.decide``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import structlog
from temporalio import activity

from activities.clients import Agents, LooksUpMachines, Reach, heartbeating, on_each, why
from activities.failpoints import after_effect
from activities.failures import one_line
from everstep.decide.attribution import MachineReport, RankReport, attribute
from everstep.decide.fail_slow import judge_slow_reports
from everstep.decide.logs import classify_lines
from everstep.decide.stack_outliers import rank_stacks
from everstep.decide.stack_report import StackFinding, StackReport
from everstep.decide.words import LogClass, RankState
from everstep.machine.logtail import clean
from everstep.spec import messages as m

RANKS_MAX = 16
TAIL_BYTES = 16 * 1024
TAIL_TIMEOUT_S = 5.0
EVIDENCE_MAX = 40
EVIDENCE_LINES_A_RANK = 4
LINES_KEPT = 8
STACKS_TIMEOUT_S = 10.0
"""An agent gives up on its own look sooner."""
CULPRITS_MAX = 16
FRAMES_TOLD = 4

_SAYS_LITTLE = frozenset({LogClass.SILENT, LogClass.OTHER})

log = structlog.get_logger(__name__)


class Diagnosis:
    """The activities of this file."""

    def __init__(self, ledger: LooksUpMachines, agents: Agents) -> None:
        self._ledger = ledger
        self._agents = agents

    @activity.defn(name="diagnose_run")
    async def diagnose_run(self, request: m.DiagnoseRun) -> m.DiagnosedRun:
        """Attribute a failed run from exits, signals and whole log tails."""
        wanted = ranks_to_read(request.reports)
        machines = sorted({rank.machine_id for rank in wanted})
        reach = Reach(self._ledger, self._agents, machines)
        evidence: list[str] = []
        async with heartbeating():
            found = await asyncio.gather(
                *(self._read(reach, request, rank, evidence) for rank in wanted)
            )
        newer = {rank.rank: rank for rank in found}
        reports = [
            dataclasses.replace(
                report, ranks=tuple(newer.get(rank.rank, rank) for rank in report.ranks)
            )
            for report in request.reports
        ]
        finding = attribute(
            reports, triggers=[observation.as_trigger() for observation in request.observations]
        )
        log.info(
            "run diagnosed",
            job_id=request.job_id,
            run_id=request.run_id,
            incident_id=request.incident_id,
            symptom=finding.symptom.value,
            rule=finding.rule,
            ranks_read=[rank.rank for rank in wanted],
        )
        after_effect()
        lines = [*_rank_lines(reports, {r.rank for r in wanted}), *evidence]
        return m.DiagnosedRun(
            finding=finding, evidence=tuple(one_line(line) for line in lines[:EVIDENCE_MAX])
        )

    async def _read(
        self,
        reach: Reach,
        request: m.DiagnoseRun,
        rank: RankReport,
        evidence: list[str],
    ) -> RankReport:
        """The report of one rank with what its log says further back."""
        try:
            agent = await reach.agent(rank.machine_id)
            async with asyncio.timeout(TAIL_TIMEOUT_S):
                text = await agent.log_tail(
                    request.job_id, request.generation, rank.rank, TAIL_BYTES
                )
        except Exception as error:  # noqa: BLE001 - see ``why``; the report at hand has to do
            evidence.append(f"rank {rank.rank}: log on {rank.machine_id} not read: {why(error)}")
            return rank
        lines = [clean(line) for line in text[-TAIL_BYTES:].splitlines() if line.strip()]
        log_class, telling = classify_lines(lines)
        if rank.log_class not in _SAYS_LITTLE or log_class in _SAYS_LITTLE:
            # The agent read at least as far and sooner: only silence is improved upon.
            return rank
        return dataclasses.replace(
            rank, log_class=log_class, log_lines=tuple(telling)[-LINES_KEPT:]
        )

    @activity.defn(name="find_slow_ranks")
    async def find_slow_ranks(self, request: m.FindSlowRanks) -> m.FoundSlowRanks:
        """Look at all ranks' stacks in several rounds: who is behind in most of them."""
        limits = request.policy.policy.detection
        reach = Reach(self._ledger, self._agents, [ref.machine_id for ref in request.machines])
        rounds: list[list[StackReport]] = []
        missed: dict[str, str] = {}
        async with heartbeating():
            await reach.find_all()
            due = time.monotonic()
            while len(rounds) < limits.slow_rounds:
                reports = await self._stacks(reach, request, missed)
                if not any(report.processes for report in reports):
                    break  # the run has ended, or nobody can see it
                rounds.append(reports)
                if len(rounds) < limits.slow_rounds:
                    due += limits.slow_round_interval.total_seconds()
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
        whole = len(rounds) == limits.slow_rounds
        shape = len(request.machines), request.ranks_per_machine
        found = judge_slow_reports(rounds, shape) if whole else None
        log.info(
            "looked for slow ranks",
            job_id=request.job_id,
            run_id=request.run_id,
            rounds=len(rounds),
            rule=found.rule if found else None,
            machines=[request.machines[i].machine_id for i in found.machines] if found else [],
        )
        after_effect()
        notes = [f"{machine_id}: no stacks: {what}" for machine_id, what in sorted(missed.items())]
        lines = [*_doing(found, rounds), *notes] if found else notes
        return m.FoundSlowRanks(
            finding=_cut(found) if found else None,
            rounds=len(rounds),
            evidence=tuple(one_line(line) for line in lines[:EVIDENCE_MAX]),
        )

    async def _stacks(
        self, reach: Reach, request: m.FindSlowRanks, missed: dict[str, str]
    ) -> list[StackReport]:
        """One round: what all machines answer; one that does not is unknown in it."""

        async def look(ref: m.MachineRef) -> StackReport | None:
            try:
                agent = await reach.agent(ref.machine_id)
                async with asyncio.timeout(STACKS_TIMEOUT_S):
                    # One look, and no lines: processes that run stand nowhere (``flagged``).
                    return await agent.stacks(
                        request.job_id, request.generation, looks=1, lines=False
                    )
            except Exception as error:  # noqa: BLE001 - see ``why``; the others have to do
                missed[ref.machine_id] = why(error)
                return None

        return [report for report in await on_each(request.machines, look) if report is not None]


def _cut(finding: StackFinding) -> StackFinding:
    """Without the ranks beyond what a person reads: it enters Temporal's history."""
    return dataclasses.replace(
        finding,
        culprits=finding.culprits[:CULPRITS_MAX],
        outliers=finding.outliers[:CULPRITS_MAX],
    )


def _doing(finding: StackFinding, rounds: Sequence[Sequence[StackReport]]) -> list[str]:
    """What the ranks that were behind did in the last round, innermost frame first."""
    groups = [group for report in rounds[-1] for group in report.groups]
    size = 1 + max((culprit.rank for culprit in finding.culprits), default=0)
    stacks = rank_stacks(groups, size)
    return [
        f"rank {culprit.rank}: {culprit.reason}, at last in "
        + " < ".join(stacks[culprit.rank].frames[:FRAMES_TOLD])
        for culprit in finding.culprits
        if culprit.rank in stacks
    ]


def ranks_to_read(reports: Sequence[MachineReport]) -> list[RankReport]:
    """The failed ranks whose report says least: those that ended by themselves, first to end first.

    A rank that only lost its peers is read too, after the others: its log may say more further up.
    """
    failed = [
        rank
        for report in reports
        if report.reachable
        for rank in report.ranks
        if rank.state is RankState.EXITED
        and not rank.stopped_by_us
        and (rank.exit_code != 0 or rank.signal is not None)
    ]
    return sorted(
        failed,
        key=lambda rank: (
            rank.log_class is LogClass.PEER_LOST,
            rank.log_class not in _SAYS_LITTLE,
            # Ages of one machine are durations by its own clock; between machines this only
            # decides who is read first.
            -(rank.exited_ago_s or 0.0),
            rank.rank,
        ),
    )[:RANKS_MAX]


def _rank_lines(reports: Sequence[MachineReport], ranks: set[int]) -> list[str]:
    lines = []
    for report in reports:
        if report.note:
            lines.append(f"{report.machine_id}: {report.note}")
        for rank in report.ranks:
            if rank.rank in ranks:
                lines += [
                    f"rank {rank.rank} on {rank.machine_id}: {line}"
                    for line in rank.log_lines[-EVIDENCE_LINES_A_RANK:]
                ]
    return lines
