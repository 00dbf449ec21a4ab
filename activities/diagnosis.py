"""Looking closer at what is left of a run: whole log tails of the ranks that failed.

Agents have classified the last lines already, within what fits into a report. Here the ranks whose
report says little are read again, further back, and the run is attributed anew with what that told.

Not here: the classes of log lines and the rules of attribution (``everstep.decide``).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import structlog
from temporalio import activity

from activities.clients import Agents, LooksUpMachines, Reach, heartbeating, why
from activities.failpoints import after_effect
from activities.failures import one_line
from everstep.decide.attribution import MachineReport, RankReport, attribute
from everstep.decide.logs import classify_lines
from everstep.decide.words import LogClass, RankState
from everstep.machine.logtail import clean
from everstep.spec import messages as m

RANKS_MAX = 16
TAIL_BYTES = 16 * 1024
TAIL_TIMEOUT_S = 5.0
EVIDENCE_MAX = 40
EVIDENCE_LINES_A_RANK = 4
LINES_KEPT = 8

_SAYS_LITTLE = frozenset({LogClass.SILENT, LogClass.OTHER})

log = structlog.get_logger(__name__)


class Diagnosis:
    """The activity of this file."""

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
