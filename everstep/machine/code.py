"""Code versions on a machine: a directory copied whole, under the name of what it holds.

A code version of a directory is called ``dir-`` and the first 16 hex digits of a SHA-256 over its
relative paths, modes and contents (``hash_directory``; controllers use it too). ``CodeStore``
copies one to ``<state>/code/<version>/`` so that it is there completely or not at all, and only if
it holds what its name says. Ranks may write into their copy; what was copied is verified before
each reuse, and what they added is left alone. ``.git`` and ``__pycache__`` do not belong to it.

Not here: which version a job runs (``activities.hot_update``).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

VERSIONS_KEPT = 5
FILES_MAX = 200_000
BYTES_MAX = 20 * 1024**3
IGNORED = frozenset({".git", "__pycache__"})
_VERSION = re.compile(r"dir-[0-9a-f]{16}")
_CHUNK_BYTES = 1024 * 1024


class CodeProblem(Exception):
    """A directory cannot be a code version; the text is one line for a person."""


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A file, folder or link of a tree."""

    relative: str
    mode: int
    """Kind and permission bits."""

    @property
    def identity(self) -> bytes:
        """What enters the hash beside the content."""
        kind = {stat.S_IFDIR: "d", stat.S_IFLNK: "l"}.get(stat.S_IFMT(self.mode), "f")
        # A link's own permission bits mean nothing and differ between file systems.
        bits = 0 if kind == "l" else stat.S_IMODE(self.mode) & 0o777
        return f"{kind} {bits:04o} {self.relative}".encode("utf-8", "surrogateescape") + b"\0"


def hash_directory(path: Path | str) -> str:
    """Name of the code version that a directory holds now.

    Raises:
        CodeProblem: it cannot be read, or holds what cannot be copied.
    """
    root = Path(path)
    return _hash(root, _entries(root))


def is_version_name(name: str) -> bool:
    """True for names that ``hash_directory`` gives (so they are safe as a folder's name)."""
    return _VERSION.fullmatch(name) is not None


class CodeStore:
    """The code versions of one machine."""

    def __init__(self, folder: Path, *, private: Collection[Path] = ()) -> None:
        """Keep versions in ``folder``; ``private`` directories are never part of one."""
        self._folder = folder
        self._private = tuple(private)
        self._locks: dict[str, asyncio.Lock] = {}

    async def materialise(
        self, version: str, source: str, in_use: Callable[[], Collection[str] | None]
    ) -> Path:
        """Bring a version here and return its folder; quick when it is here already.

        Args:
            version: its name.
            source: directory to copy it from.
            in_use: paths that live runs were started from; None when that is not known.

        Raises:
            CodeProblem: the source is not what the name says, or cannot be copied.
        """
        if not is_version_name(version):
            raise CodeProblem(
                "code_version must be `dir-` and 16 hex digits, the hash of the directory"
            )
        lock = self._locks.setdefault(version, asyncio.Lock())
        async with lock:
            path = await asyncio.to_thread(self._bring, version, Path(source))
            await asyncio.to_thread(self._remove_old, path, in_use())
        return path

    def _bring(self, version: str, source: Path) -> Path:
        target = self._folder / version
        manifest = self._folder / f"{version}.json"
        try:
            self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if self._is_intact(version, target, manifest):
                os.utime(manifest)
                return target
            self._check_source(source)
            self._copy(version, source, target, manifest)
        except OSError as error:
            raise CodeProblem(
                f"{source}: cannot be copied to {target}: {error.strerror or error}"
            ) from None
        return target

    def _check_source(self, source: Path) -> None:
        if not source.is_absolute() or "\0" in str(source):
            raise CodeProblem(f"source {str(source)!r}: must be an absolute path")
        if not source.is_dir():
            raise CodeProblem(f"{source}: is not a directory on this machine")
        real = source.resolve()
        for private in self._private:
            other = private.resolve()
            if real.is_relative_to(other) or other.is_relative_to(real):
                raise CodeProblem(
                    f"{source}: overlaps with {private}, which belongs to Everstep; keep the code "
                    "and Everstep's state apart"
                )

    def _copy(self, version: str, source: Path, target: Path, manifest: Path) -> None:
        temporary = self._folder / f".{version}.{os.getpid()}.tmp"
        _remove(temporary)
        try:
            entries = _entries(source)
            _copy_tree(source, temporary, entries)
            found = _hash(temporary, entries)
            if found != version:
                raise CodeProblem(
                    f"{source}: holds {found} and not {version}; it was changed since the version "
                    "was named"
                )
            if target.exists():
                # Changed by somebody; processes that still use it keep it under its new name.
                target.rename(self._folder / f".{version}.{time.time_ns()}.changed")
            manifest.unlink(missing_ok=True)
            temporary.rename(target)
            _write_whole(manifest, json.dumps([entry.relative for entry in entries]))
        finally:
            _remove(temporary)

    @staticmethod
    def _is_intact(version: str, target: Path, manifest: Path) -> bool:
        """True when everything that was copied is still there as it was."""
        try:
            names = json.loads(manifest.read_bytes())
            return _hash(target, _named_entries(target, names)) == version
        except (OSError, ValueError, TypeError, CodeProblem):
            return False

    def _remove_old(self, newest: Path, in_use: Collection[str] | None) -> None:
        if in_use is None:
            return
        with contextlib.suppress(OSError):
            manifests = sorted(
                self._folder.glob("dir-*.json"), key=lambda file: file.stat().st_mtime, reverse=True
            )
            for manifest in manifests[VERSIONS_KEPT:]:
                folder = self._folder / manifest.stem
                if folder != newest and not _used(folder, in_use):
                    manifest.unlink()
                    _remove(folder)
            for leftover in self._folder.glob(".dir-*.changed"):
                version = leftover.name[1:].partition(".")[0]
                if not _used(self._folder / version, in_use):
                    _remove(leftover)


def _used(folder: Path, in_use: Collection[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for path in in_use)


def _entries(root: Path) -> tuple[TreeEntry, ...]:
    """Everything below ``root`` that belongs to a version, sorted by relative path."""
    found: list[TreeEntry] = []
    total = 0
    try:
        for entry, size in _walk(root, root):
            found.append(entry)
            total += size
            if len(found) > FILES_MAX or total > BYTES_MAX:
                raise CodeProblem(
                    f"{root}: has more than {FILES_MAX} files or {BYTES_MAX // 1024**3} GiB; a "
                    "code version is source code, keep data and checkpoints elsewhere"
                )
    except OSError as error:
        raise CodeProblem(f"{error.filename or root}: {error.strerror or error}") from None
    return tuple(sorted(found, key=lambda entry: entry.relative))


def _walk(root: Path, folder: Path) -> Iterator[tuple[TreeEntry, int]]:
    with os.scandir(folder) as listing:
        for item in listing:
            if item.name in IGNORED:
                continue
            status = item.stat(follow_symlinks=False)
            path = Path(item.path)
            _refuse_special(root, path, status.st_mode)
            yield TreeEntry(str(path.relative_to(root)), status.st_mode), status.st_size
            if stat.S_ISDIR(status.st_mode):
                yield from _walk(root, path)


def _named_entries(root: Path, names: Iterable[str]) -> tuple[TreeEntry, ...]:
    found = [TreeEntry(name, (root / name).lstat().st_mode) for name in names]
    for entry in found:
        _refuse_special(root, root / entry.relative, entry.mode)
    return tuple(found)


def _refuse_special(root: Path, path: Path, mode: int) -> None:
    if stat.S_ISLNK(mode):
        target = path.readlink()
        landing = Path(os.path.realpath(path))
        if target.is_absolute() or not landing.is_relative_to(root.resolve()):
            raise CodeProblem(
                f"{path}: is a link to {target}, which leaves the directory; a code version must "
                "be whole by itself"
            )
    elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CodeProblem(f"{path}: is a device, socket or pipe; a code version has files only")


def _hash(root: Path, entries: Iterable[TreeEntry]) -> str:
    digest = hashlib.sha256()
    try:
        for entry in entries:
            digest.update(entry.identity)
            path = root / entry.relative
            if stat.S_ISLNK(entry.mode):
                digest.update(os.fsencode(path.readlink()))
            elif stat.S_ISREG(entry.mode):
                digest.update(_file_hash(path))
            digest.update(b"\0")
    except OSError as error:
        raise CodeProblem(f"{error.filename or root}: {error.strerror or error}") from None
    return f"dir-{digest.hexdigest()[:16]}"


def _file_hash(path: Path) -> bytes:
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def _copy_tree(source: Path, target: Path, entries: Iterable[TreeEntry]) -> None:
    target.mkdir(mode=0o755)
    folders = []
    for entry in entries:
        from_path, to_path = source / entry.relative, target / entry.relative
        if stat.S_ISLNK(entry.mode):
            to_path.symlink_to(from_path.readlink())
        elif stat.S_ISDIR(entry.mode):
            to_path.mkdir(mode=0o700)
            folders.append(entry)
        else:
            shutil.copyfile(from_path, to_path, follow_symlinks=False)
            to_path.chmod(stat.S_IMODE(entry.mode) & 0o777)
    # Last and innermost first: a folder that may not be written to must be filled before.
    for entry in reversed(folders):
        (target / entry.relative).chmod(stat.S_IMODE(entry.mode) & 0o777)
    target.chmod(0o755)


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _remove(path: Path) -> None:
    """Delete a tree, also one with folders that may not be written to."""
    if not path.exists():
        return
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)  # noqa: PTH101 - a walk yields strings
    shutil.rmtree(path, ignore_errors=True)
