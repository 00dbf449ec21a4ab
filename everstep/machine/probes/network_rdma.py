"""RDMA ports (InfiniBand and RoCE), from sysfs: state, link faults, and traffic.

Traffic is here as plain figures (``received_bytes``, ``sent_bytes``, a rate): whether a job should
have any is a rule of the job, not of the machine. Ethernet's own counters are in ``network_links``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Confidence, Symptom
from everstep.machine.probes.host_read import faulty, healthy, read_int, read_word
from everstep.machine.probes.network_links import AlertSettings
from everstep.machine.rdma import carried, ports, risen

_ERRORS = ("symbol_error", "port_rcv_errors", "local_link_integrity_errors", "VL15_dropped")
_RECOVERIES = ("link_error_recovery",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaSettings:
    """Thresholds of ``RdmaProbe``."""

    alerts: AlertSettings
    errors_per_minute_max: float
    """Symbol, receive and link integrity errors of one port, together."""


@dataclass(frozen=True, slots=True)
class _Seen:
    at_s: float
    downs: int
    errors: int
    received: int | None
    sent: int | None


class RdmaProbe:
    """Every port of every RDMA device."""

    name = "rdma"
    interval = "network"

    def __init__(self, settings: RdmaSettings, *, sys: Path, ports: Sequence[str] = ()) -> None:
        """Nothing is read yet.

        Args:
            settings: the thresholds.
            sys: where /sys is.
            ports: those that have to be up, as ``mlx5_0/1``; empty: those that have been.
        """
        self._settings = settings
        self._sys = sys
        self._given = tuple(ports)
        self._alerts = settings.alerts.window()
        self._before: dict[str, _Seen] = {}
        self._been_up: dict[str, None] = dict.fromkeys(self._given)
        self._best_rate: dict[str, float] = {}
        self._spare: list[str] = []
        self._any = False

    def look(self, now_s: float) -> Sequence[Observation]:
        """Look at all ports, also at one that has vanished."""
        found = ports(self._sys)
        self._any = bool(found)
        active = {name for name, port in found.items() if _state(port, "state") == "ACTIVE"}
        self._been_up |= dict.fromkeys(active)
        self._spare = []
        seen = []
        for name in dict.fromkeys((*self._been_up, *found)):
            port = found.get(name)
            if port is None:
                why = "the port is gone"
                seen.append(self._bad(name, "rdma_port_missing", why, now_s, {}))
            elif name in self._been_up:
                seen.append(self._judge(name, port, name in active, now_s))
            elif active:
                seen.append(self._never_up(name, port, len(active), len(found)))
            else:
                self._spare.append(name)
        return seen

    def _never_up(self, name: str, port: Path, active: int, total: int) -> Observation:
        """A port that we have not seen working, beside others that do work."""
        state = _state(port, "phys_state") or "down"
        why = f"{state.lower()}, while {active} of {total} ports are active"
        return faulty(
            self.name,
            "rdma_port_never_up",
            Symptom.NETWORK_HOST,
            Action.WARN_ONLY,
            why,
            name,
            confidence=Confidence.LOW,
            values={"phys_state": state},
        )

    def _judge(self, name: str, port: Path, active: bool, now_s: float) -> Observation:
        received, sent = carried(port)
        now = _Seen(
            now_s,
            _sum(port, ("link_downed",)),
            _sum(port, _ERRORS),
            received,
            sent,
        )
        before, self._before[name] = self._before.get(name), now
        state, physical = _state(port, "state"), _state(port, "phys_state")
        values: dict[str, Value] = {
            "state": state,
            "phys_state": physical,
            "link_downed": now.downs,
            "link_recoveries": _sum(port, _RECOVERIES),
            "errors": now.errors,
            "received_bytes": received,
            "sent_bytes": sent,
            "traffic_bytes_per_s": _traffic(before, now),
        }
        if not active:
            why = f"the port is {(state or 'not there').lower()} ({(physical or '?').lower()})"
            return self._bad(name, "rdma_port_down", why, now_s, values)
        if before is not None and now.downs > before.downs:
            why = f"the link went down {now.downs - before.downs} times since the last look"
            return self._bad(name, "rdma_link_downed", why, now_s, values)
        if (slow := self._slow(name, port)) is not None:
            return self._warn(name, "rdma_slow", slow, values)
        if before is not None and now_s > before.at_s:
            rate = max(0, now.errors - before.errors) * 60 / (now_s - before.at_s)
            if rate > self._settings.errors_per_minute_max:
                return self._warn(name, "rdma_errors", f"{rate:.3g} errors a minute", values)
        return healthy(self.name, f"active, {read_word(port / 'rate') or '?'}", name, values=values)

    def _slow(self, name: str, port: Path) -> str | None:
        word = (read_word(port / "rate") or "").partition(" ")[0]
        rate = float(word) if word.replace(".", "", 1).isdecimal() and word.isascii() else 0.0
        best = self._best_rate[name] = max(rate, self._best_rate.get(name, 0.0))
        return f"runs at {rate:g} Gb/s, before at {best:g}" if 0 < rate < best else None

    def _bad(
        self, name: str, rule: str, why: str, now_s: float, values: Mapping[str, Value]
    ) -> Observation:
        action, sure, words = self._settings.alerts.judge(self._alerts, name, now_s)
        text = f"{why} ({words})"
        return faulty(
            self.name,
            rule,
            Symptom.NETWORK_NCCL,
            action,
            text,
            name,
            confidence=sure,
            values=values,
        )

    def _warn(self, name: str, rule: str, why: str, values: Mapping[str, Value]) -> Observation:
        return faulty(
            self.name,
            rule,
            Symptom.NETWORK_NCCL,
            Action.WARN_ONLY,
            why,
            name,
            confidence=Confidence.LOW,
            values=values,
        )

    def not_here(self) -> Mapping[str, str]:
        """Why nothing was looked at, where nothing was."""
        if self._any or self._been_up:
            return {}
        return {"RDMA ports": f"{self._sys / 'class/infiniband'} has no device"}

    def not_looked_at(self) -> Mapping[str, Sequence[str]]:
        """Ports of devices of which no port is in use."""
        return dict.fromkeys(self._spare, ("no port is active: not in use",))

    def close(self) -> None:
        """Holds nothing."""


def _state(port: Path, name: str) -> str:
    """``4: ACTIVE`` as ``ACTIVE``."""
    return (read_word(port / name) or "").rpartition(":")[2].strip()[:30]


def _sum(port: Path, names: Sequence[str]) -> int:
    return sum(max(0, read_int(port / "counters" / name) or 0) for name in names)


def _traffic(before: _Seen | None, now: _Seen) -> float | None:
    """Bytes a second in both directions since the last look."""
    if before is None or now.at_s <= before.at_s:
        return None
    total = 0
    for earlier, later in ((before.received, now.received), (before.sent, now.sent)):
        if earlier is None or later is None:
            return None
        total += risen(earlier, later)
    return round(total / (now.at_s - before.at_s), 1)
