"""What a PyTorch script needs to end bit for bit where it would have ended uninterrupted.

Three things stand in the way, and there is one function for each: settings that differ from run to
run (``deterministic``), random number generators that start anew (``rng_state``), and
DistributedDataParallel, which computes its first step differently from all others (``settle_ddp``).
``docs/trainer.md`` says what is left to the script.

Importing this module does not import torch; calling its functions does.

Not here: saving and loading (the session does that).
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SETTLING_PASSES = 2
"""DDP regroups its gradients after the first backward pass and uses the new groups from the second
forward pass on."""


def deterministic(seed: int, *, threads: int | None = 1) -> None:
    """Choose deterministic kernels, pin the number of threads and seed every generator.

    Call it first thing, before anything is computed on a GPU.

    Args:
        seed: give each rank the same one and derive what must differ from the rank yourself.
        threads: CPU threads of torch; a sum over two threads has other bits than over one. None
            leaves it as it is.
    """
    # cuBLAS reads it when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    if threads is not None:
        torch.set_num_threads(threads)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """State of the generators of Python, numpy (when imported), torch and every GPU in use.

    It can be part of the state that ``session.save`` takes.
    """
    import torch

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    # Asking for the GPUs' state would initialise CUDA in scripts that do not use it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put every generator back to where ``rng_state`` found it."""
    import torch

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        numpy = importlib.import_module("numpy")
        numpy.random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def settle_ddp(model: Any, run_once: Callable[[], object]) -> None:
    """Make DDP's first real step like all later ones, so that resuming changes no bit.

    DDP learns the order in which gradients become ready in its first backward pass and then groups
    them anew. Another grouping is another order of summation in the all-reduce, so a run that is
    resumed would compute its first step with other bits. This runs ``run_once`` twice and drops
    everything it did: gradients, buffers (running statistics, say) and generators are as before.

    Call it on every rank after DDP has wrapped the model and before the first step, also in a run
    that starts from scratch. Load the checkpoint before or after, it makes no difference.

    Args:
        model: the DistributedDataParallel module.
        run_once: one forward and backward pass through ``model`` on any batch of the usual shape,
            without a step of the optimizer.
    """
    import torch

    generators = rng_state()
    with torch.no_grad():
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        for _ in range(SETTLING_PASSES):
            run_once()
            for parameter, _ in gradients:
                parameter.grad = None
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        set_rng_state(generators)
