"""Entering a job, claiming its machines, and starting and ending its ranks.

What the ledger decides (who may have which machine, which generation a run is) it decides in one
transaction each, idempotent by the request's key. Commands go to all machines of a shard at once;
each carries an id that is the same after a retry, so that a repeated one answers with its first
result. Not here: when to do any of it (``workflows``).
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Protocol

import structlog
from temporalio import activity

from activities.clients import (
    Agent,
    Agents,
    LooksUpMachines,
    Reach,
    command_for,
    heartbeating,
    ledger_call,
    on_each,
    why,
)
from activities.failpoints import after_effect
from activities.failures import one_line
from activities.policy_source import PolicySource, read_snapshot
from activities.stopping import NOT_NOW, stop_on_machine
from everstep.decide.attribution import MachineReport
from everstep.machine.client import AgentRefused
from everstep.spec import agent_api as api
from everstep.spec import messages as m
from everstep.spec.evidence import SHARD_BYTES_MAX, within
from everstep.spec.job import JobSpec
from everstep.spec.policy import Policy, PolicySnapshot

STOP_TRIES = 2
STOP_RETRY_AFTER_S = 0.5
"""With ``stopping.REACH_TIMEOUT_S`` twice: under three seconds for a machine that is gone."""
START_TRIES = 3
START_RETRY_AFTER_S = 0.3
CODE_CHECK_MAX_S = 120.0
"""The copy is there already, and is verified."""
PREPARE_TIMEOUT_MAX_S = 5.0
"""A machine that takes longer to name a port is not one to start on."""

log = structlog.get_logger(__name__)


class LaunchLedger(LooksUpMachines, Protocol):
    """What launching needs of the ledger."""

    def register_job(
        self, request: m.RegisterJob, policy: PolicySnapshot, /, *, now: datetime
    ) -> m.RegisteredJob:
        """Enter a job, or find it."""

    def open_run(self, request: m.OpenRun, /, *, now: datetime | None = ...) -> m.OpenedRun:
        """Claim machines and open the next run."""

    def close_run(self, request: m.CloseRun, /) -> object:
        """Mark a run closed."""

    def close_job(self, request: m.CloseJob, /) -> object:
        """Mark a job ended."""


class Launch:
    """The activities of this file."""

    def __init__(self, ledger: LaunchLedger, agents: Agents, policy: PolicySource) -> None:
        self._ledger = ledger
        self._agents = agents
        self._policy = policy

    @activity.defn(name="register_job")
    async def register_job(self, request: m.RegisterJob) -> m.RegisteredJob:
        """Enter the job into the ledger, or find its live run there."""
        policy = await read_snapshot(self._policy, request.spec.policy)
        registered = await ledger_call(
            self._ledger.register_job, request, policy, now=datetime.now(UTC)
        )
        after_effect()
        return registered

    @activity.defn(name="open_run")
    async def open_run(self, request: m.OpenRun) -> m.OpenedRun:
        """Claim machines and open the next run in one transaction, idempotent by request key."""
        opened = await ledger_call(self._ledger.open_run, request, now=datetime.now(UTC))
        after_effect()
        log.info(
            "run opened" if opened.run_id else "machines are missing",
            job_id=request.job_id,
            run_id=opened.run_id,
            incident_id=request.incident_id,
            machines=[ref.machine_id for ref in opened.machines][:20],
            shortfall=opened.shortfall,
        )
        return opened

    @activity.defn(name="prepare_run")
    async def prepare_run(self, request: m.PrepareRunInput) -> m.PreparedRunResult:
        """Reserve a fresh rendezvous port on the run's first machine."""
        policy, ref = request.policy.policy, request.machine
        timeout = min(PREPARE_TIMEOUT_MAX_S, policy.machines.command_timeout.total_seconds())
        reach = Reach(self._ledger, self._agents, [ref.machine_id])
        await reach.find_all()
        try:
            agent = await reach.agent(ref.machine_id)
            async with asyncio.timeout(timeout):
                prepared = await agent.prepare_run(
                    job_id=request.job_id,
                    generation=request.generation,
                    command_id=command_for(request.command_id, ref.machine_id),
                    validity_s=policy.machines.command_validity.total_seconds(),
                    timeout_s=timeout,
                )
        except Exception as error:  # noqa: BLE001 - silence, refusal or nonsense: all values here
            log.warning(
                "no rendezvous port",
                job_id=request.job_id,
                machine_id=ref.machine_id,
                reason=why(error),
            )
            return m.PreparedRunResult(unreachable=why(error))
        after_effect()
        return m.PreparedRunResult(
            master_addr=prepared.master_addr, master_port=prepared.master_port
        )

    @activity.defn(name="start_ranks")
    async def start_ranks(self, request: m.StartRanks) -> m.StartedRanks:
        """Start the ranks of one shard."""
        reach = Reach(self._ledger, self._agents, [ref.machine_id for ref in request.machines])
        refused: dict[str, str] = {}
        unreachable: dict[str, str] = {}

        async def start(ref: m.MachineRef) -> str | None:
            for tried in range(START_TRIES):
                try:
                    await self._start(await reach.agent(ref.machine_id), ref, request)
                except AgentRefused as refusal:
                    if refusal.code not in NOT_NOW:
                        refused[ref.machine_id] = why(refusal)
                        unreachable.pop(ref.machine_id, None)
                        return None
                    unreachable[ref.machine_id] = why(refusal)
                except Exception as error:  # noqa: BLE001 - see ``why``
                    unreachable[ref.machine_id] = why(error)
                else:
                    unreachable.pop(ref.machine_id, None)
                    return ref.machine_id
                if tried + 1 < START_TRIES:
                    await asyncio.sleep(START_RETRY_AFTER_S)
            return None

        async with heartbeating():
            await reach.find_all()
            started = [i for i in await on_each(request.machines, start) if i is not None]
        after_effect()
        log.info(
            "ranks started",
            job_id=request.job_id,
            run_id=request.run_id,
            machines=len(started),
            refused=refused,
            unreachable=unreachable,
        )
        return m.StartedRanks(started=tuple(started), refused=refused, unreachable=unreachable)

    async def _start(
        self, agent: Agent, ref: m.MachineRef, request: m.StartRanks
    ) -> api.StartedRun:
        limits = request.policy.policy.machines
        code_path = await self._code_path(agent, ref, request)
        timeout = limits.command_timeout.total_seconds()
        async with asyncio.timeout(timeout):
            return await agent.start_run(
                job_id=request.job_id,
                generation=request.generation,
                command_id=command_for(request.command_id, ref.machine_id),
                validity_s=limits.command_validity.total_seconds(),
                run=run_plan(request, ref, code_path),
                timeout_s=timeout,
            )

    async def _code_path(
        self, agent: Agent, ref: m.MachineRef, request: m.StartRanks
    ) -> str | None:
        """Where the code version lies on this machine: each agent has a folder of its own."""
        if request.code_path is None or request.spec.code is None:
            return request.code_path
        limits = request.policy.policy.machines
        async with asyncio.timeout(CODE_CHECK_MAX_S):
            brought = await agent.materialise_code(
                job_id=request.job_id,
                generation=request.generation,
                command_id=command_for(f"{request.command_id}/code", ref.machine_id),
                validity_s=limits.command_validity.total_seconds(),
                code_version=request.code_version,
                source=request.spec.code,
                timeout_s=CODE_CHECK_MAX_S,
            )
        return brought.path

    @activity.defn(name="stop_ranks")
    async def stop_ranks(self, request: m.StopRanks) -> m.StoppedRanks:
        """Capture evidence and end the ranks of one shard, verified."""
        reach = Reach(self._ledger, self._agents, [ref.machine_id for ref in request.machines])

        async def stop(ref: m.MachineRef) -> MachineReport:
            report = MachineReport(machine_id=ref.machine_id, reachable=False)
            for tried in range(STOP_TRIES):
                if tried:
                    await asyncio.sleep(STOP_RETRY_AFTER_S)
                report = await stop_on_machine(
                    reach,
                    ref,
                    job_id=request.job_id,
                    generation=request.generation,
                    command_id=command_for(request.command_id, ref.machine_id),
                    reason=one_line(request.reason, 200),
                    planned=request.planned,
                    policy=request.policy.policy,
                )
                if report.reachable:
                    break
            return report

        async with heartbeating():
            await reach.find_all()
            reports = await on_each(request.machines, stop)
        after_effect()
        kept, left_out = within(reports, SHARD_BYTES_MAX)
        log.info(
            "ranks stopped",
            job_id=request.job_id,
            generation=request.generation,
            machines=len(reports),
            unreachable=[r.machine_id for r in reports if not r.reachable][:20],
            not_clean=[r.machine_id for r in reports if not r.teardown_clean][:20],
            left_out=left_out,
        )
        return m.StoppedRanks(reports=kept)

    @activity.defn(name="close_run")
    async def close_run(self, request: m.CloseRun) -> m.Done:
        """Mark a run closed."""
        await ledger_call(self._ledger.close_run, request)
        after_effect()
        return m.Done()

    @activity.defn(name="close_job")
    async def close_job(self, request: m.CloseJob) -> m.Done:
        """Mark a job ended and give its machines back."""
        await ledger_call(self._ledger.close_job, request)
        after_effect()
        log.info(
            "job closed", job_id=request.job_id, phase=request.phase.value, reason=request.reason
        )
        return m.Done()


def run_plan(request: m.StartRanks, ref: m.MachineRef, code_path: str | None) -> api.RunPlan:
    """One machine's part of the run."""
    spec = request.spec
    return api.RunPlan(
        run_id=request.run_id,
        command=spec.command,
        env=spec.env,
        working_dir=spec.working_dir,
        code_version=request.code_version,
        code_path=code_path,
        machines=request.machines_total,
        ranks_per_machine=spec.ranks_per_machine,
        group_rank=ref.group_rank,
        master_addr=request.master_addr,
        master_port=request.master_port,
        axes=axes_of(spec),
        start_reason=request.start_reason,
        restore=request.restore,
        checkpoint_dir=request.checkpoint_dir,
        checkpoint_keep=spec.checkpoint.keep,
        progress_pattern=spec.progress.pattern,
        policy=agent_run_policy(request.policy.policy),
    )


def axes_of(spec: JobSpec) -> tuple[tuple[str, int], ...]:
    """The axes that have ranks along them, in the order of ranks; none if the sizes do not fit."""
    try:
        sizes = spec.layout.sizes(spec.world_size)
    except ValueError:
        return ()
    return tuple((axis, sizes[axis]) for axis in spec.layout.order if sizes[axis] > 1)


def agent_run_policy(policy: Policy) -> api.AgentRunPolicy:
    """The part of the policy that an agent applies by itself."""
    detection, teardown = policy.detection, policy.teardown
    return api.AgentRunPolicy(
        settle_window_s=detection.settle_window.total_seconds(),
        first_step_max_s=detection.first_step_max.total_seconds(),
        hang_min_s=detection.hang_min.total_seconds(),
        hang_factor=detection.hang_factor,
        section_max_s=detection.section_max.total_seconds(),
        exit_skew_max_s=detection.exit_skew_max.total_seconds(),
        failure_grace_s=teardown.failure_grace.total_seconds(),
        kill_wait_s=teardown.kill_wait.total_seconds(),
        runs_kept_max=policy.retention.runs_on_machine_max,
        signals=api.SignalPolicy(
            log_hang_min_s=detection.log_hang_min.total_seconds(),
            log_silent_after_s=detection.log_silent_after.total_seconds(),
            loss_spike_factor=detection.loss_spike_factor,
            loss_spike_window=detection.loss_spike_window,
            loss_spike_sustained=detection.loss_spike_sustained,
            loss_spike_warmup=detection.loss_spike_warmup,
            step_time_factor=detection.step_time_factor,
            step_time_window_s=detection.step_time_window.total_seconds(),
            rdma_silent_after_s=detection.rdma_silent_after.total_seconds(),
        ),
    )
