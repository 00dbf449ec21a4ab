"""What a kernel log says about its machine, and how far the log could be read at all.

A log in which nothing was found and one in which nothing could be read must not look alike. Not
here: what was found (``kernel_findings``), and which of it stands (``kernel``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everstep.decide.kernel_findings import EVIDENCE_CHARS_MAX, EvidenceLine
from everstep.decide.kernel_text import FIRST_WORDS, KernelLine
from everstep.decide.observation import Observation
from everstep.decide.words import Action, Confidence, Side, Symptom

_QUOTED = re.compile(r"NVRM: Xid \(|nvidia-nvswitch\d{1,3}: SXid \(", re.IGNORECASE)
_OWN_WORDS = FIRST_WORDS | {"nvrm"}
_WORD = re.compile(r"[\w-]+")
_DEVICE = re.compile(r"[\w-]+ [\da-f]{4}:[\da-f]{2}:[\da-f]{2}\.\d\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelVerdict:
    """What a kernel log says about its machine."""

    action: Action
    symptom: Symptom
    """UNKNOWN when nothing that means anything was found."""
    side: Side
    confidence: Confidence
    rule: str
    """Which row decided; empty: none."""
    target: str
    observations: tuple[Observation, ...]
    """One for each finding that stands, the one that decided first."""
    evidence: tuple[EvidenceLine, ...]
    why: str
    """One sentence for a person."""


class Coverage:
    """How many lines were read, how many of them were the kernel's, and what may be missing."""

    def __init__(self) -> None:
        self.lines = 0
        """That are not empty."""
        self.kernel = 0
        self.quoted: EvidenceLine | None = None
        """The first line with an Xid or SXid that is not the kernel's as it stands there."""

    def note(self, number: int, line: str, parsed: KernelLine | None, *, found: bool) -> None:
        """Count one line.

        Args:
            number: its number.
            line: as it was read.
            parsed: None for a part of a record that is not complete.
            found: a row of the catalogue matched it.
        """
        if not line.strip():
            return
        self.lines += 1
        ours = parsed is None or parsed.from_kernel
        if parsed is not None and ours and (found or parsed.sure or _looks_so(parsed.message)):
            self.kernel += 1
        if self.quoted is not None or found or parsed is None:
            return
        quoted = _QUOTED.search(line) or _QUOTED.search(parsed.message)
        if quoted is not None and not (ours and _QUOTED.match(parsed.message)):
            text = line if _QUOTED.search(line) else parsed.message
            self.quoted = EvidenceLine(number, text.strip()[:EVIDENCE_CHARS_MAX])

    def nothing(self, last: EvidenceLine | None, *, over: bool) -> KernelVerdict:
        """The verdict when no finding stands.

        Args:
            last: the last line of what was found all the same.
            over: some of it was reported as over.
        """
        why = "no line calls for an action"
        if over:
            why = "what was reported is over"
        elif not self.lines:
            why = "the log is empty"
        elif not self.kernel:
            lines = "1 line" if self.lines == 1 else f"{self.lines} lines"
            why = f"no kernel line was recognised in {lines}"
        evidence = last
        if self.quoted is not None:
            number = self.quoted.number
            why += f", but line {number} has an Xid in a form that is not known as the kernel's own"
            evidence = last or self.quoted
        return KernelVerdict(
            action=Action.WARN_ONLY,
            symptom=Symptom.UNKNOWN,
            side=Side.UNCLEAR,
            confidence=Confidence.LOW,
            rule="",
            target="",
            observations=(),
            evidence=(evidence,) if evidence is not None else (),
            why=why,
        )


def _looks_so(message: str) -> bool:
    """Whether a bare message has words that only the kernel begins with."""
    word = _WORD.match(message)
    known = word is not None and word[0].lower() in _OWN_WORDS
    return known or _DEVICE.match(message) is not None
