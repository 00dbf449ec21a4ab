"""Whatever /proc and /sys may hold, a probe answers observations and raises nothing."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.decide.kernel_rules import KernelRules
from everstep.decide.observation import Observation
from everstep.decide.words import Verdict
from everstep.machine.probes.catalogue import Surroundings, host_probes, network_probes
from everstep.machine.probes.kernel_log_sources import Splitter, parse_record
from everstep.machine.probes.network_links import default_routes
from everstep.spec.kernel_catalogue import load_kernel_catalogue
from everstep.spec.load import load_policy
from everstep.spec.probe_events import event_data, observation_of
from tests.support.roots import BOOT_ID, ROUTES

POLICY = load_policy(None, environ={}).policy.probes
RULES: KernelRules = load_kernel_catalogue(environ={})

PROC = (
    "vmstat",
    "meminfo",
    "stat",
    "loadavg",
    "uptime",
    "interrupts",
    "pressure/cpu",
    "pressure/memory",
    "self/mountinfo",
    "sys/fs/file-nr",
    "sys/kernel/tainted",
    "sys/kernel/random/boot_id",
    "net/ipv6_route",
    "7/stat",
    "7/status",
    "7/comm",
    "7/wchan",
    "7/limits",
    "7/fd/0",
    "8/stat",
)
SYS = (
    "devices/system/edac/mc/mc0/ce_count",
    "devices/system/edac/mc/mc0/ue_count",
    "class/nvme/nvme0/state",
    "block/sda/device/state",
    "block/sda/device/ioerr_cnt",
    "block/md0/md/degraded",
    "fs/ext4/sda1/errors_count",
    "fs/btrfs/a/devinfo/1/error_stats",
    "fs/pstore/dmesg-1",
    "class/net/eth0/operstate",
    "class/net/eth0/carrier",
    "class/net/eth0/carrier_changes",
    "class/net/eth0/speed",
    "class/net/eth0/duplex",
    "class/net/eth0/flags",
    "class/net/eth0/device/x",
    "class/net/eth0/statistics/rx_errors",
    "class/net/eth0/statistics/rx_dropped",
    "class/net/eth0/statistics/rx_packets",
    "class/infiniband/mlx5_0/ports/1/state",
    "class/infiniband/mlx5_0/ports/1/phys_state",
    "class/infiniband/mlx5_0/ports/1/rate",
    "class/infiniband/mlx5_0/ports/1/counters/port_rcv_data",
    "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data",
    "class/infiniband/mlx5_0/ports/1/counters/link_downed",
    "class/infiniband/mlx5_0/ports/1/counters/symbol_error",
)
FILES = (*(f"proc/{n}" for n in PROC), *(f"sys/{n}" for n in SYS), "dev/kmsg")

WORDS = st.sampled_from(
    [
        *("0", "1", "-1", "5", "9" * 30, "1e309", "nan", "inf", "-0", "0x", "0xff", "١٢", "1.5"),
        *(
            "oom_kill",
            "MemTotal:",
            "MemAvailable:",
            "pswpin",
            "cpu",
            "cpu0",
            "MCE:",
            "some",
            "full",
        ),
        *("avg10=99", "avg10=x", "avg60=", "total=1", "D", ")", "(", "-", " - ", "rw,ro", "nfs4"),
        *(
            "up",
            "down",
            "4: ACTIVE",
            "1: DOWN",
            "dead",
            "live",
            "running",
            "half",
            "\\040",
            "\\999",
        ),
        *("Max open files", "voluntary_ctxt_switches:", "write_errs", BOOT_ID, "eth0", "0" * 32),
        *("6,1,1,-;NVRM: Xid (PCI:0000:05:00): 79, pid=1", "\n", "\n", "\t", "\0", ""),
    ]
)
LINES = st.lists(WORDS, max_size=30).map(lambda words: " ".join(words).encode())
CONTENT = st.one_of(LINES, st.binary(max_size=200), st.text(max_size=100).map(str.encode))
TREE = st.dictionaries(st.sampled_from(FILES), CONTENT, max_size=len(FILES))


def lay(root: Path, tree: dict[str, bytes]) -> None:
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def check(seen: Sequence[Observation], name: str) -> None:
    keys = [(one.target, one.rule, one.verdict) for one in seen]
    assert len(set(keys)) == len(keys), keys
    for one in seen:
        assert one.probe == name
        assert one.reason
        assert (one.verdict is Verdict.FAULTY) == (one.action is not None) == bool(one.symptom)
        sent = json.loads(json.dumps(event_data(one), allow_nan=False))
        back = observation_of(one.reason, sent)
        assert back is not None
        assert (back.verdict, back.rule[:64]) == (one.verdict, one.rule[:64])


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(TREE, min_size=1, max_size=3))
def test_garbage_in_proc_and_sys(trees: list[dict[str, bytes]]) -> None:
    root = Path(tempfile.mkdtemp())
    around = Surroundings(
        proc=root / "proc",
        sys=root / "sys",
        dev=root / "dev",
        pids=lambda: [7, 8],
        kernel_rules=RULES,
        kernel_log_past_s=60,
    )
    policy = POLICY.model_copy(update={"kernel_log": "kmsg"})
    probes = [*host_probes(policy, around), *network_probes(policy, around)]
    try:
        for number, tree in enumerate(trees):
            lay(root, tree)  # the next one is laid over it: counters jump
            for probe in probes:
                if probe.name not in ("gateway", "clock"):  # these ask the real world
                    check(probe.look(number * 150.0), probe.name)
    finally:
        for probe in probes:
            probe.close()
        shutil.rmtree(root)


@given(CONTENT)
def test_garbage_as_routes(content: bytes) -> None:
    root = Path(tempfile.mkdtemp())
    try:
        lay(root, {"net/route": ROUTES.encode() + b"\n" + content})
        assert [route.gateway for route in default_routes(root)][:1] == ["192.0.2.1"]
    finally:
        shutil.rmtree(root)


@given(st.binary(max_size=300))
def test_garbage_as_kernel_records(raw: bytes) -> None:
    record = parse_record(raw)

    assert record is None or (record.number >= 0 and "\n" not in record.text)


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6))
def test_lines_are_the_same_however_they_are_cut(raw: bytes, cuts: list[int]) -> None:
    whole, pieces = Splitter(), Splitter()
    places = [0, *sorted(cuts), len(raw)]

    expected = [*whole.feed(raw), *whole.end()]
    found = [line for a, b in pairwise(places) for line in pieces.feed(raw[a:b])]

    assert [*found, *pieces.end()] == expected
