"""Small, bounded reads of /proc and /sys, and the observations that host and network probes make.

What a kernel file holds is not trusted: it may be missing, empty, cut, of another kernel's format
or garbage. Every helper answers None for that and raises nothing. Not here: what the figures mean.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Confidence, Symptom, Verdict

TEXT_BYTES_MAX = 4 * 1024 * 1024
"""No file of /proc that is read here comes near it; a wrong path may."""
NOTHING: Mapping[str, Value] = MappingProxyType({})
_ENTRIES_MAX = 100_000
_NUMBER_DIGITS_MAX = 24
"""2**64 has 20 digits."""


def read_text(path: Path, limit: int = TEXT_BYTES_MAX) -> str | None:
    """The file's text, or None when it cannot be read. Never waits for a writer (a FIFO)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    parts: list[bytes] = []
    room = limit
    try:
        while room > 0 and (part := os.read(fd, min(room, 1 << 16))):
            parts.append(part)
            room -= len(part)
    except OSError:
        if not parts:
            return None
    finally:
        os.close(fd)
    return b"".join(parts).decode("utf-8", "replace")


def read_word(path: Path) -> str | None:
    """The first line without the space around it; None when the file cannot be read."""
    text = read_text(path, 4096)
    return None if text is None else text.partition("\n")[0].strip()


def read_int(path: Path) -> int | None:
    """A counter; None when the file cannot be read or holds something else."""
    word = read_word(path)
    return None if word is None else to_int(word)


def to_int(word: str) -> int | None:
    """A whole number, decimal or with 0x."""
    word = word.strip()
    if not word.isascii() or len(word) > _NUMBER_DIGITS_MAX:
        return None
    try:
        return int(word, 16) if word[:2].lower() == "0x" else int(word)
    except ValueError:
        return None


def to_float(word: str) -> float | None:
    """A finite number."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def pairs(text: str | None) -> dict[str, int]:
    """Lines of ``name number``, as in vmstat, memory.events and meminfo (``name: number kB``)."""
    found: dict[str, int] = {}
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) >= 2 and (value := to_int(words[1])) is not None:
            found[words[0].rstrip(":")] = value
    return found


def pressure(text: str | None) -> dict[str, float]:
    """A PSI file as ``some_avg10`` -> per cent; ``total`` in microseconds."""
    found: dict[str, float] = {}
    for line in (text or "").splitlines():
        kind, *fields = line.split() or [""]
        for field in fields:
            name, _, word = field.partition("=")
            if (value := to_float(word)) is not None:
                found[f"{kind}_{name}"] = value
    return found


def names_in(folder: Path) -> list[str]:
    """Names in a folder in natural order (``eth2`` before ``eth10``); none when it is not there."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_ENTRIES_MAX), strict=False)]
    except (OSError, ValueError):
        return []
    return sorted(names, key=_natural)


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(p[:18]), "") if p[:1].isdecimal() else (1, 0, p) for p in parts if p]


def children(folder: Path, prefix: str = "") -> Iterator[Path]:
    """What is in a folder, in natural order, whose name starts so."""
    return (folder / name for name in names_in(folder) if name.startswith(prefix))


def healthy(
    probe: str, reason: str, target: str = "", values: Mapping[str, Value] = NOTHING
) -> Observation:
    """Looked at and well."""
    return Observation(
        probe=probe, verdict=Verdict.HEALTHY, reason=reason, target=target, values=values
    )


def unknown(
    probe: str, reason: str, target: str = "", rule: str = "", values: Mapping[str, Value] = NOTHING
) -> Observation:
    """Could not look."""
    return Observation(
        probe=probe,
        verdict=Verdict.UNKNOWN,
        reason=reason,
        target=target,
        rule=rule,
        values=values,
    )


def faulty(
    probe: str,
    rule: str,
    symptom: Symptom,
    action: Action,
    reason: str,
    target: str = "",
    *,
    confidence: Confidence = Confidence.HIGH,
    values: Mapping[str, Value] = NOTHING,
) -> Observation:
    """Looked at and not well."""
    return Observation(
        probe=probe,
        verdict=Verdict.FAULTY,
        reason=reason,
        target=target,
        rule=rule,
        symptom=symptom,
        action=action,
        confidence=confidence,
        values=values,
    )


def size(count: float) -> str:
    """Bytes for a person: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB" if count < 1024 else f"{count / 1024:.3g} PiB"
