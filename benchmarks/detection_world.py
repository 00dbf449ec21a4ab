"""The machines of ``bench_detection``: real agents, networks they lose, and a controller's ear.

A machine with a network is a namespace with two cables: ``mgmt0`` to the controller's side, which
carries the agent's event stream, and ``data0`` to a switch of its own, with the default route.

    10.78.0.1    the controller's side: this program
    10.78.0.N    machine N, its agent
    10.79.N.1    machine N's switch, its gateway

All of it lives in the network and mount namespace that this program was started in, and ends with
it. Not here: faults, and what counts as an observation of one (``detection_cases``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from activities.detection import SILENT_HEARTBEATS
from everstep.machine.client import AgentClient, AgentUnreachable
from everstep.secrets import Secrets
from everstep.spec.agent_api import EventLine
from everstep.spec.load import load_policy
from tests.agents import kill_ranks

START_LIMIT_S = 90.0
"""Other programs use this box too."""
END_LIMIT_S = 10.0
POLL_S = 0.05
CONTROL, BRIDGE = "10.78.0.1", "mgmt"
NOBODY = "http://127.0.0.1:9"
"""Agents register with controllers; here none is there, only one that reads streams."""


class NotInTime(Exception):
    """Something did not happen within its limit."""


def ip(*arguments: str) -> None:
    """Run ``ip``."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


# --- networks


def open_network() -> None:
    """The controller's side; once."""
    # ``ip netns`` keeps names here; this one is the private mount namespace's.
    Path("/run/netns").mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "everstep-netns", "/run/netns"], check=True)
    ip("link", "set", "lo", "up")
    _add_bridge(BRIDGE, 0)
    ip("addr", "add", f"{CONTROL}/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")


def _add_bridge(name: str, number: int) -> None:
    # An address of its own: else it changes with the ports, and for a while nobody is heard.
    address = f"02:00:00:00:00:{number:02x}"
    ip("link", "add", name, "address", address, "type", "bridge")


@dataclass(frozen=True, slots=True)
class Network:
    """The network of one machine."""

    number: int

    @property
    def name(self) -> str:
        """The namespace."""
        return f"machine-{self.number}"

    @property
    def address(self) -> str:
        """Where the agent is reached."""
        return f"10.78.0.{self.number + 1}"

    @property
    def port(self) -> str:
        """The switch's end of the machine's cable."""
        return f"port{self.number}"

    @property
    def switch(self) -> str:
        """The machine's switch, which is its gateway too."""
        return f"switch{self.number}"

    def build(self) -> None:
        """Lay both cables."""
        ip("netns", "add", self.name)
        self._inside("link", "set", "lo", "up")
        uplink = f"uplink{self.number}"
        self._cable(uplink, "mgmt0", f"{self.address}/24")
        ip("link", "set", uplink, "master", BRIDGE, "up")
        _add_bridge(self.switch, self.number)
        ip("addr", "add", f"10.79.{self.number}.1/24", "dev", self.switch)
        ip("link", "set", self.switch, "up")
        self._cable(self.port, "data0", f"10.79.{self.number}.2/24")
        ip("link", "set", self.port, "master", self.switch, "up")
        self._inside("route", "add", "default", "via", f"10.79.{self.number}.1")

    def _cable(self, outside: str, inside: str, address: str) -> None:
        ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", self.name)
        self._inside("addr", "add", address, "dev", inside)
        self._inside("link", "set", inside, "up")

    def _inside(self, *arguments: str) -> None:
        ip("-n", self.name, *arguments)

    def lose_nic(self, interface: str) -> None:
        """The interface is gone, as when its card or its driver has died."""
        self._inside("link", "del", interface)

    def set_port(self, state: str) -> None:
        """The switch's port, ``up`` or ``down``: the machine's carrier comes and goes with it."""
        ip("link", "set", self.port, state)

    def unplug_in_switch(self) -> None:
        """The switch forwards nothing any more; the link to it stays up."""
        ip("link", "set", self.port, "nomaster")

    def close(self) -> None:
        """Take it down; what is left of it goes with the program."""
        for arguments in (("netns", "del", self.name), ("link", "del", self.switch)):
            with contextlib.suppress(RuntimeError):
                ip(*arguments)


@contextlib.contextmanager
def network(number: int) -> Iterator[Network]:
    """The network of one machine, for as long as it is needed."""
    made = Network(number)
    try:
        made.build()
        yield made
    finally:
        made.close()


# --- agents


@dataclass
class Agent:
    """A running agent and its client."""

    machine_id: str
    folder: Path
    client: AgentClient

    async def well(self, probes: Sequence[str]) -> None:
        """Wait until these probes have looked and found everything well."""
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            with contextlib.suppress(AgentUnreachable):
                info = await self.client.info()
                if set(probes) <= set(info.healthy_probes):
                    return
            if time.monotonic() > deadline:
                raise NotInTime(f"{self.machine_id}: {', '.join(probes)} did not find it well")
            await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def agent(
    folder: Path, machine_id: str, net: Network | None = None, library: Path | None = None
) -> AsyncIterator[Agent]:
    """An agent as it is installed, with all of its probes and the default policy.

    Args:
        folder: of this machine alone; its kernel log is the file ``kernel.log`` in it.
        machine_id: its name.
        net: the network that it lives in; None: the one of this program, on loopback.
        library: folder of the library that stands in for NVIDIA's.
    """
    secrets, process = _start(folder, machine_id, net, library)
    try:
        url = await _address(process, folder)
        async with AgentClient(url, secrets.controller, machine_id=machine_id) as client:
            yield Agent(machine_id, folder, client)
    finally:
        # In a thread: an agent takes seconds to end, and the others are being timed.
        await asyncio.to_thread(_end, process, folder)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_LIMIT_S)
    process.kill()
    process.wait()
    kill_ranks(folder / "state")


def _start(
    folder: Path, machine_id: str, net: Network | None, library: Path | None
) -> tuple[Secrets, subprocess.Popen[bytes]]:
    folder.mkdir(parents=True)
    (folder / "kernel.log").touch()
    secrets = Secrets.create(folder / "secrets")
    host = net.address if net else "127.0.0.1"
    inside = ("ip", "netns", "exec", net.name) if net else ()
    env = dict(os.environ)
    if library is not None:
        env["LD_LIBRARY_PATH"] = f"{library}:{env.get('LD_LIBRARY_PATH', '')}"
    with (folder / "agent.log").open("ab") as output:
        process = subprocess.Popen(
            [
                *(*inside, str(Path(sys.executable).parent / "everstep"), "agent"),
                *("--machine-id", machine_id, "--state", str(folder / "state")),
                *("--secrets", str(secrets.directory), "--controller", NOBODY),
                *("--listen", f"{host}:0", "--address", host, "--insecure"),
                *("--kernel-log", str(folder / "kernel.log")),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,  # a terminal's Ctrl-C is for this program, which ends it
        )
    return secrets, process


async def _address(process: subprocess.Popen[bytes], folder: Path) -> str:
    told = folder / "state" / "agent" / "address.json"
    deadline = time.monotonic() + START_LIMIT_S
    while not told.exists():
        if process.poll() is not None:
            raise NotInTime(f"the agent has ended: {(folder / 'agent.log').read_text()[-500:]}")
        if time.monotonic() > deadline:
            raise NotInTime(f"the agent did not start within {START_LIMIT_S:g} s")
        await asyncio.sleep(POLL_S)
    return str(json.loads(told.read_text())["url"])


# --- the controller's side of the stream


@dataclass
class Ear:
    """What came over one agent's stream, each line with the instant when it was here."""

    lines: list[tuple[float, EventLine]] = field(default_factory=list)
    lost_s: float | None = None
    """When the stream broke or had been silent for as long as a watch bears it."""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def listen(self, client: AgentClient) -> None:
        """Read until it is lost, in the way of ``watch_run``."""
        heartbeat = load_policy(None, environ={}).policy.detection.heartbeat_interval
        silence_max_s = max(1.0, SILENT_HEARTBEATS * heartbeat.total_seconds())
        stream = client.stream()
        try:
            while True:
                async with asyncio.timeout(silence_max_s):
                    line = await anext(stream)
                if isinstance(line, EventLine):
                    await self._note(line)
        except (TimeoutError, AgentUnreachable, StopAsyncIteration):
            async with self._changed:
                self.lost_s = time.monotonic()
                self._changed.notify_all()
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()

    async def _note(self, line: EventLine) -> None:
        async with self._changed:
            self.lines.append((time.monotonic(), line))
            self._changed.notify_all()

    def first(self, since_s: float, matches: Callable[[EventLine], bool]) -> float | None:
        """Seconds from an instant to the first line that matches."""
        found = (at_s for at_s, line in self.lines if at_s >= since_s and matches(line))
        at_s = next(found, None)
        return None if at_s is None else at_s - since_s

    def rule(self, since_s: float, matches: Callable[[EventLine], bool]) -> str:
        """What decided in the first line that matches; a probe's event has a rule."""
        found = (line for at_s, line in self.lines if at_s >= since_s and matches(line))
        line = next(found, None)
        return "" if line is None else str(line.data.get("rule") or line.kind.value)

    async def until(self, there: Callable[[], bool], limit_s: float) -> None:
        """Wait for what the lines say, for no longer than the limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(there)


@contextlib.asynccontextmanager
async def heard(client: AgentClient) -> AsyncIterator[Ear]:
    """An ear that listens already."""
    ear = Ear()
    listening = asyncio.create_task(ear.listen(client))
    try:
        await ear.until(lambda: bool(ear.lines) or ear.lost_s is not None, START_LIMIT_S)
        yield ear
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
