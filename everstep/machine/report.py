"""A run on this machine in the words that others understand: report, state and summary.

Everything here is derived, at any time and by any agent, from what lies in the run's folder and
from the processes that are there. Not here: what led to it (``run``).
"""

from __future__ import annotations

import math
import time

from everstep.decide.attribution import MachineReport, RankReport
from everstep.decide.reports import Seen
from everstep.decide.words import RankState
from everstep.machine.facts import Evidence
from everstep.machine.health import Health
from everstep.machine.logtail import within
from everstep.machine.monitor import NS
from everstep.machine.run import Run
from everstep.spec.agent_api import RunState, RunSummary

_LOG_BYTES_PER_MACHINE = 16_000
_LOG_BYTES_PER_RANK = 1_500
NO_PROGRESS = "no rank has attached to the trainer library: no first step and no hang rule here"
FROM_LOG = "steps are read from what ranks print: who is behind does not show in them"


def _state(run: Run, rank: int) -> RankState:
    if rank in run.exits:
        return RankState.EXITED
    if rank in run.facts.unknown_exits:
        return RankState.UNKNOWN if run.facts.vanished else RankState.EXITED
    if rank in run.processes.handles:
        return RankState.RUNNING
    return RankState.UNKNOWN if rank in run.processes.starts else RankState.NOT_STARTED


def _evidence(run: Run, rank: int, now_ns: int) -> Evidence:
    stopping = run.facts.stopping
    if stopping is not None and rank in stopping.evidence:
        return stopping.evidence[rank]
    if rank in run.facts.exit_evidence:
        return run.facts.exit_evidence[rank]
    if rank not in run.processes.handles:
        return Evidence()
    progress = run.monitor.progress(rank)
    return Evidence(
        process_state=run.process_state(rank),
        stalled_for_s=run.monitor.stalled_for_s(rank, now_ns),
        section=progress.section if progress is not None else None,
    )


def _rank_report(run: Run, rank: int, now_ns: int, log_bytes: int) -> RankReport:
    ended = run.exits.get(rank)
    ended_ns = ended.at_ns if ended is not None else run.facts.unknown_exits.get(rank)
    progress = run.monitor.progress(rank)
    evidence = _evidence(run, rank, now_ns)
    log_class, lines = run.logs[rank].says()
    failed = ended is not None and ended.code != 0 and not run.stopped_by_us(rank)
    return RankReport(
        rank=rank,
        machine_id=run.record.machine_id,
        state=_state(run, rank),
        exit_code=ended.code if ended is not None else None,
        signal=ended.signal if ended is not None else None,
        stopped_by_us=run.stopped_by_us(rank),
        # What is printed may lie in a buffer: comparing ranks by it would blame the wrong one.
        step=progress.step if progress is not None and progress.source == "library" else None,
        nonfinite_step=progress.nonfinite_step if progress is not None else None,
        stalled_for_s=evidence.stalled_for_s,
        process_state=evidence.process_state,
        section=evidence.section,
        save_error=progress.save_error if progress is not None else None,
        log_class=log_class,
        log_lines=within(lines, log_bytes),
        log_finding=run.logs[rank].finding(rank, ended.code, ended.signal)
        if failed and ended is not None
        else None,
        # After a reboot the instant belongs to a clock that has begun anew.
        exited_ago_s=(
            round((now_ns - ended_ns) / NS, 6) if ended_ns is not None and run.same_boot else None
        ),
    )


def machine_report(run: Run, health: Health) -> MachineReport:
    """What is known about this machine's part of a run, and about the machine itself."""
    now_ns = time.monotonic_ns()
    stopping = run.facts.stopping
    ranks = run.record.ranks
    log_bytes = max(300, min(_LOG_BYTES_PER_RANK, _LOG_BYTES_PER_MACHINE // len(ranks)))
    notes = [run.facts.note] if run.facts.note else []
    if run.monitor.log_steps:
        notes.append(FROM_LOG)
    elif not run.monitor.uses_library:
        notes.append(NO_PROGRESS)
    return MachineReport(
        machine_id=run.record.machine_id,
        reachable=True,
        planned_stop=stopping.reason if stopping is not None and stopping.planned else None,
        processes_vanished=run.facts.vanished,
        teardown_clean=run.facts.teardown_clean,
        note="; ".join(notes),
        ranks=tuple(_rank_report(run, rank, now_ns, log_bytes) for rank in ranks),
        observations=_of_this_run(run, health.seen(), now_ns),
        healthy_probes=health.healthy_probes(),
        stacks=run.stacks.report,
    )


def _of_this_run(run: Run, seen: tuple[Seen, ...], now_ns: int) -> tuple[Seen, ...]:
    """Without what had gone again before the run began: it says nothing about this run."""
    age_s = (now_ns - run.record.created_ns) / NS if run.same_boot else 0.0
    return tuple(one for one in seen if one.cleared_ago_s is None or one.cleared_ago_s <= age_s)


def run_state(run: Run, health: Health) -> RunState:
    """The present state of a run."""
    return RunState(
        run_id=run.record.plan.run_id,
        ended=run.facts.ended,
        succeeded=run.facts.ended and run.succeeded,
        first_step_seen=run.facts.first_step,
        report=machine_report(run, health),
        pids={rank: start.pid for rank, start in run.processes.starts.items()},
    )


def _finite(value: float | None) -> float | None:
    """JSON has no NaN; that a loss is not finite is an event of its own."""
    return value if value is not None and math.isfinite(value) else None


def run_summary(run: Run) -> RunSummary:
    """A run in a heartbeat line."""
    seen = [p for rank in run.record.ranks if (p := run.monitor.progress(rank)) is not None]
    stepped = [p for p in seen if p.step is not None]
    newest = max(stepped, key=lambda p: p.step_at_ns, default=None)
    lowest = min(stepped, key=lambda p: p.step or 0, default=None)
    if run.monitor.log_steps:
        lowest = max(stepped, key=lambda p: p.step or 0, default=None)  # one prints for all
    return RunSummary(
        job_id=run.record.job_id,
        run_id=run.record.plan.run_id,
        generation=run.record.generation,
        live_ranks=len(run.processes.live),
        step=lowest.step if lowest is not None else None,
        step_from_log=run.monitor.log_steps,
        loss=_finite(lowest.loss) if lowest is not None else None,
        grad_norm=_finite(lowest.grad_norm) if lowest is not None else None,
        step_age_s=(
            round((time.monotonic_ns() - newest.step_at_ns) / NS, 3) if newest is not None else None
        ),
    )
