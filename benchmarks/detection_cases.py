"""The faults of ``bench_detection``: how each is made, and which event tells of it.

As a program it measures some of them, side by side, each at a machine of its own and anew for each
repetition, and writes what it saw into ``FOLDER/seen.json``. It ends when its standard input does.

    python -m benchmarks.detection_cases FOLDER REPETITIONS CASE...

Not here: namespaces and agents (``detection_world``), the result (``bench_detection``).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from activities.launch import agent_run_policy
from benchmarks.common import CHECKOUT
from benchmarks.detection_world import (
    POLL_S,
    START_LIMIT_S,
    Agent,
    Ear,
    Network,
    NotInTime,
    agent,
    heard,
    network,
    open_network,
)
from everstep.decide.words import Action, Verdict
from everstep.spec.agent_api import EventKind, EventLine, RunPlan
from everstep.spec.load import load_policy
from tests.support.nvml import LIBRARY, StandIn

LIMIT_S = 120.0
"""Twice what the slowest may take by the policy: this box may be slow."""
STARTS_AT_ONCE = 2
FLAP_DOWN_S, FLAP_UP_S = 0.5, 4.0
SICK_GPU = 1
WARM_STEPS = 50
THERMAL = 0x40
"""NVML's reason for lowered clocks: hardware thermal slowdown."""
OOPS = (
    "BUG: unable to handle page fault for address: ffffb12345678000",
    "#PF: supervisor write access in kernel mode",
    "Oops: 0002 [#1] SMP NOPTI",
    "CPU: 3 PID: 4711 Comm: kworker/3:2 Not tainted 6.1.0-18-amd64 #1",
)
REAL, STAND_IN = "real", "stand-in"
NAMESPACES, COMPILER = "namespaces", "compiler"
Matches = Callable[[EventLine], bool]
Gate = asyncio.Semaphore


@dataclass(slots=True)
class Subject:
    """A machine and the way to break it."""

    agent: Agent
    break_it: Callable[[], object]
    go_on: Callable[[], Coroutine[Any, Any, None]] | None = None
    """What the fault does after that, until it is cancelled."""


Setting = Callable[[Path, int], AbstractAsyncContextManager[Subject]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row."""

    name: str
    kind: str
    """``real``: the thing itself; ``stand-in``: what the agent reads is made, all else is real."""
    made: str
    """How, in words."""
    setting: Setting
    told: Matches
    """Whether an event tells of it; ignored where the stream itself is what is lost."""
    interval: str = ""
    """Which interval of the policy the fault comes at a random instant of; empty: none matters."""
    probes: tuple[str, ...] = ()
    """Probes that have to have found the machine well before."""
    evicts_later: bool = False
    """The first observation is a warning; a later one calls for the eviction."""
    hint: Matches | None = None
    """An event that says less, sooner."""
    stream_lost: bool = False
    """No event can come: the stream's silence is what is noticed."""
    needs: str = ""
    paper_s: float | None = None
    """The paper's Table 3, with inspection; None: it has no such row."""


@dataclass(slots=True)
class Seen:
    """One repetition; all seconds count from the fault."""

    case: str
    first_s: float | None
    evict_s: float | None = None
    hint_s: float | None = None
    rule: str = ""


# --- what tells


def faulty(*rules: str) -> Matches:
    """A probe's event with one of these rules that says faulty."""

    def matches(line: EventLine) -> bool:
        data = line.data
        return (
            line.kind is EventKind.PROBE
            and data.get("verdict") == Verdict.FAULTY
            and data.get("rule") in rules
        )

    return matches


def missed(line: EventLine) -> bool:
    """The gateway has not answered once."""
    return line.kind is EventKind.PROBE and line.data.get("rule") == "gateway_missed"


def of_kind(kind: EventKind) -> Matches:
    """An event of a run."""
    return lambda line: line.kind is kind


def nothing(_: EventLine) -> bool:
    """No event."""
    return False


# --- settings


def on_network(break_it: Callable[[Network], object]) -> Setting:
    """A machine in a namespace."""

    @asynccontextmanager
    async def setting(folder: Path, number: int) -> AsyncIterator[Subject]:
        with network(number) as net:
            async with agent(folder, net.name, net) as running:
                yield Subject(running, lambda: break_it(net))

    return setting


@asynccontextmanager
async def flapping(folder: Path, number: int) -> AsyncIterator[Subject]:
    """A switch's port that goes down and up again and again."""
    with network(number) as net:

        async def go_on() -> None:
            while True:
                await asyncio.sleep(FLAP_DOWN_S)
                net.set_port("up")
                await asyncio.sleep(FLAP_UP_S)
                net.set_port("down")

        async with agent(folder, net.name, net) as running:
            yield Subject(running, lambda: net.set_port("down"), go_on)


def with_gpus(**says: str | int) -> Setting:
    """A machine with two GPUs of the stand-in library; the second one falls ill."""

    @asynccontextmanager
    async def setting(folder: Path, number: int) -> AsyncIterator[Subject]:
        home = folder.with_name(f"{folder.name}-nvml")
        home.mkdir()
        shutil.copy(folder.parent / LIBRARY, home / LIBRARY)
        library = StandIn(home)
        library.set(count=2)
        async with agent(folder, f"machine-{number}", library=home) as running:
            yield Subject(running, lambda: library.set(SICK_GPU, **says))

    return setting


@asynccontextmanager
async def kernel_fault(folder: Path, number: int) -> AsyncIterator[Subject]:
    """A machine whose kernel log is a file."""

    def write() -> None:
        with (folder / "kernel.log").open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in OOPS))

    async with agent(folder, f"machine-{number}") as running:
        yield Subject(running, write)


def with_ranks(number_of_signal: signal.Signals) -> Setting:
    """A machine with two ranks that make ten steps a second."""

    @asynccontextmanager
    async def setting(folder: Path, number: int) -> AsyncIterator[Subject]:
        async with agent(folder, f"machine-{number}") as running:
            pids = await _start_ranks(running)
            try:
                yield Subject(running, lambda: os.kill(pids[1], number_of_signal))
            finally:
                await running.client.stop_run(
                    **_ENVELOPE,
                    command_id="stop",
                    reason="seen",
                    grace_s=0.5,
                    kill_wait_s=10.0,
                )

    return setting


_ENVELOPE: dict[str, Any] = {"job_id": "bench", "generation": 1, "validity_s": 30.0}


async def _start_ranks(running: Agent) -> Mapping[int, int]:
    client = running.client
    place = await client.prepare_run(**_ENVELOPE, command_id="prepare")
    script = CHECKOUT / "examples" / "counter_job" / "train.py"
    plan = RunPlan(
        run_id="bench-r1",
        command=(
            *(sys.executable, str(script), "--steps", "1000000", "--step-ms", "100"),
            *("--save-every", "1000000", "--timeout-s", "600"),
        ),
        code_version="none",
        machines=1,
        ranks_per_machine=2,
        group_rank=0,
        master_addr=place.master_addr,
        master_port=place.master_port,
        start_reason="launch",
        policy=agent_run_policy(load_policy(None, environ={}).policy),
    )
    started = await client.start_run(**_ENVELOPE, command_id="start", run=plan)
    deadline = time.monotonic() + START_LIMIT_S
    while not any((run.step or 0) >= WARM_STEPS for run in (await client.info()).runs):
        if time.monotonic() > deadline:
            raise NotInTime(f"{running.machine_id}: the ranks made no {WARM_STEPS} steps")
        await asyncio.sleep(POLL_S)
    return started.pids


# --- the cases

CASES = (
    Case(
        name="NIC crash",
        kind=REAL,
        made="the interface of the default route is deleted; the stream has a NIC of its own",
        setting=on_network(lambda net: net.lose_nic("data0")),
        told=faulty("link_missing", "link_down"),
        interval="network",
        probes=("link", "gateway"),
        evicts_later=True,
        needs=NAMESPACES,
        paper_s=30,
    ),
    Case(
        name="NIC crash, the machine's only NIC",
        kind=REAL,
        made="the interface that carries the stream is deleted",
        setting=on_network(lambda net: net.lose_nic("mgmt0")),
        told=nothing,
        interval="heartbeat",
        stream_lost=True,
        needs=NAMESPACES,
    ),
    Case(
        name="port flapping",
        kind=REAL,
        made=f"the switch's port is down for {FLAP_DOWN_S:g} s and up for {FLAP_UP_S:g} s, "
        "by turns",
        setting=flapping,
        told=faulty("link_flap", "link_down"),
        interval="network",
        probes=("link", "gateway"),
        evicts_later=True,
        needs=NAMESPACES,
        paper_s=30,
    ),
    Case(
        name="switch down",
        kind=REAL,
        made="the bridge that is the switch forwards nothing any more, the link to it stays up",
        setting=on_network(Network.unplug_in_switch),
        told=faulty("gateway_unreachable"),
        hint=missed,
        interval="network",
        probes=("link", "gateway"),
        needs=NAMESPACES,
        paper_s=60,
    ),
    Case(
        name="GPU driver hang",
        kind=STAND_IN,
        made="calls for one of two GPUs of the stand-in library do not return",
        setting=with_gpus(hang=1),
        told=faulty("driver_hang"),
        interval="gpu",
        probes=("gpu",),
        needs=COMPILER,
        paper_s=10,
    ),
    Case(
        name="high temperature",
        kind=STAND_IN,
        made="the library says 95 °C and that clocks are lowered for heat",
        setting=with_gpus(temperature=95, slowdown_reasons=THERMAL),
        told=faulty("thermal_slowdown", "thermal_slowdown_lasting"),
        interval="gpu",
        probes=("gpu",),
        evicts_later=True,
        needs=COMPILER,
        paper_s=10,
    ),
    Case(
        name="GPU lost",
        kind=STAND_IN,
        made="the library answers GPU_IS_LOST for one of two GPUs",
        setting=with_gpus(error=15),
        told=faulty("gpu_lost"),
        interval="gpu",
        probes=("gpu",),
        needs=COMPILER,
        paper_s=10,
    ),
    Case(
        name="OS kernel fault",
        kind=STAND_IN,
        made="the lines of a kernel oops, in a file that the agent follows as its kernel log",
        setting=kernel_fault,
        told=faulty("kernel_oops"),
        interval="host",
        probes=("kernel_log",),
        paper_s=2,
    ),
    Case(
        name="rank SIGKILL",
        kind=REAL,
        made="one of two ranks is killed",
        setting=with_ranks(signal.SIGKILL),
        told=of_kind(EventKind.RANK_EXITED),
    ),
    Case(
        name="rank SIGSTOP (hang)",
        kind=REAL,
        made="one of two ranks that make ten steps a second is stopped",
        setting=with_ranks(signal.SIGSTOP),
        told=of_kind(EventKind.RANK_STALLED),
    ),
)


# --- measuring


async def measure(case: Case, folder: Path, numbers: Mapping[int, int], gate: Gate) -> list[Seen]:
    """All repetitions of one case, one after the other.

    Args:
        case: what is broken.
        folder: for all machines.
        numbers: repetition to the number of its machine.
        gate: how many agents may be starting at once.
    """
    found = []
    for repetition, number in numbers.items():
        async with AsyncExitStack() as stack:
            async with gate:
                setting = case.setting(folder / f"machine-{number}", number)
                subject = await stack.enter_async_context(setting)
                await subject.agent.well(case.probes)
            ear = await stack.enter_async_context(heard(subject.agent.client))
            # One instant in each part of the interval, so that few repetitions cover it.
            share = (repetition + random.random()) / len(numbers)
            await asyncio.sleep(share * _interval_s(case.interval))
            found.append(await _one(case, subject, ear))
    return found


def _interval_s(name: str) -> float:
    if not name:
        return 0.0
    policy = load_policy(None, environ={}).policy
    return {
        "gpu": policy.probes.gpu_interval,
        "host": policy.probes.host_interval,
        "network": policy.probes.network_interval,
        "heartbeat": policy.detection.heartbeat_interval,
    }[name].total_seconds()


async def _one(case: Case, subject: Subject, ear: Ear) -> Seen:
    """Break it, and listen."""
    at_s = time.monotonic()
    subject.break_it()
    going_on = asyncio.create_task(subject.go_on()) if subject.go_on else None

    def evicts(line: EventLine) -> bool:
        return case.told(line) and line.data.get("action") == Action.EVICT_MACHINE

    def complete() -> bool:
        if ear.lost_s is not None:
            return True
        last = evicts if case.evicts_later else case.told
        return ear.first(at_s, last) is not None

    try:
        await ear.until(complete, LIMIT_S)
    finally:
        if going_on is not None:
            going_on.cancel()
            await asyncio.gather(going_on, return_exceptions=True)
    if case.stream_lost:
        first_s = None if ear.lost_s is None else ear.lost_s - at_s
        seen = Seen(case.name, first_s, rule="silence")
    elif ear.lost_s is not None:
        raise NotInTime(f"{case.name}: the event stream was lost")
    else:
        seen = Seen(
            case.name,
            ear.first(at_s, case.told),
            evict_s=ear.first(at_s, evicts) if case.evicts_later else None,
            hint_s=ear.first(at_s, case.hint) if case.hint else None,
            rule=ear.rule(at_s, case.told),
        )
    print(f"  {seen.case}: {seen.first_s and round(seen.first_s, 2)} s", flush=True)
    return seen


async def run(folder: Path, repetitions: int, names: list[str]) -> None:
    """Measure some cases."""
    cases = [case for case in CASES if case.name in names]
    if any(case.needs == NAMESPACES for case in cases):
        open_network()
    gate, numbers = Gate(STARTS_AT_ONCE), itertools.count(1)
    # The slowest ones start first: together they take as long as one of them.
    cases.sort(key=lambda case: (case.interval != "network", not case.evicts_later))
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                measure(case, folder, {n: next(numbers) for n in range(repetitions)}, gate)
            )
            for case in cases
        ]
    seen = [asdict(one) for task in tasks for one in task.result()]
    (folder / "seen.json").write_text(json.dumps(seen), encoding="utf-8")


async def main(folder: Path, repetitions: int, names: list[str]) -> int:
    """Measure, until done or told to end; nothing of it is left either way."""
    loop = asyncio.get_running_loop()
    measuring = asyncio.create_task(run(folder, repetitions, names))
    ended: list[str] = []

    def end(why: str) -> None:
        if not ended:  # once: what cleans up is not to be cancelled too
            ended.append(why)
            measuring.cancel()

    def wait_for_end_of_input() -> None:
        sys.stdin.buffer.read()
        with contextlib.suppress(RuntimeError):  # the loop is closed: it is over
            loop.call_soon_threadsafe(end, "the benchmark has ended")

    threading.Thread(target=wait_for_end_of_input, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number.name)
    try:
        await measuring
    except asyncio.CancelledError:
        print(f"ended: {ended[0] if ended else 'cancelled'}", file=sys.stderr)
        return 130
    except ExceptionGroup as problems:
        late, others = problems.split(NotInTime)
        if others is not None:
            raise others from None
        for problem in late.exceptions if late is not None else ():
            print(f"detection_cases: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Without Python's own end: the thread that reads standard input would hold it up.
    code = asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
    sys.stdout.flush()
    os._exit(code)
