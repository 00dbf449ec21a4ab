"""One part file: a rank's share of one checkpoint.

::

    b"EVSTCKP1" | u64 header length | header, JSON | payload | SHA-256 of everything before

Little endian. Written under a temporary name, flushed to disk, then renamed: a part that has its
name is whole, and one that is damaged later does not match its checksum.

Not here: which parts belong together (``_store``).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from everstep_trainer import _codec
from everstep_trainer._errors import CheckpointUnreadable, UnsupportedState

if TYPE_CHECKING:
    from collections.abc import Mapping

MAGIC = b"EVSTCKP1"
FORMAT = 1
DIGEST_BYTES = 32
HEADER_BYTES_MAX = 64 * 1024 * 1024
"""The controller reads headers too, with this bound."""
_PREFIX = struct.Struct("<8sQ")
_CHUNK = 1 << 20


class PartSummary(NamedTuple):
    """Name tag of a part: what its header says, and its size and checksum as stored."""

    header: dict[str, Any]
    size: int
    sha256: str


def write_part(temporary: Path, identity: Mapping[str, Any], state: _codec.Encoded) -> PartSummary:
    """Write a whole part to ``temporary`` and flush it to disk; renaming it is the caller's.

    Raises:
        OSError: it could not be written.
        UnsupportedState: the description of the state is larger than a header may be.
    """
    header = {
        "format": FORMAT,
        "byteorder": sys.byteorder,
        **identity,
        "tree": state.tree,
        "tensors": state.blobs,
        "payload_bytes": state.payload_bytes,
    }
    encoded = json.dumps(header, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(encoded) > HEADER_BYTES_MAX:
        raise UnsupportedState(
            f"the state has {len(encoded)} bytes of plain Python values; at most "
            f"{HEADER_BYTES_MAX} can be stored: put large lists of numbers into arrays"
        )
    digest = hashlib.sha256()
    with temporary.open("wb", buffering=0) as file:
        _write(file, digest, _PREFIX.pack(MAGIC, len(encoded)) + encoded)
        at = 0
        for blob, source in zip(state.blobs, state.sources):  # noqa: B905 - Python 3.9
            if blob["offset"] > at:
                _write(file, digest, bytes(blob["offset"] - at))
            view, _keep = _codec.raw_bytes(source)
            if view.nbytes != blob["bytes"]:
                raise RuntimeError(f"{blob['name']} changed its size while it was being saved")
            _write(file, digest, view)
            at = blob["offset"] + blob["bytes"]
        file.write(digest.digest())
        os.fsync(file.fileno())
        size = file.tell()
    return PartSummary(header, size, digest.hexdigest())


def read_summary(path: Path) -> PartSummary | None:
    """Header and checksum of a part whose size is right, or None: missing, cut off or foreign."""
    try:
        with path.open("rb") as file:
            header, size = _read_header(file, hashlib.sha256())
            file.seek(-DIGEST_BYTES, os.SEEK_END)
            return PartSummary(header, size, file.read(DIGEST_BYTES).hex())
    except (OSError, CheckpointUnreadable):
        return None


def read_part(path: Path, expected: Mapping[str, Any], sha256: str | None = None) -> Any:
    """The state in a part, verified to the last byte.

    Args:
        path: the part.
        expected: what its header has to say about itself.
        sha256: the checksum that the checkpoint's COMPLETE.json has noted.

    Raises:
        CheckpointUnreadable: anything is not as it should be; the message names the file.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return _read_state(file, expected, sha256)
    except CheckpointUnreadable as why:
        raise CheckpointUnreadable(f"cannot resume from {path}: {why}") from None
    except OSError as error:
        raise CheckpointUnreadable(f"cannot resume from {path}: {error.strerror}") from None


def _read_state(file: BinaryIO, expected: Mapping[str, Any], sha256: str | None) -> Any:
    digest = hashlib.sha256()
    header, _size = _read_header(file, digest)
    for key, value in expected.items():
        if header.get(key) != value:
            raise CheckpointUnreadable(
                f"it says {key} {header.get(key)!r:.80}, but {value!r} is expected"
            )
    blobs, at = [], 0
    for blob in header["tensors"]:
        made = _allocate(blob, at, header["payload_bytes"])
        _skip(file, digest, blob["offset"] - at)
        _fill(file, digest, _codec.fillable(made).view)
        blobs.append(made)
        at = blob["offset"] + blob["bytes"]
    _skip(file, digest, header["payload_bytes"] - at)
    stored = _exactly(file, DIGEST_BYTES)
    if stored != digest.digest():
        raise CheckpointUnreadable("its content does not match its checksum: it is damaged")
    if sha256 is not None and sha256 != digest.hexdigest():
        raise CheckpointUnreadable("its checksum is not the one that COMPLETE.json has noted")
    return _codec.decode(header["tree"], blobs)


def _read_header(file: BinaryIO, digest: Any) -> tuple[dict[str, Any], int]:
    size = os.fstat(file.fileno()).st_size
    if size < _PREFIX.size + DIGEST_BYTES:
        raise CheckpointUnreadable(f"it has only {size} bytes: it is cut off")
    prefix = _exactly(file, _PREFIX.size)
    magic, length = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise CheckpointUnreadable("it is not a part of an Everstep checkpoint")
    if length > min(HEADER_BYTES_MAX, size - _PREFIX.size - DIGEST_BYTES):
        raise CheckpointUnreadable("it is cut off or its header is damaged")
    encoded = _exactly(file, length)
    digest.update(prefix)
    digest.update(encoded)
    try:
        header = json.loads(encoded)
    except (ValueError, RecursionError):
        raise CheckpointUnreadable("its header is damaged") from None
    if not isinstance(header, dict) or not isinstance(header.get("tensors"), list):
        raise CheckpointUnreadable("its header is damaged")
    if header.get("format") != FORMAT or header.get("byteorder") != sys.byteorder:
        raise CheckpointUnreadable(
            f"it has format {header.get('format')!r:.20}, {header.get('byteorder')!r:.20} endian; "
            f"this library reads format {FORMAT} on {sys.byteorder} endian machines"
        )
    if header.get("payload_bytes") != size - _PREFIX.size - length - DIGEST_BYTES:
        raise CheckpointUnreadable("it is not as long as its header says: it is cut off")
    return header, size


def _allocate(blob: Any, at: int, payload_bytes: int) -> Any:
    """Memory for one blob, after a look at whether it can be where it says."""
    try:
        offset, size = blob["offset"], blob["bytes"]
        if not at <= offset <= offset + size <= payload_bytes:
            raise CheckpointUnreadable("its header is damaged: a tensor lies outside the payload")
        return _codec.allocate(blob)
    except (KeyError, TypeError, AttributeError):
        raise CheckpointUnreadable("its header is damaged: a tensor is not described") from None


def _write(file: Any, digest: Any, data: Any) -> None:
    view = memoryview(data)
    while view.nbytes:
        written = file.write(view[:_CHUNK])
        digest.update(view[:written])
        view = view[written:]


def _fill(file: Any, digest: Any, view: memoryview) -> None:
    while view.nbytes:
        count = file.readinto(view[:_CHUNK])
        if not count:
            raise CheckpointUnreadable("it ends too early")
        digest.update(view[:count])
        view = view[count:]


def _skip(file: Any, digest: Any, count: int) -> None:
    while count > 0:
        chunk = _exactly(file, min(count, _CHUNK))
        digest.update(chunk)
        count -= len(chunk)


def _exactly(file: BinaryIO, count: int) -> bytes:
    chunks = []
    while count > 0:
        chunk = file.read(count)
        if not chunk:
            raise CheckpointUnreadable("it ends too early")
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)
