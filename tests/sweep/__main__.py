"""``make sweep``: every failpoint of an incident with an eviction, one run each.

    python -m tests.sweep [--shard 1/8] [--only TEXT] [--kinds kill,freeze] [--torch] [--limit N]
    python -m tests.sweep --outages [--minutes 10] [--only TEXT]

Every run's outcome is a line in ``.sweep/<fingerprint>/outcomes.jsonl``; a sweep that is started
again goes on where it was. At the end: failpoints x outcomes, and exit code 1 unless every
failpoint was reached and every run ended like the one in which nothing struck.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.sweep import arena
from tests.sweep.outages import sweep_outages

ATTEMPTS_MAX = 3
"""A failpoint whose number depends on timing may be missed; missed three times it counts."""
TORCH_EVERY = 10


async def record(workload: arena.Workload, folder: Path) -> tuple[list[str], arena.Outcome, str]:
    """Names of all failpoints, the outcome to compare with, and the uninterrupted hash."""
    sha256 = await arena.uninterrupted(workload, folder)
    names = folder / "names.txt"
    run = folder / "record"
    run.mkdir()
    expected = await arena.run_once(workload, run, failpoint=f"record:{names}")
    if expected.verdict != "same" or expected.sha256 != sha256:
        raise SystemExit(f"the run without a strike is not right itself: {expected}")
    seen = dict.fromkeys(names.read_text(encoding="utf-8").splitlines())
    return list(seen), expected, sha256


def plan(names: list[str], kinds: set[str]) -> list[str]:
    """Failpoints with their actions: killed at every one, frozen before and in every activity."""
    points = [f"{name}:kill" for name in names if "kill" in kinds]
    if "freeze" in kinds:
        points += [
            f"{name}:freeze"
            for name in names
            if name.startswith("activity:") and not name.endswith("after_return")
        ]
    return points


async def strike(
    workload: arena.Workload, point: str, expected: arena.Outcome, sha256: str
) -> arena.Outcome:
    """One run, tried again while its failpoint is missed."""
    outcome = arena.Outcome("not reached")
    for _ in range(ATTEMPTS_MAX):
        with tempfile.TemporaryDirectory(prefix="everstep-sweep-") as folder:
            outcome = arena.judge(
                await arena.run_once(
                    workload, Path(folder), failpoint=point, freeze=point.endswith(":freeze")
                ),
                expected,
                sha256,
            )
            if outcome.verdict not in ("same", "not reached"):
                _keep_logs(Path(folder), point)
        if outcome.verdict != "not reached":
            break
    return outcome


def _keep_logs(folder: Path, point: str) -> None:
    target = arena.ROOT / ".sweep" / "failed" / point.replace(":", ".")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder / "state" / "logs", target, dirs_exist_ok=True)
    for name in ("ledger.db", "ledger.db-wal"):
        if (folder / "state" / name).exists():
            shutil.copy(folder / "state" / name, target / name)


async def sweep(options: argparse.Namespace) -> int:
    """All points of this shard; answers the exit code."""
    index, count = (int(part) for part in options.shard.split("/"))
    failed = 0
    workloads = [(arena.counter(), 1)] + (
        [(arena.tiny_gpt(), TORCH_EVERY)] if options.torch else []
    )
    for workload, every in workloads:
        base = arena.ROOT / ".sweep" / arena.fingerprint(workload)
        base.mkdir(parents=True, exist_ok=True)
        names, expected, sha256 = await _recorded(workload, base)
        points = plan(names, set(options.kinds.split(",")))[::every]
        points = [p for p in points if options.only in p][index - 1 :: count][: options.limit]
        log = base / "outcomes.jsonl"
        done = _done(log)
        print(
            f"{workload.name}: {len(points)} failpoints in shard {options.shard}, "
            f"{sum(p in done for p in points)} done before"
        )
        for number, point in enumerate(points, 1):
            if point not in done:
                outcome = await strike(workload, point, expected, sha256)
                row = {"point": point, "verdict": outcome.verdict, "detail": outcome.detail}
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                done[point] = row
            row = done[point]
            print(f"[{number}/{len(points)}] {point}: {row['verdict']} {row['detail']}", flush=True)
        failed += _table([done[p] for p in points])
    return 1 if failed else 0


async def _recorded(workload: arena.Workload, base: Path) -> tuple[list[str], arena.Outcome, str]:
    cache = base / "record.json"
    if cache.exists():
        found = json.loads(cache.read_text(encoding="utf-8"))
        return (
            found["names"],
            arena.Outcome("same", "", found["picture"], found["sha256"]),
            found["sha256"],
        )
    with tempfile.TemporaryDirectory(prefix="everstep-sweep-") as folder:
        names, expected, sha256 = await record(workload, Path(folder))
    cache.write_text(json.dumps({"names": names, "picture": expected.picture, "sha256": sha256}))
    return names, expected, sha256


def _done(log: Path) -> dict[str, dict[str, Any]]:
    if not log.exists():
        return {}
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {row["point"]: row for row in rows if row["verdict"] == "same"}


def _table(rows: list[dict[str, Any]]) -> int:
    """Print failpoints x outcomes; answers how many were not right."""
    verdicts = sorted({row["verdict"] for row in rows})
    kinds = sorted({_kind(row["point"]) for row in rows})
    width = max((len(k) for k in kinds), default=4)
    print()
    print(" " * width, *(f"{v:>12}" for v in verdicts))
    for kind in kinds:
        counts = Counter(row["verdict"] for row in rows if _kind(row["point"]) == kind)
        print(f"{kind:<{width}}", *(f"{counts[v]:>12}" for v in verdicts))
    wrong = [row for row in rows if row["verdict"] != "same"]
    print(
        f"\n{len(rows)} failpoints, {len(rows) - len(wrong)} ended the same, {len(wrong)} did not"
    )
    return len(wrong)


def _kind(point: str) -> str:
    what, name, _, where, action = point.split(":")
    return f"{what} {name} {where} {action}"


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="make sweep", description=__doc__)
    parser.add_argument("--shard", default="1/1", help="which part of the points, like 2/8")
    parser.add_argument("--only", default="", help="only points whose name contains this")
    parser.add_argument("--kinds", default="kill,freeze")
    parser.add_argument("--torch", action="store_true", help="also one point in ten with PyTorch")
    parser.add_argument("--limit", type=int, default=None, help="at most this many points")
    parser.add_argument("--outages", action="store_true", help="long outages instead of failpoints")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long each of them lasts")
    options = parser.parse_args()
    if options.outages:
        return 1 if asyncio.run(sweep_outages(options.minutes, options.only)) else 0
    return asyncio.run(sweep(options))


if __name__ == "__main__":
    sys.exit(main())
