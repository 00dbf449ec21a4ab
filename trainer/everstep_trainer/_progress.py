"""The progress block: 4 KiB of shared memory through which a rank tells its agent where it is.

The rank writes, the agent reads, nobody waits. A reader takes the sequence number before and after:
odd or changed means "being written, try again". The magic comes last when a block is set up, so a
half-made block is never read. On machines with weakly ordered memory a reader may, very rarely, see
one report mixed with the one before it; it reads again at its next poll.

Everything that a training step touches lies in one contiguous piece, so that ``report`` is one
``pack`` and one copy. (Not ``pack_into``: it fills the place with zeros before it writes, and a
rank that is killed or loses its turn in between would seem to be at step 0, with a NaN there.)
Without an agent the block is plain memory of the process, so that nothing here needs
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

# pid, generation, step, loss, grad_norm, flags, monotonic ns, nonfinite step, steps reported
_STEP = struct.Struct("<IIqddQQqQ")
# depth, entered (monotonic ns), limit in seconds, name
_SECTION = struct.Struct("<QQd64s")
# last committed step, step of the last failed save, its error
_SAVES = struct.Struct("<qq256s")
_FAILED = struct.Struct("<q256s")
_FLAGS = struct.Struct("<Q")
_COMMITTED = struct.Struct("<q")

_SEQ_WORD = 1
_STEP_AT = slice(16, 80)
_FLAGS_AT = slice(48, 56)
_SECTION_AT = slice(80, 168)
_COMMITTED_AT = slice(168, 176)
_FAILED_AT = slice(176, 440)
_SAVES_AT = slice(168, 440)

_NAN = math.nan
_pack_step = _STEP.pack
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
        "_steps",
        "_words",
        "last_is_finite",
        "nonfinite_steps",
    )

    def __init__(self, memory: Memory, generation: int) -> None:
        self._memory: Memory = memory
        self._words = memoryview(memory).cast("Q")  # a sequence number is stored in one go
        self._generation = generation
        self._pid = os.getpid()
        self._flags = FLAG_ATTACHED
        self._steps = 0
        self._nonfinite_step = NONE
        self.nonfinite_steps: set[int] = set()
        """Every step that was reported with a loss or gradient norm that is not finite."""
        self.last_is_finite = True
        """False when the newest report was one of those."""
        # Goes on where a previous writer of the same file ended.
        self._seq = (self._words[_SEQ_WORD] + 1) & ~1
        step = _pack_step(self._pid, generation, NONE, _NAN, _NAN, self._flags, _now(), NONE, 0)
        self._write(
            (_STEP_AT, step),
            (_SECTION_AT, _SECTION.pack(0, 0, 0.0, b"")),
            (_SAVES_AT, _SAVES.pack(NONE, NONE, b"")),
        )
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
        try:
            block = _pack_step(
                self._pid, self._generation, step, loss, grad_norm, flags, _now(),
                self._nonfinite_step if finite else self._note_nonfinite(step), self._steps + 1,
            )  # fmt: skip
        except (struct.error, TypeError):
            raise _wrong_arguments(step, loss, grad_norm) from None
        self.last_is_finite = finite
        self._flags = flags
        self._steps += 1
        seq = self._seq
        self._seq = seq + 2
        words = self._words
        words[1] = seq + 1
        self._memory[_STEP_AT] = block
        words[1] = seq + 2

    def write_section(self, depth: int, entered_ns: int, limit_s: float, name: str) -> None:
        """The innermost declared section; at depth 0 the instant the last one was left."""
        self._write((_SECTION_AT, _SECTION.pack(depth, entered_ns, limit_s, _fit(name, 64))))

    def write_committed(self, step: int) -> None:
        """Checkpoint ``step`` is complete."""
        self._write((_COMMITTED_AT, _COMMITTED.pack(step)))

    def write_failed_save(self, step: int, error: str) -> None:
        """The save of ``step`` failed; the flag stays, since the error does too."""
        self._flags |= FLAG_SAVE_FAILED
        self._write(
            (_FLAGS_AT, _FLAGS.pack(self._flags)),
            (_FAILED_AT, _FAILED.pack(step, _fit(error, 256))),
        )

    def write_finished(self) -> None:
        """The interpreter ends by itself."""
        self._flags |= FLAG_FINISHED
        self._write((_FLAGS_AT, _FLAGS.pack(self._flags)))

    def detach(self) -> None:
        """Write into memory of our own from now on (a forked child must not speak for the rank)."""
        self._memory = bytearray(BLOCK_BYTES)
        self._words = memoryview(self._memory).cast("Q")

    def _note_nonfinite(self, step: int) -> int:
        """The first such step; knows this one from now on."""
        if self._nonfinite_step == NONE:
            self._nonfinite_step = step
        self.nonfinite_steps.add(step)
        return self._nonfinite_step

    def _write(self, *pieces: tuple[slice, bytes]) -> None:
        self._words[_SEQ_WORD] = self._seq + 1
        for place, content in pieces:
            self._memory[place] = content
        self._seq += 2
        self._words[_SEQ_WORD] = self._seq


def _wrong_arguments(*given: object) -> TypeError:
    shown = ", ".join(f"{value!r:.40}" for value in given)
    return TypeError(f"step() takes a whole number and two floats or None, not {shown}")


def _fit(text: str, room: int) -> bytes:
    """UTF-8 of at most ``room`` bytes that does not end within a character."""
    encoded = text.encode("utf-8", "replace")
    return encoded[:room].decode("utf-8", "ignore").encode("utf-8")
