"""The folder of one run on one machine: names, creation at full size, and retention.

``<state>/runs/<job_id>/<generation>/`` holds everything the agent and the shim know about a run, so
that an agent that comes back finds it there. Files that must never fail to be written later are
filled when the folder is made. Not here: what the files say.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from everstep.machine import progress, shim
from everstep.machine.facts import FactsFile
from everstep.spec.agent_api import RunPlan

T = TypeVar("T")

_EXIT_RECORD_BYTES = 192
_START_RECORD_BYTES = 192
_SHIM_RECORD_BYTES = 512
_PRIVATE = 0o700
_OWNER_ONLY = 0o600
_TRAVERSABLE = 0o711


@dataclass(frozen=True, slots=True)
class RankUser:
    """The account that ranks run under when the agent is root."""

    name: str
    uid: int
    gid: int
    home: str


class RunRecord(BaseModel):
    """``plan.json``: what was asked for, and the mark that every process of the run carries."""

    format: int = 1
    job_id: str
    generation: int
    machine_id: str
    mark: str
    boot_id: str
    created_ns: int
    plan: RunPlan

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of this machine."""
        first = self.plan.group_rank * self.plan.ranks_per_machine
        return tuple(range(first, first + self.plan.ranks_per_machine))


@dataclass(frozen=True, slots=True)
class RankStart:
    """A line of ``ranks.jsonl``."""

    rank: int
    pid: int
    start_ticks: int
    started_ns: int


@dataclass(frozen=True, slots=True)
class RankExit:
    """A line of ``exits.jsonl``: exactly one of ``code`` and ``signal`` is known."""

    rank: int
    code: int | None
    signal: int | None
    at_ns: int


def _records(path: Path, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """The whole records of a file; a torn one is being written and will be whole next time."""
    try:
        raw = path.read_bytes()
    except OSError:
        return []
    records = []
    for line in raw.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            records.append(make(json.loads(line)))
    return records


class RunFolder:
    """Paths of one run, and its records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = path / "plan.json"
        self.facts = path / "facts.bin"
        self.work = path / "work"

    def log(self, rank: int) -> Path:
        """What the rank writes to standard output and standard error."""
        return self.path / f"rank-{rank}.log"

    def progress(self, rank: int) -> Path:
        """The rank's progress file."""
        return self.path / "progress" / f"rank-{rank}.bin"

    def stack(self, rank: int) -> Path:
        """Where the rank writes its stack when it is asked by signal."""
        return self.path / "stacks" / f"rank-{rank}.txt"

    @property
    def stacks_taken(self) -> Path:
        """The stacks that were taken before the run was torn down."""
        return self.path / "stacks.json"

    def error(self, rank: int) -> Path:
        """``TORCHELASTIC_ERROR_FILE`` of the rank."""
        return self.path / "error" / f"rank-{rank}.json"

    def create(self, record: RunRecord, launch: dict[str, Any], user: RankUser | None) -> None:
        """Make the folder and take all the space its records will ever need.

        Raises:
            OSError: there is no space, or the folder exists.
        """
        for parent in (self.path.parent.parent, self.path.parent):
            parent.mkdir(exist_ok=True)
        self.path.mkdir()
        mode = _PRIVATE if user is None else _TRAVERSABLE
        for folder in (self.path.parent.parent, self.path.parent, self.path):
            folder.chmod(mode)
        for folder in (self.work, *(self.path / n for n in ("progress", "error", "stacks"))):
            folder.mkdir(mode=_PRIVATE)
            self._give(folder, user)
        FactsFile.create(self.facts, len(record.ranks))
        ranks = len(record.ranks)
        for name, size in (
            (shim.SHIM_FILE, _SHIM_RECORD_BYTES),
            (shim.RANKS_FILE, _START_RECORD_BYTES * ranks),
            (shim.EXITS_FILE, _EXIT_RECORD_BYTES * ranks),
        ):
            (self.path / name).write_bytes(b"\n" * size)
        for rank in record.ranks:
            self.log(rank).touch(mode=0o640)
            progress.create(self.progress(rank))
            self.stack(rank).touch(mode=_OWNER_ONLY)
            for own in (self.progress(rank), self.stack(rank)):
                self._give(own, user)
        self._write_private(self.path / shim.LAUNCH_FILE, json.dumps(launch))
        # Last: a folder without plan.json is one whose making was interrupted.
        self._write_private(self.plan, record.model_dump_json())

    @staticmethod
    def _write_private(path: Path, text: str) -> None:
        path.touch(mode=_OWNER_ONLY)  # a job's own environment may hold secrets of its owner
        path.write_text(text, encoding="utf-8")

    @staticmethod
    def _give(path: Path, user: RankUser | None) -> None:
        if user is not None:
            os.chown(path, user.uid, user.gid)

    def read_plan(self) -> RunRecord | None:
        """The record, or None when the folder is not (or no longer) a run's."""
        try:
            return RunRecord.model_validate_json(self.plan.read_bytes())
        except (OSError, ValidationError):
            return None

    def read_shim(self) -> tuple[int, int] | None:
        """Pid and start time of the shim; None before it has started."""
        found = _records(
            self.path / shim.SHIM_FILE, lambda line: (int(line["pid"]), int(line["start_ticks"]))
        )
        return found[0] if found else None

    def read_starts(self) -> dict[int, RankStart]:
        """Ranks that were started."""
        found = _records(
            self.path / shim.RANKS_FILE,
            lambda line: RankStart(
                int(line["rank"]),
                int(line["pid"]),
                int(line["start_ticks"]),
                int(line["started_ns"]),
            ),
        )
        return {start.rank: start for start in found}

    def read_exits(self) -> dict[int, RankExit]:
        """Ranks whose exit the shim has recorded."""
        found = _records(
            self.path / shim.EXITS_FILE,
            lambda line: RankExit(
                int(line["rank"]),
                None if line["code"] is None else int(line["code"]),
                None if line["signal"] is None else int(line["signal"]),
                int(line["at_ns"]),
            ),
        )
        return {ended.rank: ended for ended in found}

    def remove(self) -> None:
        """Delete the folder; what cannot be deleted stays and is met again next time."""
        shutil.rmtree(self.path, ignore_errors=True)


def run_folders(runs: Path) -> list[tuple[str, int, RunFolder]]:
    """All run folders below ``runs``: job, generation, folder; oldest generation first."""
    found = [
        (job.name, int(folder.name), RunFolder(folder))
        for job in runs.iterdir()
        if job.is_dir()
        for folder in job.iterdir()
        if folder.name.isdigit() and folder.is_dir()
    ]
    return sorted(found, key=lambda item: item[:2])
