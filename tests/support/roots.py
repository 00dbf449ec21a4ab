"""Trees that look like /proc and /sys, for what this machine does not have."""

from __future__ import annotations

from pathlib import Path

BOOT_ID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"


def write(root: Path, name: str, text: object) -> None:
    """Write one file of a tree, with the folders above it."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def rdma_port(sys: Path, name: str, **values: object) -> None:
    """An RDMA port such as ``mlx5_0/1``; counters go into its folder ``counters``."""
    device, _, number = name.partition("/")
    folder = f"class/infiniband/{device}/ports/{number}"
    defaults: dict[str, object] = {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
    }
    for key, value in (defaults | values).items():
        where = folder if key in defaults else f"{folder}/counters"
        write(sys, f"{where}/{key}", value)


def link(sys: Path, name: str, *, physical: bool = True, **values: object) -> None:
    """A network interface; statistics by their names, ``rx_errors`` and so on."""
    folder = f"class/net/{name}"
    own: dict[str, object] = {
        "operstate": "up",
        "carrier": 1,
        "carrier_changes": 2,
        "speed": 100_000,
        "duplex": "full",
        "flags": "0x1003",
    }
    for key, value in (own | values).items():
        where = folder if key in own else f"{folder}/statistics"
        write(sys, f"{where}/{key}", value)
    if physical:
        (sys / folder / "device").mkdir(exist_ok=True)


def process(
    proc: Path,
    pid: int,
    *,
    state: str = "S",
    switches: int = 1,
    parent: int = 1,
    **files: str,
) -> None:
    """A process: its state, context switches, and further files of its folder."""
    fields = ["0"] * 50
    fields[0], fields[1], fields[19] = state, str(parent), "4711"
    write(proc, f"{pid}/stat", f"{pid} (a) b) {' '.join(fields)}")
    write(proc, f"{pid}/status", f"Name:\tx\nvoluntary_ctxt_switches:\t{switches}")
    for name, text in files.items():
        write(proc, f"{pid}/{name}", text)


ROUTES = (
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    "eth9\t00000000\t01000A0A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    "*\t00000000\t00000000\t0201\t0\t0\t0\t00000000\t0\t0\t0\n"
    "eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0"
)
"""Two default gateways (192.0.2.1 is preferred), a blackhole and a plain route."""
