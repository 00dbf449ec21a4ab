"""What large YAML files said when they were last read: a catalogue takes half a second to parse.

A command that starts in a moment cannot spend that each time. Kept as JSON with a checksum, under
the hash of the text, in this user's own cache folder; whatever is wrong there only costs the
parsing. Not here: parsing (``yaml_text``), and what the data mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

WORTH_BYTES = 4 * 1024
"""Smaller texts are parsed faster than anybody notices."""
FORMAT = 2
"""Part of the name: raised when the same text would be read otherwise."""
KEPT_MAX = 16
_BYTES_MAX = 4 * 1024 * 1024


def remembered(text: str, parse: Callable[[], Any]) -> Any:
    """The data of a text, from the cache or parsed (and then kept).

    Raises:
        whatever ``parse`` raises; the cache itself never raises.
    """
    folder = _folder()
    if folder is None:
        return parse()
    name = hashlib.sha256(f"{FORMAT}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()
    file = folder / f"{name}.json"
    with suppress(OSError, ValueError, RecursionError):
        return _read(file)
    data = parse()
    with suppress(OSError, ValueError, TypeError):
        _keep(file, data)
    return data


def _folder() -> Path | None:
    """The cache folder; None where this user has none."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    if not base.startswith("/"):
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(base) / "everstep" / "yaml"


def _read(file: Path) -> Any:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as opened:
        found = os.fstat(fd)
        # It decides what happens to machines: only what this user has written counts.
        own = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not own or not stat.S_ISREG(found.st_mode) or found.st_size > _BYTES_MAX:
            raise ValueError(file)
        checksum, _, body = opened.read().partition(b"\n")
        if checksum != _checksum(body):
            raise ValueError(file)
        return json.loads(body)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode("ascii")


def _keep(file: Path, data: Any) -> None:
    body = json.dumps(data).encode("ascii")
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as opened:
            opened.write(_checksum(body) + b"\n" + body)
        fresh.replace(file)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    kept = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in kept[KEPT_MAX:]:
        old.unlink(missing_ok=True)
