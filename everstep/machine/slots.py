"""A preallocated file of fixed slots: the agent's memory that a full disk cannot stop.

The event ring and the fences are kept in one each. Every slot carries a checksum over its length
and payload, so a write that was cut short (the process was killed, the power went) is seen as an
empty slot and nothing else is touched. The header names the file's shape, its random id and the
boot of the machine that it belongs to.

A file that is damaged, truncated or of another shape is made anew in place with a new id, and
``SlotFile.renewed`` says why, in words for a log line. If even that is impossible (no room at
the first start), writes go nowhere and ``SlotFile.problem`` says so: the agent works on and only
its memory across its own restart is lost. Not here: what the payloads mean.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HEADER_BYTES = 4096
_MAGIC = b"EVSLOTS1"
_HEADER = struct.Struct("<8s16s40sIII")
"""Magic, id, boot id, slots, bytes a slot, checksum of what is before it."""
_SLOT = struct.Struct("<II")
"""Checksum of length and payload, length of the payload."""


def machine_boot_id() -> str:
    """The kernel's name for this boot of the machine: monotonic times are comparable within it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()[:40]
    except OSError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class SlotShape:
    """What kind of file it is, and how large."""

    kind: bytes
    """16 bytes at most; two kinds are never mistaken for each other."""
    slots: int
    slot_bytes: int

    @property
    def payload_bytes_max(self) -> int:
        """Largest payload of one slot."""
        return self.slot_bytes - _SLOT.size

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return HEADER_BYTES + self.slots * self.slot_bytes


class SlotFile:
    """An open slot file. Used from one thread at a time."""

    def __init__(self, path: Path, shape: SlotShape, *, keep_over_reboot: bool) -> None:
        """Open or make the file; never raises for what the file holds.

        Args:
            path: where it is.
            shape: what it must be.
            keep_over_reboot: False when the content means nothing after the machine restarted.
        """
        self.path = path
        self.shape = shape
        self.renewed: str | None = None
        """Why the file was made anew although one was there."""
        self.problem: str | None = None
        """Why nothing can be kept at the moment."""
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            reason = self._read_header(keep_over_reboot)
            if reason is not None:
                self._renew(reason)
        except OSError as error:
            self.close()
            self.file_id = secrets.token_hex(8)
            self.problem = f"{path}: {error.strerror or error}"

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Index and payload of every slot that holds a whole one."""
        if self._descriptor is None:
            return
        for index in range(self.shape.slots):
            block = os.pread(self._descriptor, self.shape.slot_bytes, self._offset(index))
            if len(block) < _SLOT.size:
                return
            checksum, length = _SLOT.unpack_from(block)
            payload = block[_SLOT.size : _SLOT.size + length]
            if not 0 < length <= self.shape.payload_bytes_max or len(payload) != length:
                continue
            if zlib.crc32(block[4 : _SLOT.size] + payload) == checksum:
                yield index, payload

    def write(self, index: int, payload: bytes, *, sync: bool) -> bool:
        """Put a payload into a slot; False (and ``problem`` set) when it could not be kept."""
        length = struct.pack("<I", len(payload))
        block = struct.pack("<I", zlib.crc32(length + payload)) + length + payload
        if self._descriptor is None or len(payload) > self.shape.payload_bytes_max:
            return False
        try:
            os.pwrite(self._descriptor, block, self._offset(index))
            if sync:
                os.fdatasync(self._descriptor)
        except OSError as error:
            self.problem = f"{self.path}: {error.strerror or error}"
            return False
        self.problem = None
        return True

    def close(self) -> None:
        """Close the file; writes go nowhere from now on."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _offset(self, index: int) -> int:
        return HEADER_BYTES + index * self.shape.slot_bytes

    def _read_header(self, keep_over_reboot: bool) -> str | None:
        """None when the file can be used as it is; else why not ("" for a new file)."""
        descriptor = self._descriptor
        if descriptor is None:
            return ""
        size = os.fstat(descriptor).st_size
        if size == 0:
            return ""
        block = os.pread(descriptor, HEADER_BYTES, 0)
        if size != self.shape.file_bytes or len(block) != HEADER_BYTES:
            return f"it has {size} bytes and not {self.shape.file_bytes}"
        magic, file_id, boot, slots, slot_bytes, checksum = _HEADER.unpack_from(block, 16)
        whole = zlib.crc32(block[: 16 + _HEADER.size - 4]) == checksum
        if not whole or magic != _MAGIC or block[:16].rstrip(b"\0") != self.shape.kind:
            return "its header is damaged"
        if (slots, slot_bytes) != (self.shape.slots, self.shape.slot_bytes):
            return "it was made with another size"
        if not keep_over_reboot and boot.rstrip(b"\0").decode("ascii") != machine_boot_id():
            return "the machine was restarted since it was written"
        self.file_id = file_id.decode("ascii")
        return None

    def _renew(self, reason: str) -> None:
        descriptor = self._descriptor
        if descriptor is None:
            return
        self.file_id = secrets.token_hex(8)
        self.renewed = reason or None
        if os.fstat(descriptor).st_size > self.shape.file_bytes:
            os.ftruncate(descriptor, self.shape.file_bytes)
        # Blocks that the file has already are kept: a damaged file is renewed on a full disk too.
        os.posix_fallocate(descriptor, 0, self.shape.file_bytes)
        empty = bytes(self.shape.slot_bytes)
        for index in range(self.shape.slots):
            os.pwrite(descriptor, empty, self._offset(index))
        body = self.shape.kind.ljust(16, b"\0") + _HEADER.pack(
            _MAGIC,
            self.file_id.encode("ascii"),
            machine_boot_id().encode("ascii"),
            self.shape.slots,
            self.shape.slot_bytes,
            0,
        )
        body = body[:-4] + struct.pack("<I", zlib.crc32(body[:-4]))
        os.pwrite(descriptor, body.ljust(HEADER_BYTES, b"\0"), 0)
        os.fdatasync(descriptor)
