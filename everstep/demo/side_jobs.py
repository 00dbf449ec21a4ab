"""Jobs of their own: two that must end, each with its reason, and one that knows nothing of us.

Not here: the main job's faults (``everstep.demo.faults``).
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from pathlib import Path

from temporalio.client import WorkflowFailureError

from everstep.decide.words import JobPhase, Rung, Symptom
from everstep.demo import jobs
from everstep.demo.faults import row_of
from everstep.demo.report import Row
from everstep.demo.stage import RECOVER_LIMIT_S, START_LIMIT_S, Before, Stage
from everstep.errors import JobFailed
from everstep.ledger import MachineState
from everstep.rpc_errors import input_was_refused, short
from everstep.spec.messages import TASK_QUEUE, TRAINING_JOB, job_workflow_id

PLAIN_STEPS = 60
END_LIMIT_S = 180.0
_STEP = re.compile(r"^step (\d+) ", re.MULTILINE)


async def user_error(stage: Stage, code: Path) -> Row:
    """A fault in the job's own code that never goes away: the budget ends it, nobody is blamed."""
    stage.orders.mkdir(parents=True, exist_ok=True)
    order = "always.exception.rank1.step3"
    (stage.orders / order).touch()
    machines_before = await _evicted(stage)
    await stage.client.launch(jobs.user_error_job(code=code, orders=stage.orders))
    reason = ""
    try:
        result = await stage.client.wait(stage.job_id, timeout_s=END_LIMIT_S, poll_s=0.2)
        reason = f"it ended as {result.phase}"
    except JobFailed as error:
        reason = str(error)
    fired = sorted((stage.orders / "fired").glob(f"{order}.*"), key=lambda p: p.stat().st_mtime)
    at = fired[0].stat().st_mtime if fired else time.time()
    incidents = await stage.new_incidents(Before(0, -1, 0))
    name = "user error that never goes away"
    row = row_of(name, stage.job_id, at, incidents, await stage.runs())
    row.ends_job, row.recover_s, row.steps_lost, row.problem = True, None, None, ""
    job = await asyncio.to_thread(stage.ledger.job, stage.job_id)
    last = incidents[-1].decisions[-1].decision.rung if incidents else None
    if job is None or job.phase is not JobPhase.FAILED:
        row.problem = f"the job is {job.phase if job else 'unknown'}: {reason}"
    elif row.symptom != Symptom.USER_CODE or last is not Rung.GIVE_UP:
        row.problem = f"named {row.symptom}, ended by {last}"
    elif await _evicted(stage) != machines_before:
        row.problem = "a machine was blamed"
    elif len(fired) < 2:
        row.problem = f"the fault was made {len(fired)} times"
    return row


async def bad_spec(stage: Stage) -> Row:
    """A spec that cannot be, sent past our own checks: the start fails at once with the reason."""
    temporal, at = stage.client.temporal, time.time()
    row = Row(
        name="bad job spec",
        job=stage.job_id,
        symptom=str(Symptom.CONFIG_ERROR),
        action="refused",
        steps_lost=None,
        ends_job=True,
    )
    handle = await temporal.start_workflow(
        TRAINING_JOB,
        jobs.bad_spec(),
        id=job_workflow_id(stage.job_id),
        task_queue=TASK_QUEUE,
    )
    try:
        async with asyncio.timeout(30):
            await handle.result()
        row.problem = "it was taken"
    except TimeoutError:
        row.problem = "it neither failed nor ended"
    except WorkflowFailureError as error:
        row.detect_s = row.decide_s = time.time() - at
        reason = short(error.cause)
        if not input_was_refused(error) or "layout" not in reason:
            row.problem = f"refused with: {reason}"
    return row


async def plain_torchrun(stage: Stage, code: Path, folder: Path) -> Row:
    """A script without the trainer library, whose rank is killed: it resumes from its own file."""
    name = "plain torchrun script, rank SIGKILL"
    checkpoints = folder / "plain-checkpoints"
    await stage.client.launch(jobs.plain_job(code=code, steps=PLAIN_STEPS, checkpoints=checkpoints))

    async def saved() -> bool:
        return (checkpoints / "newest").is_file()

    await stage.until("the plain script saved something", saved, limit_s=START_LIMIT_S)
    at = await stage.signal_rank(1, signal.SIGKILL)
    first: list[tuple[float, int]] = []

    async def steps_again() -> bool:
        if step := _STEP.search(await stage.log(0, generation=2)):
            first.append((time.time(), int(step[1])))
        return bool(first)

    await stage.until("the plain script steps again", steps_again, limit_s=RECOVER_LIMIT_S)
    before = [int(step) for step in _STEP.findall(await stage.log(0, generation=1))]
    result = await stage.client.wait(stage.job_id, timeout_s=RECOVER_LIMIT_S, poll_s=0.2)
    incidents = await stage.new_incidents(Before(0, -1, 0))
    runs = await stage.runs()
    row = row_of(name, stage.job_id, at, incidents, runs)
    # Nobody reports its steps: what it prints is all there is.
    again_at, again = first[0]
    row.recover_s, row.steps_lost = again_at - at, max(0, max(before) - again + 1)
    row.problem = ""
    if result.phase is not JobPhase.SUCCEEDED:
        row.problem = f"the job has {result.phase}: {result.reason}"
    elif len(incidents) != 1 or len(runs) != 2:
        row.problem = f"{len(incidents)} incidents and {len(runs)} runs instead of 1 and 2"
    return row


async def _evicted(stage: Stage) -> set[str]:
    rows = await asyncio.to_thread(stage.ledger.machines)
    return {row.machine_id for row in rows if row.state is MachineState.EVICTED}
