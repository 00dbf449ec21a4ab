"""The progress block: 4 KiB of shared memory through which a rank tells its agent where it is.

The rank writes, the agent reads, nobody waits. A reader takes the sequence number before and after:
odd or changed means "being written, try again". The magic comes last when a block is set up, so a
half-made block is never read. On machines with weakly ordered memory a reader may, very rarely, see
one report mixed with the one before it; it reads again at its next poll.

Everything that a training step touches lies in one contiguous piece, so that ``report`` is one
``pack_into``. Without an agent the block is plain memory of the process, so that nothing here needs
to ask whether Everstep is there.

Not here: judging progress (the agent does that).
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Memory = mmap.mmap | bytearray

BLOCK_BYTES = 4096
MAGIC = b"EVSTPRG1"
NONE = -1
"""Written where there is no step."""

FLAG_LOSS = 1
FLAG_GRAD_NORM = 2
FLAG_ATTACHED = 4
FLAG_FINISHED = 8
FLAG_SAVE_FAILED = 16

# seq, pid, generation, step, loss, grad_norm, flags, monotonic ns, nonfinite step, steps reported
_STEP = struct.Struct("<QIIqddQQqQ")
# depth, entered (monotonic ns), limit in seconds, name
_SECTION = struct.Struct("<QQd64s")
# last committed step, step of the last failed save, its error
_SAVES = struct.Struct("<qq256s")
_SEQ = struct.Struct("<Q")
_SEQ_AT, _SECTION_AT, _SAVES_AT = 8, 80, 168

_NAN = math.nan
_pack_step = _STEP.pack_into
_pack_seq = _SEQ.pack_into
_isfinite = math.isfinite
_now = time.monotonic_ns


def map_block(path: str) -> mmap.mmap:
    """Map the file that the agent made for this rank (or make it).

    Raises:
        OSError: it cannot be opened, or has no room on its disk.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A mapped hole is filled at the first write, and on a full disk that is a SIGBUS in the
        # middle of training: make sure now that the block is really there.
        try:
            os.posix_fallocate(descriptor, 0, BLOCK_BYTES)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            if os.fstat(descriptor).st_size < BLOCK_BYTES:
                os.ftruncate(descriptor, BLOCK_BYTES)
        return mmap.mmap(descriptor, BLOCK_BYTES)
    finally:
        os.close(descriptor)


class ProgressBlock:
    """Writer of one block. Made for one thread: a second one at worst garbles one report."""

    __slots__ = (
        "_flags",
        "_generation",
        "_memory",
        "_nonfinite_step",
        "_pid",
        "_seq",
        "_step",
        "_steps",
        "last_is_finite",
        "nonfinite_steps",
    )

    def __init__(self, memory: Memory, generation: int) -> None:
        self._memory: Memory = memory
        self._generation = generation
        self._pid = os.getpid()
        self._flags = FLAG_ATTACHED
        self._step = NONE
        self._steps = 0
        self._nonfinite_step = NONE
        self.nonfinite_steps: set[int] = set()
        """Every step that was reported with a loss or gradient norm that is not finite."""
        self.last_is_finite = True
        """False when the newest report was one of those."""
        seq: int = _SEQ.unpack_from(memory, _SEQ_AT)[0]
        self._seq = (seq + 1) & ~1  # goes on where a previous writer of the same file ended
        begun = self._begin()
        _STEP.pack_into(
            memory, _SEQ_AT, begun, self._pid, generation, NONE, _NAN, _NAN, self._flags, _now(),
            NONE, 0,
        )  # fmt: skip
        _SECTION.pack_into(memory, _SECTION_AT, 0, 0, 0.0, b"")
        _SAVES.pack_into(memory, _SAVES_AT, NONE, NONE, b"")
        self._end(begun)
        memory[: len(MAGIC)] = MAGIC

    def report(self, step: int, loss: float | None = None, grad_norm: float | None = None) -> None:
        """Step ``step`` is complete. Everything in here counts: it runs once per training step."""
        flags = self._flags & ~3
        finite = True
        if loss is None:
            loss = _NAN
        else:
            flags |= 1
            if not _isfinite(loss):
                finite = False
        if grad_norm is None:
            grad_norm = _NAN
        else:
            flags |= 2
            if not _isfinite(grad_norm):
                finite = False
        if not finite:
            self._note_nonfinite(step)
        self.last_is_finite = finite
        self._step = step
        self._flags = flags
        self._steps += 1
        seq = self._seq + 2
        self._seq = seq
        memory = self._memory
        try:
            # The odd number is the first field that is written, and the even one the last.
            _pack_step(
                memory, 8, seq - 1, self._pid, self._generation, step, loss, grad_norm, flags,
                _now(), self._nonfinite_step, self._steps,
            )  # fmt: skip
        except (struct.error, TypeError):
            _pack_seq(memory, 8, seq)
            raise TypeError(
                f"step() takes a whole number and two floats or None, not {step!r:.40}, "
                f"{loss!r:.40}, {grad_norm!r:.40}"
            ) from None
        _pack_seq(memory, 8, seq)

    def write_section(self, depth: int, entered_ns: int, limit_s: float, name: str) -> None:
        """The innermost declared section; at depth 0 the instant the last one was left."""
        begun = self._begin()
        _SECTION.pack_into(self._memory, _SECTION_AT, depth, entered_ns, limit_s, _fit(name, 64))
        self._end(begun)

    def write_committed(self, step: int) -> None:
        """Checkpoint ``step`` is complete."""
        begun = self._begin()
        struct.pack_into("<q", self._memory, _SAVES_AT, step)
        self._end(begun)

    def write_failed_save(self, step: int, error: str) -> None:
        """The save of ``step`` failed; the flag stays, since the error does too."""
        self._flags |= FLAG_SAVE_FAILED
        begun = self._begin()
        self._write_flags()
        struct.pack_into("<q256s", self._memory, _SAVES_AT + 8, step, _fit(error, 256))
        self._end(begun)

    def write_finished(self) -> None:
        """The interpreter ends by itself."""
        self._flags |= FLAG_FINISHED
        begun = self._begin()
        self._write_flags()
        self._end(begun)

    def detach(self) -> None:
        """Write into memory of our own from now on (a forked child must not speak for the rank)."""
        self._memory = bytearray(BLOCK_BYTES)

    def _note_nonfinite(self, step: int) -> None:
        if self._nonfinite_step == NONE:
            self._nonfinite_step = step
        self.nonfinite_steps.add(step)

    def _write_flags(self) -> None:
        struct.pack_into("<Q", self._memory, 48, self._flags)

    def _begin(self) -> int:
        begun = self._seq + 1
        _pack_seq(self._memory, _SEQ_AT, begun)
        return begun

    def _end(self, begun: int) -> None:
        self._seq = begun + 1
        _pack_seq(self._memory, _SEQ_AT, self._seq)


def _fit(text: str, room: int) -> bytes:
    """UTF-8 of at most ``room`` bytes that does not end within a character."""
    encoded = text.encode("utf-8", "replace")
    return encoded[:room].decode("utf-8", "ignore").encode("utf-8")
