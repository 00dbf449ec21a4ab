"""Network interfaces: link state, carrier changes, errors and drops, speed and duplex.

An interface matters when it was named, or when it is a physical one that has been up once or leads
to the default route. Spare ports without a cable are no fault. Two alerts about one interface
within the window make it a reason to act (``alerts``). RDMA ports are in ``network_rdma``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import byteorder

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Confidence, Symptom
from everstep.machine.probes.alerts import AlertWindow
from everstep.machine.probes.host_read import (
    faulty,
    healthy,
    names_in,
    read_int,
    read_text,
    read_word,
    to_int,
)

_COUNTERS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_packets", "tx_packets")
_IFF_UP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """When alerts about one network target become a reason to act."""

    alerts_min: int
    window_s: float

    def window(self) -> AlertWindow:
        """A window without alerts."""
        return AlertWindow(self.alerts_min, self.window_s)

    def judge(
        self, alerts: AlertWindow, target: str, now_s: float
    ) -> tuple[Action, Confidence, str]:
        """Note one alert: what to do, how sure, and words for the reason."""
        if alerts.add(target, now_s):
            within = f"{self.window_s / 60:g} min"
            text = f"{self.alerts_min} alerts within {within}" if self.alerts_min > 1 else "alert"
            return Action.EVICT_MACHINE, Confidence.HIGH, text
        text = f"alert {alerts.count(target, now_s)} of {self.alerts_min}: it may recover"
        return Action.WARN_ONLY, Confidence.LOW, text


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Thresholds of ``LinkProbe``."""

    alerts: AlertSettings
    errors_per_s_max: float
    """Receive and transmit errors of one interface, together."""
    drops_share_max: float
    """Share of packets that are dropped."""
    drops_per_s_min: float
    """Fewer drops than this are none: some protocols are dropped on purpose."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What an interface said at one look."""

    at_s: float
    carrier_changes: int | None
    counters: Mapping[str, int]


class LinkProbe:
    """The network interfaces that matter."""

    name = "link"
    interval = "network"

    def __init__(
        self, settings: LinkSettings, *, proc: Path, sys: Path, interfaces: Sequence[str] = ()
    ) -> None:
        """Nothing is read yet.

        Args:
            settings: the thresholds.
            proc: where /proc is, for the default route.
            sys: where /sys is.
            interfaces: names of those that matter; empty: found out.
        """
        self._settings = settings
        self._proc = proc
        self._net = sys / "class" / "net"
        self._given = tuple(interfaces)
        self._alerts = settings.alerts.window()
        self._before: dict[str, _Seen] = {}
        self._been_up: dict[str, None] = {}
        self._best_speed: dict[str, int] = {}
        self._spare: list[str] = []

    def look(self, now_s: float) -> Sequence[Observation]:
        """Look at every interface that matters, also at one that has vanished."""
        route = default_interfaces(self._proc)
        self._spare = []
        seen: list[Observation] = []
        for name in dict.fromkeys((*self._given, *self._been_up, *self._found(route))):
            folder = self._net / name
            if not folder.exists():
                seen.append(self._bad(name, "link_missing", "the interface is gone", now_s, {}))
                continue
            up = (read_word(folder / "operstate") or "unknown")[:20]
            works = up == "up" or (up == "unknown" and read_int(folder / "carrier") == 1)
            if works:
                self._been_up[name] = None
            elif name not in self._given and name not in self._been_up and name not in route:
                self._spare.append(name)
                continue
            seen += self._judge(name, folder, works, now_s)
        return seen

    def _found(self, route: Sequence[str]) -> list[str]:
        """Physical interfaces, and those of the default route."""
        if self._given:
            return []
        physical = [
            name
            for name in names_in(self._net)
            if (self._net / name / "device").exists()
            and not (self._net / name / "wireless").exists()
        ]
        return [*physical, *route]

    def _judge(self, name: str, folder: Path, works: bool, now_s: float) -> list[Observation]:
        before = self._before.get(name)
        counters = {
            key: value
            for key in _COUNTERS
            if (value := read_int(folder / "statistics" / key)) is not None
        }
        changes = read_int(folder / "carrier_changes")
        self._before[name] = now = _Seen(now_s, changes, counters)
        speed = read_int(folder / "speed")
        duplex = read_word(folder / "duplex") or ""
        values: dict[str, Value] = {
            "operstate": (read_word(folder / "operstate") or "")[:20],
            "carrier_changes": changes,
            "speed_mbit_per_s": speed if speed and speed > 0 else None,
        }
        if not works:
            flags = read_int(folder / "flags") or 0
            why = "the link is down" if flags & _IFF_UP else "the interface was switched off"
            return [self._bad(name, "link_down", why, now_s, values)]
        if before is not None and changes is not None and before.carrier_changes is not None:
            flaps = changes - before.carrier_changes
            if flaps > 0:
                why = f"the carrier changed {flaps} times since the last look"
                values["carrier_changes_new"] = flaps
                return [self._bad(name, "link_flap", why, now_s, values)]
        rates = _rates(before, now)
        values |= rates
        warnings = [*self._slow(name, speed, duplex), *self._losing(rates)]
        if warnings:
            return [self._warn(name, rule, why, values) for rule, why in warnings]
        text = f"up, {speed} Mbit/s" if speed and speed > 0 else "up"
        return [healthy(self.name, text, name, values=values)]

    def _slow(self, name: str, speed: int | None, duplex: str) -> list[tuple[str, str]]:
        found = []
        if speed and speed > 0:
            best = self._best_speed[name] = max(speed, self._best_speed.get(name, 0))
            if speed < best:
                found.append(("link_slow", f"runs at {speed} Mbit/s, before at {best}"))
        if duplex == "half":
            found.append(("link_half_duplex", "runs in half duplex"))
        return found

    def _losing(self, rates: Mapping[str, float]) -> list[tuple[str, str]]:
        found = []
        errors = rates.get("errors_per_s", 0.0)
        if errors > self._settings.errors_per_s_max:
            found.append(("link_errors", f"{errors:.3g} errors a second"))
        drops, packets = rates.get("drops_per_s", 0.0), rates.get("packets_per_s", 0.0)
        share = drops / (drops + packets) if drops else 0.0
        if drops > self._settings.drops_per_s_min and share > self._settings.drops_share_max:
            found.append(("link_drops", f"{drops:.3g} packets a second dropped ({share:.1%})"))
        return found

    def _bad(
        self, name: str, rule: str, why: str, now_s: float, values: Mapping[str, Value]
    ) -> Observation:
        action, sure, words = self._settings.alerts.judge(self._alerts, name, now_s)
        return faulty(
            self.name,
            rule,
            Symptom.NETWORK_HOST,
            action,
            f"{why} ({words})",
            name,
            confidence=sure,
            values=values,
        )

    def _warn(self, name: str, rule: str, why: str, values: Mapping[str, Value]) -> Observation:
        return faulty(
            self.name,
            rule,
            Symptom.NETWORK_HOST,
            Action.WARN_ONLY,
            why,
            name,
            confidence=Confidence.LOW,
            values=values,
        )

    def not_here(self) -> Mapping[str, str]:
        """Why nothing was looked at, where nothing was."""
        if self._before or self._given or self._been_up:
            return {}
        return {"network interfaces": f"{self._net} has no physical one that is in use"}

    def not_looked_at(self) -> Mapping[str, Sequence[str]]:
        """Ports that have never been up."""
        return dict.fromkeys(self._spare, ("never been up since the first look",))

    def close(self) -> None:
        """Holds nothing."""


def _rates(before: _Seen | None, now: _Seen) -> dict[str, float]:
    """Errors, drops and packets a second since the last look; none at the first one."""
    if before is None or now.at_s <= before.at_s:
        return {}

    def rise(*names: str) -> float:
        total = sum(
            max(0, now.counters.get(name, 0) - before.counters.get(name, now.counters.get(name, 0)))
            for name in names
        )
        return round(total / (now.at_s - before.at_s), 3)

    return {
        "errors_per_s": rise("rx_errors", "tx_errors"),
        "drops_per_s": rise("rx_dropped", "tx_dropped"),
        "packets_per_s": rise("rx_packets", "tx_packets"),
    }


def default_interfaces(proc: Path) -> list[str]:
    """Interfaces of the default routes, IPv4 and IPv6; not those that lead nowhere."""
    found = [route.interface for route in default_routes(proc)]
    for line in (read_text(proc / "net" / "ipv6_route") or "").splitlines():
        fields = line.split()
        if len(fields) == 10 and fields[0] == "0" * 32 and fields[1] == "00" and fields[9] != "lo":
            found.append(fields[9])
    return list(dict.fromkeys(name for name in found if name not in ("", ".", "..", "lo")))


@dataclass(frozen=True, slots=True)
class Route:
    """A default route."""

    interface: str
    gateway: str
    """Dotted IPv4 address; empty: straight onto the interface."""


def default_routes(proc: Path) -> list[Route]:
    """The IPv4 default routes, the preferred one first."""
    found = []
    for line in (read_text(proc / "net" / "route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or fields[1] != "0" * 8 or fields[7] != "0" * 8:
            continue
        name, flags, metric = fields[0], to_int(f"0x{fields[3]}") or 0, to_int(fields[6]) or 0
        # RTF_UP, and not RTF_REJECT: a blackhole is a route too.
        if "/" in name or not flags & 1 or flags & 0x200:
            continue
        found.append((metric, Route(name, _dotted(fields[2]))))
    return [route for _, route in sorted(found, key=lambda pair: pair[0])]


def _dotted(word: str) -> str:
    """``010200C0`` is 192.0.2.1 on little-endian machines: the kernel prints its own order."""
    number = to_int(f"0x{word}")
    if number is None or not 0 < number < 1 << 32:
        return ""
    return ".".join(str(byte) for byte in number.to_bytes(4, byteorder))
