"""A sample of the crash sweep in every test run: few points, drawn by a seed that is printed.

``EVERSTEP_SEED=N`` draws the same points again. All of them: ``make sweep``.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.sweep import arena
from tests.sweep.__main__ import plan, record, strike

POINTS = {"kill": 2, "freeze": 1}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def test_a_sample_of_all_crashes_ends_like_an_undisturbed_run(tmp_path: Path) -> None:
    seed = int(os.environ.get("EVERSTEP_SEED") or random.SystemRandom().randrange(10**6))
    print(f"EVERSTEP_SEED={seed}")
    workload = arena.counter()
    names, expected, sha256 = await record(workload, tmp_path)
    # What the incident itself consists of; the launch before it is part of the whole sweep.
    incident = [n for n in names if (n.startswith("activity:") and ":1:" not in n) or "evict" in n]
    assert any("evict_machines" in name for name in incident)
    draw = random.Random(seed)
    chosen = [
        point
        for kind, count in POINTS.items()
        for point in draw.sample(plan(incident, {kind}), count)
    ]
    wrong = {}
    for point in chosen:
        outcome = await strike(workload, point, expected, sha256)
        if outcome.verdict != "same":
            wrong[point] = f"{outcome.verdict} {outcome.detail}"
    assert wrong == {}, f"EVERSTEP_SEED={seed}"
