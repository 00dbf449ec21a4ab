"""Reads docker-compose.yml, and says how a service of ours runs without containers.

A container gives a service host names, ports, volumes, files of its image and users. Here host
names become loopback with free ports, volumes become folders, the image's files those of the
checkout, and the image's user the one that runs the tests. Nothing else is changed: the command and
the environment are those that are written in the file.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import re
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.packaging.conftest import CHECKOUT, Installed

IMAGE_FILES = {
    "/opt/everstep/compose": CHECKOUT / "deploy" / "compose",
    "/opt/everstep/examples": CHECKOUT / "examples",
}
"""What the Dockerfile copies, and from where (``test_the_image_has_the_files`` compares)."""
IMAGE_PATH = CHECKOUT / "deploy" / "docker"
IMAGE_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
IMAGE_USER = "everstep"


def read_compose() -> dict[str, Any]:
    """The file, with anchors and merges resolved."""
    data: dict[str, Any] = YAML(typ="safe").load(CHECKOUT / "docker-compose.yml")
    return data


def is_ours(service: dict[str, Any]) -> bool:
    """Whether an image of ours runs the service."""
    return str(service["image"]).startswith("everstep-")


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody has now, all different.

    Below the range from which Linux takes the ports of outgoing connections: they are used seconds
    later, and must not be given away until then.
    """
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return list(ports)


@dataclass(frozen=True, slots=True)
class Runnable:
    """One service as a process on this host."""

    name: str
    command: list[str]
    healthcheck: list[str]
    environment: dict[str, str]


class Loopback:
    """The whole file, mapped onto this host."""

    def __init__(self, root: Path, installed: Installed) -> None:
        self.services: dict[str, Any] = read_compose()["services"]
        self._root = root
        self._installed = installed
        listened = {
            (name, port)
            for name, service in self.services.items()
            for port in self._ports_listened_on(name, service)
        }
        self.ports = dict(zip(sorted(listened), free_ports(len(listened)), strict=True))
        for name in read_compose()["volumes"]:
            self.volume(name).mkdir(parents=True)

    def volume(self, name: str) -> Path:
        """The folder that stands for a named volume."""
        return self._root / "volumes" / name

    def service(self, name: str) -> Runnable:
        """A service's command, healthcheck and environment on this host."""
        service = self.services[name]
        check: list[str] = service.get("healthcheck", {}).get("test", ["NONE"])
        assert check[0] in {"CMD", "NONE"}
        path = [self._installed.prefix / "bin", IMAGE_PATH, Path(sys.executable).parent]
        base = {
            **IMAGE_ENVIRONMENT,
            "PATH": os.pathsep.join([*map(str, path), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(self._root),
            "TMPDIR": os.environ["TMPDIR"],
        }
        own = {key: self._map(name, str(value)) for key, value in environment(service).items()}
        return Runnable(
            name=name,
            command=[self._map(name, part) for part in service["command"]],
            healthcheck=[self._map(name, part) for part in check[1:]],
            environment={**base, **own},
        )

    def text(self, name: str, text: str) -> str:
        """A file's content as the service would see it."""
        return self._map(name, text)

    def _ports_listened_on(self, name: str, service: dict[str, Any]) -> Iterable[int]:
        if is_ours(service):
            text = " ".join(service.get("command", ()))
            return [int(port) for port in re.findall(r"--listen=0\.0\.0\.0:(\d+)", text)]
        return {"postgres": [5432], "temporal": [7233]}.get(name, [])

    def _map(self, name: str, text: str) -> str:
        # What this service listens on, and how its own healthcheck reaches it.
        for (owner, port), here in self.ports.items():
            if owner == name:
                text = re.sub(rf"(0\.0\.0\.0|127\.0\.0\.1):{port}\b", f"127.0.0.1:{here}", text)
        # Other services, with a port and without.
        for (owner, port), here in self.ports.items():
            text = re.sub(rf"(?<![\w.-]){owner}:{port}\b", f"127.0.0.1:{here}", text)
        for owner in self.services:
            text = re.sub(rf"(?<![\w./-]){owner}(?![\w:.-])", "127.0.0.1", text)
        text = text.replace(f"={IMAGE_USER}", f"={pwd.getpwuid(os.geteuid()).pw_name}")
        for inside, outside in sorted(self._folders(name).items(), reverse=True):
            text = re.sub(rf"(?<![\w.]){re.escape(inside)}(?![\w.-])", str(outside), text)
        return text

    def _folders(self, name: str) -> dict[str, Path]:
        folders = dict(IMAGE_FILES)
        for entry in self.services[name].get("volumes", ()):
            source, target = entry.removesuffix(":ro").split(":")
            is_path = source.startswith((".", "/"))
            folders[target] = (CHECKOUT / source).resolve() if is_path else self.volume(source)
        return folders


def environment(service: dict[str, Any]) -> dict[str, str]:
    """The environment block, which is a mapping in our file."""
    block: dict[str, str] = service.get("environment", {})
    return block
