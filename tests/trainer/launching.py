"""Launches runs of the examples the way an agent does, and restarts them like the controller."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from everstep.machine import checkpoints
from tests.trainer.kit import EXAMPLES, PROGRAMS, TRAINER, Job


def free_port() -> int:
    """A loopback port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def base_environ() -> dict[str, str]:
    """What a rank gets besides the job's variables."""
    kept = ("PATH", "TMPDIR", "HOME", "TORCHINDUCTOR_CACHE_DIR")
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PYTHONPATH": str(TRAINER),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }


class Starter(Protocol):
    """How ranks are started."""

    def __call__(
        self, script: Path, arguments: Sequence[str], ranks: list[tuple[dict[str, str], Path]]
    ) -> list[int]:
        """Run all ranks to their end; their exit codes, or minus the signal."""
        ...


def start_fresh(
    script: Path, arguments: Sequence[str], ranks: list[tuple[dict[str, str], Path]]
) -> list[int]:
    """Each rank as a Python of its own."""
    started = []
    try:
        for environ, log in ranks:
            with log.open("ab") as file:
                started.append(
                    subprocess.Popen(
                        [sys.executable, str(script), *arguments],
                        env={**base_environ(), **environ},
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                    )
                )
        give_up = time.monotonic() + 90
        return [rank.wait(timeout=max(0.1, give_up - time.monotonic())) for rank in started]
    finally:
        for rank in started:
            rank.kill()
            rank.wait()


class ForkServer:
    """Ranks forked from a process that has torch imported."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "fork_ranks.py")],
            env=base_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == {"ready": True}

    def __call__(
        self, script: Path, arguments: Sequence[str], ranks: list[tuple[dict[str, str], Path]]
    ) -> list[int]:
        order = {
            "script": str(script),
            "arguments": list(arguments),
            "ranks": [{"env": environ, "log": str(log)} for environ, log in ranks],
            "limit_s": 90,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        statuses: list[int] = self._answer()["statuses"]
        return statuses

    def close(self) -> None:
        """End it. It has no children between two orders."""
        self._process.communicate(timeout=30)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class Launched:
    """One job of an example, through as many runs as it takes."""

    def __init__(
        self,
        root: Path,
        start: Starter,
        script: str,
        *arguments: str,
        world_size: int = 4,
        keep: int = 3,
    ) -> None:
        self.job = Job(root, world_size=world_size, keep=keep)
        self.faults = root / "faults"
        self.steps = root / "steps"
        self.out = root / "out.sha256"
        self.generation = 0
        self._start = start
        self._script = EXAMPLES / script
        self._arguments = (*arguments, "--out", str(self.out), "--step-log", str(self.steps))
        self.faults.mkdir()
        self.steps.mkdir()

    def run(self) -> list[int]:
        """One run, from the newest complete checkpoint."""
        self.generation += 1
        restore = self.newest()
        if self.job.checkpoints.is_dir():
            checkpoints.raise_fence(self.job.checkpoints, self.generation)
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RUN_ID": f"tests-{self.generation}",
            "JOB_FAULTS": str(self.faults),
        }
        ranks = [
            (
                self.job.environ(rank, generation=self.generation, restore=restore, **meeting),
                self.log(rank),
            )
            for rank in range(self.job.world_size)
        ]
        return self._start(self._script, self._arguments, ranks)

    def run_to_the_end(self, runs_max: int = 6) -> int:
        """Restart until it succeeds; how many runs it took."""
        for _ in range(runs_max):
            if set(self.run()) == {0}:
                return self.generation
        raise AssertionError(f"not done after {runs_max} runs:\n{self.tail()}")

    def newest(self) -> str | None:
        """Name of the newest complete checkpoint."""
        if not self.job.checkpoints.is_dir():
            return None
        found = checkpoints.scan(self.job.checkpoints, job_id="tests").complete
        best = max((checkpoint.id for checkpoint in found), default=None)
        return checkpoints.folder_name(best) if best else None

    def log(self, rank: int, generation: int | None = None) -> Path:
        """What that rank has printed in that run."""
        return self.job.root / f"rank-{rank}.{generation or self.generation}.log"

    def tail(self) -> str:
        """The end of all logs of the newest run, for a test that fails."""
        return "\n".join(
            f"--- rank {rank}\n{self.log(rank).read_text()[-1500:]}"
            for rank in range(self.job.world_size)
        )

    def digest(self) -> str:
        """The final hash."""
        return self.out.read_text(encoding="ascii").strip()

    def computed(self) -> dict[tuple[int, int], set[str]]:
        """All results of each (rank, step): one, however often it was computed."""
        results: dict[tuple[int, int], set[str]] = {}
        for path in self.steps.glob("rank-*.jsonl"):
            rank = int(path.stem.removeprefix("rank-"))
            for line in path.read_text(encoding="ascii").splitlines():
                entry = json.loads(line)
                result = entry.get("state") or entry["loss"]
                results.setdefault((rank, entry["step"]), set()).add(result)
        return results
