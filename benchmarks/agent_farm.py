"""Many agents in one process: the real HTTP API, commands, journal and streams, and no ranks.

    python benchmarks/agent_farm.py FOLDER FIRST COUNT SECRETS CONTROLLER

Agents ``m-FIRST`` to ``m-(FIRST+COUNT-1)`` listen on free loopback ports and register like any
other. When all of them listen, a line ``ready`` is printed; the process ends when its standard
input does. Their runs are a ``NullRuns``: it says that ranks were started and stopped, and starts
nothing. Not here: what is measured.
"""

from __future__ import annotations

import asyncio
import secrets as random_secrets
import ssl
import sys
from dataclasses import dataclass, field
from pathlib import Path

from everstep.decide.attribution import MachineReport
from everstep.decide.stack_report import StackReport
from everstep.machine.api import AgentParts, create_app, own_version
from everstep.machine.client import shared_ssl_context
from everstep.machine.code import CodeStore
from everstep.machine.commands import CommandDesk, Machine
from everstep.machine.fences import Fences
from everstep.machine.guard import Doors
from everstep.machine.journal import Journal
from everstep.machine.registration import Registrar
from everstep.machine.ring import EventRing
from everstep.machine.slots import SlotShape
from everstep.machine.stacks import CaptureLimits
from everstep.machine.stream import Streams
from everstep.machine.wire import hardened_server
from everstep.process_log import configure_logging
from everstep.secrets import Secrets
from everstep.spec.agent_api import (
    API_VERSION,
    EventKind,
    Registration,
    RegistrationAnswer,
    RunPlan,
    RunState,
    RunSummary,
)
from workers.agent_start import listening

RING = SlotShape(kind=b"everstep-ring", slots=128, slot_bytes=2048)
"""A sixteenth of an agent's: hundreds share a disk here."""


@dataclass
class NullRuns:
    """The interface of ``RunManager``; only remembers."""

    machine_id: str
    ring: EventRing
    states: dict[tuple[str, int], RunState] = field(default_factory=dict)

    async def prepare(self, job_id: str, generation: int) -> int:  # noqa: ARG002
        """Any port: nobody meets there."""
        return 20_000 + generation

    async def start(self, job_id: str, generation: int, plan: RunPlan) -> dict[int, int]:
        """Say that the ranks were started."""
        pids = dict.fromkeys(range(plan.ranks_per_machine), 1)
        self.states[job_id, generation] = RunState(
            run_id=plan.run_id,
            ended=False,
            succeeded=False,
            first_step_seen=False,
            report=MachineReport(machine_id=self.machine_id, reachable=True),
            pids=pids,
        )
        self.ring.emit(
            EventKind.RUN_STARTED, job_id=job_id, run_id=plan.run_id, generation=generation
        )
        return pids

    async def stop(
        self,
        job_id: str,
        generation: int,
        *,
        reason: str,
        grace_s: float,  # noqa: ARG002
        kill_wait_s: float,  # noqa: ARG002
        planned: bool,
    ) -> MachineReport:
        """Say that they were stopped."""
        self.states.pop((job_id, generation), None)
        return MachineReport(
            machine_id=self.machine_id, reachable=True, planned_stop=reason if planned else None
        )

    async def stop_older(self, job_id: str, generation: int) -> None:
        """Forget older runs."""
        for job, older in list(self.states):
            if job == job_id and older < generation:
                del self.states[job, older]

    def state(self, job_id: str, generation: int) -> RunState | None:
        """What is remembered of a run."""
        return self.states.get((job_id, generation))

    def live_jobs(self) -> dict[str, int]:
        """Jobs whose ranks are said to run."""
        return dict(self.states)

    def summaries(self) -> tuple[RunSummary, ...]:
        """The same for heartbeats."""
        return tuple(
            RunSummary(
                job_id=job, run_id=state.run_id, generation=generation, live_ranks=len(state.pids)
            )
            for (job, generation), state in self.states.items()
        )

    def log_path(self, job_id: str, generation: int, rank: int) -> Path | None:  # noqa: ARG002
        """No rank, no log."""
        return None

    async def stacks(
        self, job_id: str, generation: int, limits: CaptureLimits
    ) -> StackReport | None:
        """None: no run has processes here."""
        del job_id, generation, limits
        return None


async def agent(
    folder: Path,
    machine_id: str,
    tokens: Secrets,
    controller: str,
    context: ssl.SSLContext,
    listens: asyncio.Event,
) -> None:
    """One agent, until it is cancelled."""
    state = folder / machine_id
    state.mkdir(parents=True)
    machine = Machine(
        machine_id=machine_id,
        agent_boot_id=random_secrets.token_hex(8),
        address="127.0.0.1",
        slots=1,
    )
    ring = EventRing(state / "events.ring", RING)
    runs = NullRuns(machine_id, ring)
    streams = Streams(
        ring,
        machine_id=machine_id,
        agent_boot_id=machine.agent_boot_id,
        summaries=runs.summaries,
        heartbeat_interval_s=2.0,
    )

    async def shut_down(reason: str) -> dict[str, int]:  # noqa: ARG001
        return runs.live_jobs()

    desk = CommandDesk(
        machine,
        runs=runs,
        journal=Journal(state / "commands.sqlite"),
        fences=Fences(state / "fences"),
        code=CodeStore(state / "code", private=(state,)),
        code_in_use=lambda: (),
        shut_down=shut_down,
    )
    parts = AgentParts(
        machine=machine,
        runs=runs,
        desk=desk,
        ring=ring,
        streams=streams,
        doors=Doors(controller=tokens.controller, metrics=tokens.metrics),
    )
    server = hardened_server(create_app(parts), tls=None, exit_grace_s=0.1)
    with listening("127.0.0.1:0") as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def describe() -> Registration:
            return Registration(
                api_version=API_VERSION,
                machine_id=machine_id,
                agent_boot_id=machine.agent_boot_id,
                url=url,
                address=machine.address,
                slots=machine.slots,
                version=own_version(),
                jobs=runs.live_jobs(),
            )

        async def apply(answer: RegistrationAnswer) -> None:
            for job_id, generation in answer.fences.items():
                await desk.apply_fence(job_id, generation)

        registrar = Registrar(
            [controller],
            tokens.enrol,
            describe=describe,
            apply=apply,
            interval_s=5.0,
            ssl_context=context,
        )
        listens.set()
        await asyncio.gather(server.serve(sockets=[listener]), registrar.run())


async def main() -> None:
    """All agents, until standard input ends."""
    folder, first, count, secrets, controller = sys.argv[1:]
    configure_logging("agent-farm")
    tokens, context = Secrets.load(Path(secrets)), shared_ssl_context()
    tasks, all_listen = [], []
    for number in range(int(first), int(first) + int(count)):
        listens = asyncio.Event()
        all_listen.append(listens.wait())
        tasks.append(
            asyncio.create_task(
                agent(Path(folder), f"m-{number:03d}", tokens, controller, context, listens)
            )
        )
    await asyncio.gather(*all_listen)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
