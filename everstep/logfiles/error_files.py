"""The error files that torchrun's ranks leave (``error.json``): the exception and its traceback.

Each becomes a log source of its own, in the form in which Python prints tracebacks, so that the
same rules read it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from everstep.decide.diagnosis.types import LogLine, LogSource
from everstep.logfiles.find import LogFile

BYTES_MAX = 4 * 1024 * 1024
LINES_MAX = 2_000


def looks_like_error_file(path: Path) -> bool:
    """True for the names that torchrun gives to error files."""
    return path.suffix == ".json" and "error" in path.name


def read_error_file(file: LogFile) -> LogSource | None:
    """What an error file says; None when it is not one."""
    try:
        with file.path.open("rb") as stream:
            data = json.loads(stream.read(BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    message = data.get("message") if isinstance(data, dict) else None
    text = _traceback(message)
    if not text:
        return None
    lines = text.splitlines()[:LINES_MAX]
    return LogSource(
        file=file.shown,
        lines=tuple(LogLine(number, line) for number, line in enumerate(lines, 1)),
        lines_total=len(lines),
        rank=file.rank,
        machine=file.machine,
    )


def _traceback(message: Any) -> str:
    if isinstance(message, str):
        return message
    if not isinstance(message, dict):
        return ""
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    if isinstance(stack, str) and stack.strip():
        return stack
    said = message.get("message")
    return said if isinstance(said, str) else ""
