"""The controller as it is installed: comes up before its server, ends soon, refuses in one line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client

from everstep.errors import ConfigurationProblem
from everstep.secrets import Secrets
from workers.controller import ControllerConfig, run_controller

BIN = Path(sys.executable).parent
WAIT_MAX_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(*argv: str, log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone at the end, whatever happens."""
    with log.open("ab") as output:
        started = subprocess.Popen(
            argv, stdout=output, stderr=output, cwd="/", env={**os.environ, **env}
        )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


class Site:
    """A directory with secrets, a ledger and addresses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secrets = Secrets.create(folder / "secrets")
        self.temporal_port, self.port = free_port(), free_port()
        self.log = folder / "controller.log"

    def controller(self, **changes: str) -> list[str]:
        flags = {
            "temporal": f"127.0.0.1:{self.temporal_port}",
            "namespace": "default",
            "ledger": f"sqlite:///{self.folder}/ledger.db",
            "secrets": str(self.folder / "secrets"),
            "listen": f"127.0.0.1:{self.port}",
            "checkpoint-root": str(self.folder / "checkpoints"),
        } | {key.replace("_", "-"): value for key, value in changes.items()}
        arguments = [part for key, value in flags.items() for part in (f"--{key}", value)]
        return [str(BIN / "everstep"), "controller", *arguments]

    def server(self) -> list[str]:
        binary = shutil.which("temporal", path=str(BIN))
        assert binary is not None
        return [
            binary, "server", "start-dev", "--headless", "--ip", "127.0.0.1",
            "--port", str(self.temporal_port), "--log-level", "never",
            "--db-filename", str(self.folder / "temporal.db"),
        ]  # fmt: skip

    def health(self) -> tuple[int, Any]:
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}/healthz", timeout=5)
        except httpx.HTTPError:
            return 0, None
        return answer.status_code, answer.json()

    def until(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + WAIT_MAX_S
        while not condition():
            if time.monotonic() > give_up:
                raise AssertionError(f"never came true; log:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.slow
def test_a_controller_waits_for_its_server_and_says_whether_it_works(site: Site) -> None:
    with process(*site.controller(), log=site.log) as controller:
        site.until(lambda: site.health()[0] == 503)
        site.until(lambda: "waiting for the Temporal server" in site.log.read_text())
        with process(*site.server(), log=site.folder / "server.log"):
            site.until(lambda: site.health()[0] == 200)
            assert set(asyncio.run(_attributes(site))) >= {
                "EverstepState", "EverstepSymptom", "EverstepCodeVersion",
            }  # fmt: skip
            headers = {"authorization": f"Bearer {site.secrets.metrics}"}
            url = f"http://127.0.0.1:{site.port}/metrics"
            assert "temporal_num_pollers" in httpx.get(url, headers=headers).text
        # The server is gone: alive, but no use.
        site.until(lambda: site.health()[0] == 503)
        assert controller.poll() is None
        with process(*site.server(), log=site.folder / "server.log"):
            site.until(lambda: site.health()[0] == 200)
            controller.send_signal(signal.SIGTERM)
            assert controller.wait(timeout=30) == 0
    text = site.log.read_text()
    assert "Traceback" not in text
    for secret in ("enrol", "controller", "peer", "metrics"):
        assert getattr(site.secrets, secret) not in text


async def _attributes(site: Site) -> list[str]:
    client = await Client.connect(f"127.0.0.1:{site.temporal_port}")
    listed = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace="default")
    )
    await asyncio.sleep(0.05)
    return list(listed.custom_attributes)


@pytest.mark.slow
def test_a_waiting_controller_ends_at_once(site: Site) -> None:
    with process(*site.controller(), log=site.log) as controller:
        site.until(lambda: "waiting for the Temporal server" in site.log.read_text())
        controller.send_signal(signal.SIGTERM)
        assert controller.wait(timeout=20) == 0
    assert "Traceback" not in site.log.read_text()


def broken_cases(site: Site) -> dict[str, tuple[dict[str, str], str]]:
    """Flag changes and what the one line must name."""
    garbage = site.folder / "garbage.db"
    garbage.write_bytes(b"this is no database" * 100)
    policy = site.folder / "policy.yaml"
    policy.write_text("detection:\n  hang_mni: 5s\n")
    (site.folder / "file").write_text("")
    return {
        "secrets": ({"secrets": str(site.folder / "none")}, "none"),
        "listen": ({"listen": "nonsense"}, "--listen nonsense"),
        "ledger": ({"ledger": "mysql://x"}, "mysql"),
        "damaged ledger": ({"ledger": f"sqlite:///{garbage}"}, str(garbage)),
        "policy": ({"policy": str(policy)}, "policy.yaml:2"),
        "checkpoint root": ({"checkpoint_root": "/no/such/place"}, "--checkpoint-root"),
        "root is a file": ({"checkpoint_root": str(site.folder / "file")}, "--checkpoint-root"),
        "open to others": ({"listen": f"0.0.0.0:{site.port}"}, "--insecure"),
        "half of tls": ({"tls_cert": "/x"}, "--tls-key"),
    }


async def test_every_bad_start_is_one_line_that_names_the_flag(site: Site) -> None:
    for name, (changes, named) in broken_cases(site).items():
        fields: dict[str, Any] = {
            "temporal": f"127.0.0.1:{site.temporal_port}",
            "ledger": f"sqlite:///{site.folder}/ledger.db",
            "secrets": site.folder / "secrets",
            "listen": f"127.0.0.1:{site.port}",
            "checkpoint_root": site.folder / "checkpoints",
        }
        with pytest.raises(ConfigurationProblem) as raised:
            await run_controller(ControllerConfig(**(fields | changes)))
        assert str(raised.value).count("\n") == 0, name
        assert named in str(raised.value), name
        assert raised.value.exit_code == 3


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line_and_code_3(site: Site) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", site.port))
        taken.listen()
        ended = subprocess.run(
            site.controller(), capture_output=True, text=True, timeout=60, cwd="/", check=False
        )
    assert ended.returncode == 3
    assert f"--listen 127.0.0.1:{site.port}" in ended.stderr
