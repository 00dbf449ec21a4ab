"""The demo job: a small GPT under DistributedDataParallel, which survives anything bit for bit.

Everything that concerns Everstep is marked with its name; the rest is a training script like any
other, and runs under torchrun too. ``../faults.py`` breaks it from outside.

    python train.py --help
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import everstep_trainer  # Everstep
import torch
import torch.distributed as dist
from everstep_trainer import torch_tools  # Everstep
from faults import Faults  # type: ignore[import-not-found]
from model import (  # type: ignore[import-not-found]
    FULL,
    TINY,
    Corpus,
    TinyGPT,
    make_optimizer,
    weights_sha256,
)
from torch.nn.parallel import DistributedDataParallel


def main() -> int:
    """Train."""
    options = parse_arguments()
    session = everstep_trainer.attach()  # Everstep
    torch_tools.deterministic(options.seed)  # Everstep: same settings, same bits
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.collective_timeout_s))
    rank, size, corpus = session.rank, TINY if options.tiny else FULL, Corpus()
    model = DistributedDataParallel(TinyGPT(corpus.vocabulary, size))
    optimizer = make_optimizer(model)
    torch.manual_seed(options.seed * 1000 + rank)  # every rank drops out other neurons

    def loss_of(step: int) -> torch.Tensor:
        loss: torch.Tensor = model(*corpus.batch(size, seed=options.seed, step=step, rank=rank))
        return loss

    if options.settle:
        torch_tools.settle_ddp(model, lambda: loss_of(0).backward())  # type: ignore[no-untyped-call]

    first = resume(session, model, optimizer)
    faults = Faults(rank)
    for step in range(first, options.steps):
        began = time.monotonic()
        make_nan = faults.before_step(step)
        loss, grad_norm = train_step(model, optimizer, lambda: loss_of(step), make_nan=make_nan)  # noqa: B023
        session.step(step, loss=loss, grad_norm=grad_norm)  # Everstep
        print(f"step {step} loss {loss:.3f}", flush=True)
        if options.step_log:
            log_step(Path(options.step_log), session, step, loss)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            session.save(step, state_of(session, model, optimizer))  # Everstep
        time.sleep(max(0.0, began + options.step_ms / 1000 - time.monotonic()))

    digest = weights_sha256(model.module)
    if rank == 0 and options.out:
        write_out(Path(options.out), digest)
    print(f"final weights sha256 {digest}", flush=True)
    dist.barrier()  # rank 0 keeps the store that the others need until the end
    dist.destroy_process_group()
    return 0


def train_step(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[], torch.Tensor],
    *,
    make_nan: bool,
) -> tuple[float, float]:
    """One step; its loss on this rank and the norm of the gradients of all ranks."""
    optimizer.zero_grad(set_to_none=True)
    loss = forward()
    if make_nan:
        loss = loss * float("nan")
    loss.backward()  # type: ignore[no-untyped-call]
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), grad_norm.item()


def state_of(
    session: everstep_trainer.Session,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """What this rank saves: weights are the same everywhere, so rank 0 saves them for all."""
    state: dict[str, Any] = {"rng": torch_tools.rng_state()}
    if session.rank == 0:
        state["model"] = model.module.state_dict()
        state["optimizer"] = optimizer.state_dict()
    return state


def resume(
    session: everstep_trainer.Session,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
) -> int:
    """Load the checkpoint this run starts from, if any; the first step to train."""
    own, shared = session.load(), session.load(rank=0)
    if own is None or shared is None:
        return 0
    step, state = shared
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch_tools.set_rng_state(own[1]["rng"])
    print(f"resumed after step {step}, because of {session.start_reason}", flush=True)
    return step + 1


def write_out(path: Path, text: str) -> None:
    """Write a file that is either whole or not there."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text + "\n", encoding="ascii")
    temporary.replace(path)


def log_step(directory: Path, session: everstep_trainer.Session, step: int, loss: float) -> None:
    """Append what this rank computed: the same step must have the same loss in every run."""
    line = {"generation": session.generation, "step": step, "loss": loss.hex()}
    with (directory / f"rank-{session.rank}.jsonl").open("a", encoding="ascii") as file:
        file.write(json.dumps(line) + "\n")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a much smaller model, for tests")
    parser.add_argument("--step-ms", type=float, default=0.0, help="least duration of a step")
    parser.add_argument("--out", help="file for the SHA-256 of the final weights, by rank 0")
    parser.add_argument("--step-log", help="directory for one JSON line per step and rank")
    parser.add_argument("--collective-timeout-s", type=float, default=600.0)
    parser.add_argument(
        "--settle",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="--no-settle shows what DDP does to the bits of a resumed run",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
