"""Starting an agent: its settings, and everything that can be wrong before it works.

Whatever is found here is a ``ConfigurationProblem``: one line that names the flag, and exit code 3.
Not here: the agent itself (``workers.agent``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from everstep.errors import ConfigurationProblem
from everstep.machine.wire import server_tls
from everstep.spec.base import MachineId
from workers.agent_probes import ProbeChoice


class AgentConfig(BaseModel):
    """What an agent is started with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    machine_id: str
    state: Path
    secrets: Path
    controllers: tuple[str, ...] = ()
    listen: str = "127.0.0.1:7710"
    address: str = "127.0.0.1"
    """Where other machines reach this one; ranks meet there."""
    slots: Annotated[int, Field(ge=1, le=128)] = 8
    rank_user: str | None = None
    stop_ranks_on_exit: bool = False
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    """Certificates that controllers are checked against; default: the system's."""
    labels: dict[str, str] = Field(default_factory=dict)
    # What follows holds until the first answer of a controller, or when no policy says otherwise.
    heartbeat_interval_s: float = 2.0
    register_interval_s: float = 5.0
    stop_grace_s: float = 30.0
    kill_wait_s: float = 10.0
    probe_choice: ProbeChoice = ProbeChoice()


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int
    loopback: bool


def check(config: AgentConfig) -> ssl.SSLContext | None:
    """Everything that can be wrong before a file is touched; the server's TLS settings."""
    where = _parse_listen(config.listen)
    try:
        TypeAdapter(MachineId).validate_python(config.machine_id)
    except ValidationError:
        raise ConfigurationProblem(
            f"--machine-id {config.machine_id!r}: must be letters, digits, dots, dashes and "
            "underscores, 128 at most, and begin and end with a letter or digit"
        ) from None
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigurationProblem("--tls-cert and --tls-key: give both or neither")
    if not where.loopback and config.tls_cert is None and not config.insecure:
        raise ConfigurationProblem(
            f"--listen {config.listen}: other machines can reach this address; give --tls-cert and "
            "--tls-key, or --insecure if the network is trusted"
        )
    for url in config.controllers:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationProblem(
                f"--controller {url}: must be http://HOST:PORT or https://HOST:PORT"
            )
    if config.tls_ca is not None and not config.tls_ca.is_file():
        raise ConfigurationProblem(f"--tls-ca {config.tls_ca}: there is no such file")
    if config.rank_user is not None:
        _check_rank_user(config.rank_user)
    if config.tls_cert is None or config.tls_key is None:
        return None
    return server_tls(config.tls_cert, config.tls_key)


def _check_rank_user(name: str) -> None:
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise ConfigurationProblem(f"--rank-user {name}: there is no such user") from None
    if os.geteuid() not in {0, user.pw_uid}:
        raise ConfigurationProblem(
            f"--rank-user {name}: only an agent that runs as root can start ranks as another user"
        )


def _parse_listen(text: str) -> _Address:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise ConfigurationProblem(
            f"--listen {text}: must be HOST:PORT, like 127.0.0.1:7710 (port 0: a free one)"
        )
    try:
        loopback = ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return _Address(host, int(port), loopback)


@contextlib.contextmanager
def listening(text: str) -> Iterator[socket.socket]:
    """The bound port: taken before anything else is done, and found out about at once."""
    where = _parse_listen(text)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationProblem(f"--listen {text}: {error.strerror or error}") from None
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Right away: two that are bound and do not listen would not notice each other.
            listener.listen(2048)
        except OSError as error:
            raise ConfigurationProblem(f"--listen {text}: {error.strerror or error}") from None
        yield listener


@contextlib.contextmanager
def own_state(state: Path) -> Iterator[Path]:
    """The agent's own folder in the state directory, locked against a second agent."""
    folder = state / "agent"
    try:
        state.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationProblem(
            f"--state {state}: cannot be used: {error.filename or folder}: "
            f"{error.strerror or error}"
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigurationProblem(
                f"--state {state}: another agent is using it; every machine needs a state "
                "directory of its own"
            ) from None
        yield folder
    finally:
        os.close(lock)
