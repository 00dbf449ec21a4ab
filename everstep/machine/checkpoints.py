"""Reads a job's checkpoint directory: which checkpoints are whole, and who may still commit.

The trainer library writes the files (``trainer/everstep_trainer``), under this layout::

    FENCE                         {"min_generation": g}; commits by older generations are refused
    step-<12 digits>.g<6 digits>/
        rank-<r>.part             magic, header length, JSON header, payload, SHA-256 of all before
        COMPLETE.json             written last, by the rank that finds all parts there

Everything found here may have been cut off, overwritten or put there by somebody else: nothing is
trusted, every read is bounded, and what cannot be used costs one line, never an exception.

Not here: writing or loading checkpoints (the trainer library), and which of the whole ones a run
may start from (``everstep.decide.restore``).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.decide.restore import CheckpointId

FENCE_NAME = "FENCE"
LOCK_NAME = ".FENCE.lock"
COMPLETE_NAME = "COMPLETE.json"
PART_MAGIC = b"EVSTCKP1"
DIGEST_BYTES = 32
FENCE_BYTES_MAX = 4096
COMPLETE_BYTES_MAX = 32 * 1024 * 1024
"""100,000 parts of about 120 bytes each, with room to spare."""
HEADER_BYTES_MAX = 64 * 1024 * 1024
LOCK_WAIT_MAX_S = 2.0
"""A frozen controller may hold the lock for ever; then we go on without it and verify."""

_FOLDER = re.compile(r"step-(\d{12})\.g(\d{6})")
_PREFIX = struct.Struct("<8sQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint whose every part is there with the right size and belongs to the job."""

    id: CheckpointId
    path: str
    parts: dict[str, str | None]
    """File name to the checksum that COMPLETE.json has noted (hexadecimal)."""
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a checkpoint directory holds."""

    complete: tuple[StoredCheckpoint, ...]
    skipped: tuple[str, ...]
    """One line for each checkpoint that cannot be used, newest first."""
    unreadable: dict[CheckpointId, str]
    """Those of them that the file system would not show: they may be whole. Nothing is said about
    a checkpoint by a server that does not answer."""


class _Unusable(Exception):
    """Why a checkpoint does not count; caught within this module."""


class _Unreadable(_Unusable):
    """The file system failed: this says nothing about the checkpoint."""


_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def folder_name(checkpoint: CheckpointId) -> str:
    """Name of the folder that holds ``checkpoint``."""
    return f"step-{checkpoint.step:012d}.g{checkpoint.generation:06d}"


def parse_folder_name(name: str) -> CheckpointId | None:
    """The inverse of ``folder_name``, or None."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    return CheckpointId(step=int(match[1]), generation=int(match[2]))


def scan(directory: Path, *, job_id: str) -> Scan:
    """All whole checkpoints of ``job_id`` in ``directory``, and a line for each other one.

    Raises:
        OSError: the directory itself cannot be listed.
    """
    complete: list[StoredCheckpoint] = []
    skipped: list[str] = []
    unreadable: dict[CheckpointId, str] = {}
    for name in sorted((entry.name for entry in os.scandir(directory)), reverse=True):
        identity = parse_folder_name(name)
        if identity is None:
            if name.startswith("step-"):
                skipped.append(f"{name}: not a name that the trainer library gives a checkpoint")
            continue
        try:
            complete.append(_read_checkpoint(directory / name, identity, job_id))
        except _Unusable as why:
            skipped.append(f"{name}: {why}")
            if isinstance(why, _Unreadable):
                unreadable[identity] = skipped[-1]
    return Scan(complete=tuple(complete), skipped=tuple(skipped), unreadable=unreadable)


def damage(checkpoint: StoredCheckpoint) -> str | None:
    """Read every byte of ``checkpoint``; what is wrong with the first bad part, or None.

    Raises:
        OSError: it cannot be read, which says nothing about it.
    """
    for name, noted in checkpoint.parts.items():
        if not _digest_matches(Path(checkpoint.path) / name, noted):
            return f"{name} does not match its checksum"
    return None


def is_fenced(directory: Path) -> bool:
    """True when a run was ever fenced off here, however the fence looks now.

    Raises:
        OSError: that cannot be said.
    """
    try:
        (directory / FENCE_NAME).stat()
    except _NOT_THERE:
        return False
    return True


def read_fence(directory: Path) -> int:
    """The lowest generation that may commit; 0 when there is no readable fence."""
    try:
        content = json.loads(_read_bounded(directory / FENCE_NAME, FENCE_BYTES_MAX))
    except (OSError, ValueError, RecursionError, _Unusable):
        return 0
    value = content.get("min_generation") if isinstance(content, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def raise_fence(directory: Path, generation: int) -> int:
    """Refuse commits of generations before ``generation`` from now on; the fence never goes down.

    Returns:
        The fence that stands now.

    Raises:
        OSError: the directory cannot be written.
    """
    with _fence_lock(directory):
        standing = read_fence(directory)
        if standing >= generation:
            return standing
        temporary = directory / f".{FENCE_NAME}.{secrets.token_hex(8)}"
        try:
            with temporary.open("x", encoding="ascii") as file:
                json.dump({"min_generation": generation}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(directory / FENCE_NAME)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(directory)
    return generation


@contextlib.contextmanager
def _fence_lock(directory: Path) -> Iterator[None]:
    """Keep two controllers from reading and then writing the fence at once, where locks work."""
    with (directory / LOCK_NAME).open("ab") as file:
        give_up = time.monotonic() + LOCK_WAIT_MAX_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    break
                time.sleep(0.02)
                continue
            except OSError:
                pass  # a file system without locks: the write itself is atomic all the same
            break
        yield


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_bounded(path: Path, bytes_max: int) -> bytes:
    with path.open("rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise _Unusable(f"{path.name} is larger than {bytes_max} bytes")
    return content


def _read_checkpoint(folder: Path, identity: CheckpointId, job_id: str) -> StoredCheckpoint:
    parts = _read_complete(folder, identity)
    total = 0
    for rank, (size, _) in parts.items():
        path = folder / f"rank-{rank}.part"
        try:
            found = path.stat().st_size
        except _NOT_THERE:
            raise _Unusable(f"{path.name} is missing") from None
        except OSError as error:
            raise _Unreadable(f"{path.name} cannot be read: {error.strerror}") from None
        if found != size:
            raise _Unusable(f"{path.name} has {found} bytes instead of {size}")
        _check_header(path, size, identity, job_id=job_id, rank=rank, world_size=len(parts))
        total += size
    return StoredCheckpoint(
        id=identity,
        path=str(folder),
        parts={f"rank-{rank}.part": noted for rank, (_, noted) in parts.items()},
        total_bytes=total,
    )


def _read_complete(folder: Path, identity: CheckpointId) -> dict[int, tuple[int, str | None]]:
    """Rank to size and noted checksum of its part, for all ranks 0..world_size-1."""
    content = _read_json(folder / COMPLETE_NAME, COMPLETE_BYTES_MAX)
    for key, expected in (("step", identity.step), ("generation", identity.generation)):
        if content.get(key) != expected:
            raise _Unusable(f"{COMPLETE_NAME} says {key} {content.get(key)!r:.40}")
    world_size, parts = content.get("world_size"), content.get("parts")
    if not isinstance(world_size, int) or not isinstance(parts, dict) or world_size < 1:
        raise _Unusable(f"{COMPLETE_NAME} has no world_size and parts")
    if len(parts) != world_size:
        raise _Unusable(f"{COMPLETE_NAME} names {len(parts)} parts of {world_size}")
    found: dict[int, tuple[int, str | None]] = {}
    for rank in range(world_size):
        part = parts.get(str(rank))
        size = part.get("bytes") if isinstance(part, dict) else None
        if part is None or not isinstance(size, int) or isinstance(size, bool):
            raise _Unusable(f"{COMPLETE_NAME} has no size of rank {rank}")
        noted = part.get("sha256")
        found[rank] = (size, noted if isinstance(noted, str) else None)
    return found


def _read_json(path: Path, bytes_max: int) -> dict[str, Any]:
    try:
        content = json.loads(_read_bounded(path, bytes_max))
    except FileNotFoundError:
        raise _Unusable(f"{path.name} is missing: it was never completed") from None
    except _NOT_THERE as error:
        raise _Unusable(f"{path.name} cannot be read: {error.strerror}") from None
    except OSError as error:
        raise _Unreadable(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _Unusable(f"{path.name} is not JSON") from None
    if not isinstance(content, dict):
        raise _Unusable(f"{path.name} is not a JSON object")
    return content


def _check_header(
    path: Path, size: int, identity: CheckpointId, *, job_id: str, rank: int, world_size: int
) -> None:
    try:
        with path.open("rb") as file:
            prefix = file.read(_PREFIX.size)
            if len(prefix) < _PREFIX.size:
                raise _Unusable(f"{path.name} is cut off")
            magic, length = _PREFIX.unpack(prefix)
            if magic != PART_MAGIC:
                raise _Unusable(f"{path.name} is not a checkpoint part")
            if length > min(HEADER_BYTES_MAX, size):
                raise _Unusable(f"{path.name} has a header of {length} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise _Unreadable(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _Unusable(f"{path.name} has a header that is not JSON") from None
    if not isinstance(header, dict):
        raise _Unusable(f"{path.name} has a header that is not a JSON object")
    expected = {
        "job_id": job_id,
        "step": identity.step,
        "generation": identity.generation,
        "rank": rank,
        "world_size": world_size,
    }
    for key, value in expected.items():
        if header.get(key) != value:
            raise _Unusable(f"{path.name} says {key} {header.get(key)!r:.80}, not {value!r}")
    payload = header.get("payload_bytes")
    if payload != size - _PREFIX.size - length - DIGEST_BYTES:
        raise _Unusable(f"{path.name} is not as long as its header says")


def _digest_matches(path: Path, noted: str | None) -> bool:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = path.stat().st_size - DIGEST_BYTES
        while left > 0 and (chunk := file.read(min(left, 1 << 20))):
            digest.update(chunk)
            left -= len(chunk)
        whole = left == 0 and file.read(DIGEST_BYTES + 1) == digest.digest()
    return whole and noted in {None, digest.hexdigest()}
