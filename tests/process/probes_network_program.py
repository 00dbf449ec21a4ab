"""The stories of ``test_probes_network_real``, in network and mount namespaces of their own.

    unshare --net --mount python -m tests.process.probes_network_program STORY

``eth0`` is this machine's end of a cable; the other end is ``port`` of the gateway 10.77.0.1, a
bridge in a namespace named ``gateway``. All of it is gone when the program ends. Ends with 0 when
everything was as it has to be.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep.decide.observation import Observation
from everstep.decide.words import Action, Symptom, Verdict
from everstep.machine.probes.network_gateway import GatewayProbe, GatewaySettings
from everstep.machine.probes.network_links import AlertSettings, LinkProbe, LinkSettings
from tests.chaos.network import ip

PROC, SYS = Path("/proc"), Path("/sys")
GATEWAY, MACHINE = "10.77.0.1", "10.77.0.2"
ALERTS = AlertSettings(alerts_min=2, window_s=300)
LINK = LinkSettings(alerts=ALERTS, errors_per_s_max=1, drops_share_max=0.01, drops_per_s_min=10)
SETTLE_MAX_S = 20.0


def build() -> None:
    """Lay the cable."""
    Path("/run/netns").mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "everstep-netns", "/run/netns"], check=True)
    subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=True)  # of this network
    ip("netns", "add", "gateway")
    ip("link", "add", "eth0", "type", "veth", "peer", "name", "port", "netns", "gateway")
    at_gateway("link", "add", "switch", "type", "bridge")
    at_gateway("addr", "add", f"{GATEWAY}/24", "dev", "switch")
    at_gateway("link", "set", "switch", "up")
    at_gateway("link", "set", "port", "master", "switch", "up")
    ip("addr", "add", f"{MACHINE}/24", "dev", "eth0")
    ip("link", "set", "eth0", "up")
    ip("route", "add", "default", "via", GATEWAY)
    until("the link to be up", lambda: (SYS / "class/net/eth0/operstate").read_text() == "up\n")


def at_gateway(*arguments: str) -> None:
    """Run ``ip`` on the other side."""
    ip("-n", "gateway", *arguments)


def until(what: str, is_so: Callable[[], bool]) -> None:
    """Wait for what the kernel does in its own time."""
    deadline = time.monotonic() + SETTLE_MAX_S
    while not is_so():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


def carrier_changes() -> int:
    """As the kernel counts them."""
    return int((SYS / "class/net/eth0/carrier_changes").read_text())


def only(seen: Sequence[Observation]) -> Observation:
    """The one observation."""
    assert len(seen) == 1, seen
    return seen[0]


def cable() -> None:
    """Pulled, put back, and a flap in between two looks."""
    probe = LinkProbe(LINK, proc=PROC, sys=SYS)
    first = only(probe.look(0))  # nobody named it: it leads to the default route
    assert (first.target, first.verdict) == ("eth0", Verdict.HEALTHY), first
    at_gateway("link", "set", "port", "down")
    until("the carrier to go", lambda: (SYS / "class/net/eth0/operstate").read_text() != "up\n")
    down = only(probe.look(30))
    assert (down.rule, down.action) == ("link_down", Action.WARN_ONLY), down
    assert down.symptom is Symptom.NETWORK_HOST
    at_gateway("link", "set", "port", "up")
    until("the carrier to come", lambda: (SYS / "class/net/eth0/operstate").read_text() == "up\n")
    again = only(probe.look(400))  # long after the first alert; it came back since
    assert (again.rule, again.action) == ("link_flap", Action.WARN_ONLY), again
    assert only(probe.look(430)).verdict is Verdict.HEALTHY
    before = carrier_changes()
    at_gateway("link", "set", "port", "down")
    until("the carrier to go", lambda: carrier_changes() > before)
    at_gateway("link", "set", "port", "up")
    until("the carrier to come", lambda: (SYS / "class/net/eth0/operstate").read_text() == "up\n")
    flap = only(probe.look(460))
    assert (flap.rule, flap.action) == ("link_flap", Action.EVICT_MACHINE), flap
    ip("link", "del", "eth0")
    gone = only(probe.look(490))
    assert (gone.rule, gone.action) == ("link_missing", Action.EVICT_MACHINE), gone


def switched_off() -> None:
    """By a person, at this end."""
    probe = LinkProbe(LINK, proc=PROC, sys=SYS, interfaces=["eth0"])
    probe.look(0)
    ip("link", "set", "eth0", "down")
    seen = only(probe.look(30))
    assert seen.rule == "link_down", seen
    assert "switched off" in seen.reason, seen


def blackhole() -> None:
    """Echoes arrive, answers vanish: two misses in a row count, and an answer ends it."""
    probe = GatewayProbe(GatewaySettings(deadline_s=0.5, misses_min=2), proc=PROC)
    until("the gateway to answer", lambda: only(probe.look(0)).verdict is Verdict.HEALTHY)
    answered = only(probe.look(0))
    assert (answered.target, answered.values["method"]) == (GATEWAY, "icmp"), answered
    at_gateway("route", "add", "blackhole", f"{MACHINE}/32")
    first, second = (only(probe.look(at_s)) for at_s in (30, 60))
    assert (first.verdict, first.rule) == (Verdict.UNKNOWN, "gateway_missed"), first
    assert (second.rule, second.action) == ("gateway_unreachable", Action.EVICT_MACHINE), second
    at_gateway("route", "del", "blackhole", f"{MACHINE}/32")
    assert only(probe.look(90)).verdict is Verdict.HEALTHY


def broken_switch() -> None:
    """The link stays up and nothing comes through; the route is lost too."""
    probe = GatewayProbe(GatewaySettings(deadline_s=0.5, misses_min=2), proc=PROC)
    until("the gateway to answer", lambda: only(probe.look(0)).verdict is Verdict.HEALTHY)
    at_gateway("link", "set", "port", "nomaster")
    assert only(LinkProbe(LINK, proc=PROC, sys=SYS).look(30)).verdict is Verdict.HEALTHY
    assert only(probe.look(30)).verdict is Verdict.UNKNOWN
    ip("route", "del", "default")
    assert only(probe.look(60)).rule == "gateway_unreachable"


STORIES = {story.__name__: story for story in (cable, switched_off, blackhole, broken_switch)}


if __name__ == "__main__":
    build()
    STORIES[sys.argv[1]]()
