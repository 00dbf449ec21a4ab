"""Stacks by py-spy: reads the memory of a process from outside, without its help.

``--nonblocking``: the process is never paused, and it is the only mode that can read a process
which somebody has stopped. What is read while the process runs on may be torn; that fails, and is
tried again. Text, not ``--json``, which costs three times as much.

Not here: what to do when it may not look (``capture``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sysconfig
from pathlib import Path

from everstep.decide.stacks import Frame, parse_py_spy, stack_of

OUTPUT_BYTES_MAX = 1024 * 1024
_ATTEMPTS = 3
_KILLED_WAIT_S = 0.5
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class NoStack(Exception):
    """The process has no stack that can be read; one line says why."""


class NotPermitted(NoStack):
    """This agent may not look into processes of that account."""


def find_py_spy() -> Path | None:
    """The program that came with the package; else one on the path."""
    own = Path(sysconfig.get_path("scripts")) / "py-spy"
    if os.access(own, os.X_OK):
        return own
    found = shutil.which("py-spy")
    return Path(found) if found else None


async def dump(program: Path, pid: int, timeout_s: float) -> tuple[Frame, ...]:
    """The stack of one process.

    Raises:
        NotPermitted: the system forbids it.
        NoStack: it cannot be read, or not in time.
    """
    until = asyncio.get_running_loop().time() + timeout_s
    reason = ""
    for _ in range(_ATTEMPTS):
        left_s = until - asyncio.get_running_loop().time()
        if left_s <= 0:
            break
        code, output, errors = await _run(program, pid, left_s)
        frames = stack_of(parse_py_spy(output)) if code == 0 else ()
        if frames:
            return frames
        reason = _reason(errors)
    raise NoStack(reason or f"py-spy gave nothing within {timeout_s:g} s")


async def _run(program: Path, pid: int, timeout_s: float) -> tuple[int, str, str]:
    try:
        process = await asyncio.create_subprocess_exec(
            str(program),
            *("dump", "--nonblocking", "--full-filenames", "--pid", str(pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.defpath},
        )
    except OSError as error:
        raise NoStack(f"py-spy cannot be started: {error.strerror or error}") from None
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await asyncio.gather(
                _bounded(process.stdout), _bounded(process.stderr)
            )
            return await process.wait(), output, errors
    except TimeoutError:
        raise NoStack(f"py-spy gave nothing within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # One that hangs in the kernel is reaped when it comes back.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILLED_WAIT_S)


async def _bounded(stream: asyncio.StreamReader | None) -> str:
    """All of a stream, of which no more than a limit is kept."""
    kept = bytearray()
    while stream is not None and (part := await stream.read(65536)):
        kept += part[: max(0, OUTPUT_BYTES_MAX - len(kept))]
    return kept.decode("utf-8", "replace")


def _reason(errors: str) -> str:
    """What went wrong, in one line; py-spy adds a backtrace of its own.

    Raises:
        NotPermitted: it says so.
    """
    lowered = errors.lower()
    if "permission denied" in lowered or "operation not permitted" in lowered:
        raise NotPermitted(not_permitted())
    first = next((line.strip() for line in errors.splitlines() if line.strip()), "")
    return f"py-spy: {first.removeprefix('Error: ')}"[:200] if first else ""


def not_permitted() -> str:
    """Why an agent may not look into other processes, and what would let it."""
    try:
        scope = _SCOPE.read_text(encoding="ascii").strip()
    except OSError:
        scope = ""
    setting = f" (kernel.yama.ptrace_scope is {scope})" if scope not in ("", "0") else ""
    return (
        f"py-spy may not read the ranks' memory{setting}: "
        "the agent needs root or CAP_SYS_PTRACE, or the ranks' own account and ptrace_scope 0"
    )
