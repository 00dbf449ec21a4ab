"""A helper process that touches file systems for ``host_disk``: a mount that hangs, hangs it only.

Not a thread of the agent: a thread that sleeps uninterruptibly keeps a process from ending, with
all its open files and ports. This one may stay behind a dead mount; nobody waits for it.

Started as a plain program with isolated flags, so it imports little and nothing of ours. One JSON
line in: ``{"id": 7, "paths": [...], "write": PATH or null}``; one JSON line out for each path, in
any order, when it has been looked at. A path that still hangs is not touched a second time.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from typing import Any

BLOCK = b"everstep\n" * 455 + b"\n"
"""4 KiB: what needs a block of its own."""

# What of a write failed says more than the number: a full disk may refuse to make a file at all.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


def look_at(path: str, *, write: bool) -> dict[str, Any]:
    """What there is to say about the file system below a path."""
    answer: dict[str, Any] = {"path": path}
    try:
        found = os.statvfs(path)
        answer |= {
            "real": os.path.realpath(path),
            "device": _device(path),
            "total": found.f_blocks * found.f_frsize,
            "free": found.f_bavail * found.f_frsize,
            "inodes": found.f_files,
            "inodes_free": found.f_favail,
            "read_only": bool(found.f_flag & os.ST_RDONLY),
        }
    except (OSError, ValueError) as error:
        answer["error"] = getattr(error, "errno", None) or errno.EINVAL
        return answer
    if write:
        try:
            write_into(path)
        except OSError as error:
            answer["write_error"] = error.errno
    return answer


def _device(path: str) -> str:
    number = os.stat(path).st_dev  # noqa: PTH116 - pathlib is not loaded here
    return f"{os.major(number)}:{os.minor(number)}"


def write_into(folder: str) -> None:
    """Write and sync a block that nothing is left of, even when this process is killed."""
    try:
        fd = os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        name = os.path.join(folder, f".everstep-write-probe-{os.getpid()}")  # noqa: PTH118
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600)
        os.unlink(name)  # noqa: PTH108
    try:
        os.write(fd, BLOCK)
        os.fsync(fd)
    finally:
        os.close(fd)


def main() -> None:
    """Answer requests until standard input ends."""
    busy: set[str] = set()
    lock = threading.Lock()

    def work(number: int, path: str, write: bool) -> None:
        answer = look_at(path, write=write)
        with lock:
            busy.discard(path)
            sys.stdout.write(json.dumps({"id": number} | answer) + "\n")
            sys.stdout.flush()

    for line in sys.stdin:
        request = json.loads(line)
        for path in request["paths"]:
            with lock:
                if path in busy:
                    continue
                busy.add(path)
            arguments = (request["id"], path, path == request["write"])
            threading.Thread(target=work, args=arguments, daemon=True).start()


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        os._exit(0)  # a thread behind a dead mount is not waited for
