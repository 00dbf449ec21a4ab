"""The signatures as one thing that can be asked: which of them does this line match?

Order is precedence: the first signature that matches a line is what the line says.

Not here: reading the catalogue's files (``everstep.spec.log_catalogue``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from everstep.decide.diagnosis.literals import LITERAL_CHARS_MIN, required_literals
from everstep.decide.diagnosis.standing import says_none
from everstep.decide.diagnosis.types import Signature

_PIECE = LITERAL_CHARS_MIN


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
        pieces = {lowered[i : i + _PIECE] for i in range(len(lowered) - _PIECE + 1)}
        likely = {
            index
            for piece in self._pieces.keys() & pieces
            for text, indices in self._pieces[piece]
            if text in lowered
            for index in indices
        }
        return next((self.signatures[i] for i in sorted(likely) if self._matches(i, line)), None)

    @cached_property
    def _by_text(self) -> dict[str, list[int]]:
        out: dict[str, list[int]] = {}
        for index, texts in enumerate(self.literals):
            for text in texts:
                out.setdefault(text, []).append(index)
        return out

    @cached_property
    def _pieces(self) -> dict[str, list[tuple[str, list[int]]]]:
        """Fixed texts by one piece of each, the one that fewest others share.

        Comparing the pieces of a line with these at once is much quicker than looking for each
        text.
        """
        shared = Counter(piece for text in self._by_text for piece in _pieces_of(text))
        out: dict[str, list[tuple[str, list[int]]]] = {}
        for text, indices in self._by_text.items():
            piece = min(_pieces_of(text), key=lambda p: (shared[p], p))
            out.setdefault(piece, []).append((text, indices))
        return out

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
        if all(says_none(line, *found.span()) for found in pattern.finditer(line)):
            return False
        return unless is None or unless.search(line) is None


def _pieces_of(text: str) -> set[str]:
    return {text[i : i + _PIECE] for i in range(len(text) - _PIECE + 1)}
