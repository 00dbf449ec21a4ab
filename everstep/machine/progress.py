"""Reading the progress file that a rank writes through shared memory.

One 4096-byte file per rank, little endian, written by ``everstep_trainer`` through ``mmap``. It is
read with ``pread``, never mapped here: a rank that truncates its file would otherwise kill the
agent with SIGBUS. The content is a rank's word and may be anything; nothing in it can fail a read.

Not here: what progress means (``everstep.machine.monitor``), and the writer (the trainer library).
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PROGRESS_BYTES = 4096
MAGIC = b"EVSTPRG1"

_LAYOUT = struct.Struct("<8sQIIqddQQqQQQd64sqq256s")
_TRIES = 5

FLAG_LOSS = 1 << 0
FLAG_GRAD_NORM = 1 << 1
FLAG_ATTACHED = 1 << 2
FLAG_FINISHED = 1 << 3
FLAG_SAVE_FAILED = 1 << 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a rank last reported."""

    pid: int
    step: int | None
    loss: float | None
    grad_norm: float | None
    attached: bool
    finished: bool
    step_at_ns: int
    """Monotonic instant of the last step report; 0 before the first."""
    nonfinite_step: int | None
    steps_reported: int
    section: str | None
    section_entered_ns: int
    """0 outside sections."""
    section_left_ns: int
    """When the last section was left; 0 inside of one, and before the first."""
    section_max_s: float | None
    """The section's own limit; None: the policy's."""
    committed_step: int | None
    save_failed_step: int | None
    save_error: str | None
    source: Literal["library", "log"] = "library"
    """Where step, loss and gradient norm are from."""

    @property
    def activity(self) -> tuple[int, int, str, int, int, bool]:
        """Changes whenever the rank has done something that counts as moving.

        That is a step, or entering or leaving a section. Attaching is not: it is on the way to the
        first step.
        """
        return (
            self.steps_reported,
            self.step if self.step is not None else -1,
            self.section or "",
            self.section_entered_ns,
            self.section_left_ns,
            self.finished,
        )


NO_ACTIVITY = (0, -1, "", 0, 0, False)
"""Activity of a rank that has reported nothing yet."""


def create(path: Path) -> None:
    """Make an empty progress file whose every byte has a place on the disk.

    A hole would turn into SIGBUS in the rank when the disk is full.
    """
    path.write_bytes(bytes(PROGRESS_BYTES))


def _text(raw: bytes) -> str | None:
    text = raw.split(b"\0", 1)[0].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else " " for c in text).strip() or None


def _index(value: int) -> int | None:
    return value if value >= 0 else None


def parse(raw: bytes | bytearray) -> Progress | None:
    """The progress in a whole block; None before the rank has attached."""
    if len(raw) < _LAYOUT.size or raw[:8] != MAGIC:
        return None
    (
        _magic, _seq, pid, _generation, step, loss, grad_norm, flags, step_at_ns, nonfinite_step,
        steps, depth, entered_ns, limit_s, section, committed, failed, error,
    ) = _LAYOUT.unpack_from(raw)  # fmt: skip
    save_failed = bool(flags & FLAG_SAVE_FAILED)
    return Progress(
        pid=pid,
        step=_index(step),
        loss=loss if flags & FLAG_LOSS else None,
        grad_norm=grad_norm if flags & FLAG_GRAD_NORM else None,
        attached=bool(flags & FLAG_ATTACHED),
        finished=bool(flags & FLAG_FINISHED),
        step_at_ns=step_at_ns if steps else 0,
        nonfinite_step=_index(nonfinite_step),
        steps_reported=steps,
        section=(_text(section) or "unnamed") if depth else None,
        section_entered_ns=entered_ns if depth else 0,
        section_left_ns=0 if depth else entered_ns,
        section_max_s=limit_s if depth and math.isfinite(limit_s) and limit_s > 0 else None,
        committed_step=_index(committed),
        save_failed_step=_index(failed) if save_failed else None,
        save_error=_text(error) if save_failed else None,
    )


class ProgressReader:
    """Reads one rank's file again and again; keeps the last whole block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._last: Progress | None = None

    def read(self, *, final: bool = False) -> Progress | None:
        """The newest whole block, or the one before when the rank is writing just now.

        With ``final`` the writer is dead: a block it left half-written is taken as it stands,
        since each number in it is whole and the newest is the best evidence.
        """
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            for _ in range(_TRIES):
                raw = os.pread(self._fd, _LAYOUT.size, 0)
                seq = int.from_bytes(raw[8:16], "little")
                # Read twice, since the writer stores the sequence and the block in one go. And 0 is
                # no sequence: Python's pack_into clears the whole piece before it fills it.
                whole = seq != 0 and (seq % 2 == 0 or final)
                if whole and os.pread(self._fd, _LAYOUT.size, 0) == raw:
                    self._last = parse(raw)
                    break
        except OSError:
            pass  # deleted or unreadable: what was seen last stands
        return self._last

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
