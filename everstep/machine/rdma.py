"""The machine's RDMA ports in sysfs: which there are, and how much they have carried.

One reader for the probe of ports and for the agent's own loop (a few small files twice a minute).
A port's driver asks the port's firmware for its counters, and may wait for a minute when that
hangs: the agent's loop therefore leaves the reading to a thread (``Watch``).
Not here: the state of ports (``probes.network_rdma``), and what silence means
(``everstep.decide.anomaly``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

from everstep.machine.probes.host_read import children, read_int

SYS = Path("/sys")
LOOK_EVERY_S = 30.0
"""The paper's interval for the network; the rule needs ten minutes."""
_WORD_BYTES = 4
"""The two counters count words of four bytes (InfiniBand specification, PortCounters)."""
_STUCK_WORDS = 0xFFFF_FFFF
"""Counters of 32 bits stop here until they are reset (the same place)."""
_COUNTERS = ("port_rcv_data", "port_xmit_data")


def ports(sys: Path) -> dict[str, Path]:
    """Folders of all ports, in natural order, by names such as ``mlx5_0/1``."""
    return {
        f"{device.name}/{port.name}": port
        for device in children(sys / "class" / "infiniband")
        for port in children(device / "ports")
    }


def carried(port: Path) -> tuple[int | None, int | None]:
    """Bytes that a port has received and sent; None for a counter that does not tell."""
    received, sent = (_bytes(port / "counters" / name) for name in _COUNTERS)
    return received, sent


def _bytes(counter: Path) -> int | None:
    words = read_int(counter)
    return None if words is None or words < 0 or words == _STUCK_WORDS else words * _WORD_BYTES


def risen(earlier: int, later: int) -> int:
    """What a counter has counted at least; one that fell was reset or began anew at its end."""
    return later - earlier if later >= earlier else later


class Traffic:
    """All ports together, over time."""

    def __init__(self, sys: Path = SYS) -> None:
        """Nothing is read yet; ``sys``: where /sys is."""
        self._sys = sys
        self._before: dict[tuple[str, str], int] = {}
        """By port and counter. Kept while a port is away: it may come back and go on."""
        self._total = 0

    def total_bytes(self) -> int | None:
        """Bytes carried since the first call, both ways, as far as could be seen; never falls.

        None when nobody can tell now: there is no port that counts, or one that did does not.
        """
        now: dict[tuple[str, str], int] = {}
        for name, port in ports(self._sys).items():
            for counter, value in zip(_COUNTERS, carried(port), strict=True):
                if value is not None:
                    now[name, counter] = value
                elif (name, counter) in self._before:
                    return None  # what it carries meanwhile would be missing, and look like silence
        if not now:
            return None
        self._total += sum(risen(self._before.get(key, value), value) for key, value in now.items())
        self._before |= now
        return self._total


class Watch:
    """Looks at all ports every half minute, without ever keeping its caller waiting."""

    def __init__(self, look: Callable[[], int | None] | None = None) -> None:
        """``look``: what to call in a thread; by default that of the machine's own ports."""
        self._look = look if look is not None else Traffic().total_bytes
        self._found: SimpleQueue[int | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_s: float | None = None

    def total_bytes(self, now_s: float) -> int | None:
        """What a look has found since the last call, else None; begins a look if it is time."""
        found = None
        with contextlib.suppress(Empty):
            found = self._found.get_nowait()
        is_time = self._at_s is None or now_s - self._at_s >= LOOK_EVERY_S
        if is_time and (self._thread is None or not self._thread.is_alive()):
            self._at_s = now_s
            # A daemon: a driver that hangs must not keep the agent from ending.
            self._thread = threading.Thread(target=self._run, name="rdma-counters", daemon=True)
            self._thread.start()
        return found

    def _run(self) -> None:
        self._found.put(self._look())
