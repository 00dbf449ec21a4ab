"""A real ``everstep up`` in a process of its own, as a person starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from everstep.connect import UP_FILE
from tests.cli.conftest import Shell

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 90.0
POLICY = {
    "detection": {"hang_min": "5s", "machine_lost_after": "3s", "progress_report_interval": "1s"},
    "ladder": {"stable_after": "1s"},
    "teardown": {"stop_grace": "2s"},
}


@dataclass(slots=True)
class Up:
    """``everstep up`` on one state directory, started and ended as often as a test likes."""

    shell: Shell
    state: Path
    process: subprocess.Popen[bytes] | None = None
    env: dict[str, str] = field(default_factory=dict)

    def start(self, *flags: str) -> None:
        log = (self.state.parent / "up.out").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "everstep.cli", "up", "--state", str(self.state), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self.shell.env(**self.env),
            cwd=self.shell.home,
        )
        log.close()
        until(self.running, "up is up", also=self.said)

    def running(self) -> bool:
        """Whether it has written where everything is."""
        assert self.process is not None
        assert self.process.poll() is None, self.said()
        try:
            return bool(self.places()["pid"] == self.process.pid)
        except (FileNotFoundError, ValueError):
            return False

    def places(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state / UP_FILE).read_text())
        return found

    def said(self) -> str:
        return (self.state.parent / "up.out").read_text()

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and wait for the end; answers its exit code."""
        process = self.process
        assert process is not None
        process.send_signal(number)
        code = process.wait(timeout=LIMIT_S)
        self.process = None
        return code

    def run(self, *arguments: str) -> Any:
        """Run a command against it; answers its JSON."""
        ran = self.shell.run(*arguments, "-o", "json", EVERSTEP_STATE=str(self.state))
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    def launch(self, name: str, *arguments: str, **more: Any) -> None:
        """Launch the counter job: four ranks on two machines."""
        spec = {
            "name": name,
            "command": [sys.executable, "counter_job/train.py", *arguments],
            "machines": 2,
            "ranks_per_machine": 2,
            "code": str(EXAMPLES),
            "policy": POLICY,
            **more,
        }
        path = self.shell.home / f"{name}.json"
        path.write_text(json.dumps(spec))
        assert self.run("launch", str(path))["already"] is False

    def status(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.run("status", job)
        return found

    def processes(self) -> list[psutil.Process]:
        """Everything alive that belongs to this state: its path is in their arguments."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            mine = any(str(self.state) in word for word in words)
            if mine and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Live processes of the counter job that were started from this state's code folders."""
        found = []
        for process in psutil.process_iter(["status"]):
            if process.info["status"] == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            try:
                environment = (Path("/proc") / str(process.pid) / "environ").read_bytes()
            except OSError:
                continue
            if f"EVERSTEP_PROGRESS_FILE={self.state}/".encode() in environment:
                found.append(process)
        return found

    def clean_up(self) -> None:
        """End whatever is left after a test, failed ones too."""
        process = self.process
        if process is not None:
            for _ in range(2):  # the second one hurries, and ends ranks all the same
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in [*self.ranks(), *self.processes()]:
            left.kill()


def until(found: Callable[[], object], what: str, *, also: Callable[[], str] = str) -> None:
    """Wait for a state."""
    deadline = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}\n{also()}"
        time.sleep(0.1)
