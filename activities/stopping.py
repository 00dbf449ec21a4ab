"""Ending a run on one machine, and what to say of a machine that does not answer.

Shared by ``launch.stop_ranks`` (a few quick tries: training has stopped and everybody waits) and
``detection.confirm_machines`` (again and again until the machine counts as lost).
"""

from __future__ import annotations

import asyncio

import structlog

from activities.clients import Reach, why
from everstep.decide.attribution import MachineReport
from everstep.machine.client import AgentRefused
from everstep.spec import agent_api as api
from everstep.spec import messages as m
from everstep.spec.policy import Policy

REACH_TIMEOUT_S = 1.0
"""A machine that is well answers a question within milliseconds."""

NOT_NOW = frozenset({api.ErrorCode.BUSY, api.ErrorCode.WRONG_BOOT, api.ErrorCode.EXPIRED})
"""Refusals of an agent that only cannot do it now: it is asked again."""

log = structlog.get_logger(__name__)


async def stop_on_machine(
    reach: Reach,
    machine: m.MachineRef,
    *,
    job_id: str,
    generation: int,
    command_id: str,
    reason: str,
    planned: bool,
    policy: Policy,
) -> MachineReport:
    """Capture evidence and end the run on one machine: one try.

    Returns:
        The machine's report; ``reachable=False`` when it gave none.
    """
    teardown, limits = policy.teardown, policy.machines
    grace = (teardown.stop_grace if planned else teardown.failure_grace).total_seconds()
    kill_wait = teardown.kill_wait.total_seconds()
    answer_max = limits.command_timeout.total_seconds() + grace + kill_wait
    try:
        agent = await reach.agent(machine.machine_id)
        # First a question that costs nothing: a frozen or absent agent is found out at once, and
        # only one that lives is given the time that a teardown may take.
        async with asyncio.timeout(REACH_TIMEOUT_S):
            await agent.info()
        async with asyncio.timeout(answer_max):
            stopped = await agent.stop_run(
                job_id=job_id,
                generation=generation,
                command_id=command_id,
                validity_s=limits.command_validity.total_seconds(),
                reason=reason,
                grace_s=grace,
                kill_wait_s=kill_wait,
                timeout_s=answer_max,
            )
    except AgentRefused as refusal:
        return _refused(machine, refusal)
    except Exception as error:  # noqa: BLE001 - unreachable, late or not to be understood: unknown
        return MachineReport(machine_id=machine.machine_id, reachable=False, note=why(error))
    return stopped.report


def _refused(machine: m.MachineRef, refusal: AgentRefused) -> MachineReport:
    """The machine answers: it knows nothing of the run, may not touch it, or could not end it."""
    gone = refusal.code == api.ErrorCode.NOT_FOUND
    log.warning("stop refused", machine_id=machine.machine_id, reason=why(refusal))
    return MachineReport(
        machine_id=machine.machine_id,
        reachable=refusal.code not in NOT_NOW,
        processes_vanished=gone,
        teardown_clean=refusal.code is not api.ErrorCode.FAILED,
        note=why(refusal),
    )
