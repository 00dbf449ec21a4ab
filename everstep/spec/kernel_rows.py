"""The rows of the kernel catalogue as an operator writes them.

Not here: reading files, rules between rows and the compiled form (``kernel_catalogue``).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from everstep.decide.kernel_rules import KernelClass, TargetKind
from everstep.decide.words import Action, Side, Symptom
from everstep.spec.base import IS_REGEX, Duration, StrictModel
from everstep.spec.spans import Span

Text = Annotated[str, StringConstraints(min_length=1, max_length=300)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{1,60}$")]
Number = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,5}$")]
Regex = Annotated[str, StringConstraints(min_length=3, max_length=1_000), IS_REGEX]


class WindowsSection(StrictModel):
    """Times of the rules."""

    burst: Span
    """The same report about the same target within this time is one."""
    programs: Span
    """Errors of several programs on one GPU are counted over this time."""
    consequences: Span
    """How long before or after its cause a consequence may be printed."""
    settle: Span
    """How long a report whose weight hangs on others waits for them."""
    teardown: Span
    """How long after the end of a teardown what it has caused may still be printed."""


class KindRow(StrictModel):
    """What rows of a kind are about, where they do not say it themselves."""

    symptom: Symptom
    side: Side


class DocumentedRow(StrictModel):
    """A vendor's word for what to do, and what it comes to here."""

    meaning: Text
    action: Action


class RecoveryRow(StrictModel):
    """A recovery action that a driver prints (Xid 154)."""

    action: Action
    clears: bool = False


class Softened(StrictModel):
    """A milder action, when that Xid is the only other one of the GPU."""

    by: Annotated[int, Field(ge=1, le=999_999)]
    action: Action


class XidRow(StrictModel):
    """One Xid."""

    meaning: Text
    kind: KernelClass
    documented: str = ""
    action: Action | None = None
    symptom: Symptom | None = None
    side: Side | None = None
    source: Text | None = None
    teardown: bool = False
    several_programs: bool = False
    recovery: bool = False
    fatal: Action | None = None
    nonfatal: Action | None = None
    softened: Softened | None = None
    explained_by: tuple[Name, ...] = ()


class SxidGroup(StrictModel):
    """SXids that call for the same; ``rows`` says what each one is."""

    kind: KernelClass
    documented: str = ""
    action: Action | None = None
    symptom: Symptom | None = None
    side: Side | None = None
    source: Text | None = None
    teardown: bool = False
    fatal: Action | None = None
    nonfatal: Action | None = None
    explained_by: tuple[Name, ...] = ()
    rows: dict[Number, Text]


class SxidRow(StrictModel):
    """What one SXid has that its group has not."""

    meaning: Text | None = None
    kind: KernelClass | None = None
    documented: str | None = None
    action: Action | None = None
    symptom: Symptom | None = None
    side: Side | None = None
    source: Text | None = None
    teardown: bool | None = None
    fatal: Action | None = None
    nonfatal: Action | None = None


class RepeatRow(StrictModel):
    """So many within such a time on one target."""

    count: Annotated[int, Field(ge=2, le=4_096)]
    within: Span
    action: Action


class StayRow(StrictModel):
    """Not cleared for so long."""

    after: Span
    action: Action


class LineRow(StrictModel):
    """Kernel lines that are no Xids."""

    pattern: Regex
    begins: Regex | None = None
    meaning: Text
    kind: KernelClass
    action: Action = Action.WARN_ONLY
    symptom: Symptom | None = None
    side: Side | None = None
    source: Text | None = None
    example: str | tuple[str, ...]
    benign: bool = False
    target: TargetKind = TargetKind.MACHINE
    teardown: bool = False
    repeat: RepeatRow | None = None
    stay: StayRow | None = None
    boot_grace: Duration | None = None
    clears: tuple[Name, ...] = ()
    explained_by: tuple[Name, ...] = ()
    explained_within: Span | None = None
    follows: tuple[Name, ...] = ()


class KernelCatalogue(StrictModel):
    """The whole file."""

    source: Text
    """Where a row is from that does not say it itself."""
    windows: WindowsSection
    kinds: dict[KernelClass, KindRow]
    documented: dict[str, DocumentedRow]
    recovery_actions: dict[Text, RecoveryRow]
    unknown_xid: XidRow
    unknown_sxid: XidRow
    xids: dict[Number, XidRow]
    sxid_groups: dict[Name, SxidGroup]
    sxids: dict[Number, SxidRow] = Field(default_factory=dict)
    kernel_lines: dict[Name, LineRow]
