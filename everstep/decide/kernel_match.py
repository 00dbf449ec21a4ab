"""From one kernel message to the row of the catalogue that it is an instance of.

Nothing is remembered here but the beginning of a message that goes over several lines. Not here:
what several hits mean together (``kernel``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from everstep.decide.kernel_rules import (
    KernelClass,
    KernelRules,
    LineRule,
    NumberRule,
    RecoveryRule,
    TargetKind,
)
from everstep.decide.observation import Value
from everstep.decide.words import Action

JOINED_LINES_MAX = 5
_SHOWN_CHARS_MAX = 80

_XID = re.compile(
    r"NVRM: Xid \((?P<where>[^)]{1,60})\):? (?P<number>\d{1,5})\b,? ?(?P<rest>.*)", re.IGNORECASE
)
_SXID = re.compile(
    r"nvidia-(?P<switch>nvswitch\d{1,3}): SXid \((?P<where>[^)]{1,60})\): "
    r"(?P<number>\d{1,6})\b,? ?(?P<rest>.*)",
    re.IGNORECASE,
)
# Further lines of the same report: registers.
_SXID_MORE = re.compile(r"(Severity \d|Data ?\{)", re.IGNORECASE)
_PID = re.compile(r"\bpid=(?P<pid>\d{1,10})\b(?:, name=(?P<name>[^,]{1,64}))?")
_PCI = re.compile(
    r"(?:(?P<domain>[\da-f]{1,8}):)?(?P<bus>[\da-f]{1,2}):(?P<device>[\da-f]{1,2})(?:\.[\da-f])?",
    re.IGNORECASE,
)
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)
_FATAL = re.compile(r"\bfatal\b", re.IGNORECASE)
_RECOVERY = re.compile(r"\bto 0x[\da-f]+ \((?P<name>[^)]{1,60})\)", re.IGNORECASE)
_CAUSED_BY = re.compile(r"caused by previous Xid (?P<number>\d{1,5})", re.IGNORECASE)
_ENDED = re.compile(
    r"\b(?:kill(?:ed)?|reaped) process (?P<pid>\d{1,10})(?:, UID \d+,)? \((?P<name>.{1,64}?)\)"
    r"(?=,? (?:total-vm|vsz|UID|now|score)\b|$)"
    r"|,task=(?P<task>.{1,64}),pid=(?P<task_pid>\d{1,10})\b",
    re.IGNORECASE,
)
_FIRST_WORD = re.compile(r"(\S+)\s+")

# Bits of an x86 machine check status word (IA32_MCi_STATUS).
_STATUS_OVERFLOW = 1 << 62
_STATUS_UNCORRECTED = 1 << 61


def pci_key(text: str) -> str:
    """A PCI address as ``0000:18:00`` whoever wrote it: domain of any width, no function."""
    found = _PCI.search(text)
    if found is None:
        return text.strip().lower()[:_SHOWN_CHARS_MAX]
    domain = int(found["domain"] or "0", 16)
    return f"{domain:04x}:{int(found['bus'], 16):02x}:{int(found['device'], 16):02x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One message, recognised."""

    name: str
    """``xid_79``, ``sxid_20034``, or the name of the row."""
    rule: NumberRule | LineRule
    target: str
    action: Action
    """By this message alone."""
    count: int = 1
    """Events that it stands for."""
    gpu: str = ""
    """PCI address, for an Xid."""
    xid: int = 0
    pid: int | None = None
    program: str = ""
    recovery: RecoveryRule | None = None
    expected: bool = False
    """Ordinary while processes of ours are being ended."""
    values: Mapping[str, Value] = field(default_factory=dict)


@dataclass(slots=True)
class _Joining:
    rule: LineRule
    word: str
    text: str
    lines: int = 1


class Matcher:
    """Matches messages one after the other."""

    def __init__(self, rules: KernelRules, gpu_names: Mapping[str, str]) -> None:
        """Nothing has been seen yet.

        Args:
            rules: the catalogue.
            gpu_names: what this machine calls its GPUs, by PCI address (any spelling).
        """
        self._rules = rules
        self._gpu_names = {pci_key(address): name for address, name in gpu_names.items()}
        self._joining: list[_Joining] = []

    def name_gpus(self, gpu_names: Mapping[str, str]) -> Callable[[str], str]:
        """Call GPUs by other names from now on; returns what turns a target of before into now's.

        Args:
            gpu_names: as above; GPUs that it does not name are called by their address.
        """
        before = {name: address for address, name in self._gpu_names.items()}
        self._gpu_names = {pci_key(address): name for address, name in gpu_names.items()}

        def now(target: str) -> str:
            if target in before:
                return self._gpu(before[target])
            kind, _, text = target.partition(" ")
            if kind not in ("gpu", "pci") or _PCI.fullmatch(text) is None:
                return target
            return self._gpu_names.get(pci_key(text), target)

        return now

    def match(self, message: str) -> Hit | None:
        """The row that the message is an instance of; None for one that means nothing."""
        found = _XID.match(message)
        if found is not None:
            return self._xid(found)
        found = _SXID.match(message)
        if found is not None:
            return self._sxid(found)
        joined = self._join(message)
        if joined is not None:
            return joined
        for rule in self._rules.lines:
            if rule.begins is not None:
                if rule.begins.match(message) is None:
                    continue
                found = rule.pattern.match(message)
                if found is not None:
                    return self._line(rule, found)
                self._begin(rule, message)
                continue
            found = rule.pattern.match(message)
            if found is not None:
                return None if rule.benign else self._line(rule, found)
        return None

    def _xid(self, found: re.Match[str]) -> Hit:
        printed, rest = int(found["number"]), found["rest"]
        number = self._cause(printed, rest)
        rule = self._xid_rule(number)
        address = pci_key(found["where"])
        values: dict[str, Value] = {"xid": number, "pci_address": address}
        program = _PID.search(rest)
        pid = int(program["pid"]) if program is not None else None
        name = (program["name"] or "").strip("'") if program is not None else ""
        if pid is not None:
            values |= {"pid": pid, "program": name}
        recovery, action = None, _by_severity(rule, rest)
        if rule.recovery:
            to = _RECOVERY.search(rest)
            recovery = self._rules.recovery.get(to["name"].lower()) if to else None
            if recovery is not None:
                action = recovery.action
                values["recovery_action"] = recovery.name
        expected = rule.teardown
        if number != printed:
            values["named_by_xid"] = printed
            # Whose channels are removed is not always who made the error.
            pid, name = None, ""
            cleanup = self._xid_rule(printed).teardown
            expected = expected or (cleanup and action is Action.WARN_ONLY)
        return Hit(
            name=f"xid_{number}",
            rule=rule,
            target=self._gpu(address),
            action=action,
            gpu=address,
            xid=number,
            pid=pid,
            program=name,
            recovery=recovery,
            expected=expected,
            values=values,
        )

    def _xid_rule(self, number: int) -> NumberRule:
        return self._rules.xids.get(number, self._rules.unknown_xid)

    def _cause(self, number: int, rest: str) -> int:
        """The Xid that a line is about: the one that it names as its cause, if it does."""
        named = _CAUSED_BY.search(rest)
        if named is None or self._xid_rule(int(named["number"])).recovery:
            return number
        return int(named["number"])

    def _sxid(self, found: re.Match[str]) -> Hit | None:
        number, rest = int(found["number"]), found["rest"]
        if _SXID_MORE.match(rest):
            return None
        rule = self._rules.sxids.get(number, self._rules.unknown_sxid)
        return Hit(
            name=f"sxid_{number}",
            rule=rule,
            target=found["switch"].lower(),
            action=_by_severity(rule, rest),
            values={"sxid": number, "pci_address": pci_key(found["where"])},
        )

    def _line(self, rule: LineRule, found: re.Match[str]) -> Hit:
        groups = found.groupdict()
        action, count = rule.action, 1
        if groups.get("count"):
            count = max(1, min(int(groups["count"][:9]), 1_000_000))
        if groups.get("status"):
            status = int(groups["status"], 16)
            if status & _STATUS_UNCORRECTED:
                action = Action.EVICT_MACHINE
            elif status & _STATUS_OVERFLOW:
                action = Action.STOP_TIME_CHECK
        pid, program = (
            _ended(found.string) if rule.kind is KernelClass.OUT_OF_MEMORY else (None, "")
        )
        return Hit(
            name=rule.name,
            rule=rule,
            target=self._target(rule.target, groups.get("target") or ""),
            action=action,
            count=count,
            pid=pid,
            program=program,
            expected=rule.teardown,
        )

    def _target(self, kind: TargetKind, text: str) -> str:
        text = text.strip(" :,()")[:_SHOWN_CHARS_MAX]
        if not text or kind is TargetKind.MACHINE:
            return ""
        if kind is TargetKind.GPU:
            return self._gpu(pci_key(text))
        if kind is TargetKind.PCI:
            return self._gpu_names.get(pci_key(text), f"pci {text.lower()}")
        return f"{kind} {text}"

    def _gpu(self, address: str) -> str:
        return self._gpu_names.get(address, f"gpu {address}")

    def _begin(self, rule: LineRule, message: str) -> None:
        word = _FIRST_WORD.match(message)
        if word is not None:
            self._joining = [j for j in self._joining if j.rule is not rule]
            self._joining.append(_Joining(rule, word[1], message))

    def _join(self, message: str) -> Hit | None:
        """A row whose lines are complete with this one."""
        still: list[_Joining] = []
        hit: Hit | None = None
        for joining in self._joining:
            joining.lines += 1
            word, _, rest = message.partition(" ")
            if word == joining.word:
                joining.text += " " + rest.strip()
                found = joining.rule.pattern.match(joining.text)
                if found is not None and hit is None:
                    hit = self._line(joining.rule, found)
                    continue
            if joining.lines < JOINED_LINES_MAX:
                still.append(joining)
        self._joining = still if hit is None else []
        return hit


def _ended(message: str) -> tuple[int | None, str]:
    """The process that an out-of-memory line says was ended."""
    found = _ENDED.search(message)
    if found is None:
        return None, ""
    return int(found["pid"] or found["task_pid"]), found["name"] or found["task"]


def _by_severity(rule: NumberRule, rest: str) -> Action:
    """The action, by the severity that the line prints where the row asks for it."""
    if rule.nonfatal is not None and _NONFATAL.search(rest):
        return rule.nonfatal
    if rule.fatal is not None and not _NONFATAL.search(rest) and _FATAL.search(rest):
        return rule.fatal
    return rule.action
