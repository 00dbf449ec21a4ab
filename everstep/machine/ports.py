"""Rendezvous ports that no run has used before.

A port that a dead run still holds, or that an old rank still connects to, is how restarts fail: so
every run gets a fresh one. Not here: who listens on it (rank 0 does).
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import deque
from pathlib import Path

_REMEMBERED_MAX = 2000
_TRIES = 64


class Ports:
    """Hands out free ports; remembers across restarts of the agent which ones it gave."""

    def __init__(self, path: Path, address: str) -> None:
        self._path = path
        self._address = address
        self._given: deque[int] = deque(maxlen=_REMEMBERED_MAX)
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._given.extend(int(port) for port in json.loads(path.read_text("utf-8")))

    def fresh(self) -> int:
        """A port that is free now and was not handed out lately, while there are others.

        Raises:
            OSError: no port is free at all.
        """
        with contextlib.ExitStack() as held:
            # Sockets stay bound until the choice is made, so that each try sees another port.
            for _ in range(_TRIES):
                port = held.enter_context(self._bind()).getsockname()[1]
                if port not in self._given:
                    break
        self._given.append(port)
        with contextlib.suppress(OSError):  # a full disk costs the memory of a restart, no more
            self._path.write_text(json.dumps(list(self._given)), encoding="utf-8")
        return int(port)

    def _bind(self) -> socket.socket:
        last: OSError | None = None
        for family, _, _, _, where in socket.getaddrinfo(
            self._address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            made = socket.socket(family, socket.SOCK_STREAM)
            try:
                made.bind(where)
            except OSError as error:
                made.close()
                last = error
            else:
                return made
        if last is not None:
            # The advertised address is not one of this host's own (NAT): any free port will do.
            made = socket.socket()
            made.bind(("", 0))
            return made
        raise OSError(f"{self._address} has no address")
