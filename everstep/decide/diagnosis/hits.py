"""What the lines of a log say: every line that is evidence of something, with who wrote it.

A line of a stack frame quotes a program and says nothing. Of a chain of exceptions the first one
with a meaning of its own counts. What the process outlived is kept, but marked: training went on
after it, so it is not why the run ended.

Not here: which of the hits is the first failure (``verdict``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.prefix import parse
from everstep.decide.diagnosis.standing import (
    Standing,
    introduces_caught,
    remark,
    standing_of,
)
from everstep.decide.diagnosis.tracebacks import (
    BARE_EXCEPTION,
    Traceback,
    quoted_lines,
    tracebacks,
)
from everstep.decide.diagnosis.types import LogSource, Role, Signature, Weight
from everstep.decide.words import Action, Confidence, Side, Symptom

PROGRESS_AFTER_MIN = 3
"""So many progress lines after a failure, and the process outlived it."""
MESSAGE_LINES_MAX = 12
STEPS_CHARS_MAX = 4_000
RANK_LINES_BACK_MAX = 8

PYTHON_EXCEPTION = Signature(
    name="python_exception",
    pattern="",
    symptom=Symptom.USER_CODE,
    side=Side.USER_CODE,
    action=Action.ROLLBACK_CODE,
    weight=Weight.WEAK,
    confidence=Confidence.LOW,
    why="the program raised an exception that no other signature explains",
)
_ECHO = re.compile(
    r"^([\w.]*\.)?(ChildFailedError|CalledProcessError|SystemExit|ProcessRaisedException"
    r"|ProcessExitedException|SignalException|ChildProcessError|TrainingFailedError|TaskError"
    r"|BrokenProcessPool|KeyboardInterrupt|RayTaskError(\(\w+\))?|StopIteration|GeneratorExit"
    r"|BrokenPipeError|Empty|Full|ConnectionResetError|ConnectionAbortedError|EOFError)\b"
)
"""Exceptions that repeat what another process did, or name no cause: the cause is elsewhere."""
_PROGRESS = re.compile(
    r"\b(iter(ation)?|step|epoch|ep|global_step)s?\b\W{0,16}\d+|\d+/\d+ \[\d+:\d+"
    r"|['\"]?loss['\"]?\s*[:=]",
    re.IGNORECASE,
)
_RETRIED = re.compile(
    r"\b(will retry|retrying|retry(ing)? (attempt|in|after)|attempt \d+ of \d+|retried|retry loop"
    r"|(reducing|skipping) (the )?batch|falling back)\b",
    re.IGNORECASE,
)
_TOLD_OF = re.compile(r"\(RANK (\d+)\)\s*$")
"""A distributed checkpoint prints on one rank the traceback of another."""
_OF_NO_RANK = re.compile(
    r"^(?:srun|slurmstepd|salloc|sbatch|mpirun|mpiexec|prterun|kubelet)\b|\bkernel:|\bNVRM\b"
)


@dataclass(frozen=True, slots=True)
class Item:
    """One line with its writer."""

    source: int
    position: int
    """Index in the source's lines."""
    number: int
    text: str
    rank: int | None
    machine: str | None
    mentioned: int | None
    segment: int
    """Changes where lines were left out."""
    steps: int = 0
    """How many times it reports progress: a bar that is redrawn is one line."""
    plain: bool = False
    """It is known to hold no text of the catalogue."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One line that is evidence."""

    item: Item
    signature: Signature
    survived: bool = False
    """The process went on after it."""
    mild: bool = False
    """Its writer says that it goes on: a log line below the level of an error."""
    echo: bool = False
    """It only repeats that another process failed."""
    context: tuple[Item, ...] = ()
    """Lines that belong to it (the frames of its traceback)."""

    @property
    def rank(self) -> int | None:
        """The rank that it is about."""
        return self.item.rank if self.item.rank is not None else self.item.mentioned


def items_of(source: LogSource, index: int) -> list[Item]:
    """The lines of a source, with prefixes read."""
    out: list[Item] = []
    segment, before = 0, None
    for position, line in enumerate(source.lines):
        if before is not None and line.number != before + 1:
            segment += 1
        before = line.number
        parsed = parse(line.text)
        out.append(
            Item(
                index,
                position,
                line.number,
                parsed.text,
                parsed.rank if parsed.rank is not None else source.rank,
                parsed.machine or source.machine,
                parsed.mentioned,
                segment,
                _steps(line.text, parsed.text),
                line.plain,
            )
        )
    return out


def _steps(raw: str, text: str) -> int:
    if "\r" in raw:
        return sum(is_progress(part) for part in raw[:STEPS_CHARS_MAX].split("\r"))
    return int(is_progress(text))


def hits_of(catalogue: Catalogue, items: Sequence[Item]) -> list[Hit]:
    """All hits of one source, in the order of its lines."""
    found: dict[int, Hit] = {}
    for stream in _streams(items):
        for hit in _stream_hits(catalogue, stream):
            found[hit.item.position] = hit
    ordered = [found[position] for position in sorted(found)]
    return [_with_rank(hit, items) for hit in _survivals(ordered, items)]


def is_progress(text: str) -> bool:
    """True for a line that reports a training step."""
    return _PROGRESS.search(text) is not None


def _streams(items: Sequence[Item]) -> list[list[Item]]:
    """Lines by the rank that wrote them: launchers mix the output of ranks."""
    streams: dict[int | None, list[Item]] = {}
    for item in items:
        streams.setdefault(item.rank, []).append(item)
    return list(streams.values())


def _stream_hits(catalogue: Catalogue, stream: Sequence[Item]) -> list[Hit]:
    texts = [item.text for item in stream]
    quoted = quoted_lines(texts)
    chains = list(_chains(list(tracebacks(texts, _segments(stream)))))
    raised = {traceback.final for chain in chains for traceback in chain}
    inside = {
        position
        for chain in chains
        for traceback in chain
        for position in range(traceback.start, traceback.final)
    }
    hits = [hit for chain in chains if (hit := _chain_hit(catalogue, stream, chain)) is not None]
    for position, item in enumerate(stream):
        if position in quoted or position in raised or position in inside or not item.text.strip():
            continue
        signature = None if item.plain else catalogue.match(item.text)
        hit = None if signature is None else _hit(item, signature)
        if hit is not None:
            hits.append(hit)
        elif BARE_EXCEPTION.match(item.text):
            echo = _ECHO.match(item.text) is not None
            hits.append(Hit(item, PYTHON_EXCEPTION, echo=echo))
    return hits


def _segments(stream: Sequence[Item]) -> list[int]:
    return [item.segment for item in stream]


def _hit(
    item: Item, signature: Signature, context: tuple[Item, ...] = (), *, mild: bool = False
) -> Hit | None:
    standing = standing_of(item.text, signature)
    if standing is Standing.NOTHING:
        return None
    retried = _RETRIED.search(item.text) is not None
    mild = mild or standing is Standing.MILD
    return Hit(item, signature, survived=retried, mild=mild, context=context)


def _chains(found: Sequence[Traceback]) -> list[list[Traceback]]:
    chains: list[list[Traceback]] = []
    for traceback in found:
        if traceback.chained and chains:
            chains[-1].append(traceback)
        else:
            chains.append([traceback])
    return chains


def _chain_hit(
    catalogue: Catalogue, stream: Sequence[Item], chain: Sequence[Traceback]
) -> Hit | None:
    """What a chain of exceptions says: the first one that a signature knows, else the first."""
    plain: Hit | None = None
    mild = _was_caught(stream, chain[0])
    for traceback in chain:
        final = stream[traceback.final]
        told = _TOLD_OF.search(stream[traceback.start].text)
        context = tuple(stream[max(traceback.start + 1, traceback.final - 2) : traceback.final])
        for line in _message(stream, traceback):
            item = line if told is None else replace(line, rank=int(told[1]))
            signature = catalogue.match(item.text)
            if signature is not None and signature.role is not Role.NOTE:
                return _hit(item, signature, context, mild=mild)
        echo = _ECHO.match(final.text) is not None
        if plain is None or (plain.echo and not echo):
            final = final if told is None else replace(final, rank=int(told[1]))
            plain = Hit(final, PYTHON_EXCEPTION, mild=mild, echo=echo, context=context)
    return plain


def _was_caught(stream: Sequence[Item], traceback: Traceback) -> bool:
    """The line right before it is the log message that it belongs to, below an error."""
    if traceback.start == 0:
        return remark(stream[traceback.start].text)
    header, before = stream[traceback.start], stream[traceback.start - 1]
    if remark(header.text):
        return True
    return before.segment == header.segment and introduces_caught(before.text)


def _message(stream: Sequence[Item], traceback: Traceback) -> list[Item]:
    """The line that names the exception and the lines of its text after it."""
    first = stream[traceback.final]
    out = [first]
    for item in stream[traceback.final + 1 : traceback.final + 1 + MESSAGE_LINES_MAX]:
        if item.segment != first.segment or "Traceback (most recent" in item.text:
            break
        if item.text.endswith("exception:") or item.text.endswith("exception occurred:"):
            break
        out.append(item)
    return out


def _survivals(hits: Sequence[Hit], items: Sequence[Item]) -> list[Hit]:
    """Mark what a process went on after."""
    if not hits:
        return []
    begin = hits[0].item.position
    progress = [item for item in items[begin:] if item.steps]
    out: list[Hit] = []
    for hit in hits:
        after = 0
        for item in reversed(progress):
            if item.position <= hit.item.position or after >= PROGRESS_AFTER_MIN:
                break
            if hit.item.rank is None or item.rank in (None, hit.item.rank):
                after += item.steps
        lived = after >= PROGRESS_AFTER_MIN and hit.signature.role is not Role.NOTE
        out.append(replace(hit, survived=True) if lived else hit)
    return out


def _with_rank(hit: Hit, items: Sequence[Item]) -> Hit:
    """A line without a prefix belongs to the rank whose lines stand right before it."""
    if hit.rank is not None or _OF_NO_RANK.search(hit.item.text):
        return hit
    position = hit.item.position
    for item in reversed(items[max(0, position - RANK_LINES_BACK_MAX) : position]):
        if item.segment != hit.item.segment:
            break
        if item.rank is not None:
            return replace(hit, item=replace(hit.item, mentioned=item.rank))
    return hit
