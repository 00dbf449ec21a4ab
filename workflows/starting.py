"""Opening and starting a run: claim machines, choose the restore point, start ranks.

Returns what went wrong as observations, which is bad news like any other; the caller recovers.
"""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from temporalio.exceptions import ActivityError

    from activities import contracts
    from everstep.decide.words import JobPhase, RunPhase, Verdict
    from everstep.spec import messages as m
    from everstep.spec.agent_api import EventKind
    from workflows.context import JobContext, cancelled


WAIT_POLL_FACTOR_MAX = 12
"""A job that waits long for machines looks twelve times less often than at first, and people are
told (after six minutes, by default)."""


async def open_run(context: JobContext) -> bool:
    """Claim machines and open the next run.

    Returns:
        True when a run is open; False when it is time to look at wishes (or to roll) first.
    """
    state = context.state
    wanted = state.next_run
    opened = await contracts.call(
        contracts.open_run,
        m.OpenRun(
            request_key=context.key(),
            job_id=state.job_id,
            machines_needed=state.spec.machines,
            slots_needed=state.spec.ranks_per_machine,
            keep=wanted.keep,
            avoid=wanted.avoid,
            start_reason=wanted.start_reason,
            code_version=state.code_version or "none",
            incident_id=wanted.incident_id,
            opened_at=workflow.now(),
        ),
        summary=f"claim {state.spec.machines} machines and open run {state.runs_total + 1}",
    )
    if opened.shortfall:
        wanted.waiting_polls += 1
        context.enter(
            JobPhase.WAITING_FOR_MACHINES,
            f"{opened.shortfall} of {state.spec.machines} machines with "
            f"{state.spec.ranks_per_machine} free slots are missing",
        )
        if wanted.waiting_polls == 1:
            context.record()
        if wanted.waiting_polls == WAIT_POLL_FACTOR_MAX:
            context.tell(f"waits-for-run-{state.runs_total + 1}", "warning")
        base = context.policy.policy.machines.wait_poll_interval.total_seconds()
        await context.wait(
            lambda: state.wish is not None or state.roll,
            timeout_s=base * min(wanted.waiting_polls, WAIT_POLL_FACTOR_MAX),
            summary=f"wait for {opened.shortfall} machines",
        )
        return False
    state.run = m.RunRef(
        run_id=opened.run_id,
        generation=opened.generation,
        machines=opened.machines,
        code_version=state.code_version or "none",
        start_reason=wanted.start_reason,
        opened_at=workflow.now(),
    )
    state.runs_total += 1
    wanted.waiting_polls = 0
    return True


async def start_run(context: JobContext) -> tuple[m.ObservationRecord, ...]:
    """Start the open run's ranks on all of its machines.

    Returns:
        Nothing when all started, else what went wrong.
    """
    state = context.state
    context.enter(
        JobPhase.STARTING, f"starting run {state.runs_total}: {state.next_run.start_reason}"
    )
    try:
        problems = await _prepare(context)
    except ActivityError as error:
        if cancelled(error):
            raise
        return _problems({"-": str(error.cause or error)[:500]}, "probe", "cannot prepare the run")
    return problems or await _start_ranks(context)


async def _prepare(context: JobContext) -> tuple[m.ObservationRecord, ...]:
    state, run = context.state, context.state.run
    if run is None:
        raise RuntimeError("no run is open")
    code = (
        contracts.schedule(
            contracts.materialise_code,
            m.MaterialiseCodeInput(
                command_id=context.key(),
                job_id=state.job_id,
                generation=run.generation,
                source=state.spec.code,
                code_version=state.code_version,
                machines=run.machines,
                policy=context.policy,
            ),
            summary=f"bring code version {state.code_version or 'of the launch'} to the machines",
        )
        if state.spec.code
        else None
    )
    restore = contracts.schedule(
        contracts.choose_restore_point,
        m.ChooseRestorePoint(
            job_id=state.job_id,
            run_id=run.run_id,
            generation=run.generation,
            checkpoint=state.spec.checkpoint.dir,
            before_step=state.next_run.restore_before,
        ),
        summary="fence older runs off and choose the restore point",
    )
    port = contracts.schedule(
        contracts.prepare_run,
        m.PrepareRunInput(
            command_id=context.key(),
            job_id=state.job_id,
            generation=run.generation,
            machine=run.machines[0],
            policy=context.policy,
        ),
        summary=f"reserve a fresh port on {run.machines[0].machine_id}",
    )
    point: m.RestorePoint = await context.unless_cancelled(restore)
    where: m.PreparedRunResult = await context.unless_cancelled(port)
    if code is not None:
        brought: m.MaterialisedCodeResult = await context.unless_cancelled(code)
        if brought.failed:
            return _problems(brought.failed, "probe", "code version not brought")
        state.code_version, state.code_path = brought.code_version, brought.path
    if where.unreachable:
        return _problems(
            {run.machines[0].machine_id: where.unreachable}, "unreachable", "not reached"
        )
    state.run = run.model_copy(
        update={
            "restore": point.restore,
            "code_version": state.code_version or "none",
            "code_path": state.code_path,
        }
    )
    # The choice stands in the ledger: what it passed over is off the lineage from now on.
    state.next_run.restore_before = None
    # What an earlier run had reached is not where this one is.
    state.progress = m.Progress(step=point.restore.step if point.restore else None)
    context.rendezvous = (where.master_addr, where.master_port, point.checkpoint_dir)
    return ()


async def _start_ranks(context: JobContext) -> tuple[m.ObservationRecord, ...]:
    state, run = context.state, context.state.run
    if run is None:
        raise RuntimeError("no run is open")
    master_addr, master_port, checkpoint_dir = context.rendezvous
    commanded = workflow.now()
    handles = [
        contracts.schedule(
            contracts.start_ranks,
            m.StartRanks(
                command_id=context.key(),
                job_id=state.job_id,
                run_id=run.run_id,
                generation=run.generation,
                machines=shard,
                machines_total=len(run.machines),
                spec=state.spec,
                code_version=run.code_version,
                code_path=run.code_path,
                master_addr=master_addr,
                master_port=master_port,
                start_reason=run.start_reason,
                restore=run.restore,
                checkpoint_dir=checkpoint_dir,
                policy=context.policy,
            ),
            summary=f"start {len(shard) * state.spec.ranks_per_machine} ranks from "
            + (f"step {run.restore.step}" if run.restore else "the beginning"),
        )
        for shard in context.shards()
    ]
    problems: tuple[m.ObservationRecord, ...] = ()
    for handle in handles:
        try:
            started: m.StartedRanks = await handle
        except ActivityError as error:
            if cancelled(error):
                raise
            problems += _problems({"-": str(error.cause or error)[:500]}, "probe", "start failed")
            continue
        problems += _problems(started.refused, "probe", "start refused")
        problems += _problems(started.unreachable, "unreachable", "not reached")
    if not problems:
        context.enter(JobPhase.RUNNING, f"run {run.generation} started, waiting for its first step")
    context.record(
        {RunPhase.OPENED: run.opened_at, RunPhase.START_COMMANDED: commanded}
        | ({} if problems else {RunPhase.STARTED: workflow.now()})
    )
    return problems


def _problems(lines: dict[str, str], kind: str, what: str) -> tuple[m.ObservationRecord, ...]:
    return tuple(
        m.ObservationRecord(
            kind="unreachable" if kind == "unreachable" else EventKind.PROBE,
            verdict=Verdict.UNKNOWN if kind == "unreachable" else Verdict.FAULTY,
            machine_id=None if machine == "-" else machine,
            reason=f"{what}: {reason}"[:600],
        )
        for machine, reason in sorted(lines.items())
    )
