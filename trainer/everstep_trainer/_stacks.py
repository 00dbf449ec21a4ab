"""Lets the agent ask this process for its stack where it may not look itself.

The standard library's ``faulthandler`` writes the stacks of all threads into a file of the agent's
when a signal comes. It does so without the interpreter, so also while the process is blocked in a
collective, and costs nothing until then. A signal that the script handles itself is left alone.

Not here: sending the signal (the agent does), and reading the file.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_kept: list[int] = []
"""The descriptor that faulthandler writes to; it must stay open, and is opened once."""


def answer_by_signal(environ: Mapping[str, str]) -> bool:
    """Register the handler that ``EVERSTEP_STACK_FILE`` and ``EVERSTEP_STACK_SIGNAL`` ask for.

    False, without an error, where that is not wanted or not possible: training matters more.
    """
    path, number = environ.get("EVERSTEP_STACK_FILE"), environ.get("EVERSTEP_STACK_SIGNAL", "")
    if not path or not number.isdecimal() or _kept:
        return bool(_kept)
    with contextlib.suppress(ImportError, OSError, ValueError, RuntimeError, AttributeError):
        import faulthandler
        import signal

        if signal.getsignal(int(number)) is not signal.SIG_DFL:
            return False
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            faulthandler.register(int(number), file=descriptor, all_threads=True, chain=False)
        except BaseException:
            os.close(descriptor)
            raise
        _kept.append(descriptor)
    return bool(_kept)
