"""How much the machine's RDMA ports have carried in all, from sysfs.

Cheap enough for the agent's own loop: a few small files twice a minute. Not here: the state of
ports (``probes.network_rdma``), and what silence means (``everstep.decide.anomaly``).
"""

from __future__ import annotations

from pathlib import Path

SYS = Path("/sys")
LOOK_EVERY_S = 30.0
"""The paper's interval for the network; the rule needs ten minutes."""
_WORD_BYTES = 4
"""The two counters count words of four bytes (InfiniBand specification, PortCounters)."""


def total_bytes(sys: Path = SYS) -> int | None:
    """Sum of all ports' counters, both ways; None where there is no port that tells."""
    counters = (sys / "class" / "infiniband").glob("*/ports/*/counters/port_*_data")
    total, told = 0, False
    try:
        for counter in counters:
            if counter.name in ("port_xmit_data", "port_rcv_data"):
                total += _WORD_BYTES * int(counter.read_text())
                told = True
    except (OSError, ValueError):
        return None  # a port is going away or coming: the next look will see a steady picture
    return total if told else None
