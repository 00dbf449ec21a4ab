"""Python tracebacks in the lines of one process: where each begins, what it raised, what caused it.

Lines may be sparse (``everstep.decide.diagnosis.types``): a traceback ends at a gap.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_HEADER = re.compile(r"Traceback \(most recent call last\):\s*(?:\(RANK \d+\)\s*)?$")
_CHAINED = re.compile(
    r"(During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\s*$"
)
EXCEPTION = re.compile(r"^(?:[\w.]+: )?([A-Za-z_][\w.]*)(: |:?$)")
BARE_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Fault)(?::(?= |$)|$)"
)
_FRAME = re.compile(r'^\s*(?:\[\d+\]\s*)?File "[^"]*", line \d+')
_CODE = re.compile(r"^\s{4,}\S|^\s+[\^~]+\s*$")
FRAMES_MAX = 400


@dataclass(frozen=True, slots=True)
class Traceback:
    """One traceback, by indices into the lines it was found in."""

    start: int
    final: int
    """The line that names the exception."""
    chained: bool
    """It came up while the one before it was handled, or because of it."""


def tracebacks(texts: Sequence[str], segments: Sequence[int]) -> Iterator[Traceback]:
    """All tracebacks whose exception is there, in order.

    Args:
        texts: lines of one process without prefixes.
        segments: for each line, a number that changes where lines were left out.
    """
    chained = False
    position = 0
    while position < len(texts):
        text = texts[position]
        if "Traceback (most recent" not in text or _HEADER.search(text) is None:
            chained = chained or ("exception" in text and _CHAINED.search(text) is not None)
            position += 1
            continue
        final = position + 1
        limit = min(len(texts), position + FRAMES_MAX)
        base = max(0, _indent(texts[final]) - 2) if final < limit else 0
        while (
            final < limit and _indent(texts[final]) > base and segments[final] == segments[position]
        ):
            final += 1
        if (
            final < limit
            and segments[final] == segments[position]
            and EXCEPTION.match(texts[final].strip())
        ):
            yield Traceback(position, final, chained)
            chained = False
        position = max(final, position + 1)


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def quoted_lines(texts: Sequence[str]) -> set[int]:
    """Indices of lines that quote a program's text: stack frames. They say nothing themselves."""
    out: set[int] = set()
    for index, text in enumerate(texts):
        if not text[:1].isspace() and 'File "' not in text:
            continue
        if _FRAME.match(text) or (_CODE.match(text) and (index - 1 in out)):
            out.add(index)
    return out
