"""The signatures as one thing that can be asked: which of them does this line match?

Order is precedence: the first signature that matches a line is what the line says.

Not here: reading the catalogue's files (``everstep.spec.log_catalogue``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from everstep.decide.diagnosis.literals import required_literals
from everstep.decide.diagnosis.types import Signature


class Catalogue:
    """Signatures in order of precedence, ready to be matched.

    Expressions are compiled when a line first holds one of their fixed texts, so a start costs
    nothing for signatures that never come up.
    """

    def __init__(
        self, signatures: Sequence[Signature], literals: Sequence[Sequence[str]] | None = None
    ) -> None:
        """Take the signatures.

        Args:
            signatures: in order of precedence.
            literals: their fixed texts where they are known already, in the same order.
        """
        self.signatures = tuple(signatures)
        found = (
            literals if literals is not None else [required_literals(s.pattern) for s in signatures]
        )
        self.literals: tuple[tuple[str, ...], ...] = tuple(tuple(texts) for texts in found)
        self._compiled: dict[int, tuple[re.Pattern[str], re.Pattern[str] | None]] = {}

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """All fixed texts, lower-case: what a fast scan looks for."""
        return tuple(sorted({text for texts in self.literals for text in texts}))

    def match(self, line: str) -> Signature | None:
        """The first signature that the line matches."""
        lowered = line.lower()
        for index, texts in enumerate(self.literals):
            for text in texts:
                if text in lowered:
                    if self._matches(index, line):
                        return self.signatures[index]
                    break
        return None

    def named(self, name: str) -> Signature | None:
        """The signature of that name."""
        return next((s for s in self.signatures if s.name == name), None)

    def _matches(self, index: int, line: str) -> bool:
        compiled = self._compiled.get(index)
        if compiled is None:
            row = self.signatures[index]
            compiled = (
                re.compile(row.pattern, re.IGNORECASE),
                re.compile(row.unless, re.IGNORECASE) if row.unless else None,
            )
            self._compiled[index] = compiled
        pattern, unless = compiled
        if pattern.search(line) is None:
            return False
        return unless is None or unless.search(line) is None
