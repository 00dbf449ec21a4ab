"""Network probes and real faults: cables, a switch and a gateway in network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.probes_network_program import STORIES

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90


@pytest.mark.root
@pytest.mark.parametrize("story", sorted(STORIES))
def test_network(story: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("network faults are not tested: only root can make network namespaces")
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("network faults are not tested: there is no unshare or no ip program")
    tried = "ip link add everstep-a type veth peer name everstep-b && mount -t sysfs sysfs /sys"
    inside = ("unshare", "--net", "--mount")
    made = subprocess.run([*inside, "sh", "-c", tried], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"network faults are not tested: {made.stderr.strip()}")

    done = subprocess.run(
        [*inside, sys.executable, "-m", "tests.process.probes_network_program", story],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'trainer'}"},
    )

    assert done.returncode == 0, done.stderr
