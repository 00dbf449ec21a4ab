"""Starting a controller: its settings, and everything that can be wrong before it works.

Whatever is found here is a ``ConfigurationProblem``: one line that names the flag, and exit code 3.
Not here: the controller itself (``workers.controller``).
"""

from __future__ import annotations

import os
import socket
import ssl
from ipaddress import ip_address
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from everstep.errors import ConfigurationProblem
from everstep.machine.wire import server_tls


class ControllerConfig(BaseModel):
    """What a controller is started with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ledger: str
    secrets: Path
    checkpoint_root: Path
    temporal: str | None = None
    """HOST:PORT; None: Temporal's own client configuration says."""
    namespace: str | None = None
    listen: str = "127.0.0.1:7700"
    policy: Path | None = None
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    """Certificates that agents are checked against; None: the system's."""


def check_tls(config: ControllerConfig) -> ssl.SSLContext | None:
    """The endpoint's TLS settings, or None for plain HTTP."""
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigurationProblem("--tls-cert and --tls-key: give both or neither")
    if config.tls_ca is not None and not config.tls_ca.is_file():
        raise ConfigurationProblem(f"--tls-ca {config.tls_ca}: there is no such file")
    if config.tls_cert is None or config.tls_key is None:
        return None
    return server_tls(config.tls_cert, config.tls_key)


def check_open_to_others(config: ControllerConfig, listener: socket.socket) -> None:
    """Refuse to be reachable by other machines without TLS, unless that was asked for."""
    host = str(listener.getsockname()[0])
    if ip_address(host.partition("%")[0]).is_loopback or config.insecure or config.tls_cert:
        return
    raise ConfigurationProblem(
        f"--listen {config.listen}: other machines can reach this address; give --tls-cert and "
        "--tls-key, or --insecure if the network is trusted"
    )


def prepare_checkpoint_root(root: Path) -> None:
    """Make the root unless it is there; its parent has to be (a share that is not mounted)."""
    try:
        root.mkdir(exist_ok=True)
    except FileExistsError:
        raise ConfigurationProblem(f"--checkpoint-root {root}: is not a directory") from None
    except OSError as error:
        raise ConfigurationProblem(f"--checkpoint-root {root}: {error.strerror}") from None
    if not root.is_absolute():
        raise ConfigurationProblem(f"--checkpoint-root {root}: must be an absolute path")
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigurationProblem(f"--checkpoint-root {root}: cannot be written to")
