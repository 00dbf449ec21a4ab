"""docker-compose.yml and Dockerfile: sound as files, and their services really start.

Images cannot be built or run here, so each of *our* services is started as a process with exactly
the command and environment that the file gives it (see ``compose.py`` for the mapping), from an
installed wheel, against a real PostgreSQL with a password and a real Temporal server.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.compose import IMAGE_FILES, Loopback, Runnable, is_ours, read_compose
from tests.packaging.conftest import CHECKOUT, Installed
from tests.packaging.servers import running_postgres, running_temporal, succeeds, wait_for

CONTROLLERS = ("controller-1", "controller-2")
AGENTS = ("agent-1", "agent-2", "agent-3")
THIRD_PARTY = {"postgres", "temporal-schema", "temporal", "temporal-namespace", "temporal-ui"}
ENOUGH_FOR_A_STOP_S = 30.0


# --- As files


def test_the_services_are_those_that_were_asked_for() -> None:
    services = read_compose()["services"]
    assert set(services) == {"init", *CONTROLLERS, *AGENTS, "demo", *THIRD_PARTY}
    assert {name for name, service in services.items() if not is_ours(service)} == THIRD_PARTY


def test_every_image_has_an_exact_version() -> None:
    for name, service in read_compose()["services"].items():
        assert re.fullmatch(r"[\w/-]+:\d+\.\d+(\.\d+)?(-[\w.]+)?", service["image"]), name


def test_every_volume_is_declared_and_every_declared_volume_is_used() -> None:
    compose = read_compose()
    used = {
        entry.partition(":")[0]
        for service in compose["services"].values()
        for entry in service.get("volumes", ())
    }
    assert {name for name in used if not name.startswith(".")} == set(compose["volumes"])
    assert all((CHECKOUT / name).is_dir() for name in used if name.startswith("."))


def test_dependencies_exist_and_have_the_healthchecks_they_are_waited_for_by() -> None:
    services = read_compose()["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in services, name
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[other], f"{name} waits for the health of {other}"
            if how["condition"] == "service_completed_successfully":
                assert services[other].get("restart") == "on-failure", other


def test_what_runs_for_ever_is_restarted_and_checked() -> None:
    services = read_compose()["services"]
    for name in ("postgres", "temporal", *CONTROLLERS, *AGENTS):
        assert services[name]["restart"] == "unless-stopped", name
        assert services[name]["healthcheck"]["test"][0] == "CMD", name


def test_only_loopback_is_published() -> None:
    for name, service in read_compose()["services"].items():
        assert all(entry.startswith("127.0.0.1:") for entry in service.get("ports", ())), name


def test_no_secret_stands_in_the_file() -> None:
    words = re.compile(r"(?i)password|secret|token|_pwd")
    for name, service in read_compose()["services"].items():
        for key, value in service.get("environment", {}).items():
            assert not words.search(key) or str(value).startswith("/run/everstep/"), f"{name} {key}"
        for part in service.get("command", ()):
            assert not re.search(r"://[^/@]*:[^/@]*@", part), f"{name}: a URL with a password"


def test_ranks_cannot_read_tokens() -> None:
    services = read_compose()["services"]
    for name in AGENTS:
        assert "--rank-user=everstep" in services[name]["command"]
        assert "user" not in services[name], "the agent is root, to start ranks as somebody else"
    dockerfile = (CHECKOUT / "Dockerfile").read_text()
    agent = dockerfile.partition("FROM base AS agent")[2]
    controller = dockerfile.partition("FROM base AS controller")[2].partition("FROM ")[0]
    assert "USER everstep" in controller
    assert "USER " not in agent


def test_the_image_has_the_files_and_targets_that_the_services_use() -> None:
    dockerfile = (CHECKOUT / "Dockerfile").read_text()
    for inside, outside in IMAGE_FILES.items():
        assert f"COPY {outside.relative_to(CHECKOUT)} {inside}\n" in dockerfile
    for service in filter(is_ours, read_compose()["services"].values()):
        assert f"AS {service['build']['target']}\n" in dockerfile
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )?(.+) \S+$", dockerfile, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (CHECKOUT / name).exists(), name
        top = name.partition("/")[0]
        assert f"!{top}\n" in (CHECKOUT / ".dockerignore").read_text() + "\n", name


def test_docker_compose_accepts_the_file() -> None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and succeeds([*command, "version"]):
            break
    else:
        pytest.skip("NOT CHECKED by docker compose itself: neither plug-in nor binary is here")
    done = subprocess.run(
        [*command, "-f", str(CHECKOUT / "docker-compose.yml"), "--profile", "demo", "config", "-q"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_python_of_the_image_is_one_that_is_supported() -> None:
    bases = re.findall(r"^FROM (python\S+)", (CHECKOUT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(bases) == {"python:3.11-slim-bookworm"}


# --- As processes


@dataclass
class Processes:
    """Services of ours that run now."""

    logs: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, service: Runnable) -> None:
        with (self.logs / f"{service.name}.log").open("ab") as output:
            self.running[service.name] = subprocess.Popen(
                service.command,
                env=service.environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def wait_healthy(self, service: Runnable) -> None:
        def healthy() -> bool:
            code = self.running[service.name].poll()
            assert code is None, f"{service.name} ended with {code}:\n{self.log(service.name)}"
            return succeeds(service.healthcheck, service.environment)

        wait_for(
            f"{service.name} to become healthy", healthy, explain=lambda: self.log(service.name)
        )

    def stop(self, name: str) -> int:
        """What ``docker compose stop`` does."""
        process = self.running.pop(name)
        process.terminate()
        try:
            return process.wait(ENOUGH_FOR_A_STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return -signal.SIGKILL

    def stop_all(self) -> None:
        for name in reversed(list(self.running)):
            self.stop(name)


def run_once(service: Runnable) -> None:
    """Run a service that ends by itself."""
    done = subprocess.run(
        service.command,
        env=service.environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, f"{service.name}: {done.stdout}{done.stderr}"


@dataclass
class Installation:
    """All services up, on this host."""

    loopback: Loopback
    processes: Processes
    installed: Installed

    def cli(self, *arguments: str) -> Any:
        """Ask with the command line, as an operator in a controller's container would."""
        controller = self.loopback.service("controller-1")
        flags = dict(part.split("=", 1) for part in controller.command if part.startswith("--l"))
        done = subprocess.run(
            ["everstep", *arguments, "-o", "json"],
            env={**controller.environment, "EVERSTEP_LEDGER_URL": flags["--ledger"]},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def up(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Bring everything up in the order of the file's dependencies."""
    root = tmp_path_factory.mktemp("compose")
    loopback = Loopback(root, installed)
    with contextlib.ExitStack() as stack:
        init = loopback.service("init")
        run_once(init)
        password = (loopback.volume("postgres-secret") / "password").read_text()
        run_once(init)  # `up` for the second time
        assert (loopback.volume("postgres-secret") / "password").read_text() == password

        stack.enter_context(
            running_postgres(
                loopback.volume("postgres-data"),
                port=loopback.ports["postgres", 5432],
                user=loopback.services["postgres"]["environment"]["POSTGRES_USER"],
                password=password,
            )
        )
        temporal_port = loopback.ports["temporal", 7233]
        stack.enter_context(running_temporal(root / "temporal.log", port=temporal_port))
        namespace = loopback.service("temporal-namespace")
        run_once(namespace)
        run_once(namespace)

        processes = Processes(root)
        stack.callback(processes.stop_all)
        for group in (CONTROLLERS, AGENTS):
            for name in group:
                processes.start(loopback.service(name))
            for name in group:
                processes.wait_healthy(loopback.service(name))
        yield Installation(loopback, processes, installed)


@pytest.mark.postgres
@pytest.mark.slow
def test_all_agents_register(up: Installation) -> None:
    def registered() -> set[str]:
        return {row["machine_id"] for row in up.cli("machines")}

    wait_for("three machines in the ledger", lambda: len(registered()) == len(AGENTS))
    assert registered() == {"machine-1", "machine-2", "machine-3"}


@pytest.mark.postgres
@pytest.mark.slow
def test_an_agent_that_is_killed_is_started_again(up: Installation) -> None:
    import psutil

    service = up.loopback.service("agent-3")
    (agent,) = psutil.Process(up.processes.running["agent-3"].pid).children()
    agent.kill()
    wait_for("the agent to be gone", lambda: not agent.is_running())
    up.processes.wait_healthy(service)
    assert "keep-running: everstep ended with 137; starting it again" in up.processes.log("agent-3")


@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
def test_the_demo_profile_trains(up: Installation) -> None:
    demo = up.loopback.service("demo")
    up.processes.start(Runnable("demo", list(demo.command), [], demo.environment))

    def saved() -> bool:
        assert up.processes.running["demo"].poll() is None, up.processes.log("demo")
        return any(up.loopback.volume("checkpoints").rglob("step-*/COMPLETE.json"))

    wait_for("a checkpoint of all ranks in the shared volume", saved, limit_s=240.0)
    assert up.processes.stop("demo") != 0
    _cancel(up)


def _cancel(up: Installation) -> None:
    up.cli("cancel", "tiny-gpt", *_temporal(up))
    wait_for(
        "the job to end",
        lambda: up.cli("status", "tiny-gpt", *_temporal(up))["phase"] == "cancelled",
        limit_s=90.0,
    )


def _temporal(up: Installation) -> list[str]:
    return ["--temporal", f"127.0.0.1:{up.loopback.ports['temporal', 7233]}"]
