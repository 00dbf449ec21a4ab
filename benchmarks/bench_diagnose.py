"""What ``everstep diagnose`` takes for a folder of logs: 64 ranks, 200 MB, one of them failed.

Beside it the least that reading lines costs: a bare Python loop over all lines, and ``grep -c`` for
one word. All are processes of their own, start-up included, and alternate. CPU time is what an idle
box would show; time that passed is a row too. Goal: at most three times the bare loop.

    python benchmarks/bench_diagnose.py
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common

RANKS = 64
BYTES_EACH = 200_000_000 // RANKS
GOAL = 3.0
OURS, BARE, GREP = "everstep diagnose", "floor: a bare Python loop over the lines", "grep -c"
LOOP = """
import sys

n = 0
for name in sys.argv[1:]:
    for line in open(name, "rb"):
        n += 1
"""
ERROR = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
TIMEOUT = (
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=900, "
    "OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600044 milliseconds"
)
FAILED_RANK = 37


@dataclass(frozen=True, slots=True)
class Cost:
    """What one process took."""

    cpu_s: float
    passed_s: float
    peak_mib: float
    out: str


def main() -> int:
    """Measure; whether the goal is met is told, not punished."""
    options = common.arguments(__doc__, repetitions=7, at_least=3)
    load_before, samples = common.load(), common.Samples()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as directory:
        folder = Path(directory) / "logs"
        write_logs(folder)
        files = [str(path) for path in sorted(folder.iterdir())]
        home = {**os.environ, "XDG_CACHE_HOME": str(Path(directory) / "cache")}
        commands = {
            BARE: [sys.executable, "-c", LOOP, *files],
            OURS: [sys.executable, "-m", "everstep.cli", "diagnose", str(folder), "-o", "json"],
            GREP: ["grep", "-c", "Error", *files],
        }
        for command in commands.values():
            run(command, home)  # page cache, and the catalogue's own
        for _ in range(options.repetitions):
            for system, command in commands.items():
                cost = run(command, home)
                if system == OURS:
                    verdict = json.loads(cost.out)
                    found = (verdict["symptom"], verdict["first_failed_rank"])
                    assert found == ("gpu_oom", FAILED_RANK), found
                samples.add(system, "CPU time", cost.cpu_s, unit="s")
                samples.add(system, "time passed", cost.passed_s, unit="s")
                samples.add(system, "peak memory", cost.peak_mib, unit="MiB")
        for _ in range(options.repetitions):
            start = run([sys.executable, "-m", "everstep.cli", "diagnose", files[0]], home)
            samples.add("everstep diagnose, one file of 3 MB", "CPU time", start.cpu_s, unit="s")
    ours, bare = samples.median(OURS, "CPU time"), samples.median(BARE, "CPU time")
    assert ours is not None
    assert bare is not None
    notes = common.Notes(
        title="Diagnosing a folder of logs",
        text=f"{RANKS} files, 200 MB of step lines; rank {FAILED_RANK} ran out of GPU memory, the "
        f"others timed out. Every row is a process with its start. Goal: {GOAL:g} times the loop.",
        remarks=[verdict_of(ours / bare)],
    )
    common.publish("diagnose", samples.rows(), notes, load_before=load_before)
    return 0


def verdict_of(ratio: float) -> str:
    """What the numbers say about the goal."""
    return f"Goal {'met' if ratio <= GOAL else 'missed'}: {ratio:.1f} times the loop's CPU time."


def write_logs(folder: Path) -> None:
    """Logs as Megatron-LM writes them, each with its end."""
    folder.mkdir()
    dice = random.Random(1)
    for rank in range(RANKS):
        lines, size, step = [], 0, 0
        while size < BYTES_EACH:
            step += 1
            line = (
                f"[rank{rank}]: iteration {step:8d}/ 250000 | consumed samples: {step * 256:12d} "
                f"| elapsed time per iteration (ms): {4000 + 40 * dice.random():.1f} | learning "
                f"rate: 2.999E-04 | lm loss: {2 + dice.random():.6f} | grad norm: "
                f"{1 + dice.random():.3f} | number of nan iterations:   0 |\n"
            )
            lines.append(line)
            size += len(line)
        end = ERROR if rank == FAILED_RANK else TIMEOUT.format(rank=rank)
        lines.append(f"[rank{rank}]: {end}\n")
        (folder / f"rank_{rank}.log").write_text("".join(lines))


def run(command: list[str], environ: dict[str, str]) -> Cost:
    """Run one process and see what it took."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environ, cwd=common.CHECKOUT
    )
    assert process.stdout is not None
    out = process.stdout.read()
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    passed = time.perf_counter() - began
    kib: resource.struct_rusage = usage
    return Cost(kib.ru_utime + kib.ru_stime, passed, kib.ru_maxrss / 1024, out)


if __name__ == "__main__":
    sys.exit(main())
