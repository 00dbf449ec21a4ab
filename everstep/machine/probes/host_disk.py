"""Disks under the paths that matter: room, inodes, read-only, and mounts that hang.

The paths are the checkpoint directory, the run folder and the temporary one. A mount that hangs
must not hang the agent, so a helper process touches them (``host_disk_child``) and has a deadline.
Errors that disks count themselves are in ``host_hardware``, what the kernel says in ``kernel_log``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Confidence, Symptom
from everstep.machine.probes import host_disk_child
from everstep.machine.probes.host_read import faulty, healthy, read_text, size, unknown

_REMOTE = re.compile(
    r"^(nfs.*|cifs|smb.*|ceph|lustre|gpfs|beegfs.*|wekafs|glusterfs|9p|virtiofs|fuse(\..*|blk)?|"
    r"afs|orangefs|pvfs2|gfs2|ocfs2|panfs|juicefs|curvefs|3fs)$"
)
_SHUT = frozenset({"emergency_ro", "shutdown"})
"""Mount options by which ext4 and others say that they have stopped after an error."""
TARGET_CHARS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """Thresholds of ``DiskProbe``. A limit is the smaller one of bytes and share."""

    free_min: int
    """Bytes: with less free it is full."""
    free_share_min: float
    """The same as a share: binds on small file systems."""
    low_factor: float
    """It warns at this many times the limit."""
    inodes_free_min: int
    """Inodes: with less free it is full. The share is the same as for bytes."""
    deadline_s: float
    """A file system that does not answer within it hangs."""
    write_every_s: float
    """How often a block is written into our own folder."""


class DiskHelper:
    """The helper process: asked with a deadline, replaced when it has died."""

    def __init__(self, program: Sequence[str] | None = None) -> None:
        own = (sys.executable, "-I", "-S", str(Path(host_disk_child.__file__)))
        self._program = tuple(program) if program else own
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._rest = b""
        self._stuck: set[str] = set()

    def ask(
        self, paths: Sequence[str], write: str | None, deadline_s: float
    ) -> dict[str, dict[str, Any]]:
        """What it says about each path; those that hang are missing.

        Raises:
            OSError: the helper cannot be started, or died.
        """
        process = self._running()
        self._number += 1
        request = {"id": self._number, "paths": list(paths), "write": write}
        assert process.stdin is not None  # noqa: S101 - opened as a pipe
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        return self._answers(process, set(paths), time.monotonic() + deadline_s)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                self._program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C is for us
            )
        return self._process

    def _answers(
        self, process: subprocess.Popen[bytes], missing: set[str], until: float
    ) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        assert process.stdout is not None  # noqa: S101 - opened as a pipe
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                # One that hung at the last look is not waited for: it says when it is back.
                awaited = missing - self._stuck
                left = max(0.0, until - time.monotonic()) if awaited else 0.0
                if not selector.select(left):
                    break
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    raise OSError(errno.EPIPE, "the helper process has died")
                *lines, self._rest = (self._rest + part).split(b"\n")
                for line in lines:
                    answer = json.loads(line)
                    self._stuck.discard(answer["path"])
                    # An answer to an older question is late: its path has to answer anew.
                    if answer["id"] == self._number:
                        found[answer["path"]] = answer
                        missing.discard(answer["path"])
        self._stuck |= missing
        return found

    def close(self) -> None:
        """Let it end; one that is stuck behind a dead mount is not waited for."""
        process, self._process, self._rest = self._process, None, b""
        self._stuck = set()
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)


class DiskProbe:
    """Room, inodes, read-only and hanging mounts of the paths that it is given."""

    name = "disk"
    interval = "host"

    def __init__(
        self,
        settings: DiskSettings,
        *,
        paths: Callable[[], Iterable[Path]],
        own_folder: Path | None,
        proc: Path,
        helper: DiskHelper | None = None,
    ) -> None:
        """Nothing is touched yet.

        Args:
            settings: the thresholds.
            paths: asked for at each look: jobs and their checkpoint directories come and go.
            own_folder: a folder of ours, where a block is written now and then; also looked at.
            proc: where /proc is, for the mount table.
            helper: the process that touches file systems; given in tests.
        """
        self._settings = settings
        self._paths = paths
        self._own = own_folder
        self._proc = proc
        self._helper = helper or DiskHelper()
        self._written_s: float | None = None
        self._write_error: int | None = None
        self._writable: set[str] = set()

    def look(self, now_s: float) -> Sequence[Observation]:
        """Look at every path; those that do not answer in time hang."""
        own = [] if self._own is None else [self._own]
        paths = list(dict.fromkeys(os.fspath(path) for path in (*self._paths(), *own)))
        paths = [path for path in paths if "\0" not in path]
        if not paths:
            return []
        due = (
            self._written_s is None
            or self._write_error is not None
            or now_s - self._written_s >= self._settings.write_every_s
        )
        write = os.fspath(self._own) if self._own is not None and due else None
        mounts = _mounts(self._proc)
        try:
            answers = self._helper.ask(paths, write, self._settings.deadline_s)
        except (OSError, ValueError, KeyError) as error:
            self._helper.close()
            return [unknown(self.name, f"the helper process failed: {error}", short(path))
                    for path in paths]  # fmt: skip
        if write is not None and (answer := answers.get(write)) is not None:
            self._written_s, self._write_error = now_s, answer.get("write_error")
        self._writable &= set(paths)
        return [self._judge(path, answers.get(path), mounts) for path in paths]

    def _judge(
        self, path: str, answer: Mapping[str, Any] | None, mounts: Sequence[_Mount]
    ) -> Observation:
        if answer is None:
            return self._hangs(path, mounts)
        code = answer.get("error")
        if code in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EINVAL):
            return unknown(
                self.name, f"cannot be looked at: {_text(code)}", short(path), values={"path": path}
            )
        mount = _mount_of(mounts, answer.get("real", path), answer.get("device"))
        if code is not None:
            return self._broken(path, mount, "mount_error", f"the file system says: {_text(code)}")
        values: dict[str, Value] = {
            name: answer[key]
            for name, key in (
                ("free_bytes", "free"),
                ("total_bytes", "total"),
                ("inodes_free", "inodes_free"),
            )
        }
        values |= {"mount": mount.point, "fs": mount.kind, "path": path}
        if answer["read_only"] or _SHUT & mount.options:
            return self._read_only(path, mount, values)
        self._writable.add(path)
        if self._own is not None and path == os.fspath(self._own) and self._write_error is not None:
            found = self._cannot_write(path, mount, self._write_error, values)
            if found is not None:
                return found
        return self._room(path, answer, values)

    def _room(
        self, path: str, answer: Mapping[str, Any], values: Mapping[str, Value]
    ) -> Observation:
        settings = self._settings
        text = f"{size(answer['free'])} of {size(answer['total'])} free"
        least = min(settings.free_min, settings.free_share_min * answer["total"])
        least_inodes = min(settings.inodes_free_min, settings.free_share_min * answer["inodes"])
        inodes = answer["inodes_free"]
        for factor, action in (
            (1.0, Action.FIX_CONFIG_GIVE_UP),
            (settings.low_factor, Action.WARN_ONLY),
        ):
            rule = "full" if factor == 1 else "low"
            # File systems without a fixed number of inodes say 0 of 0.
            if answer["inodes"] and inodes < least_inodes * factor:
                why = f"{inodes} of {answer['inodes']} inodes free"
                return self._faulty(path, f"inodes_{rule}", Symptom.DISK_FULL, action, why, values)
            if answer["total"] and answer["free"] < least * factor:
                return self._faulty(path, f"disk_{rule}", Symptom.DISK_FULL, action, text, values)
        return healthy(self.name, text, short(path), values=values)

    def _read_only(self, path: str, mount: _Mount, values: Mapping[str, Value]) -> Observation:
        shut = sorted(_SHUT & mount.options)
        if path in self._writable or shut:
            why = f"{mount.kind} at {mount.point} has become read-only"
            why += f" after an error ({shut[0]})" if shut else ""
            return self._broken(path, mount, "disk_read_only", why, values)
        # Never seen otherwise: by a mistake of a person as well as after an error.
        why = f"{mount.kind} at {mount.point} is mounted read-only"
        return self._faulty(
            path,
            "disk_read_only",
            Symptom.FILESYSTEM_IO,
            Action.STOP_TIME_CHECK,
            why,
            values,
            Confidence.LOW,
        )

    def _cannot_write(
        self, path: str, mount: _Mount, code: int, values: Mapping[str, Value]
    ) -> Observation | None:
        why = f"a block cannot be written: {_text(code)}"
        if code in (errno.ENOSPC, errno.EDQUOT):
            action = Action.FIX_CONFIG_GIVE_UP
            return self._faulty(path, "disk_full", Symptom.DISK_FULL, action, why, values)
        if code in (errno.EACCES, errno.EPERM):
            return None  # whose folder it is, is no fault of the disk
        rule = "disk_read_only" if code == errno.EROFS else "disk_write_failed"
        return self._broken(path, mount, rule, why, values)

    def _hangs(self, path: str, mounts: Sequence[_Mount]) -> Observation:
        mount = _mount_of(mounts, os.path.normpath(path), None)
        where = f"{mount.kind} at {mount.point}" if mount.kind else "the file system"
        why = f"{where} has not answered for {self._settings.deadline_s:g} s"
        values: dict[str, Value] = {"mount": mount.point, "fs": mount.kind, "path": path}
        return self._broken(path, mount, "mount_hangs", why, values, Confidence.LOW)

    def _broken(
        self,
        path: str,
        mount: _Mount,
        rule: str,
        why: str,
        values: Mapping[str, Value] | None = None,
        confidence: Confidence = Confidence.HIGH,
    ) -> Observation:
        """A fault of a disk is the machine's; one of a service may be the service's."""
        action = Action.EVICT_MACHINE
        if mount.remote:
            action, confidence = Action.WAIT_EXTERNAL, Confidence.LOW
        return self._faulty(
            path, rule, Symptom.FILESYSTEM_IO, action, why, values or {"path": path}, confidence
        )

    def _faulty(
        self,
        path: str,
        rule: str,
        symptom: Symptom,
        action: Action,
        why: str,
        values: Mapping[str, Value],
        confidence: Confidence = Confidence.HIGH,
    ) -> Observation:
        return faulty(
            self.name, rule, symptom, action, why, short(path), confidence=confidence, values=values
        )

    def close(self) -> None:
        """End the helper process."""
        self._helper.close()


def short(path: str) -> str:
    """A path as a target: its end, where it is too long."""
    return path if len(path) <= TARGET_CHARS_MAX else "…" + path[1 - TARGET_CHARS_MAX :]


def _text(code: int | None) -> str:
    return f"{os.strerror(code or 0)} ({errno.errorcode.get(code or 0, code)})"


@dataclass(frozen=True, slots=True)
class _Mount:
    point: str
    kind: str
    device: str
    options: frozenset[str]

    @property
    def remote(self) -> bool:
        """Whether another machine serves it, which then may be at fault itself."""
        return bool(_REMOTE.match(self.kind))


_NOWHERE = _Mount("", "", "", frozenset())


def _mounts(proc: Path) -> list[_Mount]:
    """The mount table as this process sees it; later lines cover earlier ones."""
    found = []
    for line in (read_text(proc / "self" / "mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, after = left.split(" "), right.split(" ")
        if len(fields) >= 6 and len(after) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            options = frozenset(f"{fields[5]},{after[2]}".split(","))
            found.append(_Mount(point, after[0], fields[2], options))
    return found


def _mount_of(mounts: Sequence[_Mount], path: str, device: str | None) -> _Mount:
    """The mount that a path lies on, by the longest mount point."""
    best = _NOWHERE
    for mount in mounts:
        base = mount.point.rstrip("/")
        inside = path == mount.point or path.startswith(base + "/")
        matches = device is None or mount.device == device
        if inside and matches and len(mount.point) >= len(best.point):
            best = mount
    if not best.point and device is not None:
        return _mount_of(mounts, path, None)  # btrfs and overlay give files a device of their own
    return best
