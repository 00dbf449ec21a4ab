"""From a fault to the next step: Everstep beside plain torchrun, same training, same faults.

Four ranks of the examples' small GPT on one box, a checkpoint every five steps, broken three steps
after the last one, so that three steps are lost by either. Everstep runs ``examples/tiny_gpt`` (its
trainer library reports steps and saves), torchrun runs ``examples/plain_torchrun_script`` (the same
model and data with ``torch.save``), so a hang is left to the collective's own timeout there. Both
take turns, one at a time. When a step was made is read from the ranks' logs for both; when Everstep
had detected and decided comes from its ledger, when torchrun had detected from its log.

    python benchmarks/bench_recovery.py [--repetitions N]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.step_eye import NotInTime, Recovered, StepEye, recovery
from benchmarks.torchrun import EXAMPLES, ORDERS_ENV, Fleet, Torchrun
from everstep.decide.words import RunPhase
from everstep.demo.faults import row_of
from everstep.demo.stage import Stage
from everstep.short_lived import leave, run_short
from workers.embedded import Embedded, EmbeddedOptions

MACHINES, RANKS_PER_MACHINE = 2, 2
SAVE_EVERY = 5
STEPS_AFTER_SAVE = 3
STEPS = 1_000_000
"""Nobody waits for the end."""
LIMIT_S = 120.0
POLICY: dict[str, Any] = {
    "detection": {
        "hang_min": "5s",
        "machine_lost_after": "3s",
        "first_step_max": "3m",
        "progress_report_interval": "30s",
    },
    # Faults on purpose, one after the other, would spend the budgets of a day.
    "ladder": {
        "stable_after": "2s",
        "infrastructure_restarts_max": 50,
        "user_code_restarts_max": 50,
        "unclear_restarts_max": 50,
    },
}
HANG_LIMIT_S = 20.0
"""How long torchrun is given to notice a hang; four times what Everstep's policy here allows."""
MACHINE_LIMIT_S = 75.0
OURS, PEER = "everstep", "torchrun"
ELASTIC = "torchrun, 2 machines and a spare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that a rank is ordered to make."""

    name: str
    order: str
    rank: int
    torchrun_limit_s: float = LIMIT_S


FAULTS = (
    Fault(name="rank SIGKILL", order="sigkill", rank=1),
    Fault(name="rank SIGSEGV", order="sigsegv", rank=2),
    Fault(name="exception", order="exception", rank=3),
    Fault(name="hang (SIGSTOP)", order="sigstop", rank=3, torchrun_limit_s=HANG_LIMIT_S),
)
MACHINE = "machine lost"

REMARKS = (
    (
        "Everstep's policy in this benchmark (and in the demo) calls a job hung after 5 s and a "
        "machine lost after 3 s; the defaults are 60 s and 15 s. torchrun has no hang detection: "
        "it waits for the collective's timeout (gloo's default: 30 minutes), and was given up "
        f"after {HANG_LIMIT_S:g} s."
    ),
    (
        "A launcher that dies with its machine restarts nothing, so machine loss has no row for "
        f"the single torchrun. `{ELASTIC}` is torchrun with one launcher for each machine, a c10d "
        "rendezvous on the surviving one, and a third launcher that has asked to join; given up "
        f"after {MACHINE_LIMIT_S:g} s."
    ),
    (
        "torchrun always restarts, whatever failed: it has no `decide_s`. Its `detect_s` is when "
        "its log says that a rank failed."
    ),
    (
        "torchrun runs with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. Without it torch 2.13 keeps "
        "one store over all restarts, and with four gloo ranks here nearly every restart failed "
        "on refused connections."
    ),
)


def main() -> int:
    """Measure."""
    options = common.arguments(__doc__, repetitions=3, at_least=1)
    return run_short(lambda: measure(options.repetitions))


async def measure(repetitions: int) -> int:
    """All rounds."""
    load_before, samples = common.load(), common.Samples()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        # Each round's lost machine stays out: a standby for every one of them.
        embedded = Embedded(
            EmbeddedOptions(
                state=folder / "s",
                machines=MACHINES + repetitions,
                slots=RANKS_PER_MACHINE,
            )
        )
        try:
            await embedded.start()
            for number in range(1, repetitions + 1):
                print(f"round {number} of {repetitions}", flush=True)
                await everstep_round(embedded, samples, folder, number)
                await torchrun_round(samples, folder / f"torchrun-{number}")
            # Once: it takes minutes, and says whether, not how fast.
            await elastic_round(samples, folder / "elastic")
        finally:
            await embedded.stop()
    common.publish("recovery", samples.rows(), notes(samples), load_before=load_before)
    return 0


# --- Everstep


async def everstep_round(
    embedded: Embedded, samples: common.Samples, folder: Path, number: int
) -> None:
    """One job, broken by each fault in turn."""
    job_id = f"bench-{number}"
    client = await embedded.client()
    stage = Stage(embedded, client, job_id, folder / f"orders-{job_id}")
    spec = {
        "name": job_id,
        "command": [
            *(sys.executable, "tiny_gpt/train.py"),
            *("--steps", str(STEPS), "--save-every", str(SAVE_EVERY)),
        ],
        "machines": MACHINES,
        "ranks_per_machine": RANKS_PER_MACHINE,
        "working_dir": str(EXAMPLES),
        "checkpoint": {"dir": str(folder / f"checkpoints-{job_id}"), "keep": 2},
        "env": {ORDERS_ENV: str(stage.orders)},
        "policy": POLICY,
    }
    machines = embedded.options.state / "machines"

    def logs() -> dict[Path, int]:
        found = machines.glob(f"*/runs/{job_id}/*/rank-*.log")
        return {path: int(path.parent.name) for path in found}

    try:
        async with _eye(logs) as eye:
            await client.launch(spec)
            for fault in FAULTS:
                await stage.settled()
                step = _next_fault_step(eye)

                async def inject(fault: Fault = fault, step: int = step) -> float:
                    return await _order(stage.orders, fault, step, eye)

                await _everstep_fault(stage, eye, samples, fault.name, inject)
            await stage.settled()
            await _everstep_fault(stage, eye, samples, MACHINE, lambda: _machine_off(stage, eye))
        await client.cancel(job_id, reason="the round is over")
        await client.wait(job_id, timeout_s=LIMIT_S)
    finally:
        await stage.close()


async def _everstep_fault(
    stage: Stage,
    eye: StepEye,
    samples: common.Samples,
    name: str,
    inject: Callable[[], Awaitable[float]],
) -> None:
    before = await stage.settled()
    at = await inject()
    last = _last_step(eye, before.generation)
    back = await recovery(eye, at=at, run=before.generation, last_step=last, limit_s=LIMIT_S)
    await stage.recovered(before)
    row = row_of(name, stage.job_id, at, await stage.new_incidents(before), await stage.runs())
    assert not row.problem, f"{name}: {row.problem}"
    newest = (await stage.runs())[-1]
    assert newest.generation == before.generation + 1, f"{name}: more than one new run"
    started = newest.at(RunPhase.STARTED)
    assert started is not None
    _note(
        samples,
        OURS,
        name,
        back,
        detect_s=row.detect_s,
        decide_s=row.decide_s,
        start_s=started.timestamp() - at,
    )


async def _machine_off(stage: Stage, eye: StepEye) -> float:
    """A machine loses power as many steps after a save as the other faults happen."""
    status = await stage.client.status(stage.job_id)
    await eye.until(
        "the step to lose a machine at",
        lambda: eye.newest()[1] % SAVE_EVERY == STEPS_AFTER_SAVE - 1,
        limit_s=LIMIT_S,
    )
    at = time.time()
    await asyncio.to_thread(stage.embedded.power_off, status.machines[-1])
    return at


# --- torchrun


async def torchrun_round(samples: common.Samples, folder: Path) -> None:
    """One launcher for all four ranks, broken by each fault in turn."""
    ranks = MACHINES * RANKS_PER_MACHINE
    async with (
        Torchrun(folder, ranks, STEPS, SAVE_EVERY) as job,
        _eye(job.logs) as eye,
    ):
        for fault in FAULTS:
            await eye.until("steps", lambda: eye.newest()[1] >= 0, limit_s=LIMIT_S)
            step = _next_fault_step(eye)
            before = eye.newest()[0]
            at = await _order(job.orders, fault, step, eye)
            try:
                back = await recovery(
                    eye,
                    at=at,
                    run=before,
                    last_step=_last_step(eye, before),
                    limit_s=fault.torchrun_limit_s,
                )
            except NotInTime:
                _note(samples, PEER, fault.name, None)
                return
            _note(samples, PEER, fault.name, back, detect_s=job.failed_at(after=at) - at)


async def elastic_round(samples: common.Samples, folder: Path) -> None:
    """A launcher for each of two machines and a spare one; a machine dies with its launcher."""
    async with (
        Fleet(folder, RANKS_PER_MACHINE, STEPS, SAVE_EVERY) as fleet,
        _eye(fleet.logs) as eye,
    ):
        await eye.until("steps", lambda: eye.newest()[1] >= SAVE_EVERY, limit_s=LIMIT_S)
        fleet.start_spare()
        await fleet.spare_waits()
        before, _ = eye.newest()
        at = time.time()
        fleet.power_off()
        try:
            back = await recovery(
                eye,
                at=at,
                run=before,
                last_step=_last_step(eye, before),
                limit_s=MACHINE_LIMIT_S,
            )
        except NotInTime:
            _note(samples, ELASTIC, MACHINE, None)
        else:
            _note(samples, ELASTIC, MACHINE, back)


# --- both


@contextlib.asynccontextmanager
async def _eye(logs: Callable[[], dict[Path, int]]) -> AsyncIterator[StepEye]:
    eye = StepEye(logs)
    looking = asyncio.create_task(eye.run())
    try:
        yield eye
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def _next_fault_step(eye: StepEye) -> int:
    """A step soon, right before which ``STEPS_AFTER_SAVE`` steps are not saved."""
    step = eye.newest()[1] + SAVE_EVERY
    return step + (STEPS_AFTER_SAVE - step) % SAVE_EVERY


async def _order(orders: Path, fault: Fault, step: int, eye: StepEye) -> float:
    """Have the fault made before ``step``; answers when it was."""
    name = f"{fault.order}.rank{fault.rank}.step{step}"
    await asyncio.to_thread(_place, orders / name)
    note = orders / "fired" / name

    def fired() -> bool:
        return note.is_file() and note.stat().st_size > 0

    await eye.until(f"fault {name}", fired, limit_s=LIMIT_S)
    content = json.loads(note.read_text(encoding="ascii"))
    assert content["step"] == step, f"{name} came at step {content['step']}"
    return float(content["time_s"])


def _place(order: Path) -> None:
    order.parent.mkdir(parents=True, exist_ok=True)
    order.touch()


def _last_step(eye: StepEye, run: int) -> int:
    """The newest step of a run that has been broken."""
    eye.look()
    return max(step for made_by, step in eye.seen if made_by == run)


def _note(
    samples: common.Samples,
    system: str,
    fault: str,
    back: Recovered | None,
    *,
    detect_s: float | None = None,
    decide_s: float | None = None,
    start_s: float | None = None,
) -> None:
    values: dict[str, tuple[float | None, str]] = {
        "detect_s": (detect_s, "s"),
        "decide_s": (decide_s, "s"),
        "start_s": (start_s, "s"),
        "first_step_s": (back.first_step_s if back else None, "s"),
        "back_s": (back.back_s if back else None, "s"),
        "steps_lost": (back.steps_lost if back else None, "steps"),
    }
    for metric, (value, unit) in values.items():
        if value is not None or (back is None and metric == "first_step_s"):
            samples.add(system, f"{fault}: {metric}", value, unit=unit)
    told = ", ".join(f"{m} {v:.2f}" for m, (v, _) in values.items() if v is not None)
    print(f"  {system}: {fault}: {told or 'did not recover'}", flush=True)


def notes(samples: common.Samples) -> common.Notes:
    """What has to be said about the numbers."""
    ratios = []
    for fault in FAULTS:
        ours = samples.median(OURS, f"{fault.name}: back_s")
        peer = samples.median(PEER, f"{fault.name}: back_s")
        if ours is not None and peer is not None:
            ratios.append(f"{fault.name} {ours / peer:.2f}")
    return common.Notes(
        title="From a fault to the next step",
        text=(
            "Four ranks of a small GPT under DDP over gloo, a checkpoint every "
            f"{SAVE_EVERY} steps, a fault {STEPS_AFTER_SAVE} steps after one. All times count from "
            "the fault: detected, decided, new ranks started, first step of any of them, back at "
            "the step where the fault came. Between start and first step the training script "
            "starts: imports, process group, load."
        ),
        remarks=(
            f"Everstep / torchrun, until back: {', '.join(ratios) or 'no fault in common'}.",
            *REMARKS,
        ),
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    leave(code)
