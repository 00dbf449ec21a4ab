"""Control time of a job on 256 machines: launch, stop, and what following it costs.

256 agents (real HTTP API, command journal, event streams; see ``agent_farm``) in a few processes
register with a real controller, but start no ranks, so what is left is control: claiming machines
in the ledger, commands, workflow tasks. The floor in the same run is a bare loop: the same
commands, prepared before, sent to the same agents at once, with one HTTP client for each agent over
one TLS context. Ratios to it say what Temporal, ledger and activities add; agents and controller
share the CPUs.

    python benchmarks/bench_launch_256.py [--repetitions N]
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from benchmarks import common
from everstep.client import Client
from everstep.decide.words import JobPhase, RunPhase
from everstep.ledger import Ledger, RunRow
from everstep.machine.client import PATHS, shared_ssl_context
from everstep.secrets import Secrets
from everstep.short_lived import leave, run_short
from everstep.spec.agent_api import AgentRunPolicy, Command, RunPlan, StartRun, StopRun
from workers.embedded import Embedded, EmbeddedOptions

AGENTS = 256
FARMS = 4
SAMPLE_S = 10.0
LIMIT_S = 180.0
OURS, FLOOR = "everstep", "floor: a bare loop of 256 POSTs"
CONTROLLER = "controller-1"
CPU_REMARK = (
    f"CPU shares over {SAMPLE_S:g} s. Without a job the controller takes {AGENTS} registrations "
    f"every 5 s and writes each into the ledger; with one it also reads {AGENTS} streams with a "
    "heartbeat line every 2 s."
)


def main() -> int:
    """Measure."""
    options = common.arguments(__doc__, repetitions=5, at_least=1)
    return run_short(lambda: measure(options.repetitions))


async def measure(repetitions: int) -> int:
    """All repetitions on one fleet."""
    load_before, samples = common.load(), common.Samples()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        embedded = Embedded(EmbeddedOptions(state=folder / "s", machines=0))
        try:
            await embedded.start()
            async with fleet(embedded, folder / "agents") as urls, Loop(embedded, urls) as loop:
                client = await embedded.client()
                ledger = Ledger(embedded.addresses.ledger)
                await cpu_share(samples, embedded, "controller CPU, no job")
                for number in range(1, repetitions + 1):
                    await loop.repetition(samples, number)
                    await one_job(samples, embedded, client, ledger, f"bench-{number}")
                ledger.close()
        finally:
            await embedded.stop()
    common.publish("launch_256", samples.rows(), notes(samples), load_before=load_before)
    return 0


@contextlib.asynccontextmanager
async def fleet(embedded: Embedded, folder: Path) -> AsyncIterator[dict[str, str]]:
    """All agents, registered: their URLs by machine."""
    up = embedded.addresses
    farms: list[subprocess.Popen[bytes]] = []
    try:
        farms.extend(_farm(folder, n, up.secrets, up.controllers[0]) for n in range(FARMS))
        for process in farms:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            assert line == b"ready\n", "an agent farm did not start"
        ledger = Ledger(up.ledger)
        async with asyncio.timeout(LIMIT_S):
            while len(rows := await asyncio.to_thread(ledger.machines)) < AGENTS:  # noqa: ASYNC110 - a database
                await asyncio.sleep(0.2)
        ledger.close()
        yield {row.machine_id: row.url for row in rows}
    finally:
        for process in farms:
            process.kill()
            process.wait()


def _farm(folder: Path, number: int, secrets: str, controller: str) -> subprocess.Popen[bytes]:
    share = AGENTS // FARMS
    return subprocess.Popen(
        [
            *(sys.executable, str(common.CHECKOUT / "benchmarks" / "agent_farm.py")),
            *(str(folder), str(number * share), str(share), secrets, controller),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


# --- the floor


class Loop:
    """The bare loop: commands that are ready, sent to all agents at once."""

    def __init__(self, embedded: Embedded, urls: dict[str, str]) -> None:
        token = Secrets.load(embedded.addresses.secrets).controller
        context = shared_ssl_context()
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._clients = {
            machine_id: httpx.AsyncClient(
                base_url=url, headers=headers, verify=context, timeout=60.0, trust_env=False
            )
            for machine_id, url in urls.items()
        }
        self._boots: dict[str, tuple[str, float]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def repetition(self, samples: common.Samples, number: int) -> None:
        """Start and stop a run by hand."""
        for machine_id, client in self._clients.items():
            info = (await client.get("/v1/machine")).json()
            self._boots[machine_id] = (info["agent_boot_id"], info["monotonic_s"])
        fields = {"job_id": f"floor-{number}", "generation": 1}
        start_s = await self._send(StartRun, number, fields | {"run": PLAN})
        stop_s = await self._send(
            StopRun, number, fields | {"reason": "floor", "grace_s": 1.0, "kill_wait_s": 1.0}
        )
        samples.add(FLOOR, "start_run", start_s, unit="s")
        samples.add(FLOOR, "stop_run", stop_s, unit="s")

    async def _send(self, kind: type[Command], number: int, fields: dict[str, Any]) -> float:
        bodies = {
            machine_id: kind(
                agent_boot_id=boot,
                not_after_s=clock_s + 120.0,
                command_id=f"floor/{number}/{kind.__name__}/{machine_id}",
                **fields,
            ).model_dump_json()
            for machine_id, (boot, clock_s) in self._boots.items()
        }
        began = time.monotonic()
        answers = await asyncio.gather(
            *(
                self._clients[machine_id].post(PATHS[kind], content=body)
                for machine_id, body in bodies.items()
            )
        )
        took_s = time.monotonic() - began
        bad = [answer.text for answer in answers if not answer.is_success]
        assert not bad, bad[0]
        return took_s


PLAN = RunPlan(
    run_id="floor-r1",
    command=("true",),
    code_version="none",
    machines=AGENTS,
    ranks_per_machine=1,
    group_rank=0,
    master_addr="127.0.0.1",
    master_port=29500,
    start_reason="launch",
    policy=AgentRunPolicy(
        settle_window_s=0.3,
        first_step_max_s=600.0,
        hang_min_s=60.0,
        hang_factor=10.0,
        section_max_s=1800.0,
        exit_skew_max_s=30.0,
        failure_grace_s=1.0,
        kill_wait_s=10.0,
        runs_kept_max=5,
    ),
)


# --- Everstep


async def one_job(
    samples: common.Samples, embedded: Embedded, client: Client, ledger: Ledger, job_id: str
) -> None:
    """Launch a job on all machines, follow it, cancel it."""
    launched_at = time.time()
    await client.launch(
        {"name": job_id, "command": ["true"], "machines": AGENTS, "ranks_per_machine": 1}
    )
    run = await _started(ledger, job_id)
    started, commanded = run.at(RunPhase.STARTED), run.at(RunPhase.START_COMMANDED)
    assert started is not None
    assert commanded is not None
    samples.add(OURS, "launch to started", started.timestamp() - launched_at, unit="s")
    samples.add(OURS, "start_ranks", (started - commanded).total_seconds(), unit="s")
    await cpu_share(samples, embedded, f"controller CPU, {AGENTS} streams open")
    cancelled_at = time.time()
    await client.cancel(job_id, reason="measured")
    result = await client.wait(job_id, timeout_s=LIMIT_S, poll_s=0.05)
    assert result.phase is JobPhase.CANCELLED, result.reason
    samples.add(OURS, "cancel to ended", time.time() - cancelled_at, unit="s")
    print(
        f"  {job_id}: started after {started.timestamp() - launched_at:.2f} s, ended "
        f"{time.time() - cancelled_at:.2f} s after cancel",
        flush=True,
    )


async def _started(ledger: Ledger, job_id: str) -> RunRow:
    async with asyncio.timeout(LIMIT_S):
        while True:
            runs = await asyncio.to_thread(ledger.runs, job_id)
            if runs and runs[0].at(RunPhase.STARTED) is not None:
                assert len(runs) == 1, "the job was restarted"
                return runs[0]
            await asyncio.sleep(0.1)


async def cpu_share(samples: common.Samples, embedded: Embedded, metric: str) -> None:
    """How much of one CPU the controller takes for a while."""
    process = psutil.Process(embedded.pid(CONTROLLER))
    before, began = process.cpu_times(), time.monotonic()
    await asyncio.sleep(SAMPLE_S)  # the length of the sample
    after, passed_s = process.cpu_times(), time.monotonic() - began
    used_s = after.user + after.system - before.user - before.system
    samples.add(OURS, metric, 100 * used_s / passed_s, unit="% of a CPU")


# --- words


def notes(samples: common.Samples) -> common.Notes:
    """What has to be said about the numbers."""
    pairs = (
        ("launch to started", "start_run"),
        ("start_ranks", "start_run"),
        ("cancel to ended", "stop_run"),
    )
    ratios = []
    for ours, floor in pairs:
        a, b = samples.median(OURS, ours), samples.median(FLOOR, floor)
        assert a is not None
        assert b is not None
        ratios.append(f"{ours} {a / b:.1f}")
    return common.Notes(
        title="A job on 256 machines",
        text=(
            f"{AGENTS} agents without ranks, in {FARMS} processes on the same CPUs; every command "
            "is journalled by every agent as always. Launch: from the client's call to the run's "
            "start on all machines. Cancel: from the call to the end of the workflow."
        ),
        remarks=(
            f"Everstep / floor: {', '.join(ratios)}.",
            CPU_REMARK,
        ),
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    leave(code)
