"""The kernel catalogue as the judge uses it: rows of Xids, SXids and other kernel lines.

Plain values without a default of their own: what is in them stands in ``config/xid.yaml``, which
``everstep.spec.kernel_catalogue`` reads and checks. Not here: how lines are judged (``kernel``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from everstep.decide.words import Action, Side, Symptom


class KernelClass(StrEnum):
    """What a line is about; gives a row its symptom and side where it names none itself."""

    APPLICATION = "application"
    MEMORY = "memory"
    LINK = "link"
    BUS = "bus"
    HARDWARE = "hardware"
    FIRMWARE = "firmware"
    DRIVER = "driver"
    HOST_MEMORY = "host_memory"
    OUT_OF_MEMORY = "out_of_memory"
    KERNEL = "kernel"
    STORAGE = "storage"
    REMOTE_STORAGE = "remote_storage"
    NETWORK = "network"
    THERMAL = "thermal"
    INFO = "info"


class TargetKind(StrEnum):
    """What the ``target`` group of a pattern names."""

    GPU = "gpu"
    PCI = "pci"
    SWITCH = "nvswitch"
    NIC = "nic"
    DISK = "disk"
    SERVER = "server"
    CPU = "cpu"
    DIMM = "dimm"
    PROCESS = "process"
    MACHINE = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRule:
    """One Xid or SXid."""

    number: int
    meaning: str
    kind: KernelClass
    documented: str
    """What the vendor documents, in the vendor's word; empty: nothing."""
    action: Action
    """For the line by itself, or when it prints no severity."""
    symptom: Symptom
    side: Side
    source: str
    teardown: bool = False
    """Ordinary while processes of ours are being ended."""
    several_programs: bool = False
    """From several programs on one GPU it is the GPU, not the programs."""
    recovery: bool = False
    """The line prints the recovery action that the GPU needs (Xid 154)."""
    fatal: Action | None = None
    nonfatal: Action | None = None
    """For lines that print ``Fatal`` or ``Nonfatal``."""
    softened_by: int | None = None
    softened_action: Action | None = None
    """Taken instead when that Xid is the only other one that says anything about the GPU."""
    explained_by: tuple[str, ...] = ()
    """Rules (``xid_79``) after which this one is a consequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """So many within such a time on one target."""

    count: int
    within_s: float
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Not cleared for so long."""

    for_s: float
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRule:
    """Kernel lines that are no Xids. The pattern holds from the start of the message on.

    Groups with a meaning: ``target`` (what it is about), ``count`` (events that one line stands
    for), ``status`` (a machine check status word in hex, whose bits say whether it was corrected).
    """

    name: str
    pattern: re.Pattern[str]
    meaning: str
    kind: KernelClass
    action: Action
    symptom: Symptom
    side: Side
    source: str
    examples: tuple[str, ...]
    benign: bool = False
    """A look-alike: judged before all others, and never anything."""
    begins: re.Pattern[str] | None = None
    """For a message over several lines: how the first one begins. The pattern then holds for the
    lines joined by spaces, without the word that all of them begin with."""
    target: TargetKind = TargetKind.MACHINE
    teardown: bool = False
    repeat: Repeat | None = None
    stay: Stay | None = None
    boot_grace_s: float = 0.0
    """Nothing unusual this early after boot (where the line says how early it is)."""
    clears: tuple[str, ...] = ()
    """Rules that are over for the same target when this line comes."""
    explained_by: tuple[str, ...] = ()
    explained_within_s: float = 30.0
    follows: tuple[str, ...] = ()
    """It counts only shortly after one of these rows: a stack says something about what hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRule:
    """A recovery action that a driver prints."""

    name: str
    action: Action
    clears: bool
    """The GPU is well again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Times of the rules, in seconds."""

    burst_s: float
    programs_s: float
    consequences_s: float
    settle_s: float
    teardown_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRules:
    """The whole catalogue."""

    xids: Mapping[int, NumberRule]
    sxids: Mapping[int, NumberRule]
    unknown_xid: NumberRule
    unknown_sxid: NumberRule
    lines: tuple[LineRule, ...]
    """In the order in which they are tried: look-alikes first."""
    recovery: Mapping[str, RecoveryRule]
    """By the printed name in lower case."""
    windows: Windows
    source: str = ""
    """Where it came from, for people."""
    by_name: Mapping[str, LineRule] = field(default_factory=dict)
