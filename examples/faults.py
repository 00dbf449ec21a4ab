"""Orders to break a job from within, given from outside while it runs.

The environment variable ``JOB_FAULTS`` names a directory. An order is an empty file in it::

    KIND.rankR.stepN          fires once, on rank R, before the first step that is N or later
    always.KIND.rankR.stepN   fires every time, in every run of the job

``KIND`` is one of

    exception   raise RuntimeError
    exit0       end the process with exit code 0, too early
    exitC       the same with exit code C (1 to 99)
    nan         make the loss of that step NaN
    sigkill sigsegv sigabrt sigstop   what the signal of that name does
    hang        stay in Python for ever, without progress
    slowT       take T hundredths of a second (1 to 99) more for this step and every one after it,
                until the process ends

An order is taken by renaming it into ``fired/``, which happens once whatever is restarted in the
meantime; the files there are the count of what fired, and each says when (wall clock and monotonic
seconds), at which step and in which process.

Not here: faults from outside a process (a machine that dies, a network that is cut).
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

_ORDER = re.compile(r"(always\.)?([a-z]+?)(\d{0,2})\.rank(\d+)\.step(\d+)")
_SIGNALS = {
    "sigkill": signal.SIGKILL,
    "sigsegv": signal.SIGSEGV,
    "sigabrt": signal.SIGABRT,
    "sigstop": signal.SIGSTOP,
}
KINDS = frozenset({"exception", "exit", "nan", "hang", "slow", *_SIGNALS})


class Faults:
    """The orders for one rank. Does nothing, at no cost, when ``JOB_FAULTS`` is not set."""

    def __init__(self, rank: int, directory: str | None = None) -> None:
        name = directory if directory is not None else os.environ.get("JOB_FAULTS")
        self._directory = Path(name) if name else None
        self._rank = rank
        self._delay_s = 0.0

    def before_step(self, step: int) -> bool:
        """Carry out what is ordered for this rank now; True when the loss is to become NaN."""
        if self._directory is None:
            return False
        make_nan = False
        for path in sorted(self._orders()):
            order = _ORDER.fullmatch(path.name)
            if order is None or order[2] not in KINDS:
                raise SystemExit(f"{path}: not an order; see {__file__}")
            if int(order[4]) != self._rank or step < int(order[5]):
                continue
            if not self._take(path, step, always=bool(order[1])):
                continue
            if order[2] == "nan":
                make_nan = True
            elif order[2] == "slow":
                self._delay_s = int(order[3] or 1) / 100
            else:
                _carry_out(order[2], int(order[3] or 0), self._rank, step)
        if self._delay_s:
            time.sleep(self._delay_s)
        return make_nan

    def _orders(self) -> list[Path]:
        assert self._directory is not None
        try:
            return [path for path in self._directory.iterdir() if path.is_file()]
        except FileNotFoundError:
            return []

    def _take(self, order: Path, step: int, *, always: bool) -> bool:
        """Note that ``order`` fires now; False when another process has been quicker."""
        fired = order.parent / "fired"
        fired.mkdir(exist_ok=True)
        name = f"{order.name}.{os.getpid()}.{time.monotonic_ns()}" if always else order.name
        note = fired / name
        if not always:
            try:
                order.rename(note)
            except FileNotFoundError:
                return False
        content = {
            "rank": self._rank,
            "step": step,
            "pid": os.getpid(),
            "time_s": time.time(),
            "monotonic_s": time.monotonic(),
        }
        note.write_text(json.dumps(content) + "\n", encoding="ascii")
        return True


def _carry_out(kind: str, code: int, rank: int, step: int) -> None:
    sys.stdout.flush()
    if kind == "exception":
        raise RuntimeError(f"fault ordered: exception in rank {rank} before step {step}")
    if kind == "exit":
        os._exit(code)
    if kind == "hang":
        threading.Event().wait()
    os.kill(os.getpid(), _SIGNALS[kind])


def order(directory: Path, kind: str, *, rank: int, step: int, always: bool = False) -> Path:
    """Place an order (for whoever breaks the job); the path of its file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{'always.' if always else ''}{kind}.rank{rank}.step{step}"
    if _ORDER.fullmatch(path.name) is None:
        raise ValueError(f"{path.name!r} is not an order")
    path.touch()
    return path


def fired(directory: Path) -> dict[str, int]:
    """How often each order in ``directory`` has fired."""
    counts: dict[str, int] = {}
    try:
        notes = sorted((directory / "fired").iterdir())
    except FileNotFoundError:
        return counts
    for note in notes:
        found = _ORDER.match(note.name)
        if found:
            counts[found[0]] = counts.get(found[0], 0) + 1
    return counts
