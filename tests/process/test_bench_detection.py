"""The benchmark of detection times: a real agent is what it measures, and nothing is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.common import CHECKOUT
from tests.agents import wait_for

LIMIT_S = 120.0


def start(folder: Path, *cases: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.detection_cases", str(folder), "1", *cases],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=CHECKOUT,
    )


def processes(folder: Path) -> list[psutil.Process]:
    """Agents and ranks: all of them name the folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "agent" in words and any(str(folder) in word for word in words):
            found.append(process)
    return found


def test_a_kernel_fault_is_timed_from_the_log_to_the_stream(tmp_path: Path) -> None:
    with start(tmp_path, "OS kernel fault") as program:
        assert program.wait(LIMIT_S) == 0
    (seen,) = json.loads((tmp_path / "seen.json").read_text("utf-8"))
    assert (seen["case"], seen["rule"]) == ("OS kernel fault", "kernel_oops")
    assert seen["first_s"] > 0
    assert processes(tmp_path) == []


@pytest.mark.parametrize("how", ["end of input", "SIGINT", "SIGTERM"])
def test_told_to_end_it_takes_its_agents_along(tmp_path: Path, how: str) -> None:
    with start(tmp_path, "rank SIGSTOP (hang)") as program:
        wait_for(lambda: processes(tmp_path), "an agent", LIMIT_S)
        if how == "end of input":
            assert program.stdin is not None
            program.stdin.close()
        else:
            program.send_signal(signal.Signals[how])
        assert program.wait(LIMIT_S) == 130
    assert processes(tmp_path) == []
    assert not (tmp_path / "seen.json").exists()
