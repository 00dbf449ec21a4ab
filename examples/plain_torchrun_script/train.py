"""The training of ``../tiny_gpt`` as people write it without Everstep: nothing in here knows it.

It is started by ``torchrun``, saves its own checkpoints with ``torch.save`` and resumes from the
newest one. Under Everstep the same command works (``job.yaml``): the launcher is replaced, and
exits, logs, hangs and machines are watched from outside.

Its step and loss are read from the lines that it prints. Not here: checkpoints that Everstep can
restore from. That is what the trainer library adds; ``../tiny_gpt/train.py`` shows it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tiny_gpt"))

import torch
import torch.distributed as dist
from faults import Faults  # type: ignore[import-not-found]
from model import (  # type: ignore[import-not-found]
    FULL,
    TINY,
    Corpus,
    TinyGPT,
    make_optimizer,
    weights_sha256,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record  # leaves the traceback of a failed rank where TORCHELASTIC_ERROR_FILE says
def main() -> None:
    """Train."""
    options = parse_arguments()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    dist.init_process_group("gloo")
    rank, size, corpus = dist.get_rank(), TINY if options.tiny else FULL, Corpus()
    # With find_unused_parameters DDP never regroups gradients: a resumed run has the same bits.
    model = DistributedDataParallel(TinyGPT(corpus.vocabulary, size), find_unused_parameters=True)
    optimizer = make_optimizer(model)
    torch.manual_seed(options.seed * 1000 + rank)
    checkpoints, faults = Path(options.checkpoint_dir), Faults(rank)

    for step in range(load_newest(checkpoints, rank, model, optimizer), options.steps):
        make_nan = faults.before_step(step)
        optimizer.zero_grad(set_to_none=True)
        loss = model(*corpus.batch(size, seed=options.seed, step=step, rank=rank))
        if make_nan:
            loss = loss * float("nan")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step} loss {loss.item():.3f}", flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            save(checkpoints, step, rank, model, optimizer)

    digest = weights_sha256(model.module)
    if rank == 0 and options.out:
        Path(options.out).write_text(digest + "\n", encoding="ascii")
    print(f"final weights sha256 {digest}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def save(
    checkpoints: Path,
    step: int,
    rank: int,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
) -> None:
    """One folder per step; it counts once ``newest`` names it."""
    folder = checkpoints / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"rng": torch.get_rng_state(), "python": random.getstate()}
    if rank == 0:
        state |= {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / f"rank-{rank}.pt")
    dist.barrier()
    if rank == 0:
        temporary = checkpoints / "newest.tmp"
        temporary.write_text(str(step), encoding="ascii")
        temporary.replace(checkpoints / "newest")
        for old in checkpoints.glob("step-*"):
            if int(old.name.removeprefix("step-")) < step:
                shutil.rmtree(old)


def load_newest(
    checkpoints: Path,
    rank: int,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
) -> int:
    """Load the newest checkpoint, if there is one; the first step to train."""
    try:
        step = int((checkpoints / "newest").read_text(encoding="ascii"))
    except FileNotFoundError:
        return 0
    folder = checkpoints / f"step-{step}"
    shared = torch.load(folder / "rank-0.pt", weights_only=True)
    own = torch.load(folder / f"rank-{rank}.pt", weights_only=True)
    model.module.load_state_dict(shared["model"])
    optimizer.load_state_dict(shared["optimizer"])
    torch.set_rng_state(own["rng"])
    random.setstate(own["python"])
    print(f"resumed after step {step}", flush=True)
    return step + 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint-dir", default="checkpoints", help="shared by all machines")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a much smaller model, for tests")
    parser.add_argument("--out", help="file for the SHA-256 of the final weights, by rank 0")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
