"""What the end of a rank's log says, as a class: a table of signatures, not a chain of conditions.

The question is always "what did *this* rank suffer first". So the root of a chain of Python
exceptions counts, not the last one printed; a complaint about a peer is a class of its own, because
such a rank is a witness; and a text that names a device or a remote service is never taken for an
error of the owner's code, which would blame the wrong side.

The table is short: what the runtime itself prints when ranks fail. It stands in code because
workflows ask it too, and because agents go by it when the catalogue of signatures
(``config/log_signatures.yaml``, ``diagnosis``) cannot be read; where both speak, ``faults`` says
which of them counts. Not here: whose fault a class is (``everstep.decide.attribution``), and
reading files (``everstep.machine``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep.decide.words import LogClass

LINE_CHARS_MAX = 300
LINES_KEPT_MAX = 8
LINES_READ_MAX = 2_000
STALE_AFTER_LINES = 40
"""A traceback with more output than this after it was survived; it is not why the rank ended."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One row: text that is evidence of a class."""

    log_class: LogClass
    pattern: re.Pattern[str]
    example: str
    """A line that matches, as programs print it (a test holds the table to it)."""
    exception_only: bool = False
    """True: counts only as the text of a Python exception, not in any line."""


def _row(
    log_class: LogClass, pattern: str, example: str, *, exception_only: bool = False
) -> Signature:
    return Signature(log_class, re.compile(pattern, re.IGNORECASE), example, exception_only)


SIGNATURES: tuple[Signature, ...] = (
    # Everstep's own trainer library.
    _row(
        LogClass.CHECKPOINT_REFUSED,
        r"\bStaleGeneration\b",
        "everstep_trainer.StaleGeneration: run 3 may not commit: generation 4 exists",
    ),
    _row(
        LogClass.CHECKPOINT_UNREADABLE,
        r"\b(CheckpointUnreadable|WorldSizeChanged)\b",
        "everstep_trainer.CheckpointUnreadable: rank-0.part: checksum differs",
    ),
    _row(
        LogClass.CHECKPOINT_UNREADABLE,
        r"PytorchStreamReader failed|size mismatch for \S+: copying a param"
        r"|(Missing|Unexpected) key(\(s\))? in (checkpoint )?state_dict",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central "
        "directory",
    ),
    # Memory. "Unable to allocate" is numpy's MemoryError.
    _row(
        LogClass.OUT_OF_MEMORY,
        r"\b(CUDA|HIP|XPU|MPS)( error:)? out of memory|\bOutOfMemoryError\b",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB",
    ),
    _row(
        LogClass.OUT_OF_MEMORY,
        r"^\S*MemoryError\b|can't allocate memory|Cannot allocate memory|std::bad_alloc",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:116] . DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 8000000000000 bytes.",
    ),
    _row(
        LogClass.OUT_OF_MEMORY,
        r"\boom[-_]kill|Out of memory: Killed process|Memory cgroup out of memory",
        "Out of memory: Killed process 25315 (python3) total-vm:53312244kB",
    ),
    # Shared memory and semaphores also say "no space left", but mean a setting of the container.
    _row(
        LogClass.OTHER,
        r"\B/dev/shm|shared memory|SemLock",
        "RuntimeError: unable to write to file </torch_25_12>: No space left on device (28) in "
        "shared memory",
    ),
    _row(
        LogClass.DISK_FULL,
        r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]|\bno space left in /",
        "OSError: [Errno 28] No space left on device",
    ),
    _row(
        LogClass.PORT_TAKEN,
        r"Address already in use|EADDRINUSE",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address "
        "already in use).",
    ),
    # Witnesses: this rank waited for others.
    _row(
        LogClass.COLLECTIVE_TIMEOUT,
        r"Timed out waiting \d+\s?ms for (recv|send) operation",
        "RuntimeError: [pair.cc:1] Timed out waiting 5000ms for recv operation to complete",
    ),
    _row(
        LogClass.COLLECTIVE_TIMEOUT,
        r"Watchdog caught collective operation timeout|dump signal due to a collective timeout"
        r"|failed to pass monitoredBarrier|Application timeout caused pair closure",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580)",
    ),
    _row(
        LogClass.COLLECTIVE_TIMEOUT,
        r"DistStoreError: |wait timeout after \d+\s?ms|Socket Timeout"
        r"|(client )?socket has timed out after",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 "
        "clients joined.",
    ),
    _row(
        LogClass.OTHER,
        r"^(ConnectionResetError|BrokenPipeError|ConnectionRefusedError|ConnectionError"
        r"|(requests|urllib3?|botocore|aiohttp|httpx|ssl|http|socket)\.)",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        exception_only=True,
    ),
    _row(
        LogClass.PEER_LOST,
        r"Connection closed by peer|Connection reset by peer|Broken pipe"
        r"|Connection was likely closed|remote process exit|ncclRemoteError"
        r"|recvValue failed|sendBytes failed|connectFullMesh failed"
        r"|client socket has failed to connect|\bActorDiedError\b"
        r"|communicator (was|has been) aborted",
        "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:41234",
    ),
    # Devices, drivers, storage, name service: not the owner's code, whoever raised it.
    _row(
        LogClass.OTHER,
        r"\b(CUDA|HIP|NVML|NCCL|cuDNN|cuBLAS)\b.{0,40}\b(error|mismatch|failure)\b|CUDNN_STATUS"
        r"|CUBLAS_STATUS|\bnccl\w*Error\b|uncorrectable|device-side assert"
        r"|DataLoader worker .{0,40}(killed by signal|exited unexpectedly)",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ),
    _row(
        LogClass.OTHER,
        r"\[Errno (5|107|110|113|116|121)\]|Stale file handle|Input/output error"
        r"|name resolution|Name or service not known|Too Many Requests",
        "OSError: [Errno 116] Stale file handle: '/data/cache.arrow'",
    ),
    _row(LogClass.OTHER, r"^KeyboardInterrupt\b", "KeyboardInterrupt", exception_only=True),
    # The program could not even be loaded.
    _row(
        LogClass.IMPORT_FAILED,
        r"\b(ModuleNotFoundError|ImportError)\b|: No module named |can't open file '"
        r"|undefined symbol|cannot open shared object file",
        "ModuleNotFoundError: No module named 'megatron'",
    ),
)
"""In order of precedence: the first row that matches wins."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_RANK_PREFIX = re.compile(r"^\[(rank|default)\d+\]:\s?")
_TRACEBACK = re.compile(r"^(\s*)Traceback \(most recent call last\):\s*$")
_CHAINED = re.compile(
    r"^\s*(During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\s*$"
)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: .*|:)?$")
_BARE_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception)(: |$)")
_NOISE = re.compile(r"^(frame #\d+:|\s*<omitting|Exception raised from |C\+\+ CapturedTraceback)")


@dataclass(frozen=True, slots=True)
class _Traceback:
    start: int
    final: int
    """Index of the line that names the exception."""
    chained: bool
    """It follows another one of the same chain."""


def classify_lines(lines: Sequence[str]) -> tuple[LogClass, tuple[str, ...]]:
    """The class of a log's end, and the few lines that a person would look at, oldest first."""
    text = [line for line in map(_clean, lines[-LINES_READ_MAX:]) if line.strip()]
    if not text:
        return LogClass.SILENT, ()
    root = _root_traceback(text)
    if root is not None:
        message = _message(text, root)
        log_class = _match(message, exception=True) or LogClass.PYTHON_EXCEPTION
        return log_class, _traceback_lines(text, root, message)
    tail = [line for line in text[-STALE_AFTER_LINES:] if not _NOISE.match(line)] or text[-1:]
    log_class = _match(tail, exception=False) or _bare_exception(tail) or LogClass.OTHER
    return log_class, _kept(tail)


def headline(lines: Sequence[str]) -> str:
    """The line that says most: the exception if one is there, else the last one, else nothing."""
    for line in reversed(lines):
        if _BARE_EXCEPTION.match(line) or any(s.pattern.search(line) for s in SIGNATURES):
            return line
    return lines[-1] if lines else ""


def _clean(line: str) -> str:
    plain = _RANK_PREFIX.sub("", _ANSI.sub("", line).rstrip())
    return "".join(c if c.isprintable() else " " for c in plain).rstrip()


def _match(lines: Sequence[str], *, exception: bool) -> LogClass | None:
    for signature in SIGNATURES:
        if signature.exception_only and not exception:
            continue
        if any(signature.pattern.search(line) for line in lines):
            return signature.log_class
    return None


def _bare_exception(lines: Sequence[str]) -> LogClass | None:
    """The class of exceptions whose traceback is not in the log (cut off, or a syntax error)."""
    found = [line for line in lines if _BARE_EXCEPTION.match(line)]
    if not found:
        return None
    return _match(found, exception=True) or LogClass.PYTHON_EXCEPTION


def _root_traceback(text: Sequence[str]) -> _Traceback | None:
    """The first traceback of the last chain, unless the rank lived on after it."""
    found = list(_tracebacks(text))
    if not found:
        return None
    after = [line for line in text[found[-1].final + 1 :] if not _NOISE.match(line)]
    if len(after) > STALE_AFTER_LINES:
        return None
    root = len(found) - 1
    while root > 0 and found[root].chained:
        root -= 1
    return found[root]


def _tracebacks(text: Sequence[str]) -> Iterator[_Traceback]:
    chained = False
    position = 0
    while position < len(text):
        header = _TRACEBACK.match(text[position])
        if header is None:
            chained = chained or _CHAINED.match(text[position]) is not None
            position += 1
            continue
        indent = header.group(1)
        final = position + 1
        while final < len(text) and text[final].startswith(indent + " "):
            final += 1
        if final < len(text) and _EXCEPTION.match(text[final].strip()):
            yield _Traceback(position, final, chained)
            chained = False
        position = max(final, position + 1)


def _message(text: Sequence[str], traceback: _Traceback) -> list[str]:
    """The exception's own lines: its name and text, up to what is printed after it."""
    out = [text[traceback.final].strip()]
    for line in text[traceback.final + 1 : traceback.final + 1 + STALE_AFTER_LINES]:
        if _CHAINED.match(line) or _TRACEBACK.match(line):
            break
        if not _NOISE.match(line):
            out.append(line.strip())
    return out


def _traceback_lines(
    text: Sequence[str], traceback: _Traceback, message: Sequence[str]
) -> tuple[str, ...]:
    frames = [line for line in text[traceback.start + 1 : traceback.final] if line.strip()]
    return _kept([*frames[-2:], *message[: LINES_KEPT_MAX - 2]])


def _kept(lines: Sequence[str]) -> tuple[str, ...]:
    unique: list[str] = []
    for line in lines:
        shown = line[:LINE_CHARS_MAX]
        if not unique or unique[-1] != shown:
            unique.append(shown)
    return tuple(unique[-LINES_KEPT_MAX:])
