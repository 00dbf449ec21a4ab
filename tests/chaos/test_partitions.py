"""Networks that are cut: from the controller, from peers, from both, and back later.

Every story runs in network namespaces of its own, which only root can make.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
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


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Told]]:
    """All stories that were asked for, started at once: they mostly wait."""
    reason = why_not()
    if reason:
        pytest.skip(f"partitions are not tested: {reason}")
    asked = {item.name for item in request.session.items if isinstance(item, pytest.Function)}
    stories = [story for story in sorted(STORIES) if f"test_partition[{story}]" in asked]
    running = {story: start(story, tmp_path_factory.mktemp("net")) for story in stories}
    yield running
    for one in running.values():
        one.end()


@dataclass(frozen=True, slots=True)
class Told:
    """A story that is being told."""

    process: subprocess.Popen[bytes]
    said: Path

    def end(self) -> None:
        """One that takes too long is interrupted: it ends what it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(50)


def start(story: str, folder: Path) -> Told:
    command = [sys.executable, "-m", "tests.chaos.partitions", story, str(folder)]
    said = folder / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            ["unshare", "--net", "--mount", *command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'trainer'}"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    return Told(process, said)


@pytest.mark.parametrize("story", sorted(STORIES))
def test_partition(story: str, told: dict[str, Told]) -> None:
    one = told[story]
    try:
        one.process.wait(STORY_LIMIT_S)
    except subprocess.TimeoutExpired:
        one.end()
    assert one.process.returncode == 0, one.said.read_text()[-6000:]
