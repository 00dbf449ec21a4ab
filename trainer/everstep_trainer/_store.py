"""The checkpoint directory of a job, as one rank sees it: commit, complete, prune.

There is no barrier between ranks. Each writes its part under a temporary name and renames it; each
then looks whether all parts are there, and whoever finds them writes COMPLETE.json. Two that find
them at once write the same thing.

A folder belongs to one run (its generation is in its name), so two runs never write into the same
one. The fence is read right before each of the two renames that count. That leaves a gap of
microseconds, which is closed elsewhere: the controller never restores a checkpoint that is not on
the job's own line of history, and the same rule decides here what is pruned.

Not here: what a part looks like (``_parts``), and what to do about an error (``_session``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep_trainer import _codec, _parts
from everstep_trainer._errors import CheckpointUnreadable, StaleGeneration, WorldSizeChanged

if TYPE_CHECKING:
    from everstep_trainer._environment import Environment, RestorePoint

FENCE = "FENCE"
COMPLETE = "COMPLETE.json"
STEP_MAX = 10**12 - 1
PENDING_MAX = 2
"""How many unfinished checkpoints a rank leaves its part in. The ranks of a job are never more than
one save apart, since they wait for each other in every step; beyond that one of them has failed to
save, and the part is only in the way."""

_FOLDER = re.compile(r"step-(\d{12})\.g(\d{6})")


class Found(NamedTuple):
    """A checkpoint folder. Ordered by step, then by generation."""

    step: int
    generation: int
    name: str

    def is_at_or_before(self, step: int, generation: int) -> bool:
        """True when it is the other one or lies before it."""
        return (self.step, self.generation) <= (step, generation)


class Store:
    """The directory, for one rank of one run."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._directory = Path(environment.checkpoint_dir or "")
        self._rank = environment.rank
        self._generation = environment.generation
        self._pending: list[int] = []
        self._seen_whole: set[Found] = set()

    def write(self, step: int, state: _codec.Encoded) -> int:
        """Write this rank's part of the checkpoint after ``step``; its size in bytes.

        Raises:
            OSError: it could not be written; nothing of it is left.
            StaleGeneration: a newer run exists.
        """
        folder = self.folder(step)
        part = folder / _part_name(self._rank)
        self.check_fence()
        there = _parts.read_summary(part)
        if there is not None and self._is_ours(there.header, step, self._rank):
            return there.size
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            _sync_directory(self._directory)
        # While our part is missing, nothing here can be our run's complete checkpoint: it was left
        # by somebody who used the same generation before (a ledger that was lost, say).
        _remove_file(folder / COMPLETE)
        temporary = part.with_name(f"{part.name}.tmp")
        try:
            size = _parts.write_part(temporary, self._identity(step, self._rank), state).size
            self.check_fence()
            temporary.replace(part)
        except BaseException as error:
            _remove_file(temporary)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(part)  # write() does not say where
            raise
        _sync_directory(folder)
        self._pending.append(step)
        return size

    def complete(self, step: int) -> bool:
        """Write COMPLETE.json if every rank's part is there; True when the checkpoint is complete.

        Raises:
            OSError: it could not be written.
            StaleGeneration: a newer run exists.
        """
        folder = self.folder(step)
        if (folder / COMPLETE).exists():  # ours, since `write` removed any other
            self._settle(step)
            return True
        parts: dict[str, dict[str, Any]] = {}
        # Backwards, since the last rank's part is the likeliest to be missing still.
        for rank in reversed(range(self._environment.world_size)):
            summary = _parts.read_summary(folder / _part_name(rank))
            if summary is None or not self._is_ours(summary.header, step, rank):
                return False
            parts[str(rank)] = {"bytes": summary.size, "sha256": summary.sha256}
        _sync_directory(folder)  # the others' renames must not come after ours
        temporary = folder / f"{COMPLETE}.{self._rank}.tmp"
        content = {
            "step": step,
            "generation": self._generation,
            "world_size": self._environment.world_size,
            "run_id": self._environment.run_id,
            "parts": {rank: parts[rank] for rank in sorted(parts, key=int)},
        }
        try:
            with temporary.open("w", encoding="ascii") as file:
                json.dump(content, file)
                file.flush()
                os.fsync(file.fileno())
            self.check_fence()
            temporary.replace(folder / COMPLETE)
        except BaseException:
            _remove_file(temporary)
            raise
        _sync_directory(folder)
        self._settle(step)
        return True

    def complete_pending(self, newest: int = -1) -> int:
        """Look at this rank's unfinished checkpoints again.

        On a network file system another rank's part may only now be visible.

        Returns:
            The newest step that turned out to be complete, or ``newest``.
        """
        for step in tuple(self._pending):
            if self.complete(step):
                newest = max(newest, step)
        for step in self._pending[:-PENDING_MAX]:
            self._pending.remove(step)
            _remove_file(self.folder(step) / _part_name(self._rank))
            with contextlib.suppress(OSError):  # somebody else's part is still in it
                self.folder(step).rmdir()
        return newest

    def prune(self) -> None:
        """Remove what no run of this job can ever need again. For rank 0 only.

        Raises:
            OSError: the directory cannot be listed.
        """
        found = sorted(self._list())
        if any(f.generation > self._generation for f in found) or self._is_fenced():
            return
        restored, keep = self._environment.restore, self._environment.checkpoint_keep
        whole = {f for f in found if self._is_whole(f)}
        own = [f for f in found if f in whole and f.generation == self._generation]
        ours = [f for f in found if f in whole and _is_on_our_line(f, self._generation, restored)]
        doomed = set(ours[:-keep])
        if own:
            # Off our line of history for good, and something better is there.
            doomed |= whole.difference(ours)
        for f in found:
            # Its run is over, or has gone past it: it will never be completed.
            abandoned = f.generation < self._generation or bool(own and f < own[-1])
            # One that has its COMPLETE.json and looks broken may just be unreadable now.
            if abandoned and not os.path.lexists(self._directory / f.name / COMPLETE):
                doomed.add(f)
        for f in sorted(doomed):
            _remove_folder(self._directory / f.name)

    def load(self, rank: int) -> Any:
        """State in one rank's part of the checkpoint that this run starts from.

        Raises:
            CheckpointUnreadable: it is damaged, foreign or incomplete.
            StaleGeneration: a newer run exists.
        """
        restore = self._environment.restore
        if restore is None:
            raise ValueError("this run starts from scratch")
        with contextlib.suppress(OSError, ValueError):  # reading needs no fence, it is only earlier
            self.check_fence()
        path = Path(restore.path) / COMPLETE
        content = _read_complete(path)
        world_size = content.get("world_size")
        if world_size != self._environment.world_size:
            raise WorldSizeChanged(
                f"cannot resume from {restore.path}: it was saved by {world_size!r:.20} ranks and "
                f"this run has {self._environment.world_size}"
            )
        for key, value in (("step", restore.step), ("generation", restore.generation)):
            if content.get(key) != value:
                raise CheckpointUnreadable(
                    f"cannot resume from {path}: it says {key} {content.get(key)!r:.40}, "
                    f"but {value} is expected"
                )
        noted = content["parts"].get(str(rank))
        sha256 = noted.get("sha256") if isinstance(noted, dict) else None
        if not isinstance(sha256, str):
            raise CheckpointUnreadable(
                f"cannot resume from {path}: it names no part of rank {rank}"
            )
        expected = {
            "job_id": self._environment.job_id,
            "step": restore.step,
            "generation": restore.generation,
            "rank": rank,
            "world_size": world_size,
        }
        return _parts.read_part(Path(restore.path) / _part_name(rank), expected, sha256)

    def check_fence(self) -> None:
        """Raise unless this run may commit.

        Raises:
            StaleGeneration: a newer run exists.
            OSError, ValueError: the fence cannot be read, so nobody knows.
        """
        if self._is_fenced():
            raise StaleGeneration(
                f"generation {self._generation} of job {self._environment.job_id} has been "
                f"replaced by a newer run (see {self._directory / FENCE}): "
                "its checkpoint is refused"
            )

    def _is_fenced(self) -> bool:
        try:
            with (self._directory / FENCE).open(encoding="ascii") as file:
                content = json.loads(file.read(4096))
        except FileNotFoundError:
            return False
        lowest = content.get("min_generation") if isinstance(content, dict) else None
        if not isinstance(lowest, int):
            raise ValueError(f"{self._directory / FENCE} holds no min_generation")  # noqa: TRY004
        return lowest > self._generation

    def _is_whole(self, found: Found) -> bool:
        """True when COMPLETE.json is there and the parts it names are, with their sizes."""
        if found in self._seen_whole:
            return True
        folder = self._directory / found.name
        try:
            content = _read_complete(folder / COMPLETE)
            whole = bool(content["parts"]) and all(
                (folder / _part_name(int(rank))).stat().st_size == part["bytes"]
                for rank, part in content["parts"].items()
            )
        except (CheckpointUnreadable, OSError, ValueError, KeyError, TypeError):
            return False
        if whole:
            self._seen_whole.add(found)
        return whole

    def _settle(self, step: int) -> None:
        if step in self._pending:
            self._pending.remove(step)

    def _is_ours(self, header: dict[str, Any], step: int, rank: int) -> bool:
        return all(header.get(k) == v for k, v in self._identity(step, rank).items())

    def _identity(self, step: int, rank: int) -> dict[str, Any]:
        return {
            "job_id": self._environment.job_id,
            "run_id": self._environment.run_id,
            "generation": self._generation,
            "step": step,
            "rank": rank,
            "world_size": self._environment.world_size,
        }

    def folder(self, step: int) -> Path:
        """Path of the folder that holds this run's checkpoint after ``step``."""
        return self._directory / f"step-{step:012d}.g{self._generation:06d}"

    def _list(self) -> list[Found]:
        matches = (_FOLDER.fullmatch(name) for name in os.listdir(self._directory))  # noqa: PTH208 - names, not paths
        return [Found(int(m[1]), int(m[2]), m[0]) for m in matches if m]


def _is_on_our_line(found: Found, generation: int, restored: RestorePoint | None) -> bool:
    """The rule of ``everstep.decide.restore.on_lineage``, as far as one run can know it."""
    if found.generation == generation:
        return True
    return restored is not None and found.is_at_or_before(restored.step, restored.generation)


def _read_complete(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="ascii") as file:
            content = json.load(file)
    except OSError as error:
        raise CheckpointUnreadable(f"cannot resume from {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointUnreadable(f"cannot resume from {path}: it is not JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("parts"), dict):
        raise CheckpointUnreadable(f"cannot resume from {path}: it names no parts")
    return content


def _part_name(rank: int) -> str:
    return f"rank-{rank}.part"


def _remove_folder(folder: Path) -> None:
    # Without COMPLETE.json it is no checkpoint any more, so it does not matter how far we get.
    _remove_file(folder / COMPLETE)
    with contextlib.suppress(OSError):
        for path in tuple(folder.iterdir()):
            _remove_file(path)
        folder.rmdir()


def _remove_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
