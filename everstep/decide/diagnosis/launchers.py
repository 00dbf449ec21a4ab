"""How processes ended, as launchers and schedulers report it in logs.

torchrun's ``ChildFailedError`` block and error lines, srun, mpirun, DeepSpeed, shells. A process
that was sent a signal by its launcher is collateral.

Not here: what an end means (``endings``).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep.decide.diagnosis.hits import Item

SIGNALS = {name.value: name.name for name in signal.Signals}
_NUMBERS = {name.name: name.value for name in signal.Signals}
_WORDS = {
    "killed": 9,
    "segmentation fault": 11,
    "aborted": 6,
    "bus error": 7,
    "terminated": 15,
    "illegal instruction": 4,
    "floating point exception": 8,
    "out of memory": 9,
    "out of memory: killed": 9,
}
_LAUNCHER_KILLS = frozenset({signal.SIGTERM.value, signal.SIGINT.value, signal.SIGHUP.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One reported end of a process."""

    item: Item
    code: int | None = None
    signal: int | None = None
    rank: int | None = None
    machine: str | None = None
    root: bool = False
    """The launcher names it as the first failure that it saw."""

    @property
    def collateral(self) -> bool:
        """It was told to stop by whoever ended the job."""
        return self.signal in _LAUNCHER_KILLS

    @property
    def victim(self) -> bool:
        """It aborted itself, as the NCCL watchdog makes a process do that waits for others."""
        return self.signal == signal.SIGABRT.value


def normal(code: int | None) -> tuple[int | None, int | None]:
    """Exit code and signal: -9 and 137 are both signal 9."""
    if code is None:
        return None, None
    if code < 0:
        return None, -code
    if code > 128 and code - 128 in SIGNALS:
        return None, code - 128
    return code, None


_BLOCK = re.compile(r"(Root Cause \(first observed failure\)|^Other failures|^Failures):\s*$")
_RECORD = re.compile(r"^\s*\[\d+\]:\s*$")
_FIELD = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*:\s(.*)$")
_RULE = re.compile(r"^[=-]{20,}\s*$")
_ELASTIC = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
_SRUN = re.compile(r"srun: error: (?P<host>[\w.-]+): tasks? (?P<ranks>[\d,\[\]-]+): (?P<how>.+)$")
_MPIRUN = re.compile(
    r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on signal (?P<sig>\d+)"
)
_DIED = re.compile(r"(?:died|terminated|exited) with (?:<Signals\.)?(?P<name>SIG[A-Z]+)")
_SIGNAL_LINE = re.compile(
    r"^(?:.*: line \d+:\s+\d+ )?"
    r"(?P<how>Killed|Segmentation fault|Aborted|Bus error|Illegal instruction|Terminated)"
    r"(?: \(core dumped\))?(?:\s{2,}.*)?$"
)
_FATAL = re.compile(
    r"Fatal Python error: (?P<how>Segmentation fault|Aborted|Bus error|Illegal instruction)"
    r"|\*\*\* (?:Process received signal|SIG(?P<name>[A-Z]+) received)"
    r"|^Signal: (?P<how2>Segmentation fault|Aborted|Bus error|Illegal instruction) \(\d+\)"
    r"|!!!!!!! (?P<how3>Segfault) encountered"
)
_CODE = re.compile(
    r"(?:exit(?:ed|s)?|return(?:ed)?|terminated)\b[ _]*(?:with|on|by)?[ _]*"
    r"(?:non-zero |a non-zero )?(?:exit )?(?:code|status|signal)"
    r"\s*(?:[:=]|of|was)?\s*(?P<code>-?\d+)",
    re.IGNORECASE,
)


def ends_of(items: Sequence[Item]) -> list[End]:
    """All ends that one source reports, in order."""
    return [*_blocks(items), *(end for item in items if not item.plain for end in _line_ends(item))]


class _Block:
    """One record of a block while it is read."""

    def __init__(self) -> None:
        self.start: Item | None = None
        self.fields: dict[str, str] = {}

    def take(self, *, root: bool) -> Iterator[End]:
        """The record as it stands, and begin the next one."""
        if self.start is not None and ("exitcode" in self.fields or "rank" in self.fields):
            yield _record(self.start, self.fields, root=root)
        self.start, self.fields = None, {}


def _blocks(items: Sequence[Item]) -> Iterator[End]:
    record = _Block()
    root = inside = False
    for item in items:
        heading = _BLOCK.search(item.text)
        if heading is not None or (inside and _RULE.match(item.text)):
            yield from record.take(root=root)
            if heading is not None:
                inside, root = True, heading[1].startswith("Root")
            continue
        if not inside:
            continue
        if _RECORD.match(item.text) or (item.text == "" and item.rank is not None):
            yield from record.take(root=root)
            record.start = item
        field = _FIELD.match(item.text)
        if field is not None:
            record.start = record.start or item
            record.fields[field[1]] = field[2].strip()
    yield from record.take(root=root)


def _record(start: Item, fields: dict[str, str], *, root: bool) -> End:
    code = re.match(r"(-?\d+)", fields.get("exitcode", ""))
    rank = re.match(r"(\d+)", fields.get("rank", ""))
    exit_code, number = normal(int(code[1]) if code else None)
    return End(
        item=start,
        code=exit_code,
        signal=number,
        rank=int(rank[1]) if rank else None,
        machine=fields.get("host") or start.machine,
        root=root,
    )


def _line_ends(item: Item) -> Iterator[End]:
    text = item.text
    if (found := _ELASTIC.search(text)) is not None:
        code, number = normal(int(found[1]))
        rank = item.rank if item.rank is not None else int(found[2])
        yield End(item=item, code=code, signal=number, rank=rank, machine=item.machine)
    elif (found := _SRUN.search(text)) is not None:
        yield from _srun(item, found)
    elif (found := _MPIRUN.search(text)) is not None:
        yield End(
            item=item,
            signal=int(found["sig"]),
            rank=int(found["rank"]),
            machine=found["host"],
            root=True,
        )
    elif (found := _DIED.search(text)) is not None and found["name"] in _NUMBERS:
        yield End(item=item, signal=_NUMBERS[found["name"]], rank=_rank(item), machine=item.machine)
    elif (found := _SIGNAL_LINE.match(text)) is not None:
        yield End(
            item=item, signal=_WORDS[found["how"].lower()], rank=_rank(item), machine=item.machine
        )
    elif (found := _FATAL.search(text)) is not None:
        how = found["how"] or found["how2"] or ("Segmentation fault" if found["how3"] else "")
        number = _WORDS.get(how.lower()) or _NUMBERS.get(f"SIG{found['name']}")
        if number is not None:
            yield End(item=item, signal=number, rank=_rank(item), machine=item.machine)
    elif (found := _CODE.search(text)) is not None:
        value = int(found["code"])
        if "signal" in found[0].lower() and value in SIGNALS:
            code, number = None, value
        else:
            code, number = normal(value)
        if (code, number) != (0, None):
            yield End(item=item, code=code, signal=number, rank=_rank(item), machine=item.machine)


def _srun(item: Item, found: re.Match[str]) -> Iterator[End]:
    how = found["how"].strip()
    rank = re.fullmatch(r"\[?(\d+)\]?", found["ranks"])
    number = next((n for words, n in _WORDS.items() if how.lower().startswith(words)), None)
    code: int | None = None
    if number is None:
        exited = re.search(r"[Ee]xit(?:ed with exit)? code (\d+)", how)
        if exited is None:
            return
        code, number = normal(int(exited[1]))
    yield End(
        item=item,
        code=code,
        signal=number,
        rank=int(rank[1]) if rank else None,
        machine=found["host"],
    )


def _rank(item: Item) -> int | None:
    return item.rank if item.rank is not None else item.mentioned
