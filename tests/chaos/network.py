"""Machines in network namespaces of their own, on one bridge, and the ways to cut them off.

The program that uses this has been started in a network and a mount namespace of its own
(``unshare --net --mount``): nothing here is seen outside, and all of it is gone when it ends.

    10.77.0.1    the bridge: server, controllers, and the test itself
    10.77.0.11+  machines

Cuts are silent, like a broken switch: packets vanish, nobody gets an error.
"""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.connect import UpFile
from workers.embedded import Embedded, EmbeddedOptions
from workers.up_parts import PartSpec
from workers.up_state import StateDir

BRIDGE = "everstep0"
CONTROL = "10.77.0.1"


def ip(*arguments: str) -> None:
    """Run ``ip``."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Machine:
    """A network namespace with one interface."""

    machine_id: str
    address: str
    port: str
    """Its end of the cable, at the bridge."""

    def cut_from(self, *addresses: str) -> None:
        """Packets of this machine to these addresses vanish from now on."""
        for address in addresses:
            ip("-n", self.machine_id, "route", "add", "blackhole", f"{address}/32")

    def heal(self, *addresses: str) -> None:
        """Undo ``cut_from``."""
        for address in addresses:
            ip("-n", self.machine_id, "route", "del", "blackhole", f"{address}/32")

    def unplug(self) -> None:
        """Pull the cable at the bridge: the machine's own link stays up."""
        ip("link", "set", self.port, "nomaster")

    def plug_in(self) -> None:
        """Put the cable back."""
        ip("link", "set", self.port, "master", BRIDGE)


def build(count: int) -> dict[str, Machine]:
    """Make the bridge and ``count`` machines."""
    # ``ip netns`` keeps names here; this one is the private mount namespace's.
    Path("/run/netns").mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "everstep-netns", "/run/netns"], check=True)
    ip("link", "set", "lo", "up")
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("addr", "add", f"{CONTROL}/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    return {machine.machine_id: machine for machine in map(_machine, range(1, count + 1))}


def _machine(number: int) -> Machine:
    machine = Machine(f"machine-{number}", f"10.77.0.{10 + number}", f"port{number}")
    name = machine.machine_id
    ip("netns", "add", name)
    ip("link", "add", machine.port, "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("link", "set", machine.port, "master", BRIDGE, "up")
    ip("-n", name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", name, "link", "set", "lo", "up")
    return machine


class Networked(Embedded):
    """``everstep up`` whose machines have addresses, cables and namespaces of their own."""

    def __init__(self, options: EmbeddedOptions, network: dict[str, Machine]) -> None:
        """Nothing is started yet."""
        super().__init__(options)
        self.network = network

    def _addresses(self, state: StateDir) -> UpFile:
        up = super()._addresses(state)
        return replace(
            up,
            controllers=tuple(_at(url, CONTROL) for url in up.controllers),
            agents={
                machine_id: _at(url, self.network[machine_id].address)
                for machine_id, url in up.agents.items()
            },
        )

    def _controller_spec(self, name: str) -> PartSpec:
        spec = super()._controller_spec(name)
        return replace(spec, argv=(*spec.argv, "--insecure"))

    def _agent_spec(self, machine_id: str) -> PartSpec:
        spec = super()._agent_spec(machine_id)
        host, port = self.addresses.agents[machine_id].removeprefix("http://").split(":")
        argv = list(spec.argv)
        argv[argv.index("--address") + 1] = host

        async def ready() -> bool:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                return False
            writer.close()
            return True

        inside = ("ip", "netns", "exec", machine_id)
        return replace(spec, argv=(*inside, *argv, "--insecure"), ready=ready)


def _at(url: str, host: str) -> str:
    return f"http://{host}:{url.rpartition(':')[2]}"
