"""``everstep up`` from outside: jobs outlive it, and it outlives the death of its parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from everstep.ledger import Ledger
from tests.cli.conftest import Shell
from tests.e2e.up_world import EXAMPLES, POLICY, Up, until
from workers.embedded import find_temporal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Not started yet; whatever a test does, nothing of it is left behind."""
    home = tmp_path / "home"
    home.mkdir()
    made = Up(Shell(home), tmp_path / "s")
    yield made
    made.clean_up()


def digest(path: Path) -> str:
    return path.read_text().strip()


def uninterrupted(tmp_path: Path, steps: int) -> str:
    """The counter job's hash when nobody touches it: one rank after the other is started by us."""
    with_port = 20_000 + os.getpid() % 10_000
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, str(EXAMPLES / "counter_job" / "train.py")),
                *("--steps", str(steps), "--step-ms", "0"),
                *(("--out", str(tmp_path / "alone")) if rank == 0 else ()),
            ],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "4",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(with_port),
            },
            stdout=subprocess.DEVNULL,
        )
        for rank in range(4)
    ]
    assert [rank.wait(timeout=60) for rank in ranks] == [0] * 4
    return digest(tmp_path / "alone")


def test_ctrl_c_ends_everything_and_the_next_up_resumes_the_job(up: Up, tmp_path: Path) -> None:
    out = tmp_path / "out"
    up.start("--slots", "2")
    up.launch("job", "--steps", "300", "--out", str(out))
    until(lambda: up.status("job")["progress"]["step"], "the job steps")
    ports = up.places()["temporal"]
    assert up.end(signal.SIGINT) == 130
    assert up.processes() == []
    assert up.ranks() == []
    assert up.places()["pid"] is None

    up.start("--slots", "2")
    assert up.places()["temporal"] == ports
    until(lambda: up.status("job")["phase"] == "succeeded", "the job ends", also=up.said)
    assert digest(out) == uninterrupted(tmp_path, 300)
    runs = Ledger(up.places()["ledger"]).runs("job")
    assert [run.start_reason for run in runs] == ["launch", "resume"]
    assert runs[1].restore is not None
    assert up.end(signal.SIGTERM) == 0


def test_whatever_part_dies_is_back_and_the_job_goes_on(up: Up, tmp_path: Path) -> None:
    up.start("--slots", "2")
    up.launch("job", "--steps", "1500", "--out", str(tmp_path / "out"))
    until(lambda: up.status("job")["progress"]["step"], "the job steps")
    started = {p.pid: p.cmdline() for p in up.processes()}
    parts = [
        pid for pid, words in started.items() if {"start-dev", "controller", "agent"} & set(words)
    ]
    assert len(parts) == 6  # the server, two controllers, three agents
    for pid in parts:
        psutil.Process(pid).kill()
    until(
        lambda: (
            sum(
                bool({"start-dev", "controller", "agent"} & set(p.cmdline()))
                for p in up.processes()
            )
            == len(parts)
        ),
        "all parts are back",
        also=up.said,
    )

    def trains_on() -> bool:
        ran = up.shell.run("status", "job", "-o", "json", EVERSTEP_STATE=str(up.state))
        return ran.code == 0 and json.loads(ran.out)["phase"] in ("running", "succeeded")

    until(trains_on, "the job can be seen again", also=up.said)
    status = up.status("job")
    assert (status["generation"], status["incidents_total"]) == (1, 0)
    # A second Ctrl-C is for people in a hurry; ranks must not be left all the same.
    assert up.process is not None
    up.process.send_signal(signal.SIGINT)
    until(lambda: "ending" in up.said(), "it has heard the first")
    up.end(signal.SIGINT)
    assert up.ranks() == []
    assert up.processes() == []


def test_a_killed_up_leaves_nothing_running_for_long(up: Up) -> None:
    up.start("--slots", "2", "--machines", "2")
    up.launch("job", "--steps", "100000")
    until(lambda: up.status("job")["progress"]["step"], "the job steps")
    up.end(signal.SIGKILL)
    until(lambda: not up.ranks() and not up.processes(), "everything has ended")


def test_a_second_up_and_taken_ports_are_refused(up: Up) -> None:
    up.start("--machines", "1")
    second = up.shell.run("up", "--state", str(up.state))
    assert second.code == 3
    assert "another `everstep up`" in second.line
    port = up.places()["temporal"].rpartition(":")[2]
    other = up.shell.run("up", "--state", str(up.state.parent / "b"), "--temporal-port", port)
    assert other.code == 3
    assert f"port {port}" in other.line
    up.end()


def test_a_damaged_database_is_named(up: Up) -> None:
    up.state.mkdir()
    (up.state / "temporal.db").write_text("this is no database")
    ran = up.shell.run("up", "--state", str(up.state))
    assert ran.code == 3
    assert "temporal cannot be started" in ran.line
    assert up.processes() == []


def test_any_tool_can_launch_and_a_lost_temporal_database_loses_nothing(up: Up) -> None:
    up.start("--slots", "2")
    spec = {
        "name": "raw",
        "command": [sys.executable, "counter_job/train.py", "--steps", "400"],
        "machines": 2,
        "ranks_per_machine": 2,
        "code": str(EXAMPLES),
        "policy": POLICY,
    }
    path = up.shell.home / "raw.json"
    path.write_text(json.dumps(spec))
    subprocess.run(
        [
            *(find_temporal(), "workflow", "start", "--address", up.places()["temporal"]),
            *("--type", "TrainingJob", "--task-queue", "everstep", "--workflow-id", "job-raw"),
            *("--input-file", str(path)),
        ],
        check=True,
        capture_output=True,
        env=up.shell.env(),
    )
    until(lambda: up.status("raw")["progress"]["step"], "the job steps")
    assert up.run("launch", str(path))["already"] is True
    up.end()

    for left in up.state.glob("temporal.db*"):
        left.unlink()
    up.start("--slots", "2")
    status = up.status("raw")
    assert "everstep adopt raw" in status["note"]
    assert up.run("adopt", "raw")["already"] is False
    until(lambda: up.status("raw")["phase"] == "succeeded", "the job ends", also=up.said)
    up.end()
