"""Whether the gateway, or the switch, answers: two misses in a row before it counts (paper 3.2).

Asked by ICMP where this user may, else by a TCP connection, whose refusal is an answer too. A
gateway that never answers anything (a firewall drops it) is judged by whether the kernel finds its
hardware address. Not here: what the other machines see of the same switch.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Confidence, Symptom
from everstep.machine.probes.host_read import faulty, healthy, read_text, to_int, unknown
from everstep.machine.probes.network_links import default_routes

_ECHO_REQUEST = 8
_ECHO_REPLY = 0
_TCP_PORTS = (179, 22, 80)
"""BGP, SSH, HTTP: what gateways and switches listen on, or refuse."""
_ANSWERS = (0, errno.ECONNREFUSED)
_ATF_COM = 0x2


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Thresholds of ``GatewayProbe``."""

    deadline_s: float
    """How long an answer may take."""
    misses_min: int
    """So many misses in a row, and it is out of reach."""


@dataclass(slots=True)
class _Known:
    misses: int = 0
    answers_by: str = ""
    """``icmp``, ``tcp`` or ``arp``: what it has answered before; empty: nothing yet."""


class GatewayProbe:
    """The gateway of the default route, or addresses that were given."""

    name = "gateway"
    interval = "network"

    def __init__(
        self, settings: GatewaySettings, *, proc: Path, addresses: Sequence[str] = ()
    ) -> None:
        """Nothing is asked yet.

        Args:
            settings: the thresholds.
            proc: where /proc is, for routes and hardware addresses.
            addresses: IPv4 addresses to ask; empty: the gateways of the default routes.
        """
        self._settings = settings
        self._proc = proc
        self._given = tuple(addresses)
        self._known: dict[str, _Known] = {}

    def look(self, now_s: float) -> Sequence[Observation]:  # noqa: ARG002 - misses are counted
        """Ask each gateway once; blocks for at most a few deadlines."""
        routes = [route.gateway for route in default_routes(self._proc) if route.gateway]
        # A route that has vanished with its link: what answered before is still asked.
        asked = dict.fromkeys(self._given or (*routes, *self._known))
        return [self._judge(address) for address in asked]

    def _judge(self, address: str) -> Observation:
        known = self._known.setdefault(address, _Known())
        try:
            ip_address(address)
        except ValueError:
            return unknown(self.name, "this is no IP address", address[:64])
        began = time.monotonic()
        answered = self._ask(address, known.answers_by)
        took_ms = (time.monotonic() - began) * 1000
        if answered:
            known.misses, known.answers_by = 0, answered
            reason = f"answers ({answered}) within {took_ms:.1f} ms"
            return healthy(
                self.name,
                reason,
                address,
                values={"method": answered, "round_trip_ms": round(took_ms, 2)},
            )
        if not known.answers_by:
            reason = "has never answered: not by ICMP, not by TCP, and has no hardware address"
            return unknown(self.name, reason, address)
        known.misses += 1
        values: dict[str, Value] = {"misses": known.misses, "method": known.answers_by}
        if known.misses < self._settings.misses_min:
            reason = f"did not answer once ({known.answers_by}); a second miss counts"
            return unknown(self.name, reason, address, "gateway_missed", values=values)
        return faulty(
            self.name,
            "gateway_unreachable",
            Symptom.NETWORK_HOST,
            Action.EVICT_MACHINE,
            f"out of reach: {known.misses} misses in a row ({known.answers_by})",
            address,
            confidence=Confidence.LOW,  # it may be the switch: other machines will tell
            values=values,
        )

    def _ask(self, address: str, method: str) -> str:
        """How it answered; empty: it did not."""
        limit_s = self._settings.deadline_s
        if method in ("", "icmp") and ping(address, limit_s):
            return "icmp"
        if method == "icmp":
            return ""
        if method in ("", "tcp") and knock(address, _TCP_PORTS, limit_s):
            return "tcp"
        if method == "tcp":
            return ""
        if method == "arp":  # the kernel looks for its hardware address when something is sent
            knock(address, _TCP_PORTS[:1], limit_s)
        return "arp" if has_hardware_address(self._proc, address) else ""

    def not_here(self) -> Mapping[str, str]:
        """Why nothing was asked, where nothing was."""
        return {} if self._known else {"gateway": "no IPv4 default route with a gateway"}

    def not_looked_at(self) -> Mapping[str, Sequence[str]]:
        """Nothing of a gateway is left out."""
        return {}

    def close(self) -> None:
        """Holds nothing."""


def ping(address: str, limit_s: float) -> bool:
    """Whether it answers one ICMP echo; False also where this user may not ask."""
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            with socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP) as sock:
                return _echo(sock, address, limit_s, raw=kind == socket.SOCK_RAW)
        except PermissionError:
            continue
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EPROTONOSUPPORT):
                continue
            return False
    return False


def _echo(sock: socket.socket, address: str, limit_s: float, *, raw: bool) -> bool:
    token = os.urandom(16)
    number = int.from_bytes(token[:2], "big")
    header = struct.pack("!BBHHH", _ECHO_REQUEST, 0, 0, number, 1)
    check = _checksum(header + token)
    packet = struct.pack("!BBHHH", _ECHO_REQUEST, 0, check, number, 1) + token
    sock.setblocking(False)
    sock.sendto(packet, (address, 0))
    until = time.monotonic() + limit_s
    while (left := until - time.monotonic()) > 0:
        if not select.select([sock], [], [], left)[0]:
            return False
        answer, (source, *_) = sock.recvfrom(2048)
        if raw:  # with the IP header, and with everybody else's answers
            answer = answer[(answer[0] & 15) * 4 :]
        if source == address and answer[:1] == bytes([_ECHO_REPLY]) and answer[8:24] == token:
            return True
    return False


def _checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071) of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return 0xFFFF ^ ((total + (total >> 16)) & 0xFFFF)


def knock(address: str, ports: Sequence[int], limit_s: float) -> bool:
    """Whether it accepts or refuses a TCP connection to one of the ports; both are answers."""
    with ExitStack() as stack:
        waiting = []
        for port in ports:
            sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            sock.setblocking(False)
            with suppress(OSError):
                code = sock.connect_ex((address, port))
                if code in _ANSWERS:
                    return True
                if code == errno.EINPROGRESS:
                    waiting.append(sock)
        until = time.monotonic() + limit_s
        while waiting and (left := until - time.monotonic()) > 0:
            _, done, _ = select.select([], waiting, [], left)
            if any(one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS for one in done):
                return True
            waiting = [one for one in waiting if one not in done]
    return False


def has_hardware_address(proc: Path, address: str) -> bool:
    """Whether the kernel has a complete neighbour entry for it."""
    for line in (read_text(proc / "net" / "arp") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 6 and fields[0] == address:
            return bool((to_int(fields[2]) or 0) & _ATF_COM)
    return False
