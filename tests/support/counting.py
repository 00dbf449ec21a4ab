"""The counter job of ``examples``: its spec, what every step of it has to be, what ranks wrote.

The job's whole result is computed here a second time, in one process and without sockets or
checkpoints, so a test knows the right end of any run of any length without training it beside.
``tests/e2e/faults/test_faults_reference.py`` compares this with a real uninterrupted run.

Not here: breaking it (``examples/faults.py`` and ``tests.support.world``).
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from everstep.ledger import RunRow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
POLICY: dict[str, Any] = {
    "detection": {
        # Far above what a busy machine does to a step: tests that want a hang say so.
        "hang_min": "40s",
        "exit_skew_max": "15s",
        "first_step_max": "120s",
        "progress_report_interval": "10m",
    },
    "ladder": {"stable_after": "10m"},
    "teardown": {"stop_grace": "3s", "failure_grace": "300ms"},
    "machines": {"wait_poll_interval": "300ms"},
}


@lru_cache(maxsize=8)
def states(steps: int, *, world_size: int = 4, seed: int = 1) -> tuple[tuple[str, ...], ...]:
    """Every rank's state after every step, as hexadecimal text; the last row is the end."""
    ranks = [hashlib.sha256(f"{seed} {rank}".encode()).digest() for rank in range(world_size)]
    rows = []
    for step in range(steps):
        everyone = b"".join(ranks)
        ranks = [
            hashlib.sha256(everyone + struct.pack("<QI", step, rank)).digest()
            for rank in range(world_size)
        ]
        rows.append(tuple(state.hex() for state in ranks))
    return tuple(rows)


def final_sha256(steps: int, *, world_size: int = 4, seed: int = 1) -> str:
    """What the job must print and write at its end, however often it was interrupted."""
    last = states(steps, world_size=world_size, seed=seed)[-1]
    return hashlib.sha256(bytes.fromhex("".join(last))).hexdigest()


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Two policies, one over the other."""
    both = dict(base)
    for key, value in changes.items():
        both[key] = {**both.get(key, {}), **value}
    return both


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter job and the places where it leaves what it did."""

    name: str
    folder: Path
    steps: int = 100
    step_ms: float = 20
    machines: int = 2
    ranks_per_machine: int = 2
    policy: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    checkpoint_dir: Path | None = None
    """Default: one in its own folder."""
    keep: int = 3

    def __post_init__(self) -> None:
        """Places have to be there before ranks write into them."""
        for path in (self.orders, self.step_log):
            path.mkdir(parents=True, exist_ok=True)

    @property
    def orders(self) -> Path:
        """Directory of the orders that break it from within."""
        return self.folder / self.name / "orders"

    @property
    def step_log(self) -> Path:
        """Directory of one line for each step of each rank."""
        return self.folder / self.name / "steps"

    @property
    def out(self) -> Path:
        """File of the final hash."""
        return self.folder / self.name / "final.sha256"

    @property
    def checkpoints(self) -> Path:
        """Directory of its checkpoints."""
        return self.checkpoint_dir or self.folder / self.name / "checkpoints"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.machines * self.ranks_per_machine

    def spec(self) -> dict[str, Any]:
        """The job spec, as any SDK would send it."""
        return {
            "name": self.name,
            "command": [
                sys.executable,
                "counter_job/train.py",
                *("--steps", str(self.steps), "--step-ms", str(self.step_ms)),
                *("--out", str(self.out), "--step-log", str(self.step_log)),
                *self.flags,
            ],
            "machines": self.machines,
            "ranks_per_machine": self.ranks_per_machine,
            "working_dir": str(EXAMPLES),
            "env": {"JOB_FAULTS": str(self.orders)},
            "checkpoint": {"dir": str(self.checkpoints), "keep": self.keep},
            "policy": merged(POLICY, self.policy),
        }

    def order(self, kind: str, *, rank: int, step: int, again: int = 0) -> str:
        """Order a fault before the start; ``again`` makes further orders for the same step."""
        name = f"{kind}.rank{rank}.step{'0' * again}{step}"
        (self.orders / name).touch()
        return name

    def fired(self) -> list[dict[str, Any]]:
        """Notes of the orders that were carried out, each with the order's ``name``."""
        folder = self.orders / "fired"
        notes = sorted(folder.iterdir()) if folder.is_dir() else []
        return [
            json.loads(text) | {"name": note.name}
            for note in notes
            if (text := note.read_text("ascii"))
        ]

    def sha256(self) -> str:
        """The hash that rank 0 wrote at the end."""
        return self.out.read_text("ascii").strip()

    def reached(self) -> int:
        """The highest step that any rank has written down; -1: none."""
        return max((_last_step(path) for path in self.step_log.glob("rank-*.jsonl")), default=-1)

    def written(self) -> dict[int, list[dict[str, Any]]]:
        """What each rank wrote down, in order."""
        found: dict[int, list[dict[str, Any]]] = {}
        for path in self.step_log.glob("rank-*.jsonl"):
            lines = path.read_text("ascii").splitlines()
            found[int(path.stem.removeprefix("rank-"))] = [json.loads(line) for line in lines]
        return found

    def problems(self, runs: Sequence[RunRow]) -> list[str]:
        """Everything that is wrong with the steps that ranks computed, in one line each.

        Each step is what it is in an uninterrupted run; each run goes step by step from its
        recorded restore point; and nobody has computed in a run that the ledger does not know.
        """
        right = states(self.steps, world_size=self.world_size)
        starts = {r.generation: r.restore.step + 1 if r.restore else 0 for r in runs}
        wrong: list[str] = []
        for rank, lines in self.written().items():
            following = dict(starts)
            for line in lines:
                generation, step = line["generation"], line["step"]
                if generation not in following:
                    wrong.append(f"rank {rank}: run {generation} is not in the ledger")
                elif step != following[generation]:
                    wrong.append(
                        f"rank {rank}, run {generation}: step {step} instead of "
                        f"{following[generation]}"
                    )
                elif line["state"] != right[step][rank]:
                    wrong.append(f"rank {rank}, run {generation}: step {step} has another state")
                following[generation] = step + 1
        return wrong


def _last_step(path: Path) -> int:
    """The step of a file's last whole line; -1: there is none."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1024))
        lines = file.read().splitlines(keepends=True)
    whole = [line for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]
    return int(json.loads(whole[-1])["step"]) if whole else -1
