"""One crash, from a fresh state to a judged end: the unit of the sweep.

A small deterministic job runs on two machines with a standby; one machine loses power, so the
incident has an eviction in it; at one failpoint the controller is killed or frozen. Afterwards the
ledger is read into a picture without times and keys, and the job's final state is one hash: both
must be those of a run in which nothing struck, and the job's of a run without any fault at all.

Real processes throughout: server, controllers, agents, shims, ranks.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

from everstep.client import Client
from everstep.decide.words import JobPhase
from everstep.errors import EverstepError, Unreachable
from workers.embedded import Embedded, EmbeddedOptions
from workers.failpoints import DIRECTORY_ENV, FAILPOINT_ENV

ROOT = Path(__file__).resolve().parents[2]
VICTIM = "machine-2"
RUN_LIMIT_S = 240.0
OVERRIDES: dict[str, Any] = {
    "detection": {
        "machine_lost_after": "1s",
        "hang_min": "20s",
        "first_step_max": "60s",
        # No refresh in so short a job: every failpoint then has the same number in every run.
        "progress_report_interval": "10m",
    },
    "ladder": {"stable_after": "10m"},
    "machines": {"wait_poll_interval": "500ms"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained."""

    name: str
    command: tuple[str, ...]
    trigger_step: int
    """The machine loses power once a checkpoint of this step is complete."""


def counter(steps: int = 120) -> Workload:
    """Ranks without torch: starts in a tenth of a second."""
    return Workload(
        name="counter",
        command=(sys.executable, "counter_job/train.py", "--steps", str(steps), "--step-ms", "30"),
        trigger_step=20,
    )


def tiny_gpt() -> Workload:
    """A real PyTorch job."""
    return Workload(
        name="gpt",
        command=(sys.executable, "tiny_gpt/train.py", "--tiny"),
        trigger_step=5,
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run ended."""

    verdict: str
    """``same`` is the only good one."""
    detail: str = ""
    picture: dict[str, Any] = field(default_factory=dict)
    sha256: str = ""


def _options(state: Path, *, controllers: int, failpoint: str) -> EmbeddedOptions:
    points = state.parent / f"{state.name}-failpoints"
    points.mkdir(exist_ok=True)
    env = {FAILPOINT_ENV: failpoint, DIRECTORY_ENV: str(points)} if failpoint else {}
    names = [f"controller-{n}" for n in range(1, controllers + 1)]
    return EmbeddedOptions(
        state=state,
        machines=3,
        slots=2,
        controllers=controllers,
        part_env=dict.fromkeys(names, env),
    )


@asynccontextmanager
async def _up(options: EmbeddedOptions) -> AsyncIterator[Embedded]:
    embedded = Embedded(options)
    await embedded.start()
    try:
        yield embedded
    finally:
        await embedded.stop()


def struck(state: Path) -> bool:
    """True when the failpoint of this run was reached."""
    return any((state.parent / f"{state.name}-failpoints").glob("struck.*"))


async def uninterrupted(workload: Workload, folder: Path) -> str:
    """The hash that the job ends with when nothing happens to it, trained without Everstep."""
    out = folder / "uninterrupted.sha256"
    port = 29600 + os.getpid() % 300
    base = {k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_", "TORCHELASTIC"))}
    processes = [
        await asyncio.create_subprocess_exec(
            *workload.command,
            "--out",
            str(out),
            cwd=ROOT / "examples",
            env=base
            | {
                "PYTHONPATH": str(ROOT / "trainer"),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % 2),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": str(rank // 2),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(4)
    ]
    codes = await asyncio.gather(*(p.wait() for p in processes))
    if any(codes):
        raise RuntimeError(f"the uninterrupted run failed: exit codes {codes}")
    return out.read_text(encoding="utf-8").split()[0]


async def run_once(
    workload: Workload, folder: Path, *, failpoint: str = "", freeze: bool = False
) -> Outcome:
    """One job through one incident, with a controller that is struck at ``failpoint``.

    Args:
        workload: what to train.
        folder: a fresh folder of this run's own.
        failpoint: ``<name>:kill``, ``<name>:freeze``, ``record:<file>`` or nothing.
        freeze: the failpoint freezes; a second controller takes over, the first is thawed later.
    """
    state, out = folder / "state", folder / "final.sha256"
    options = _options(state, controllers=2 if freeze else 1, failpoint=failpoint)
    spec = {
        "name": workload.name,
        "command": [*workload.command, "--out", str(out)],
        "machines": 2,
        "ranks_per_machine": 2,
        "working_dir": str(ROOT / "examples"),
        "policy": OVERRIDES,
    }
    try:
        async with asyncio.timeout(RUN_LIMIT_S), _up(options) as embedded:
            thaw = asyncio.create_task(_thaw(embedded, state)) if freeze else None
            client = await embedded.client()
            await _patiently(lambda: client.launch(spec))
            await _checkpoint(state / "checkpoints" / workload.name, workload.trigger_step)
            embedded.power_off(VICTIM)
            await _succeeded(client, workload.name)
            if thaw is not None:
                await thaw
                # What the thawed controller does now must change nothing: give it time to do it.
                await asyncio.sleep(1.0)
            shot = await asyncio.to_thread(picture, embedded.addresses.ledger)
    except TimeoutError:
        return Outcome("stuck", f"not finished within {RUN_LIMIT_S:g} s")
    except Exception as error:  # noqa: BLE001 - one run's failure is a row of the table
        return Outcome("broken", f"{type(error).__name__}: {error}"[:300])
    if failpoint and not failpoint.startswith("record:") and not struck(state):
        return Outcome("not reached")
    return Outcome("same", picture=shot, sha256=out.read_text(encoding="utf-8").split()[0])


async def _patiently(call: Callable[[], Any]) -> None:
    """A call that the struck controller may keep waiting."""
    while True:
        try:
            await call()
        except EverstepError:
            await asyncio.sleep(0.2)
        else:
            return


async def _succeeded(client: Client, job_id: str) -> None:
    """Wait for the job's workflow to end well: the ledger is closed then."""
    while True:
        try:
            result = await client.wait(job_id)
        except Unreachable:
            await asyncio.sleep(0.2)
            continue
        if result.phase is not JobPhase.SUCCEEDED:
            raise RuntimeError(f"the job has {result.phase}: {result.reason}")
        return


async def _checkpoint(folder: Path, step: int) -> None:
    """Wait until a checkpoint of ``step`` or later is complete."""
    while True:
        complete = [
            int(path.parent.name.split("-")[1].split(".")[0])
            for path in folder.glob("step-*/COMPLETE.json")
        ]
        if complete and max(complete) >= step:
            return
        await asyncio.sleep(0.05)


async def _thaw(embedded: Embedded, state: Path) -> None:
    """Once a controller is frozen, wait until the other one has acted for it, then thaw it."""
    while not struck(state):
        await asyncio.sleep(0.1)
    frozen = [n for n in embedded.controller_names if _is_stopped(embedded.pid(n))]
    while not frozen:
        await asyncio.sleep(0.05)
        frozen = [n for n in embedded.controller_names if _is_stopped(embedded.pid(n))]
    # Longer than the longest time after which Temporal gives an activity to somebody else.
    await asyncio.sleep(12.0)
    for name in frozen:
        embedded.kill(name, signal.SIGCONT)


def _is_stopped(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def picture(url: str) -> dict[str, Any]:
    """The ledger without times and keys: what must be the same however often we were struck."""
    queries = {
        "jobs": "select job_id, phase from jobs order by 1",
        "runs": "select generation, start_reason, outcome from runs order by 1",
        "run_machines": (
            "select r.generation, rm.group_rank, rm.machine_id from run_machines rm "
            "join runs r on r.run_id = rm.run_id order by 1, 2"
        ),
        "open_leases": "select machine_id from leases where ended_at is null order by 1",
        "blocks": "select machine_id, incident_id from blocks where released_at is null order by 1",
        "blocks_ever": "select count(*) from blocks",
        "actions": (
            "select incident_id, step, target, generation, kind from actions order by 1, 2, 3"
        ),
        "incidents": "select incident_id, number, symptom, state from incidents order by 1",
        "decisions": "select decision_id, rung from decisions order by 1",
        "rounds": "select incident_id, round_number from rounds order by 1, 2",
    }
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            return {
                name: [list(row) for row in connection.execute(text(query))]
                for name, query in queries.items()
            }
    finally:
        engine.dispose()


def judge(outcome: Outcome, expected: Outcome, sha256: str) -> Outcome:
    """Compare a struck run with the one in which nothing struck."""
    if outcome.verdict != "same":
        return outcome
    differences = [
        f"{name}: {outcome.picture[name]} instead of {rows}"
        for name, rows in expected.picture.items()
        if outcome.picture[name] != rows
    ]
    if outcome.sha256 != sha256:
        differences.append(f"weights {outcome.sha256[:12]} instead of {sha256[:12]}")
    if differences:
        return Outcome("different", "; ".join(differences)[:600], outcome.picture, outcome.sha256)
    return outcome


def fingerprint(workload: Workload) -> str:
    """Names a sweep's results: they can be resumed only for the same product and job."""
    digest = hashlib.sha256(repr(workload).encode())
    for folder in ("workflows", "activities", "everstep", "workers", "trainer"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
