"""What makes a resumed run compute the same bits (four real ranks: ``test_tiny_gpt.py``)."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from everstep_trainer import _codec, torch_tools

from tests.trainer.kit import Job, same
from tests.trainer.launching import ForkServer


def draw() -> tuple[object, ...]:
    numbers = np.random.rand()  # noqa: NPY002 - the generator that rng_state covers
    return random.random(), numbers, torch.rand(3).tolist()


def test_generators_are_put_back_also_through_a_checkpoint(tmp_path: Path) -> None:
    job = Job(tmp_path)
    draw()
    job.session().save(1, torch_tools.rng_state())
    first = draw()
    assert draw() != first
    loaded = job.session(generation=2, restore="step-000000000001.g000001").load()
    assert loaded is not None
    torch_tools.set_rng_state(loaded[1])
    assert draw() == first


def test_the_state_of_generators_can_be_stored_as_it_is() -> None:
    state = torch_tools.rng_state()
    encoded = _codec.encode(state)
    assert set(state) == {"python", "torch", "numpy"}
    assert {blob["dtype"] for blob in encoded.blobs} == {"torch:uint8", "numpy:<u4"}


class Noisy(torch.nn.Module):
    """Everything a forward pass can leave behind: running statistics, dropout, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        out: torch.Tensor = self.norm(torch.nn.functional.dropout(self.layer(x)))
        return out


def test_settling_leaves_no_trace() -> None:
    model = Noisy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generators = torch_tools.rng_state()
    model.layer.weight.grad = kept = torch.ones(4, 4)
    seen = []

    def run_once() -> None:
        seen.append(model.layer.weight.grad)
        model(torch.randn(3, 4)).sum().backward()

    torch_tools.settle_ddp(model, run_once)
    assert model.passes == 2
    assert seen == [None, None], "gradients of one pass reach the next"
    assert same(dict(model.state_dict()), before)
    assert same(torch_tools.rng_state(), generators)
    assert model.layer.weight.grad is kept
    assert model.layer.bias.grad is None


def test_settling_leaves_no_trace_when_the_pass_fails() -> None:
    model = Noisy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generators = torch_tools.rng_state()

    def run_once() -> None:
        model(torch.randn(3, 4))
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        torch_tools.settle_ddp(model, run_once)
    assert same(dict(model.state_dict()), before)
    assert same(torch_tools.rng_state(), generators)


def test_deterministic_sets_what_it_says(fork_server: ForkServer, tmp_path: Path) -> None:
    code = """
import os, random, numpy, torch
from everstep_trainer import torch_tools
def draw():
    return random.random(), numpy.random.rand(), torch.rand(1).item()
torch.set_num_threads(2)
torch_tools.deterministic(7)
first = draw()
torch_tools.deterministic(7, threads=None)
assert draw() == first
torch_tools.deterministic(8)
assert draw() != first
assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == 1
assert not torch.backends.cudnn.benchmark
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
"""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(code)
    assert fork_server(script, [], [({}, log)]) == [0], log.read_text()
