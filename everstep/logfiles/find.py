"""Which log files there are, and what their names say about whose they are.

Folders are walked without following a link twice; what is no log (checkpoints, images, archives)
is left out by its name or by its first bytes. A file that a person names is always read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import NotFound

FILES_MAX = 20_000
DEPTH_MAX = 24

_NOT_LOGS = re.compile(
    r"\.(pt|pth|bin|safetensors|ckpt|distcp|npy|npz|parquet|arrow|tar|zip|tgz|bz2|xz|zst|png|jpe?g"
    r"|so|o|a|py|pyc|whl|db|sqlite|idx|mp4|wav|onnx|h5|hdf5|pdf|metadata|lock|pid)$",
    re.IGNORECASE,
)
_RANK = (
    re.compile(r"(?:^|[/_.-])(?:global[_-]?)?rank[_-]?(\d{1,6})(?=[/_.-]|$)", re.IGNORECASE),
    re.compile(r"(?:^|/)attempt_\d+/(\d{1,6})/std(?:err|out)(?:\.log)?(?:\.gz)?$"),
    re.compile(r"(?:^|/)(\d{1,6})/(?:std(?:err|out)|output|error)(?:\.log|\.json)?(?:\.gz)?$"),
    re.compile(
        r"(?:^|[/_.-])(?:task|proc|worker|process)[_-]?(\d{1,6})(?=[/_.-]|$)", re.IGNORECASE
    ),
)
_MACHINE = re.compile(
    r"(?:[a-z][a-z0-9]*[-_.])*?(?:node|host|machine|gpu|server|nid|vm|gn|cn|n|h)[-_]?\d[\w-]*?"
    r"|[a-z]\d{2,4}-\d{2,4}|ip(?:-\d{1,3}){4}|[dh]gx[-_]?(?:[a-z]\w*[-_])?\d+[\w-]*?"
    r"|(?:[a-z][a-z0-9]*[-_])+(?:node|host|machine|gpu)[-_]?\d[\w-]*?",
    re.IGNORECASE,
)
_FOLDER = re.compile(rf"(?:{_MACHINE.pattern})(?:\.[a-z][\w.-]*)?", re.IGNORECASE)
_NO_HOST = re.compile(
    r"^(?:(?:logs?|train\w*|std(?:err|out)|out(?:put)?|err(?:or)?s?|console|slurm|job|run|worker"
    r"|(?:global[_-]?)?rank[_-]?\d*|\d+)[-_.])+",
    re.IGNORECASE,
)
_AFTER_HOST = re.compile(
    r"[-_.](?:rank|local|std|proc|task|out|err|log)[\w.-]*$|\.[a-z]\w*$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class LogFile:
    """One file to read."""

    path: Path
    shown: str
    """Its name for people: as it was given, or below the folder that was given."""
    rank: int | None
    machine: str | None
    named: bool
    """A person named this very file."""


class NoSuchPath(NotFound):
    """A path that was named does not exist or may not be looked into."""


def find_logs(paths: Iterable[Path]) -> list[LogFile]:
    """All log files of these files and folders, in a stable order.

    Raises:
        NoSuchPath: with one line, naming the path.
    """
    found: list[LogFile] = []
    for path in paths:
        try:
            kind = path.stat().st_mode
        except OSError as error:
            raise NoSuchPath(f"{path}: {error.strerror or error}") from None
        if stat.S_ISDIR(kind):
            inside = sorted(_walk(path))
            found += [_log_file(p, str(p), named=False) for p in inside[: FILES_MAX - len(found)]]
        elif stat.S_ISREG(kind) or stat.S_ISFIFO(kind):
            found.append(_log_file(path, str(path), named=True))
        else:
            raise NoSuchPath(f"{path}: neither a file nor a folder")
    return found


def owner(name: str) -> tuple[int | None, str | None]:
    """Rank and machine by the name of a file and its folders; None where it does not say."""
    plain = name.replace("\\", "/")
    rank = next((int(found[1]) for pattern in _RANK if (found := _last(pattern, plain))), None)
    *folders, name = plain.split("/")
    hosts = [m[0] for part in folders if (m := _FOLDER.fullmatch(part))]
    return rank, _host(name) or (hosts[-1] if hosts else None)


def _host(name: str) -> str | None:
    """The machine that the name of a file holds, uncut; None where it does not."""
    name, before = _NO_HOST.sub("", name), ""
    while name != before:
        before, name = name, _AFTER_HOST.sub("", name)
    return name if _MACHINE.fullmatch(name) else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007 - the last one counts
        pass
    return found


def _log_file(path: Path, shown: str, *, named: bool) -> LogFile:
    rank, machine = owner(shown)
    return LogFile(path, shown, rank, machine, named)


def _walk(folder: Path) -> Iterator[Path]:
    seen: set[tuple[int, int]] = set()
    todo = [(folder, 0)]
    while todo:
        where, depth = todo.pop()
        try:
            here = where.stat()
            entries = sorted(os.scandir(where), key=lambda entry: entry.name)
        except OSError:
            continue
        if (here.st_dev, here.st_ino) in seen or depth > DEPTH_MAX:
            continue
        seen.add((here.st_dev, here.st_ino))
        for entry in entries:
            try:
                if entry.is_dir():
                    todo.append((Path(entry.path), depth + 1))
                elif entry.is_file() and _may_be_log(entry.name):
                    yield Path(entry.path)
            except OSError:
                continue


def _may_be_log(name: str) -> bool:
    return not name.startswith(".") and _NOT_LOGS.search(name) is None
