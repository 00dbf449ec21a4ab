"""The restore point: fence first, never a checkpoint that cannot be trusted, same answer twice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.checkpoint_restore import TRIES_MAX, CheckpointRestore
from activities.contracts import PERMANENT_FAILURE, TEMPORARY_FAILURE
from everstep.decide.restore import CheckpointId, LineageEntry
from everstep.machine import checkpoints
from everstep.spec import messages as m
from everstep.spec.agent_api import RestorePointPlan

JOB = "job"


class FakeLedger:
    """A lineage, and the first choice of each run."""

    def __init__(self, *lineage: LineageEntry) -> None:
        self.entries = lineage
        self.chosen: dict[str, RestorePointPlan | None] = {}

    def lineage(self, job_id: str, /) -> Sequence[LineageEntry]:
        return self.entries

    def set_restore_point(
        self, run_id: str, point: CheckpointId | None, *, path: str = ""
    ) -> RestorePointPlan | None:
        if run_id not in self.chosen:
            self.chosen[run_id] = (
                None
                if point is None
                else RestorePointPlan(step=point.step, generation=point.generation, path=path)
            )
        return self.chosen[run_id]


def write_part(path: Path, header: dict[str, Any], payload: bytes) -> dict[str, Any]:
    encoded = json.dumps(header | {"payload_bytes": len(payload)}).encode()
    content = struct.pack("<8sQ", b"EVSTCKP1", len(encoded)) + encoded + payload
    digest = hashlib.sha256(content)
    path.write_bytes(content + digest.digest())
    return {"bytes": len(content) + 32, "sha256": digest.hexdigest()}


def write(root: Path, step: int, generation: int, *, job: str = JOB, ranks: int = 2) -> Path:
    """A whole checkpoint as the trainer library leaves it."""
    folder = root / checkpoints.folder_name(CheckpointId(step=step, generation=generation))
    folder.mkdir(parents=True)
    checkpoints.raise_fence(root, generation)
    parts = {}
    for rank in range(ranks):
        header = {
            "job_id": job,
            "run_id": f"{job}.{generation}",
            "generation": generation,
            "step": step,
            "rank": rank,
            "world_size": ranks,
            "tree": {},
            "tensors": [],
        }
        parts[str(rank)] = write_part(folder / f"rank-{rank}.part", header, os.urandom(100))
    (folder / "COMPLETE.json").write_text(
        json.dumps({"step": step, "generation": generation, "world_size": ranks, "parts": parts})
    )
    return folder


LINE = (LineageEntry(generation=1, restored=None),)


def choose(
    root: Path,
    ledger: FakeLedger,
    generation: int = 2,
    checkpoint: str | None = None,
    attempt: int = 1,
    before_step: int | None = None,
    **options: Any,
) -> Any:
    request = m.ChooseRestorePoint(
        job_id=JOB,
        run_id=f"{JOB}.{generation}",
        generation=generation,
        checkpoint=checkpoint,
        before_step=before_step,
    )
    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(environment.info, attempt=attempt)
    return environment.run(CheckpointRestore(ledger, root, **options).choose_restore_point, request)


async def test_from_scratch_and_the_directory_is_made_and_fenced(tmp_path: Path) -> None:
    result = await choose(tmp_path, FakeLedger(), generation=1)
    assert result.restore is None
    assert result.checkpoint_dir == str(tmp_path / JOB)
    assert checkpoints.read_fence(tmp_path / JOB) == 1


async def test_the_newest_whole_one_on_the_lineage(tmp_path: Path) -> None:
    write(tmp_path / JOB, 10, 1)
    newest = write(tmp_path / JOB, 20, 1)
    result = await choose(tmp_path, FakeLedger(*LINE))
    assert result.restore == RestorePointPlan(step=20, generation=1, path=str(newest))
    assert result.skipped == ()


def cut_off(folder: Path) -> None:
    part = folder / "rank-1.part"
    part.write_bytes(part.read_bytes()[:-7])


def flip(folder: Path) -> None:
    part = folder / "rank-1.part"
    content = bytearray(part.read_bytes())
    content[-40] ^= 1
    part.write_bytes(content)


def replace_part(folder: Path) -> None:
    """A whole part, but not the one that was committed."""
    header = {
        "job_id": JOB, "generation": 1, "step": 30, "rank": 1, "world_size": 2, "pad": "x" * 8,
    }  # fmt: skip
    size = (folder / "rank-1.part").stat().st_size
    probe = write_part(folder / "rank-1.part", header, b"")["bytes"]
    write_part(folder / "rank-1.part", header, bytes(max(0, size - probe - 4)))
    complete = json.loads((folder / "COMPLETE.json").read_text())
    complete["parts"]["1"]["bytes"] = (folder / "rank-1.part").stat().st_size
    (folder / "COMPLETE.json").write_text(json.dumps(complete))


def make_folder(folder: Path) -> None:
    (folder / "COMPLETE.json").unlink()
    (folder / "COMPLETE.json").mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "never completed": lambda f: (f / "COMPLETE.json").unlink(),
    "part missing": lambda f: (f / "rank-0.part").unlink(),
    "part cut off": cut_off,
    "bit flipped": flip,
    "another part": replace_part,
    "complete is garbage": lambda f: (f / "COMPLETE.json").write_bytes(b"\x00\xff{"),
    "complete is a list": lambda f: (f / "COMPLETE.json").write_text("[1]"),
    "complete is deep": lambda f: (f / "COMPLETE.json").write_text("[" * 100_000),
    "complete names no parts": lambda f: (f / "COMPLETE.json").write_text('{"step": 30}'),
    "complete of another step": lambda f: (f / "COMPLETE.json").write_text(
        (f / "COMPLETE.json").read_text().replace('"step": 30', '"step": 31')
    ),
    "too few parts": lambda f: (f / "COMPLETE.json").write_text(
        (f / "COMPLETE.json").read_text().replace('"world_size": 2', '"world_size": 3')
    ),
    "complete is a folder": make_folder,
    "part is empty": lambda f: (f / "rank-0.part").write_bytes(b""),
}


@pytest.mark.parametrize("name", DAMAGE)
async def test_what_cannot_be_trusted_is_passed_over_with_one_line(
    tmp_path: Path, name: str
) -> None:
    older = write(tmp_path / JOB, 20, 1)
    DAMAGE[name](write(tmp_path / JOB, 30, 1))
    result = await choose(tmp_path, FakeLedger(*LINE))
    assert result.restore is not None
    assert result.restore.path == str(older)
    (line,) = result.skipped
    assert line.startswith("step-000000000030.g000001: ")
    assert "\n" not in line


async def test_another_jobs_checkpoint_is_not_ours(tmp_path: Path) -> None:
    write(tmp_path / JOB, 30, 1, job="other")
    result = await choose(tmp_path, FakeLedger(*LINE))
    assert result.restore is None
    assert "other" in result.skipped[0]


def hide(folder: Path) -> None:
    """The file system answers with an error (a link that leads to itself)."""
    part = folder / "rank-1.part"
    part.unlink()
    part.symlink_to(part)


async def refused(*arguments: Any, **named: Any) -> ApplicationError:
    with pytest.raises(ApplicationError) as raised:
        await choose(*arguments, **named)
    assert "\n" not in raised.value.message
    return raised.value


async def test_a_missing_mount_is_not_a_job_without_checkpoints(tmp_path: Path) -> None:
    """An empty directory where the job's history was: beginning anew would give it up for good."""
    ledger = FakeLedger(*LINE)
    error = await refused(tmp_path, ledger)
    assert error.type == TEMPORARY_FAILURE
    assert "mounted" in error.message
    assert (await refused(tmp_path, ledger, attempt=TRIES_MAX)).type == PERMANENT_FAILURE
    assert list(tmp_path.iterdir()) == []
    assert ledger.chosen == {}
    folder = write(tmp_path / JOB, 20, 1)
    result = await choose(tmp_path, ledger)
    assert result.restore is not None
    assert result.restore.path == str(folder)


async def test_what_cannot_be_read_now_is_waited_for(tmp_path: Path) -> None:
    older = write(tmp_path / JOB, 20, 1)
    hide(write(tmp_path / JOB, 30, 1))
    ledger = FakeLedger(*LINE)
    assert (await refused(tmp_path, ledger)).type == TEMPORARY_FAILURE
    assert ledger.chosen == {}
    result = await choose(tmp_path, ledger, attempt=TRIES_MAX)
    assert result.restore is not None
    assert result.restore.path == str(older)
    assert "cannot be read" in result.skipped[0]


async def test_an_older_one_that_cannot_be_read_does_not_matter(tmp_path: Path) -> None:
    hide(write(tmp_path / JOB, 20, 1))
    newer = write(tmp_path / JOB, 30, 1)
    result = await choose(tmp_path, FakeLedger(*LINE))
    assert result.restore is not None
    assert result.restore.path == str(newer)


async def test_nothing_begins_anew_because_nothing_can_be_read(tmp_path: Path) -> None:
    hide(write(tmp_path / JOB, 30, 1))
    ledger = FakeLedger(*LINE)
    assert (await refused(tmp_path, ledger)).type == TEMPORARY_FAILURE
    assert (await refused(tmp_path, ledger, attempt=TRIES_MAX)).type == PERMANENT_FAILURE
    assert ledger.chosen == {}


@pytest.mark.parametrize("stepped", [True, False])
async def test_a_large_one_is_read_whole_after_a_run_that_could_not_use_it(
    tmp_path: Path, *, stepped: bool
) -> None:
    """Else every restart fails as it loads, until the budget ends a healthy job."""
    older, newest = write(tmp_path / JOB, 20, 1), write(tmp_path / JOB, 30, 1)
    flip(newest)
    restored = CheckpointId(step=30, generation=1)
    ledger = FakeLedger(*LINE, LineageEntry(generation=2, restored=restored, stepped=stepped))
    result = await choose(tmp_path, ledger, generation=3, verify_bytes_max=10)
    assert result.restore is not None
    assert result.restore.path == str(newest if stepped else older)


async def test_what_was_saved_after_a_step_that_was_not_finite_is_passed_over(
    tmp_path: Path,
) -> None:
    good = write(tmp_path / JOB, 10, 1)
    write(tmp_path / JOB, 20, 1)
    result = await choose(tmp_path, FakeLedger(*LINE), before_step=20)
    assert result.restore is not None
    assert result.restore.path == str(good)
    assert "not before step 20" in result.skipped[0]


async def test_a_spoilt_one_that_cannot_be_read_is_not_waited_for(tmp_path: Path) -> None:
    good = write(tmp_path / JOB, 10, 1)
    hide(write(tmp_path / JOB, 20, 1))
    result = await choose(tmp_path, FakeLedger(*LINE), before_step=20)
    assert result.restore is not None
    assert result.restore.path == str(good)


async def test_late_commits_of_a_run_that_was_cut_off_are_not_restored(tmp_path: Path) -> None:
    shared = write(tmp_path / JOB, 10, 1)
    write(tmp_path / JOB, 99, 1)  # committed after generation 2 had started from step 10
    restored = CheckpointId(step=10, generation=1)
    ledger = FakeLedger(*LINE, LineageEntry(generation=2, restored=restored))
    result = await choose(tmp_path, ledger, generation=3)
    assert result.restore is not None
    assert result.restore.path == str(shared)
    assert "given up" in result.skipped[0]


async def test_asked_again_the_answer_is_the_same(tmp_path: Path) -> None:
    write(tmp_path / JOB, 10, 1)
    ledger = FakeLedger(*LINE)
    first = await choose(tmp_path, ledger)
    write(tmp_path / JOB, 20, 1)
    again = await choose(tmp_path, ledger)
    assert again.restore == first.restore
    assert first.restore is not None


async def test_an_older_run_that_thaws_neither_lowers_the_fence_nor_starts(tmp_path: Path) -> None:
    write(tmp_path / JOB, 10, 1)
    await choose(tmp_path, FakeLedger(*LINE), generation=5)
    with pytest.raises(ApplicationError) as raised:
        await choose(tmp_path, FakeLedger(*LINE), generation=4)
    assert raised.value.type == PERMANENT_FAILURE
    assert checkpoints.read_fence(tmp_path / JOB) == 5


async def test_a_root_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    for root, checkpoint in (
        (tmp_path / "absent", None),
        (tmp_path, str(tmp_path / "absent" / "mine")),
    ):
        with pytest.raises(ApplicationError) as raised:
            await choose(root, FakeLedger(), checkpoint=checkpoint)
        assert raised.value.type == PERMANENT_FAILURE
        assert str(tmp_path / "absent") in raised.value.message
        assert "\n" not in raised.value.message


async def test_a_directory_that_is_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / JOB).write_text("x")
    with pytest.raises(ApplicationError) as raised:
        await choose(tmp_path, FakeLedger())
    assert raised.value.type == PERMANENT_FAILURE


async def test_the_jobs_own_directory_is_used(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    folder = write(mine, 7, 1)
    result = await choose(tmp_path / "nothing", FakeLedger(*LINE), checkpoint=str(mine))
    assert result.checkpoint_dir == str(mine)
    assert result.restore is not None
    assert result.restore.path == str(folder)


async def test_skipped_lines_are_bounded(tmp_path: Path) -> None:
    for step in range(60):
        (tmp_path / JOB / f"step-{step:012d}.g000001").mkdir(parents=True)
    checkpoints.raise_fence(tmp_path / JOB, 1)
    result = await choose(tmp_path, FakeLedger(*LINE))
    assert len(result.skipped) == 21
    assert result.skipped[-1] == "and 40 more"


def test_the_fence_only_rises(tmp_path: Path) -> None:
    assert [checkpoints.raise_fence(tmp_path, g) for g in (3, 2, 7, 7, 1)] == [3, 3, 7, 7, 7]
    assert json.loads((tmp_path / "FENCE").read_text()) == {"min_generation": 7}
    assert sorted(p.name for p in tmp_path.iterdir()) == [".FENCE.lock", "FENCE"]


@pytest.mark.parametrize(
    "garbage", [b"", b"\xff\x00", b"[]", b'{"min_generation": "9"}', b"9" * 9000]
)
def test_a_damaged_fence_is_written_anew(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "FENCE").write_bytes(garbage)
    assert checkpoints.raise_fence(tmp_path, 4) == 4
    assert checkpoints.read_fence(tmp_path) == 4


def test_a_lock_that_is_never_given_back_does_not_stop_us(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".FENCE.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert checkpoints.raise_fence(tmp_path, 4) == 4


@given(
    names=st.lists(
        st.sampled_from(
            [
                "step-",
                "step-1.g1",
                "step-000000000001.g000001",
                "x",
                ".tmp",
                "step-00000000000a.g000001",
            ]
        ),
        max_size=4,
    ),
    complete=st.binary(max_size=300)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=10),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["step", "generation", "world_size", "parts", "0", "bytes"]), inner
            )
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode()),
    part=st.binary(max_size=200)
    | st.binary(max_size=100).map(lambda rest: struct.pack("<8sQ", b"EVSTCKP1", len(rest)) + rest),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_whatever_lies_there_the_scanner_returns(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], complete: bytes, part: bytes
) -> None:
    root = tmp_path_factory.mktemp("scan")
    for name in names:
        folder = root / name
        folder.mkdir(exist_ok=True)
        (folder / "COMPLETE.json").write_bytes(complete)
        (folder / "rank-0.part").write_bytes(part)
    found = checkpoints.scan(root, job_id=JOB)
    assert found.complete == ()
    assert all(line.isprintable() for line in found.skipped)
