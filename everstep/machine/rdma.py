"""The machine's RDMA ports in sysfs: which there are, and how much they have carried.

One reader for the probe of ports and for the agent's own loop (a few small files twice a minute).
Not here: the state of ports (``probes.network_rdma``), and what silence means
(``everstep.decide.anomaly``).
"""

from __future__ import annotations

from pathlib import Path

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
