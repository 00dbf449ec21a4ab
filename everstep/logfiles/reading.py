"""One log file read within bounds: the lines that may matter, numbered.

A file is read once, in blocks. Kept are its first and last lines, every line in which the scan
finds a text of the catalogue, and its neighbours; so memory does not grow with the file. A text
that was found in very many lines is only followed up in its first lines: the end of the file is
kept anyway.

Not here: what lines mean (``everstep.decide.diagnosis``).
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import IO

from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.prefix import parse
from everstep.decide.diagnosis.types import LogLine, LogSource
from everstep.logfiles.find import LogFile
from everstep.logfiles.scan import EXTRA_TEXTS, Scanner

BLOCK_BYTES = 1 << 17
LINE_BYTES_MAX = 3_900
"""A longer line is kept around the place that was found."""
HEAD_LINES = 12
TAIL_LINES = 48
TAIL_BYTES_MAX = 64 * 1024
BEFORE_LINES = 3
AFTER_LINES = 3
AFTER_TRACEBACK_LINES = 80
KEPT_LINES_MAX = 6_000
FOUND_OF_ONE_TEXT_MAX = 300
TRIED_IN_VAIN_MAX = 1_000
"""A text that stood in so many lines of a file and was evidence in none is ordinary there."""
_BINARY_SHARE_MAX = 0.05
_STRANGE = bytes([*range(9), *range(14, 27)])
_GZIP = b"\x1f\x8b"
_TRACEBACK = "traceback (most recent call last)"


@dataclass(slots=True)
class Read:
    """What came of one file."""

    source: LogSource | None
    bytes_read: int = 0
    problem: str | None = None
    """One line: why it could not be read (to its end)."""


def read_log(file: LogFile, catalogue: Catalogue, scanner: Scanner) -> Read:
    """Read one file. Never raises for what is in it or for not being allowed to read it."""
    keeper = _Keeper(catalogue, scanner)
    problem: str | None = None
    try:
        with closing(_open(file)) as stream:
            for block in _blocks(_decoded(stream)):
                if keeper.blocks == 0 and _is_binary(block):
                    if not file.named:
                        return Read(None)
                    problem = f"{file.shown}: it begins with bytes that are no text"
                keeper.take(block)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        problem = f"{file.shown}: {reason}"
        if keeper.blocks == 0:
            return Read(None, 0, problem)
    source = LogSource(
        file=file.shown,
        lines=keeper.lines(),
        lines_total=keeper.count + keeper.open,
        rank=file.rank,
        machine=file.machine,
        complete=problem is None,
    )
    return Read(source, keeper.bytes_read, problem)


def _open(file: LogFile) -> IO[bytes] | gzip.GzipFile:
    stream = file.path.open("rb", buffering=0)
    if file.path.is_file() and stream.read(2) == _GZIP:
        stream.close()
        return gzip.open(file.path, "rb")
    if file.path.is_file():
        stream.seek(0)
    return stream


def _decoded(stream: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    """The bytes of a file, as UTF-8 where a mark at its begin says that it is UTF-16."""
    chunk = stream.read(BLOCK_BYTES)
    if not chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        while chunk:
            yield chunk
            chunk = stream.read(BLOCK_BYTES)
        return
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    while chunk:
        yield decoder.decode(chunk).encode("utf-8", "replace")
        chunk = stream.read(BLOCK_BYTES)


def _blocks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines, about ``BLOCK_BYTES`` at a time; a line without end is cut."""
    rest = b""
    for chunk in chunks:
        block = rest + chunk if rest else chunk
        cut = block.rfind(b"\n") + 1
        if cut == 0:
            if len(block) < BLOCK_BYTES:
                rest = block
                continue
            cut = len(block)
        yield block[:cut] if cut < len(block) else block
        rest = block[cut:]
    if rest:
        yield rest


def _is_binary(block: bytes) -> bool:
    sample = block[:4096]
    return len(sample) - len(sample.translate(None, _STRANGE)) > _BINARY_SHARE_MAX * len(sample)


class _Keeper:
    """Keeps the lines that may matter while a file goes by."""

    def __init__(self, catalogue: Catalogue, scanner: Scanner) -> None:
        self._catalogue = catalogue
        self._scanner = scanner
        self._kept: dict[int, str] = {}
        self._last: deque[tuple[int, bytes]] = deque(maxlen=2)
        """The last blocks, each with the number of its first line."""
        self._found: Counter[int] = Counter()
        self._tried: Counter[int] = Counter()
        self._until = 0
        """Keep all lines up to this number."""
        self.count = 0
        """Lines that have ended."""
        self.open = False
        """The last one has no line end (yet)."""
        self.blocks = 0
        self.bytes_read = 0

    def take(self, block: bytes) -> None:
        """Look at the next whole lines of the file."""
        first = self.count + 1
        if self.blocks == 0:
            self._head(block)
        self.blocks += 1
        self.bytes_read += len(block)
        self._carry_on(block, first)
        self._follow(block, first, self._scanner.places(block))
        self._last.append((first, block))
        self.count += block.count(b"\n")
        self.open = not block.endswith(b"\n")

    def lines(self) -> tuple[LogLine, ...]:
        """What was kept, in order."""
        out = dict(self._kept)
        wanted = TAIL_LINES
        for first, block in reversed(self._last):
            end = _end_of(block, wanted)
            last = first + block.count(b"\n") - block.endswith(b"\n")
            for number, raw in enumerate(end, last - len(end) + 1):
                out.setdefault(number, _text(raw))
            wanted -= len(end)
            if wanted <= 0:
                break
        numbers = sorted(out)
        speaking = self._speaking([out[number] for number in numbers])
        return tuple(
            LogLine(number, out[number], position not in speaking)
            for position, number in enumerate(numbers)
        )

    def _speaking(self, texts: list[str]) -> set[int]:
        """Which of these lines hold a text that any rule goes by."""
        whole = "\n".join(text.replace("\n", " ") for text in texts).encode()
        lines: set[int] = set()
        line = at = 0
        for offset, _ in self._scanner.places(whole):
            line += whole.count(b"\n", at, offset)
            at = max(at, offset)
            lines.add(line)
        return lines

    def _head(self, block: bytes) -> None:
        for number, raw in enumerate(block.split(b"\n", HEAD_LINES)[:HEAD_LINES], 1):
            if raw or number == 1:
                self._keep(number, raw)

    def _carry_on(self, block: bytes, first: int) -> None:
        """The block before asked for some lines of this one."""
        wanted = self._until - first + 1
        if wanted > 0:
            for number, raw in enumerate(block.split(b"\n", wanted)[:wanted], first):
                self._keep(number, raw)

    def _follow(self, block: bytes, first: int, places: list[tuple[int, int]]) -> None:
        number, at, done = first, 0, -1
        for offset, text in places:
            if offset <= done or self._tired_of(text):
                continue
            start = block.rfind(b"\n", 0, offset) + 1
            end = block.find(b"\n", offset)
            end = len(block) if end < 0 else end
            number += block.count(b"\n", at, start)
            at = start
            self._tried[text] += 1
            raw = _window(block, start, end, offset)
            line = parse(_text(raw)).text
            lowered = line.lower()
            extra = any(known in lowered for known in EXTRA_TEXTS)
            if extra or self._catalogue.match(line) is not None:
                self._found[text] += 1
                done = end
                after = AFTER_TRACEBACK_LINES if _TRACEBACK in lowered else AFTER_LINES
                self._around(block, start, end, number, after)
                self._kept[number] = _text(raw)

    def _tired_of(self, text: int) -> bool:
        return (
            self._found[text] >= FOUND_OF_ONE_TEXT_MAX
            or (self._tried[text] >= TRIED_IN_VAIN_MAX and not self._found[text])
            or len(self._kept) >= KEPT_LINES_MAX
        )

    def _around(self, block: bytes, start: int, end: int, number: int, after: int) -> None:
        position = start
        for back in range(1, BEFORE_LINES + 1):
            if position <= 0:
                break
            previous = block.rfind(b"\n", 0, position - 1) + 1
            self._keep(number - back, block[previous : position - 1])
            position = previous
        following = block[end + 1 : end + 1 + after * LINE_BYTES_MAX].split(b"\n", after)[:after]
        for ahead, raw in enumerate(following, 1):
            if raw:
                self._keep(number + ahead, raw)
        self._until = max(self._until, number + after)

    def _keep(self, number: int, raw: bytes) -> None:
        if len(self._kept) < KEPT_LINES_MAX + HEAD_LINES:
            self._kept.setdefault(number, _text(raw[:LINE_BYTES_MAX]))


def _end_of(block: bytes, wanted: int) -> list[bytes]:
    """The last lines of a block."""
    end = block.removesuffix(b"\n") if len(block) <= TAIL_BYTES_MAX else block[-TAIL_BYTES_MAX:]
    last = end.removesuffix(b"\n").split(b"\n")
    if len(block) > TAIL_BYTES_MAX and len(last) > 1:
        last = last[1:]  # cut at its beginning
    return [raw[:LINE_BYTES_MAX] for raw in last[-wanted:]]


def _window(block: bytes, start: int, end: int, offset: int) -> bytes:
    """The line, or of a very long one the part around what was found."""
    if end - start <= LINE_BYTES_MAX:
        return block[start:end]
    begin = max(start, offset - LINE_BYTES_MAX // 2)
    return block[begin : min(end, begin + LINE_BYTES_MAX)]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").replace("\x00", " ")
