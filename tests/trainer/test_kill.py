"""SIGKILL at every point of a save never leaves a checkpoint that is restored wrongly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.kit import CHECKOUT, PROGRAMS, TRAINER


@pytest.mark.parametrize(
    ("killed_rank", "keep", "points_min"),
    [
        pytest.param(1, 3, 60, id="writing a large part and completing"),
        pytest.param(0, 1, 60, id="completing and pruning"),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kill_at_any_point_of_a_save_harms_nothing(
    tmp_path: Path, killed_rank: int, keep: int, points_min: int
) -> None:
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        [
            sys.executable,
            str(PROGRAMS / "kill_sweep.py"),
            str(tmp_path),
            str(killed_rank),
            str(keep),
        ],
        env={**kept, "PYTHONPATH": f"{CHECKOUT}:{TRAINER}", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        check=True,
    )
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    assert result["points"] >= points_min, "the sweep has not been where it was meant to go"
