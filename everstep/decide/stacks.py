"""From the text of a stack dump to what stacks can be compared by.

Two ranks that are in the same place must have equal stacks whatever took them, wherever the code
lies on their machines, however deep a recursion is, and whatever a forked child has inherited from
its parent. What differs from look to look in one process (a polling loop) is cut off by ``steady``.

Not here: grouping and judging (``aggregation``), what a stack waits for (``stack_waits``), taking
stacks (``everstep.machine.stacks``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

FRAMES_SHOWN_MAX = 40
NAME_CHARS_MAX = 80
FRAMES_READ_MAX = 2000
_PERIOD_MAX = 8
"""Longest cycle of functions that counts as one recursion."""

_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_CHECKED_OUT = re.compile(
    r".*/(?=(?:torch|torchtitan|megatron|deepspeed|nemo|lightning|transformers|everstep_trainer)/)"
)
"""Packages that are often used from where they were checked out."""
_STDLIB = re.compile(r".*/lib/python3\.\d+t?/")
_PLACES = ((_PACKAGES, ""), (_STDLIB, "lib/"), (_CHECKED_OUT, ""))
_PY_SPY_THREAD = re.compile(r'^Thread (0x[0-9A-Fa-f]+|\d+) ?(?:\(([^)]*)\))?(?:: "(.*)")?$')
_PY_SPY_FRAME = re.compile(r"^ {4}(.+?) \((.*?)(?::(\d+))?\)$")
_FAULT_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")
_FAULT_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_MAIN_THREAD = "MainThread"
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]+")

_CHILD_STARTS = (("_bootstrap", "lib/multiprocessing/process.py"),)
"""Outermost frame of a child that Python made; what stands above it is the parent's, by fork."""
_THREAD_STARTS = (("_bootstrap", "lib/threading.py"),)
_BACKWARD = "_engine_run_backward"


class Frame(NamedTuple):
    """One call: bare function name, path within its package (or bare file name), line."""

    function: str
    path: str
    line: int | None

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{self.function} ({where})"

    @property
    def place(self) -> tuple[str, str]:
        """The call without its line."""
        return (self.function, self.path)


class Thread(NamedTuple):
    """The frames of one thread, innermost first."""

    name: str
    frames: tuple[Frame, ...]


def frame(function: str, path: str, line: int | None) -> Frame:
    """A frame as it is compared: where a package or a job's code lies does not matter."""
    for pattern, prefix in _PLACES:
        inside, found = pattern.subn(prefix, path, count=1)
        if found:
            break
    else:
        inside = path if path.startswith("<") else path.rpartition("/")[2]
    # Some tools give qualified names, others bare ones: ``Queue.get``, ``f.<locals>.<lambda>``.
    bare = function.rpartition(".")[2] or function
    return Frame(_clean(bare), _clean(inside), line or None)


def _clean(text: str) -> str:
    plain = _UNPRINTABLE.sub("?", text) or "?"
    return plain if len(plain) <= NAME_CHARS_MAX else f"{plain[: NAME_CHARS_MAX - 3]}..."


def parse_py_spy(text: str) -> tuple[Thread, ...]:
    """The threads in the text of ``py-spy dump --full-filenames``; other lines are passed over."""
    threads: list[tuple[str, list[Frame]]] = []
    total = 0
    for line in text.splitlines():
        if found := _PY_SPY_THREAD.match(line):
            threads.append((found[3] or "", []))
        elif threads and total < FRAMES_READ_MAX and (found := _PY_SPY_FRAME.match(line)):
            threads[-1][1].append(frame(found[1], found[2], _line(found[3])))
            total += 1
    return tuple(Thread(name, tuple(frames)) for name, frames in threads)


def parse_faulthandler(text: str) -> tuple[Thread, ...]:
    """The threads in what ``faulthandler`` wrote; the last one is the main thread."""
    threads: list[list[Frame]] = []
    total = 0
    for line in text.splitlines():
        if _FAULT_THREAD.match(line):
            threads.append([])
        elif threads and total < FRAMES_READ_MAX and (found := _FAULT_FRAME.match(line)):
            threads[-1].append(frame(found[3], found[1], _line(found[2])))
            total += 1
    last = len(threads) - 1
    return tuple(
        Thread(_MAIN_THREAD if at == last else "", tuple(frames))
        for at, frames in enumerate(threads)
    )


def _line(text: str | None) -> int | None:
    # A number that no file has would only be kept for its digits.
    return int(text) if text and text.isdecimal() and len(text) < 9 else None


def stack_of(threads: Sequence[Thread]) -> tuple[Frame, ...]:
    """The one stack that stands for a process, innermost first.

    It is the main thread's. While that is in the backward pass, hooks run in threads that the
    autograd engine has started: their frames are put in front, as if backward had called them.
    """
    main = next((t.frames for t in threads if t.name == _MAIN_THREAD), None)
    if main is None:
        # A process without a main thread by name: the one that nobody started as a thread.
        main = next((t.frames for t in threads if t.frames and not _is_started(t)), ())
    own = _own_frames(main)
    if any(f.function == _BACKWARD for f in own[:3]):
        hooks = sorted(
            t.frames for t in threads if t.frames and t.frames != main and not _is_started(t)
        )
        own = tuple(f for frames in hooks for f in frames) + own
    return _without_recursion(own)


def _is_started(thread: Thread) -> bool:
    """Whether Python code started the thread; service threads differ from rank to rank."""
    return thread.frames[-1].place in _THREAD_STARTS


def _own_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Without the frames that a forked child has inherited from its parent."""
    for at, each in enumerate(frames):
        if each.place in _CHILD_STARTS:
            return tuple(frames[: at + 1])
    return tuple(frames)


def _without_recursion(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """With each cycle of calls once, whatever its depth is at the moment."""
    kept: list[Frame] = []
    for each in frames:
        kept.append(each)
        for period in range(1, _PERIOD_MAX + 1):
            if len(kept) < 2 * period:
                break
            if [f.place for f in kept[-period:]] == [f.place for f in kept[-2 * period : -period]]:
                del kept[-period:]
                break
    return tuple(kept)


def steady(first: Sequence[Frame], second: Sequence[Frame]) -> tuple[tuple[Frame, ...], bool]:
    """What two looks at one process have in common from the outside in, and whether it moved.

    A frame that is at another line is kept without its line; what it had called is dropped.
    """
    kept: list[Frame] = []
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a.place != b.place:
            break
        if a.line != b.line:
            kept.append(a._replace(line=None))
            break
        kept.append(a)
    common = tuple(reversed(kept))
    return common, common != tuple(first) or common != tuple(second)


def without_lines(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """For processes that are running: where exactly in a function they are is noise."""
    return tuple(f._replace(line=None) for f in frames)


def fingerprint(frames: Iterable[Frame]) -> str:
    """16 hexadecimal digits; equal for equal stacks, on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for each in frames:
        digest.update(f"{each}\n".encode())
    return digest.hexdigest()


def shown(frames: Sequence[Frame]) -> tuple[str, ...]:
    """The exemplar of a group: both ends of a stack that is too long."""
    if len(frames) <= FRAMES_SHOWN_MAX:
        return tuple(str(f) for f in frames)
    outer = FRAMES_SHOWN_MAX // 3
    inner = FRAMES_SHOWN_MAX - outer - 1
    left_out = len(frames) - inner - outer
    return (
        *(str(f) for f in frames[:inner]),
        f"... {left_out} frames ...",
        *(str(f) for f in frames[-outer:]),
    )
