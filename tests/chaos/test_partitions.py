"""Networks that are cut: from the controller, from peers, from both, and back later.

Every story runs in network namespaces of its own, which only root can make.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.partitions import STORIES

ROOT = Path(__file__).resolve().parents[2]
STORY_LIMIT_S = 280

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(STORY_LIMIT_S + 60)]


def why_not() -> str:
    """Why no network can be cut here; empty: it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "there is no unshare or no ip program"
    bridge = "ip link add everstep-try type bridge"
    made = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", bridge],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if made.returncode == 0 else f"no bridge can be made: {made.stderr.strip()}"


@pytest.fixture(scope="module", autouse=True)
def _networks() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"partitions are not tested: {reason}")


@pytest.mark.parametrize("story", sorted(STORIES))
def test_partition(story: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos.partitions", story, str(tmp_path)]
    process = subprocess.Popen(
        ["unshare", "--net", "--mount", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'trainer'}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=STORY_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it ends what it started
        said, _ = process.communicate(timeout=50)
    assert process.returncode == 0, said[-6000:]
