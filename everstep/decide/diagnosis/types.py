"""Input and output of log diagnosis.

Plain records. A log is a *sparse* list of numbered lines: all of a short file, and of a long one
its head, its end and every line that may hold a signature, with its neighbours. Rules must
therefore never read anything into a gap.

Not here: how lines are found (``everstep.logfiles``) and what follows from them (``verdict``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from everstep.decide.words import Action, Confidence, Side, Symptom


class Role(StrEnum):
    """What a line says about the process that wrote it."""

    ROOT = "root"
    """It failed by itself."""
    WITNESS = "witness"
    """It failed because of others, by its own account."""
    TEARDOWN = "teardown"
    """It was stopped on purpose, by its launcher or by us."""
    NOTE = "note"
    """Worth a record; a verdict only when there is nothing else (a warning, a slow step)."""


class Weight(StrEnum):
    """How much a root says: a stronger one is the finding even when a weaker one came first."""

    STRONG = "strong"
    """Names a fault that nothing else explains: a lost GPU, a full disk, memory that ran out."""
    NORMAL = "normal"
    WEAK = "weak"
    """Names no cause of its own: any exception, any exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One row of the catalogue: text that is evidence of a symptom."""

    name: str
    """Also the rule of a verdict; stable."""
    pattern: str
    """Regular expression, searched in a line without colours and rank prefix; case is ignored."""
    symptom: Symptom
    side: Side
    action: Action
    role: Role = Role.ROOT
    weight: Weight = Weight.NORMAL
    confidence: Confidence = Confidence.HIGH
    machine_specific: bool = False
    """The fault is in the machine that wrote the line."""
    unless: str = ""
    """Regular expression: a line that matches it too is no evidence."""
    why: str = ""
    """One sentence for a person."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line as it stood in the file."""

    number: int
    """From 1."""
    text: str
    plain: bool = False
    """A scan has looked for all texts that rules go by, and none is in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """What was read of one file."""

    file: str
    lines: tuple[LogLine, ...] = ()
    """In the order of the file, with gaps."""
    lines_total: int = 0
    rank: int | None = None
    """Set when the file is known to be one rank's (by its name or by whoever knows)."""
    machine: str | None = None
    complete: bool = True
    """False when the file could not be read to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a process ended, as far as the caller knows."""

    exit_code: int | None = None
    signal: int | None = None
    rank: int | None = None
    """None: the job as a whole."""
    stopped_by_us: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceLine:
    """One line that speaks for the verdict."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The verdict about one failure."""

    symptom: Symptom
    side: Side
    action: Action
    confidence: Confidence
    rule: str
    """Name of the signature or rule that decided."""
    why: str
    """One or two sentences for a person."""
    first_failed_rank: int | None = None
    """None when the evidence does not say."""
    machines: tuple[str, ...] = ()
    """Machines under suspicion, as the logs name them."""
    evidence: tuple[EvidenceLine, ...] = ()
    witnesses: tuple[int, ...] = ()
    """Ranks that only suffered from others."""
    role: Role = Role.ROOT
    machine_specific: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TailFinding:
    """What the end of one rank's log says about that rank."""

    symptom: Symptom
    side: Side
    action: Action
    role: Role
    confidence: Confidence
    rule: str
    machine_specific: bool = False
    why: str = ""
    evidence: tuple[str, ...] = ()
    """The few lines that a person would look at, oldest first, without rank prefix."""
