"""What ranks have written, read from the agents that keep it; nothing of it is stored elsewhere.

Not here: which lines matter (``everstep.decide.logs``).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass

from everstep.connect import Places
from everstep.errors import NotFound, Unreachable
from everstep.ledger.views import RunRow
from everstep.ledger_reader import list_machines, read_job_spec, read_run
from everstep.machine.client import AgentClient
from everstep.machine.conversation import AgentRefused, AgentUnreachable
from everstep.secrets import Secrets

FOLLOW_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    """Which logs, and how much of them."""

    job_id: str
    rank: int | None = None
    generation: int | None = None
    follow: bool = False
    tail_bytes: int = 16 * 1024


async def show_logs(places: Places, request: LogRequest) -> None:
    """Print the end of the ranks' logs, and go on with what is added when asked to.

    Raises:
        NotFound: no such job, run or rank, or the machine does not keep that log any more.
        Unreachable: a machine does not answer.
    """
    url = places.require_ledger()
    token = Secrets.load(places.require_secrets()).controller
    run = await asyncio.to_thread(read_run, url, request.job_id, request.generation)
    per_machine = (await asyncio.to_thread(read_job_spec, url, request.job_id)).ranks_per_machine
    where = {row.machine_id: row.url for row in await asyncio.to_thread(list_machines, url)}
    ranks = _ranks(run, per_machine, request.rank)
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, AgentClient] = {}
        for machine_id in sorted(set(ranks.values())):
            clients[machine_id] = AgentClient(where[machine_id], token, machine_id=machine_id)
            await stack.enter_async_context(clients[machine_id])
        label = len(ranks) > 1
        tails = {
            rank: _Tail(clients[machine_id], run, rank, request.tail_bytes, label=label)
            for rank, machine_id in ranks.items()
        }
        for tail in tails.values():
            sys.stdout.write(await tail.more())
            if not request.follow:
                sys.stdout.write(tail.rest())
        while request.follow:
            sys.stdout.flush()
            await asyncio.sleep(FOLLOW_POLL_S)
            for tail in tails.values():
                # A machine that is away for a moment comes back with what it has kept.
                with contextlib.suppress(Unreachable):
                    sys.stdout.write(await tail.more())


def _ranks(run: RunRow, per_machine: int, wanted: int | None) -> dict[int, str]:
    """Ranks to show and the machine of each."""
    all_ranks = {
        ref.group_rank * per_machine + local: ref.machine_id
        for ref in run.machines
        for local in range(per_machine)
    }
    if wanted is None:
        return dict(sorted(all_ranks.items()))
    if wanted not in all_ranks:
        raise NotFound(
            f"{run.job_id} run {run.generation} has no rank {wanted} (it has 0 to "
            f"{len(all_ranks) - 1})"
        )
    return {wanted: all_ranks[wanted]}


class _Tail:
    """One rank's log, shown piece by piece."""

    def __init__(
        self, client: AgentClient, run: RunRow, rank: int, size: int, *, label: bool
    ) -> None:
        self._client = client
        self._run = run
        self._rank = rank
        self._size = size
        self._label = f"[rank {rank}] " if label else ""
        self._offset: int | None = None
        self._partial = b""

    async def more(self) -> str:
        """What was added since the last call, as whole lines."""
        run, which = self._run, f"rank {self._rank}, run {self._run.generation}"
        try:
            start, _, added = await self._client.log_part(
                run.job_id, run.generation, self._rank, tail_bytes=self._size, offset=self._offset
            )
        except AgentUnreachable as error:
            raise Unreachable(f"the machine of {which} does not answer: {error}") from None
        except AgentRefused as error:
            raise NotFound(f"no log of {which}: {error}") from None
        self._offset = start + len(added)
        whole, newline, self._partial = (self._partial + added).rpartition(b"\n")
        text = (whole + newline).decode("utf-8", "replace")
        return "".join(f"{self._label}{line}\n" for line in text.splitlines())

    def rest(self) -> str:
        """A last line without its end."""
        text = self._partial.decode("utf-8", "replace")
        return f"{self._label}{text}\n" if text else ""
