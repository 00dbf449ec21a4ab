"""Bringing a job's code version to its machines.

A version is named by the hash of what it holds, so the same name is the same code on every machine,
and an agent that has a whole copy answers at once. A job without ``code`` has the version "none".

Not here: copying (each agent, ``everstep.machine.code``), and changing a running job's version.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import structlog
from temporalio import activity

from activities.clients import (
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
from activities.failures import permanent
from everstep.machine.code import CodeProblem, hash_directory
from everstep.spec import messages as m

NO_CODE = "none"
TRIES = 3
RETRY_AFTER_S = 0.5
COPY_TIMEOUT_S = 1800.0
"""For one machine, one try. A code version is source code: seconds, on any file system."""

log = structlog.get_logger(__name__)


class CodeLedger(LooksUpMachines, Protocol):
    """What bringing code needs of the ledger."""

    def record_code_version(
        self,
        job_id: str,
        code_version: str,
        *,
        now: datetime,
        source: str | None = ...,
        path: str | None = ...,
    ) -> object:
        """Enter a code version of a job, once."""


class HotUpdate:
    """The activity of this file."""

    def __init__(self, ledger: CodeLedger, agents: Agents) -> None:
        self._ledger = ledger
        self._agents = agents

    @activity.defn(name="materialise_code")
    async def materialise_code(self, request: m.MaterialiseCodeInput) -> m.MaterialisedCodeResult:
        """Bring a code version to machines, verified by hash."""
        if request.source is None:
            return m.MaterialisedCodeResult(code_version=NO_CODE)
        source, validity = request.source, request.policy.policy.machines.command_validity
        reach = Reach(self._ledger, self._agents, [ref.machine_id for ref in request.machines])
        paths: dict[str, str] = {}
        failed: dict[str, str] = {}
        async with heartbeating():
            await reach.find_all()
            version = request.code_version or await self._version(source)

            async def bring(ref: m.MachineRef) -> None:
                for tried in range(TRIES):
                    if tried:
                        await asyncio.sleep(RETRY_AFTER_S)
                    try:
                        agent = await reach.agent(ref.machine_id)
                        answer = await agent.materialise_code(
                            job_id=request.job_id,
                            generation=request.generation,
                            command_id=command_for(request.command_id, ref.machine_id),
                            validity_s=validity.total_seconds(),
                            code_version=version,
                            source=source,
                            timeout_s=COPY_TIMEOUT_S,
                        )
                    except Exception as error:  # noqa: BLE001 - see ``why``
                        failed[ref.machine_id] = why(error)
                    else:
                        failed.pop(ref.machine_id, None)
                        paths[ref.machine_id] = answer.path
                        return

            await on_each(request.machines, bring)
            path = next(iter(paths.values()), None)
            await ledger_call(
                self._ledger.record_code_version,
                request.job_id,
                version,
                now=datetime.now(UTC),
                source=source,
                path=path,
            )
        after_effect()
        log.info(
            "code brought",
            job_id=request.job_id,
            code_version=version,
            machines=len(paths),
            failed=failed,
        )
        return m.MaterialisedCodeResult(code_version=version, path=path, failed=failed)

    async def _version(self, source: str) -> str:
        try:
            return await asyncio.to_thread(hash_directory, Path(source))
        except CodeProblem as problem:
            raise permanent(f"code: {problem}") from None
