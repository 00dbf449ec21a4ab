"""What an agent has already concluded and reported about a run, so that no successor does it twice.

Exit codes and progress are facts of the shim and of the ranks and lie in their own files. This file
holds what only the agent knows: which exits it has reported, which ranks were alive when it began
to stop them, the evidence it took before. It is small, is rewritten in place into two slots that
had their full size from the beginning, and survives kill -9 between any two instructions.

An event is emitted first and noted here second: a crash exactly between the two repeats an event,
which readers tolerate; the other order would lose it.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_SLOT_BYTES = 8192
_SLOT_BYTES_PER_RANK = 1024
_HEADER = "%016d %010d %010d\n"
_HEADER_BYTES = len(_HEADER % (0, 0, 0))


class _Mutable(BaseModel):
    model_config = ConfigDict(extra="ignore", validate_assignment=False)


class Evidence(_Mutable):
    """What was seen of one rank just before its run was stopped."""

    process_state: str | None = None
    stalled_for_s: float | None = None
    section: str | None = None


class Stopping(_Mutable):
    """The agent has begun to end the run's processes."""

    reason: str
    planned: bool
    ranks: list[int]
    """Ranks that were alive then: how they end is our doing."""
    evidence: dict[int, Evidence] = Field(default_factory=dict)


class Stall(_Mutable):
    """A rank that has been reported as stalled."""

    activity: list[int | str | bool]
    since_ns: int


class LogStall(_Mutable):
    """No step line has come for too long, in any rank's log."""

    rank: int
    """Whose log had the last one."""
    positions: dict[int, int]
    """Where in each log the last step or phase stood."""
    since_ns: int


class SignalTold(_Mutable):
    """A signal that was told and is not over, with what its end is judged by."""

    series: str = ""
    rank: int | None = None
    limit: float | None = None


class Facts(_Mutable):
    """All of it, for one run on one machine."""

    adopted_total: int = 0
    first_step: bool = False
    exits_reported: list[int] = Field(default_factory=list)
    unknown_exits: dict[int, int] = Field(default_factory=dict)
    """Ranks that ended without a record, and the instant at which that was noticed."""
    shim_lost: bool = False
    """The shim was killed while ranks lived on: their exits can no longer be known."""
    vanished: bool = False
    nonfinite_reported: list[int] = Field(default_factory=list)
    save_failures: dict[int, str] = Field(default_factory=dict)
    stalls: dict[int, Stall] = Field(default_factory=dict)
    early_exit_reported: bool = False
    step_time_s: float | None = None
    log_gap_s: float | None = None
    """Usual time between step lines."""
    log_pause_s: float = 0.0
    """Longest time between step lines."""
    log_stall: LogStall | None = None
    signals: dict[str, SignalTold] = Field(default_factory=dict)
    """By kind of event."""
    stopping: Stopping | None = None
    exit_evidence: dict[int, Evidence] = Field(default_factory=dict)
    """The same as ``Stopping.evidence``, for ranks that ended by themselves."""
    ended: bool = False
    """Every rank has ended, what they left behind too, and that was reported."""
    teardown_clean: bool = True
    note: str = ""


class FactsFile:
    """Two slots, written in turn; the newer whole one counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sequence = 0
        self._slot_bytes = path.stat().st_size // 2

    @staticmethod
    def create(path: Path, ranks: int) -> None:
        """Take the file's whole space now, since the disk may be full later."""
        path.write_bytes(bytes(2 * (_SLOT_BYTES + _SLOT_BYTES_PER_RANK * ranks)))

    def load(self) -> Facts:
        """The newest facts; fresh ones when nothing (readable) was ever written."""
        raw = self._path.read_bytes()
        best = Facts()
        for start in (0, self._slot_bytes):
            slot = raw[start : start + self._slot_bytes]
            try:
                sequence, length, checksum = map(int, slot[:_HEADER_BYTES].split())
                body = slot[_HEADER_BYTES : _HEADER_BYTES + length]
                if zlib.crc32(body) == checksum and sequence > self._sequence:
                    best = Facts.model_validate(json.loads(body))
                    self._sequence = sequence
            except (ValueError, ValidationError):
                continue
        return best

    def save(self, facts: Facts) -> None:
        """Write the facts over the older slot.

        Raises:
            OSError: the disk fails (a full one does not matter: no new space is needed).
            ValueError: the facts outgrew their slot.
        """
        body = facts.model_dump_json(exclude_defaults=True).encode()
        if len(body) + _HEADER_BYTES > self._slot_bytes:
            raise ValueError(f"{len(body)} bytes of facts do not fit into {self._slot_bytes}")
        self._sequence += 1
        header = (_HEADER % (self._sequence, len(body), zlib.crc32(body))).encode()
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, header + body, (self._sequence % 2) * self._slot_bytes)
        finally:
            os.close(fd)
