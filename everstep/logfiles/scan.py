"""A fast search for many fixed texts in raw bytes.

One pass of Hyperscan over a block of a file finds every place where one of the catalogue's texts
stands, whatever their number; only the lines of these places are looked at again.

Not here: which texts (``Catalogue.texts``), and reading blocks (``reading``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hyperscan

from everstep.decide.diagnosis.literals import LITERAL_CHARS_MIN

EXTRA_TEXTS = (
    "traceback (most recent call last)",
    "root cause (first observed failure)",
    "failed (exitcode:",
    "srun: error:",
    "exited on signal",
    "died with <signals.",
    "fatal python error",
    "*** process received signal",
    "segmentation fault",
    "killed",
    "aborted",
    "bus error",
    "illegal instruction",
    "terminated",
    "segfault",
    "exit code",
    "exitcode",
    "exit status",
    "return code",
    "with code",
    "with signal",
    "on signal",
)
"""Texts that rules beside the catalogue go by: tracebacks and how processes ended."""


class Scanner:
    """Finds the catalogue's texts, and those of other rules, in bytes; case is ignored."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Build the search for these texts.

        ``texts`` then has those that are enough to find all of them.
        """
        wanted = _shortest({*texts, *EXTRA_TEXTS})
        encoded = [text.encode("utf-8") for text in wanted]
        self.texts = tuple(wanted)
        self._database = hyperscan.Database()
        self._database.compile(
            expressions=encoded,
            ids=list(range(len(encoded))),
            elements=len(encoded),
            flags=[hyperscan.HS_FLAG_CASELESS] * len(encoded),
            literal=True,
        )

    def places(self, block: bytes) -> list[tuple[int, int]]:
        """Where texts stand: (offset of their last byte, index of the text), by offset."""
        found: list[tuple[int, int]] = []
        add = found.append

        def seen(index: int, _start: int, end: int, _flags: int, _context: Any) -> None:
            add((end - 1, index))

        if block:
            self._database.scan(block, match_event_handler=seen)
        found.sort()
        return found


def _shortest(texts: set[str]) -> list[str]:
    """Texts that hold none of the others: whoever finds these has found all, and much quicker."""
    kept: dict[str, list[str]] = {}
    """By how they begin."""
    for text in sorted(texts, key=lambda t: (len(t), t)):
        if not any(
            text.startswith(one, i)
            for i in range(len(text) - LITERAL_CHARS_MIN + 1)
            for one in kept.get(text[i : i + LITERAL_CHARS_MIN], ())
        ):
            kept.setdefault(text[:LITERAL_CHARS_MIN], []).append(text)
    return sorted(one for group in kept.values() for one in group)
