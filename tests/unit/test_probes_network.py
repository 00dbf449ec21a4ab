"""Network probes over trees that look like /proc and /sys: links, RDMA ports, routes."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from everstep.decide.observation import Observation
from everstep.decide.words import Action, Confidence, Symptom, Verdict
from everstep.machine.probes import network_gateway
from everstep.machine.probes.network_gateway import GatewayProbe, GatewaySettings
from everstep.machine.probes.network_links import (
    AlertSettings,
    LinkProbe,
    LinkSettings,
    default_interfaces,
    default_routes,
)
from everstep.machine.probes.network_rdma import RdmaProbe, RdmaSettings
from tests.support.roots import ROUTES, link, rdma_port, write

ALERTS = AlertSettings(alerts_min=2, window_s=300)
LINK = LinkSettings(alerts=ALERTS, errors_per_s_max=1, drops_share_max=0.01, drops_per_s_min=10)
RDMA = RdmaSettings(alerts=ALERTS, errors_per_minute_max=60)
GATEWAY = GatewaySettings(deadline_s=0.3, misses_min=2)


def faults(seen: Sequence[Observation]) -> dict[str, Observation]:
    return {one.target: one for one in seen if one.verdict is Verdict.FAULTY}


def links(root: Path, *interfaces: str) -> LinkProbe:
    return LinkProbe(LINK, proc=root, sys=root, interfaces=interfaces)


# --- links


def test_a_link_that_goes_down_warns_first_and_evicts_at_the_second_look(tmp_path: Path) -> None:
    link(tmp_path, "eth0")
    probe = links(tmp_path)
    assert faults(probe.look(0)) == {}
    link(tmp_path, "eth0", operstate="down", carrier=0, carrier_changes=3)

    first, second = (faults(probe.look(at_s))["eth0"] for at_s in (30, 60))

    assert (first.rule, first.action, first.confidence) == (
        "link_down",
        Action.WARN_ONLY,
        Confidence.LOW,
    )
    assert (second.action, second.confidence) == (Action.EVICT_MACHINE, Confidence.HIGH)
    assert second.symptom is Symptom.NETWORK_HOST


def test_flaps_count_together_only_within_the_window(tmp_path: Path) -> None:
    link(tmp_path, "eth0", carrier_changes=2)
    probe = links(tmp_path)
    probe.look(0)
    actions = []
    for at_s, changes in ((30, 4), (60, 4), (400, 6), (430, 8)):
        link(tmp_path, "eth0", carrier_changes=changes)
        found = faults(probe.look(at_s)).get("eth0")
        actions.append(found.action if found else None)

    assert actions == [Action.WARN_ONLY, None, Action.WARN_ONLY, Action.EVICT_MACHINE]


def test_spare_ports_are_no_fault_and_are_named(tmp_path: Path) -> None:
    link(tmp_path, "eth0")
    link(tmp_path, "eth1", operstate="down", carrier=0)
    link(tmp_path, "veth7", physical=False, operstate="down", carrier=0)
    probe = links(tmp_path)

    assert [one.target for one in probe.look(0)] == ["eth0"]
    assert list(probe.not_looked_at()) == ["eth1"]


def test_the_interface_of_the_default_route_matters_whatever_it_is(tmp_path: Path) -> None:
    write(tmp_path, "net/route", ROUTES)
    link(tmp_path, "eth0", physical=False, operstate="down", carrier=0)
    link(tmp_path, "eth9", physical=False)

    assert list(faults(links(tmp_path).look(0))) == ["eth0"]


def test_an_interface_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    link(tmp_path, "eth0")

    seen = links(tmp_path, "eth0", "eth5").look(0)

    assert {target: one.rule for target, one in faults(seen).items()} == {"eth5": "link_missing"}


def test_an_interface_that_vanishes_is_a_fault_and_not_forgotten(tmp_path: Path) -> None:
    link(tmp_path, "eth0")
    probe = links(tmp_path)
    probe.look(0)
    shutil.rmtree(tmp_path / "class/net/eth0")

    assert faults(probe.look(30))["eth0"].rule == "link_missing"


def test_an_interface_that_was_switched_off_says_so(tmp_path: Path) -> None:
    link(tmp_path, "eth0", operstate="down", flags="0x1002")

    seen = faults(links(tmp_path, "eth0").look(0))["eth0"]

    assert seen.reason.startswith("the interface was switched off")


def test_errors_drops_and_a_slower_link_warn(tmp_path: Path) -> None:
    link(tmp_path, "eth0", rx_errors=0, tx_errors=0, rx_dropped=0, rx_packets=0)
    probe = links(tmp_path)
    assert faults(probe.look(0)) == {}
    link(tmp_path, "eth0", rx_errors=20, tx_errors=20, rx_packets=1000)
    assert faults(probe.look(30))["eth0"].rule == "link_errors"
    link(tmp_path, "eth0", rx_dropped=600, rx_packets=2000)
    assert faults(probe.look(60))["eth0"].rule == "link_drops"
    link(tmp_path, "eth0", rx_dropped=1200, rx_packets=1_000_000)  # a small share
    assert faults(probe.look(90)) == {}
    link(tmp_path, "eth0", speed=10_000)
    seen = faults(probe.look(120))["eth0"]
    assert (seen.rule, seen.action) == ("link_slow", Action.WARN_ONLY)
    link(tmp_path, "eth0", duplex="half")
    assert faults(probe.look(150))["eth0"].rule == "link_half_duplex"


def test_default_routes_are_read_and_a_blackhole_is_none(tmp_path: Path) -> None:
    write(tmp_path, "net/route", ROUTES)
    write(tmp_path, "net/ipv6_route", f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} 0 0 0 3 eth6")

    assert [(r.interface, r.gateway) for r in default_routes(tmp_path)] == [
        ("eth0", "192.0.2.1"),
        ("eth9", "10.10.0.1"),
    ]
    assert default_interfaces(tmp_path) == ["eth0", "eth9", "eth6"]


# --- RDMA


def test_an_rdma_port_that_goes_down_warns_first_and_evicts_at_the_second_look(
    tmp_path: Path,
) -> None:
    rdma_port(tmp_path, "mlx5_0/1", link_downed=0)
    probe = RdmaProbe(RDMA, sys=tmp_path)
    assert faults(probe.look(0)) == {}
    rdma_port(tmp_path, "mlx5_0/1", state="1: DOWN", phys_state="2: Polling", link_downed=1)

    first, second = (faults(probe.look(at_s))["mlx5_0/1"] for at_s in (30, 60))

    assert (first.rule, first.action) == ("rdma_port_down", Action.WARN_ONLY)
    assert second.action is Action.EVICT_MACHINE
    assert second.symptom is Symptom.NETWORK_NCCL
    shutil.rmtree(tmp_path / "class/infiniband")
    assert faults(probe.look(90))["mlx5_0/1"].rule == "rdma_port_missing"


def test_an_rdma_link_that_came_back_between_two_looks(tmp_path: Path) -> None:
    rdma_port(tmp_path, "mlx5_0/1", link_downed=4)
    probe = RdmaProbe(RDMA, sys=tmp_path)
    probe.look(0)
    rdma_port(tmp_path, "mlx5_0/1", link_downed=6)

    assert faults(probe.look(30))["mlx5_0/1"].rule == "rdma_link_downed"
    assert faults(probe.look(60)) == {}


def test_rdma_traffic_is_in_bytes_and_a_rate(tmp_path: Path) -> None:
    rdma_port(tmp_path, "mlx5_0/1", port_rcv_data=1000, port_xmit_data=500)
    probe = RdmaProbe(RDMA, sys=tmp_path)
    (first,) = probe.look(0)
    assert (first.values["received_bytes"], first.values["sent_bytes"]) == (4000, 2000)
    assert first.values["traffic_bytes_per_s"] is None
    rdma_port(tmp_path, "mlx5_0/1", port_rcv_data=1300, port_xmit_data=800)
    assert probe.look(30)[0].values["traffic_bytes_per_s"] == 80.0
    assert probe.look(60)[0].values["traffic_bytes_per_s"] == 0.0


def test_rdma_errors_and_a_slower_port_warn(tmp_path: Path) -> None:
    rdma_port(tmp_path, "mlx5_0/1", symbol_error=0)
    probe = RdmaProbe(RDMA, sys=tmp_path)
    probe.look(0)
    rdma_port(tmp_path, "mlx5_0/1", symbol_error=61)
    assert faults(probe.look(60))["mlx5_0/1"].rule == "rdma_errors"
    rdma_port(tmp_path, "mlx5_0/1", rate="100 Gb/sec (4X EDR)")
    assert faults(probe.look(120))["mlx5_0/1"].rule == "rdma_slow"


def test_ports_that_have_never_been_active(tmp_path: Path) -> None:
    """Beside active ones they are worth a word; where none is active they are not in use."""
    down = {"state": "1: DOWN", "phys_state": "3: Disabled"}
    rdma_port(tmp_path, "mlx5_0/1", **down)
    unused = RdmaProbe(RDMA, sys=tmp_path)
    assert unused.look(0) == []
    assert list(unused.not_looked_at()) == ["mlx5_0/1"]
    rdma_port(tmp_path, "mlx5_1/1")
    seen = faults(RdmaProbe(RDMA, sys=tmp_path).look(0))
    assert seen["mlx5_0/1"].action is Action.WARN_ONLY
    named = faults(RdmaProbe(RDMA, sys=tmp_path, ports=["mlx5_0/1"]).look(0))
    assert named["mlx5_0/1"].rule == "rdma_port_down"


def test_a_machine_without_rdma_devices_says_so(tmp_path: Path) -> None:
    probe = RdmaProbe(RDMA, sys=tmp_path)

    assert probe.look(0) == []
    assert "has no device" in probe.not_here()["RDMA ports"]


# --- gateway


def test_loopback_answers(tmp_path: Path) -> None:
    """By ICMP where this user may send it, else by refusing a connection."""
    (seen,) = GatewayProbe(GATEWAY, proc=tmp_path, addresses=["127.0.0.1"]).look(0)

    assert seen.verdict is Verdict.HEALTHY
    assert seen.values["method"] in ("icmp", "tcp")


def test_a_refused_and_an_accepted_connection_are_answers() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert network_gateway.knock("127.0.0.1", [port], 1)  # bound, so nobody else's; refused
        listening.listen()
        assert network_gateway.knock("127.0.0.1", [port], 1)


def test_a_gateway_that_has_never_answered_is_unknown(tmp_path: Path) -> None:
    # Nobody may ping or connect to everybody, whatever network this runs in.
    probe = GatewayProbe(GATEWAY, proc=tmp_path, addresses=["255.255.255.255", "none"])

    assert [one.verdict for at_s in (0, 30, 60) for one in probe.look(at_s)] == [
        Verdict.UNKNOWN
    ] * 6


def test_a_hardware_address_is_an_answer_of_last_resort_and_two_misses_count(
    tmp_path: Path,
) -> None:
    head = "IP address HW type Flags HW address Mask Device\n"
    write(tmp_path, "net/arp", f"{head}255.255.255.255 0x1 0x2 aa:bb:cc:dd:ee:ff * eth0")
    probe = GatewayProbe(GATEWAY, proc=tmp_path, addresses=["255.255.255.255"])
    assert probe.look(0)[0].values["method"] == "arp"
    write(tmp_path, "net/arp", f"{head}255.255.255.255 0x1 0x0 00:00:00:00:00:00 * eth0")

    (first,), (second,) = probe.look(30), probe.look(60)

    assert (first.verdict, first.rule) == (Verdict.UNKNOWN, "gateway_missed")
    assert (second.rule, second.action) == ("gateway_unreachable", Action.EVICT_MACHINE)
    assert second.confidence is Confidence.LOW


def test_without_a_gateway_there_is_nothing_to_ask(tmp_path: Path) -> None:
    probe = GatewayProbe(GATEWAY, proc=tmp_path)

    assert probe.look(0) == []
    assert "gateway" in probe.not_here()
