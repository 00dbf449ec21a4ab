"""The state directory of ``everstep up``: who holds it, its format, and the ports it remembers.

One file, ``state.json``, holds the format's number and the ports; a lock on ``up.lock`` keeps two
supervisors out of one directory. Everything that can be wrong with the directory becomes one line.

Not here: the processes (``workers.up_parts``) and ``up.json`` for other commands
(``everstep.connect``).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import socket
from pathlib import Path
from typing import Self

from everstep.errors import ConfigurationProblem

FORMAT = 1
STATE_FILE = "state.json"
LOCK_FILE = "up.lock"
_PORT_LOWEST = 15_000
_PORT_TRIES = 200


def problem(path: Path, error: OSError) -> ConfigurationProblem:
    """An operating system's error about a path, in one line."""
    if error.errno == errno.ENOSPC:
        return ConfigurationProblem(f"{path}: the disk is full; free space or name another --state")
    return ConfigurationProblem(f"{path}: {error.strerror or error}; name another --state")


class StateDir:
    """A state directory that is ours until ``close``."""

    def __init__(self, path: Path, lock: int, ports: dict[str, int]) -> None:
        """Use ``open``."""
        self.path = path
        self._lock = lock
        self._ports = ports

    @classmethod
    def open(cls, path: Path) -> Self:
        """Make the directory if needed, lock it, and read what an earlier ``up`` left.

        Raises:
            ConfigurationProblem: it is not a directory, cannot be written, is held by another
                ``up``, or was written by a newer or by no version of Everstep.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in ("logs", "machines", "checkpoints"):
                (path / folder).mkdir(mode=0o700, exist_ok=True)
            lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileExistsError, NotADirectoryError):
            raise ConfigurationProblem(
                f"{path}: the state directory has to be a directory, and something in this path "
                f"is a file; name another --state"
            ) from None
        except OSError as error:
            raise problem(path, error) from None
        try:
            _take(lock, path)
            state = cls(path, lock, _read(path / STATE_FILE))
            state._write()
        except BaseException:
            os.close(lock)
            raise
        return state

    def port(self, name: str, wanted: int | None = None) -> int:
        """A port for ``name``, which is remembered.

        It is the one that was asked for, else the one it had before if that is free, else a fresh
        one.

        Raises:
            ConfigurationProblem: the one that was asked for is taken.
        """
        if wanted is not None:
            if not port_is_free(wanted):
                raise ConfigurationProblem(
                    f"port {wanted} (for {name}) is taken by another process; give a free one or "
                    f"none at all"
                )
            chosen = wanted
        else:
            known = self._ports.get(name)
            chosen = known if known and port_is_free(known) else self._fresh_port()
        self._ports[name] = chosen
        self._write()
        return chosen

    def _fresh_port(self) -> int:
        taken = set(self._ports.values())
        highest = _ephemeral_lowest() - 1
        for _ in range(_PORT_TRIES):
            candidate = random.randint(_PORT_LOWEST, highest)  # noqa: S311 - not a secret
            if candidate not in taken and port_is_free(candidate):
                return candidate
        raise ConfigurationProblem(f"no free port between {_PORT_LOWEST} and {highest}")

    def _write(self) -> None:
        target = self.path / STATE_FILE
        scratch = target.with_suffix(".tmp")
        try:
            with scratch.open("w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, "ports": self._ports}, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(target)
        except OSError as error:
            raise problem(target, error) from None

    def close(self) -> None:
        """Give the directory back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _take(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        raise ConfigurationProblem(
            f"{path}: another `everstep up` (process {holder}) runs on this state; "
            f"end it first or name another --state"
        ) from None
    except OSError as error:
        raise problem(path, error) from None
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        raise problem(path, error) from None


def _read(path: Path) -> dict[str, int]:
    """The remembered ports."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise problem(path, error) from None
    except ValueError as error:
        raise _corrupted(path, str(error)) from None
    number = data.get("format") if isinstance(data, dict) else None
    if not isinstance(number, int):
        raise _corrupted(path, "it has no format number")
    if number > FORMAT:
        raise ConfigurationProblem(
            f"{path}: written by a newer Everstep (format {number}, this one reads {FORMAT}); "
            f"upgrade, or name another --state"
        )
    ports = data.get("ports", {})
    if not isinstance(ports, dict) or not all(
        isinstance(p, int) and 0 < p < 2**16 for p in ports.values()
    ):
        raise _corrupted(path, "its ports are not numbers of ports")
    return {str(name): port for name, port in ports.items()}


def _corrupted(path: Path, why: str) -> ConfigurationProblem:
    return ConfigurationProblem(
        f"{path}: corrupted ({why}); delete this one file, only remembered ports are lost"
    )


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        # Servers set it too; without it, a port whose last connections linger looks taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _ephemeral_lowest() -> int:
    """Lowest port the kernel hands to outgoing connections.

    Ours lie below: while a server of ours is down, a client that keeps trying to reach a port in
    that range can be given the very same port as its own, connect to itself, and keep it taken.
    """
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        lowest = int(text.split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 32_768
    return lowest if lowest > _PORT_LOWEST + 1000 else 2**16
