"""Four real ranks over gloo that do, on command, what a hang or a slow run looks like.

``python stack_world.py FOLDER WORLD_SIZE``: prints the pid of each rank, then waits. PyTorch is
imported once and the ranks are forked from there. ``FOLDER/do-N`` with a name in it starts scenario
N on all ranks, ``FOLDER/go-N`` ends it, and each rank makes ``FOLDER/done-N-RANK``.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

FOLDER = Path(sys.argv[1])
WORLD_SIZE = int(sys.argv[2])
SLOW_S, STAGE_S = 0.5, 0.15
ODD = {"asleep": 1, "loader": 3, "checkpoint": 0, "slow": 2}
"""The rank that is at fault in each scenario."""


class World:
    """One rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.number = 0
        place = f"file://{FOLDER / 'store'}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=WORLD_SIZE)
        self.stages = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def odd(self, scenario: str) -> bool:
        return ODD[scenario] == self.rank

    def released(self) -> bool:
        return (FOLDER / f"go-{self.number}").exists()

    def wait_for_release(self) -> None:
        while not self.released():
            time.sleep(0.02)

    def serve(self) -> None:
        while True:
            self.number += 1
            command = FOLDER / f"do-{self.number}"
            while not command.exists():
                time.sleep(0.02)
            name = command.read_text(encoding="ascii")
            if name == "end":
                dist.destroy_process_group()
                return
            getattr(self, name)()
            (FOLDER / f"done-{self.number}-{self.rank}").touch()

    # --- scenarios

    def train(self, pause_s: float = 0.0) -> None:
        """Steps with a collective each, until released; all ranks agree on the last one."""
        going = True
        while going:
            self.compute(pause_s)
            flag = torch.tensor([float(self.released())])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            going = not flag.item()

    def compute(self, pause_s: float) -> None:
        time.sleep(pause_s)

    def asleep(self) -> None:
        if self.odd("asleep"):
            self.wait_for_release()
        dist.all_reduce(torch.zeros(4))

    def loader(self) -> None:
        loader = DataLoader(
            Numbers(self), batch_size=1, num_workers=1, collate_fn=list, prefetch_factor=2
        )
        for _ in loader:
            dist.all_reduce(torch.zeros(4))

    def checkpoint(self) -> None:
        helper = self.start_helper(stuck=self.odd("checkpoint"))
        self.save(helper)
        dist.barrier()

    def save(self, helper: multiprocessing.process.BaseProcess) -> None:
        helper.join()

    def start_helper(self, *, stuck: bool) -> multiprocessing.process.BaseProcess:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=self.write_checkpoint, args=(stuck,))
        process.start()
        return process

    def write_checkpoint(self, stuck: bool) -> None:
        if stuck:
            self.wait_for_release()

    def slow(self) -> None:
        self.train(SLOW_S if self.odd("slow") else 0.0)

    def stages_train(self) -> None:
        """Two stages that differ by nature: 0 and 2 compute and send, 1 and 3 wait and compute."""
        going = True
        while going:
            message = torch.zeros(4)
            if self.rank % 2 == 0:
                self.forward_first_stage()
                dist.send(message, self.rank + 1)
            else:
                dist.recv(message, self.rank - 1)
                self.forward_last_stage()
            dist.all_reduce(message, group=self.stages[self.rank % 2])
            flag = torch.tensor([float(self.released())])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            going = not flag.item()

    def forward_first_stage(self) -> None:
        time.sleep(STAGE_S)

    def forward_last_stage(self) -> None:
        time.sleep(STAGE_S)

    def stages_wait(self) -> None:
        """The first stages of all replicas wait for something outside, the last ones for them."""
        message = torch.zeros(4)
        if self.rank % 2 == 0:
            self.wait_for_release()
            dist.send(message, self.rank + 1)
        else:
            dist.recv(message, self.rank - 1)


class Numbers(IterableDataset[int]):
    """A few numbers; on the odd rank one of them does not come before the release."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __iter__(self) -> Iterator[int]:
        for number in range(4):
            if number == 2 and self.world.odd("loader"):
                self.read_shard()
            yield number

    def read_shard(self) -> None:
        self.world.wait_for_release()


def main() -> None:
    torch.set_num_threads(1)
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            World(rank).serve()
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    for _ in range(WORLD_SIZE):
        os.wait()


if __name__ == "__main__":
    main()
