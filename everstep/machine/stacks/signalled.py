"""Stacks that a process writes itself when a signal asks: faulthandler, where py-spy may not look.

The trainer library registers it in each rank (``docs/diagnose-stacks.md``). Unhandled, the signal
would end a process: it is sent only to one that is seen to catch it, was not started just now, and
is the one that was looked at. A stopped process could not answer, and is not asked.

Not here: when this is used (``capture``).
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from pathlib import Path

from everstep.decide.stacks import Frame, parse_faulthandler, stack_of
from everstep.machine.proc import Process, ProcessHandle
from everstep.machine.stacks.py_spy import NoStack

SIGNAL = 44
"""A real-time signal, which no program, shell or resource manager sends by itself."""
_LOOK_S = 0.005
_BYTES_MAX = 256 * 1024
_AGE_MIN_S = 1.0
"""A child between fork and exec seems to catch what its parent catches."""
_CAUGHT = re.compile(rb"^SigCgt:\s*([0-9a-f]+)", re.MULTILINE)
_DONE = re.compile(rb"^Current thread 0x", re.MULTILINE)


def catches(pid: int, number: int = SIGNAL) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        found = _CAUGHT.search(Path(f"/proc/{pid}/status").read_bytes())
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


async def dump(process: Process, file: Path, timeout_s: float) -> tuple[Frame, ...]:
    """The stack that the process writes into ``file``; one at a time for each file.

    Raises:
        NoStack: it does not catch the signal, or does not answer.
    """
    if process.state in "Tt":
        raise NoStack("it is stopped, so it cannot answer")
    if _age_s(process) < _AGE_MIN_S or not catches(process.pid):
        raise NoStack("it does not use the trainer library, which would answer")
    handle = ProcessHandle.open(process.pid, process.start_ticks)
    if handle is None:
        raise NoStack("it has ended")
    try:
        descriptor = _open(file)
        try:
            os.ftruncate(descriptor, 0)
            if not catches(process.pid) or not handle.signal(SIGNAL):
                raise NoStack("it may not be asked")
            text = await _answer(descriptor, timeout_s)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NoStack(f"its stack file cannot be used: {error.strerror}") from None
    finally:
        handle.close()
    frames = stack_of(parse_faulthandler(text.decode("utf-8", "replace")))
    if not frames:
        raise NoStack(f"it did not answer within {timeout_s:g} s")
    return frames


def _open(file: Path) -> int:
    # The rank's account owns the file, and may have put anything in its place.
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise NoStack("its stack file is not a file of its own")
    return descriptor


async def _answer(descriptor: int, timeout_s: float) -> bytes:
    """What was written, once it does not grow any more."""
    until = time.monotonic() + timeout_s
    seen = b""
    while time.monotonic() < until:
        await asyncio.sleep(_LOOK_S)
        text = os.pread(descriptor, _BYTES_MAX, 0)
        if text and text == seen and _DONE.search(text):
            break
        seen = text
    return seen


def _age_s(process: Process) -> float:
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return since_boot_s - process.start_ticks / os.sysconf("SC_CLK_TCK")
