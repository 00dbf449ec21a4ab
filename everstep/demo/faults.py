"""What is broken in the demo's main job, one row each, and what has to follow.

Three kinds: ``Recovery`` (an incident, a decision, a new run), ``Undisturbed`` (training goes on,
no step is lost, nobody is evicted) and ``DiskFull`` (training goes on and people are told). A fault
that leads to anything else makes the demo fail.

Not here: how a fault is made (``everstep.demo.stage``) and jobs that end (``side_jobs``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.decide.words import Rung, RunPhase, Symptom
from everstep.demo.report import Row
from everstep.demo.stage import Before, DemoFailed, Stage
from everstep.ledger import IncidentDetail, MachineState, RunRow
from workers.embedded import TEMPORAL

Play = Callable[[Stage, str], Awaitable[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of the main job."""

    key: str
    """Short name, for ``--only``."""
    name: str
    """What a person reads."""
    play: Play


# --- faults that stop training


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A fault that stops the run: what has to be named and done."""

    inject: Callable[[Stage, Before], Awaitable[float]]
    """Does it, and answers when (seconds of the wall clock)."""
    symptoms: frozenset[Symptom]
    rungs: frozenset[Rung] = frozenset({Rung.REATTEMPT})
    rounds: int = 1

    async def __call__(self, stage: Stage, name: str) -> Row:
        """Break, wait until training goes on, and read from the ledger what happened."""
        before = await stage.settled()
        at = await self.inject(stage, before)
        await stage.recovered(before, rounds=self.rounds)
        incidents = await stage.new_incidents(before)
        row = row_of(name, stage.job_id, at, incidents, await stage.runs())
        row.problem = self._problem(incidents)
        return row

    def _problem(self, incidents: list[IncidentDetail]) -> str:
        if len(incidents) != 1:
            return f"{len(incidents)} incidents instead of one"
        incident = incidents[0]
        named = {decision.finding.symptom for decision in incident.decisions}
        taken = {decision.decision.rung for decision in incident.decisions}
        if not named & self.symptoms:
            return f"named {', '.join(sorted(named))}"
        if not taken <= self.rungs or not taken:
            return f"did {', '.join(sorted(taken)) or 'nothing'}"
        if incident.rounds_total != self.rounds:
            return f"{incident.rounds_total} rounds instead of {self.rounds}"
        return ""


def row_of(
    name: str, job_id: str, at: float, incidents: list[IncidentDetail], runs: list[RunRow]
) -> Row:
    """What the ledger says about a fault that was made at ``at``."""
    if not incidents:
        return Row(name=name, job=job_id, problem="no incident was opened", steps_lost=None)
    incident = incidents[0]
    first = incident.rounds[0]
    decisions = sorted(incident.decisions, key=lambda d: d.round_number)
    after = [run for run in runs if run.incident_id == incident.incident_id]
    new_steps = [t for run in after if (t := run.at(RunPhase.FIRST_STEP)) is not None]
    detected = first.detected_at.timestamp() if first.detected_at else None
    row = Row(
        name=name,
        job=job_id,
        incident_id=incident.incident_id,
        symptom=str(decisions[0].finding.symptom if decisions else incident.symptom),
        action=action_of(incident),
        detect_s=None if detected is None else detected - at,
        decide_s=decisions[0].decided_at.timestamp() - at if decisions else None,
        recover_s=max(new_steps).timestamp() - at if new_steps else None,
    )
    row.steps_lost = _steps_lost(incident, {run.run_id: run for run in runs}, after)
    if not new_steps:
        row.problem = "no new step is recorded"
    return row


def action_of(incident: IncidentDetail) -> str:
    """What was done, in a few words."""
    done = []
    for record in sorted(incident.decisions, key=lambda d: d.round_number):
        decision = record.decision
        done.append(" ".join([str(decision.rung), *decision.evict]))
    return ", then ".join(dict.fromkeys(done)) if done else "warn_only"


def _steps_lost(
    incident: IncidentDetail, runs: dict[str, RunRow], after: list[RunRow]
) -> int | None:
    """Steps that had to be trained again, over all rounds."""
    lost = 0
    for record in incident.decisions:
        number = next(r for r in incident.rounds if r.round_number == record.round_number)
        failed = runs.get(number.run_id)
        following = next(
            (r for r in after if failed is not None and r.generation == failed.generation + 1), None
        )
        if following is None:
            return None
        if record.finding.step is None:
            continue  # the run failed before its first step
        restored = following.restore.step if following.restore else -1
        lost += max(0, record.finding.step - restored)
    return lost


def _outside(rank: int, number: signal.Signals) -> Callable[[Stage, Before], Awaitable[float]]:
    async def inject(stage: Stage, before: Before) -> float:  # noqa: ARG001
        return await stage.signal_rank(rank, number)

    return inject


def _ordered(*orders: tuple[str, int]) -> Callable[[Stage, Before], Awaitable[float]]:
    async def inject(stage: Stage, before: Before) -> float:  # noqa: ARG001
        return await stage.order(*orders)

    return inject


async def _again_at_once(stage: Stage, before: Before) -> float:  # noqa: ARG001
    """The second order is placed after the first was carried out: the very next run takes it."""
    at = await stage.order(("sigkill", 1))
    second = "sigkill.rank1.step0"
    (stage.orders / second).touch()
    await stage.fired(second)
    return at


async def _controller_too(stage: Stage, before: Before) -> float:
    """Kill the controller once the recovery has begun: ranks are being ended or started anew."""
    at = await stage.signal_rank(2, signal.SIGKILL)

    async def begun() -> bool:
        status = await stage.status()
        sight = await stage.sight()
        return (status is not None and status.phase.value == "recovering") or (
            sight is None or sight.generation > before.generation
        )

    await stage.until("the recovery has begun", begun, limit_s=60)
    await stage.killed("controller-1")
    return at


async def _machine_lost(stage: Stage, before: Before) -> float:  # noqa: ARG001
    status = await stage.status()
    if status is None:
        raise DemoFailed("no status before the machine is lost")
    at = time.time()
    stage.embedded.power_off(status.machines[-1])
    return at


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLost:
    """A machine dies with everything on it: evicted, and the standby takes its place."""

    async def __call__(self, stage: Stage, name: str) -> Row:
        """Break, recover, and look whether the machine stays out after it came back."""
        status = await stage.status()
        gone = status.machines[-1] if status else ""
        recovery = Recovery(
            inject=_machine_lost,
            symptoms=frozenset({Symptom.KERNEL_PANIC}),
            rungs=frozenset({Rung.EVICT}),
        )
        row = await recovery(stage, name)
        stage.embedded.power_on(gone)
        now = await stage.status()
        rows = {r.machine_id: r for r in await asyncio.to_thread(stage.ledger.machines)}
        if now is None or gone in now.machines:
            row.problem = row.problem or f"{gone} is used again"
        elif rows[gone].state is not MachineState.EVICTED:
            row.problem = row.problem or f"{gone} is {rows[gone].state}"
        return row


# --- faults that must not stop training


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """A fault of Everstep itself: training goes on, and nothing is done about it."""

    inject: Callable[[Stage], Coroutine[Any, Any, None]]

    async def __call__(self, stage: Stage, name: str) -> Row:
        """Break, and watch the same run go on."""
        before = await stage.settled()
        at = time.time()
        broken = asyncio.create_task(self.inject(stage))
        try:
            next_step_s = await stage.next_step_after(at, before.step)
        finally:
            await broken
        row = Row(name=name, job=stage.job_id, recover_s=next_step_s)
        after = await stage.settled()
        if after.generation != before.generation:
            row.problem = f"run {after.generation} replaced run {before.generation}"
        elif after.incidents != before.incidents:
            row.problem = "an incident was opened"
        elif after.step <= before.step:
            row.problem = f"still at step {after.step}"
        return row


def _agent_killed(group_rank: int) -> Callable[[Stage], Coroutine[Any, Any, None]]:
    async def inject(stage: Stage) -> None:
        status = await stage.status()
        if status is None:
            raise DemoFailed("no status before an agent is killed")
        machine_id = status.machines[group_rank]
        pids = await stage.pids()
        await stage.killed(machine_id)
        await stage.back(machine_id)
        if await stage.pids() != pids:
            raise DemoFailed(f"{machine_id} came back with other ranks")

    return inject


async def _controller_killed(stage: Stage) -> None:
    await stage.killed("controller-1")
    await stage.back("controller-1")


def _server_away(seconds: float) -> Callable[[Stage], Coroutine[Any, Any, None]]:
    async def inject(stage: Stage) -> None:
        before = await stage.sight()
        await stage.outage(TEMPORAL, seconds)
        after = await stage.sight()
        if before is None or after is None or after.step <= before.step:
            raise DemoFailed("training stood still while the server was away")
        await stage.back(TEMPORAL)

    return inject


# --- the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFull:
    """The checkpoint disk fills up: one warning, and the next save after space is free counts."""

    disk: Path

    async def __call__(self, stage: Stage, name: str) -> Row:
        """Fill, wait for the warning, empty, wait for a checkpoint."""
        before = await stage.settled()
        at = time.time()
        ballast = self.disk / "ballast"
        await asyncio.to_thread(_fill, ballast)
        try:

            async def warned() -> bool:
                return bool(await stage.new_incidents(before))

            await stage.until("a save failed and people were told", warned, limit_s=60)
            during = await stage.sight()
        finally:
            ballast.unlink()
        incidents = await stage.new_incidents(before)
        row = row_of(name, stage.job_id, at, incidents, await stage.runs())
        row.recover_s = await stage.next_step_after(at, before.step)
        row.steps_lost, row.problem = 0, ""
        reached = during.step if during else before.step

        async def saved() -> bool:
            return any(
                int(path.parent.name.split("-")[1].split(".")[0]) > reached
                for path in self.disk.rglob("step-*/COMPLETE.json")
            )

        await stage.until("a checkpoint after the disk was emptied", saved, limit_s=60)
        after = await stage.settled()
        if after.generation != before.generation:
            row.problem = f"run {after.generation} replaced run {before.generation}"
        elif row.symptom != Symptom.DISK_FULL:
            row.problem = f"named {row.symptom}"
        return row


def _fill(path: Path) -> None:
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                os.write(file.fileno(), b"\0" * size)
            except OSError:
                size //= 2


def main_faults(*, outage_s: float, small_disk: Path | None) -> list[Fault]:
    """The faults of the main job, in order."""
    unknown = frozenset({Symptom.UNKNOWN})
    user_code = frozenset({Symptom.USER_CODE})

    def fault(key: str, name: str, play: Play) -> Fault:
        return Fault(key=key, name=name, play=play)

    faults = [
        fault(
            "sigkill",
            "rank SIGKILL",
            Recovery(inject=_outside(1, signal.SIGKILL), symptoms=unknown),
        ),
        fault(
            "sigsegv",
            "rank SIGSEGV",
            Recovery(inject=_outside(2, signal.SIGSEGV), symptoms=unknown),
        ),
        fault(
            "exception",
            "Python exception in one rank",
            Recovery(inject=_ordered(("exception", 3)), symptoms=user_code),
        ),
        fault("agent", "agent kill -9", Undisturbed(inject=_agent_killed(1))),
        fault(
            "exit0",
            "rank exits 0 too early",
            Recovery(inject=_ordered(("exit0", 1)), symptoms=user_code),
        ),
        fault(
            "hang",
            "rank stopped with SIGSTOP (hang)",
            Recovery(inject=_outside(3, signal.SIGSTOP), symptoms=frozenset({Symptom.HANG})),
        ),
        fault(
            "nan",
            "loss becomes NaN",
            Recovery(inject=_ordered(("nan", 0)), symptoms=frozenset({Symptom.NAN_VALUE})),
        ),
        fault("controller", "controller kill -9", Undisturbed(inject=_controller_killed)),
        fault(
            "controller-recovery",
            "controller kill -9 in the middle of a recovery",
            Recovery(inject=_controller_too, symptoms=unknown),
        ),
        fault(
            "two",
            "two faults at once (SIGKILL and exception)",
            Recovery(
                inject=_ordered(("sigkill", 0), ("exception", 3)), symptoms=unknown | user_code
            ),
        ),
        fault(
            "again",
            "the same fault again at once (SIGKILL)",
            Recovery(inject=_again_at_once, symptoms=unknown, rounds=2),
        ),
        fault("server-1", "Temporal server kill -9, away 1 s", Undisturbed(inject=_server_away(1))),
    ]
    if small_disk is not None:
        faults.append(fault("disk", "disk full while saving", DiskFull(disk=small_disk)))
    return [
        *faults,
        fault(
            "server-60",
            f"Temporal server kill -9, away {outage_s:g} s",
            Undisturbed(inject=_server_away(outage_s)),
        ),
        fault("machine", "machine lost (everything on it killed)", MachineLost()),
    ]
