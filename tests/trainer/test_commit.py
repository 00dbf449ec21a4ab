"""When a checkpoint counts, who may commit it, and what is pruned."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from everstep_trainer import SaveFailed, Session, StaleGeneration, UnsupportedState

from everstep.decide.restore import CheckpointId
from everstep.machine import checkpoints
from tests.trainer.kit import Job, run_python


def whole(job: Job) -> list[tuple[int, int]]:
    """Complete checkpoints as the controller sees them, checked to the last byte."""
    if not job.checkpoints.is_dir():
        return []
    found = checkpoints.scan(job.checkpoints, job_id="tests").complete
    assert all(checkpoints.damage(checkpoint) is None for checkpoint in found)
    return sorted((checkpoint.id.step, checkpoint.id.generation) for checkpoint in found)


def save_all(job: Job, step: int, *, generation: int = 1, **how: Any) -> None:
    for rank, session in enumerate(job.sessions(generation=generation, **how)):
        session.step(step, loss=1.0)
        assert session.save(step, {"rank": rank, "step": step, "generation": generation})


# ---- complete


def test_it_is_complete_when_the_last_part_is_there(tmp_path: Path) -> None:
    job = Job(tmp_path, world_size=3)
    ranks = job.sessions()
    for rank in (1, 0):
        result = ranks[rank].save(7, {"rank": rank})
        assert (result.ok, result.complete) == (True, False)
        assert whole(job) == []
        assert job.progress(rank)["committed"] == -1
    last = ranks[2].save(7, {"rank": 2})
    assert (last.ok, last.complete) == (True, True)
    assert last.path == str(job.checkpoints / "step-000000000007.g000001")
    assert last.bytes == (Path(last.path) / "rank-2.part").stat().st_size
    assert whole(job) == [(7, 1)]
    assert job.progress(2)["committed"] == 7
    content = json.loads((Path(last.path) / "COMPLETE.json").read_bytes())
    assert {key: content[key] for key in ("step", "generation", "world_size")} == {
        "step": 7,
        "generation": 1,
        "world_size": 3,
    }
    # The others learn of it when they save next.
    ranks[0].save(8, {"rank": 0})
    assert job.progress(0)["committed"] == 7


def test_saving_the_same_step_again_changes_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, world_size=2)
    save_all(job, 3)
    before = {name: (job.checkpoints / name).read_bytes() for name in job.files()}
    result = job.session(0).save(3, {"something": "else"})
    assert result.complete
    assert {name: (job.checkpoints / name).read_bytes() for name in job.files()} == before


def test_what_another_job_of_the_same_generation_left_is_replaced(tmp_path: Path) -> None:
    """The ledger was lost, and generations start at 1 again in a directory that is in use."""
    job = Job(tmp_path, world_size=2)
    save_all(job, 3)
    second = {"EVERSTEP_RUN_ID": "second-life"}
    zero, one = (job.session(rank, **second) for rank in (0, 1))
    assert not zero.save(3, {"life": 2}).complete
    assert whole(job) == []
    assert one.save(3, {"life": 2}).complete
    assert whole(job) == [(3, 1)]
    again = job.session(1, generation=2, restore="step-000000000003.g000001")
    assert again.load() == (3, {"life": 2})


def test_a_part_that_shows_up_late_is_counted_at_the_next_save(tmp_path: Path) -> None:
    """As on a network file system: both ranks looked before they could see the other's part."""
    job = Job(tmp_path, world_size=2)
    zero, one = job.sessions()
    zero.save(1, {})
    one.save(1, {})
    (job.checkpoints / "step-000000000001.g000001" / "COMPLETE.json").unlink()
    zero._store._pending.append(1)  # type: ignore[union-attr]
    zero.save(2, {})
    assert whole(job) == [(1, 1)]


def test_four_processes_complete_without_waiting_for_each_other(tmp_path: Path) -> None:
    job = Job(tmp_path, world_size=4, keep=1000)
    code = """
import os, sys, multiprocessing
import everstep_trainer

def rank(number, barrier, counts):
    os.environ.update(RANK=str(number),
                      EVERSTEP_PROGRESS_FILE=f"{os.environ['ROOT']}/progress-1-{number}.bin")
    session = everstep_trainer.attach()
    for step in range(60):
        barrier.wait()  # so that all four find the last part at once
        session.step(step, loss=1.0)
        result = session.save(step, {"rank": number, "step": step})
        assert result.ok, result
        counts[number] += result.complete

context = multiprocessing.get_context("fork")
barrier = context.Barrier(4)
counts = context.Array("i", 4)
ranks = [context.Process(target=rank, args=(n, barrier, counts)) for n in range(4)]
for process in ranks: process.start()
for process in ranks: process.join()
print([process.exitcode for process in ranks], list(counts))
"""
    done = run_python("-c", code, env={**job.environ(), "ROOT": str(job.root)})
    assert done.stderr == ""
    codes, counts = done.stdout.split("] [")
    assert codes == "[0, 0, 0, 0"
    seen_complete = [int(count) for count in counts.rstrip("]\n").split(",")]
    # Each was completed by somebody; at least one rank sees it, often several.
    assert sum(seen_complete) >= 60
    assert whole(job) == [(step, 1) for step in range(60)]
    assert not [name for name in job.files() if name.endswith(".tmp")]
    session = job.session(2, generation=2, restore="step-000000000041.g000001")
    assert session.load() == (41, {"rank": 2, "step": 41})
    assert session.load(rank=0) == (41, {"rank": 0, "step": 41})


# ---- finite


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_never_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, bad: float
) -> None:
    job = Job(tmp_path, world_size=2)
    save_all(job, 1)
    zero, one = job.sessions()
    zero.step(2, loss=1.0)
    one.step(2, **{what: bad})
    assert zero.save(2, {}).ok
    result = one.save(2, {})
    assert (result.ok, result.error) == (False, "its reported loss or gradient norm is not finite")
    one.save(3, {})  # what came of it is not trusted under another number either
    assert whole(job) == [(1, 1)]
    assert capsys.readouterr().err.count("\n") == 1
    assert not job.progress(1)["flags"] & 16, "it is the step that is wrong, not the disk"
    # A loss scaler's skipped step is over with the next finite one.
    one.step(3, loss=1.0)
    assert one.save(3, {}).ok
    assert not one.save(2, {}).ok


# ---- fence


def test_an_older_generation_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, world_size=2)
    zero, one = job.sessions()
    zero.save(1, {})
    checkpoints.raise_fence(job.checkpoints, 2)
    with pytest.raises(StaleGeneration) as caught:
        one.save(1, {})
    message = str(caught.value)
    assert "\n" not in message
    assert "generation 1 of job tests has been replaced by a newer run" in message
    assert type(caught.value).__module__ == "everstep_trainer"
    assert whole(job) == []
    assert not [name for name in job.files() if name.endswith(".tmp")]
    save_all(job, 1, generation=2)
    assert whole(job) == [(1, 2)]


def test_the_fence_is_read_again_before_the_part_gets_its_name(job: Job) -> None:
    """It rises while the part is being written: here, when its bytes are asked for."""
    session = job.session()
    store = session._store
    assert store is not None
    from everstep_trainer import _codec

    encoded = _codec.encode({"blob": b"x" * 100})

    class Rising(list[Any]):
        def __iter__(self) -> Any:
            checkpoints.raise_fence(job.checkpoints, 2)
            return super().__iter__()

    job.checkpoints.mkdir()
    with pytest.raises(StaleGeneration):
        store.write(1, encoded._replace(sources=Rising(encoded.sources)))
    assert job.files() == [".FENCE.lock", "FENCE"]


def test_the_fence_is_read_again_before_it_is_complete(tmp_path: Path) -> None:
    job = Job(tmp_path, world_size=1)
    store = job.session()._store
    assert store is not None
    from everstep_trainer import _codec

    store.write(1, _codec.encode({}))
    checkpoints.raise_fence(job.checkpoints, 2)
    with pytest.raises(StaleGeneration):
        store.complete(1)
    assert whole(job) == []
    assert not [name for name in job.files() if name.endswith(".tmp")]


def test_a_stale_run_may_not_even_load(tmp_path: Path) -> None:
    job = Job(tmp_path)
    save_all(job, 1)
    checkpoints.raise_fence(job.checkpoints, 3)
    with pytest.raises(StaleGeneration):
        job.session(generation=2, restore="step-000000000001.g000001").load()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"min_generation": "2"}'])
def test_a_fence_that_cannot_be_read_stops_commits(job: Job, content: str) -> None:
    session = job.session()
    assert session.save(1, {})
    (job.checkpoints / "FENCE").write_text(content)
    result = session.save(2, {})
    assert not result.ok
    assert whole(job) == [(1, 1)]


def test_two_generations_write_the_same_step_and_neither_harms_the_other(tmp_path: Path) -> None:
    """The older one is cut off and unfenced: its commits must be tellable from the newer one's."""
    job = Job(tmp_path, world_size=2)
    save_all(job, 4)
    old = job.sessions()
    new = job.sessions(generation=2, restore="step-000000000004.g000001")
    old[0].save(5, {"from": "old"})
    new[1].save(5, {"from": "new"})
    old[1].save(5, {"from": "old"})
    new[0].save(5, {"from": "new"})
    assert set(whole(job)) >= {(4, 1), (5, 2)}
    third = job.session(generation=3, restore="step-000000000005.g000002")
    assert third.load() == (5, {"from": "new"})
    assert new[0].save(6, {}).ok
    assert new[1].save(6, {}).ok
    assert new[0].save(7, {}).ok  # prunes: 5.g1 lies on nobody's line of history any more
    assert (5, 1) not in whole(job)
    assert (4, 1) in whole(job)


# ---- prune


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    job = Job(tmp_path, world_size=2, keep=2)
    zero, one = job.sessions()
    for step in range(6):
        one.save(step, {})
        zero.save(step, {})
        assert len(whole(job)) == min(step + 1, 2)
    assert whole(job) == [(4, 1), (5, 1)]
    assert len(job.folders()) == 2


def test_ranks_other_than_the_first_remove_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, world_size=2, keep=1)
    zero, one = job.sessions()
    for step in range(3):
        zero.save(step, {})  # never sees its own step complete
        one.save(step, {})
    assert whole(job) == [(1, 1), (2, 1)]


def test_what_the_run_was_restored_from_stays_until_something_newer_is_complete(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, world_size=2, keep=1)
    save_all(job, 10)
    zero, one = job.sessions(generation=2, restore="step-000000000010.g000001")
    zero.save(11, {})
    zero.save(12, {})
    assert whole(job) == [(10, 1)]
    one.save(12, {})
    assert whole(job) == [(10, 1), (12, 2)]
    zero.save(13, {})
    assert whole(job) == [(12, 2)]


def test_a_newer_step_off_the_line_of_history_does_not_push_out_the_restored_one(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, keep=1)
    job.keep = 10
    save_all(job, 5)
    save_all(job, 90)  # committed after the controller had chosen step 5
    job.keep = 1
    session = job.session(generation=2, restore="step-000000000005.g000001")
    session._store.prune()  # type: ignore[union-attr]
    assert whole(job) == [(5, 1), (90, 1)]
    session.save(6, {})
    assert whole(job) == [(6, 2)]


def test_a_run_from_scratch_leaves_the_old_ones_until_it_has_its_own(tmp_path: Path) -> None:
    job = Job(tmp_path, world_size=2)
    save_all(job, 5)
    zero, one = job.sessions(generation=2)
    zero.save(0, {})
    assert whole(job) == [(5, 1)]
    one.save(0, {})
    zero.save(1, {})
    assert whole(job) == [(0, 2)]


def test_leftovers_of_dead_generations_go(tmp_path: Path) -> None:
    job = Job(tmp_path, world_size=2)
    save_all(job, 1)
    job.session(0).save(2, {})  # rank 1 died before it saved
    torn = job.checkpoints / "step-000000000002.g000001" / "rank-1.part.tmp"
    torn.write_bytes(b"torn")
    unrelated = job.checkpoints / "notes.txt"
    unrelated.write_text("mine")
    job.session(0, generation=2, restore="step-000000000001.g000001").save(2, {})
    assert job.folders() == ["step-000000000001.g000001", "step-000000000002.g000002"]
    assert unrelated.exists()


def test_a_run_that_was_replaced_removes_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, keep=1)
    old = job.session()
    old.save(1, {})
    newer = job.session(generation=2, restore="step-000000000001.g000001")
    newer.save(2, {})
    old.save(3, {})
    assert set(whole(job)) == {(2, 2), (3, 1)}


def test_one_that_cannot_be_read_just_now_is_left_alone(tmp_path: Path) -> None:
    job = Job(tmp_path, keep=1)
    save_all(job, 1)
    save_all(job, 2)
    part = job.checkpoints / "step-000000000002.g000001" / "rank-0.part"
    part.rename(part.with_suffix(".away"))
    job.session().save(3, {})
    part.with_suffix(".away").rename(part)
    assert whole(job) == [(2, 1), (3, 1)]


def test_parts_of_checkpoints_that_a_failed_rank_never_finishes_do_not_pile_up(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, world_size=2)
    save_all(job, 0)
    one = job.session(1)
    for step in range(1, 10):
        one.save(step, {})  # rank 0 cannot save any more
    assert whole(job) == [(0, 1)]
    assert len(job.folders()) == 1 + 3


def test_the_controllers_rule_and_the_librarys_are_the_same(tmp_path: Path) -> None:
    """Whatever `newest_restorable` would pick for this run's successor survives pruning."""
    from everstep.decide.restore import LineageEntry, newest_restorable

    job = Job(tmp_path, keep=1)
    job.keep = 100
    for step in (1, 2, 3):
        save_all(job, step)
    for step in (3, 4):
        save_all(job, step, generation=2, restore="step-000000000002.g000001")
    job.keep = 1
    save_all(job, 4, generation=3, restore="step-000000000003.g000002")
    lineage = [
        LineageEntry(generation=1, restored=None),
        LineageEntry(generation=2, restored=CheckpointId(step=2, generation=1)),
        LineageEntry(generation=3, restored=CheckpointId(step=3, generation=2)),
    ]
    left = [CheckpointId(step=step, generation=generation) for step, generation in whole(job)]
    assert newest_restorable(left, lineage) == CheckpointId(step=4, generation=3)


# ---- errors


def test_bad_arguments_and_states_are_the_callers_errors(job: Job) -> None:
    session = job.session()
    for step in (-1, 10**12):
        with pytest.raises(ValueError, match="step must be between"):
            session.save(step, {})
    with pytest.raises(UnsupportedState):
        session.save(1, {"open file": {1, 2}})
    assert job.files() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(job: Job) -> None:
    job.checkpoints.mkdir(mode=0o500)
    result = job.session().save(1, {})
    assert result.error is not None
    assert "Permission denied (EACCES)" in result.error


def test_a_directory_that_cannot_be_made(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.checkpoints.write_text("a file is in the way")
    session = job.session()
    results = [session.save(step, {}) for step in (1, 2)]
    assert [result.ok for result in results] == [False, False]
    assert "(ENOTDIR)" in str(results[0].error)
    assert capsys.readouterr().err.count("\n") == 1
    assert (job.progress()["failed"], job.progress()["flags"] & 16) == (2, 16)
    with pytest.raises(SaveFailed, match="save of step 3 failed: Not a directory"):
        session.save(3, {}, must_succeed=True)


def test_without_a_checkpoint_directory_it_says_so_once(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = job.environ()
    del environ["EVERSTEP_CHECKPOINT_DIR"]
    session = Session(environ)
    assert not session.save(1, {}).ok
    assert not session.save(2, {}).ok
    assert session.load() is None
    assert capsys.readouterr().err.count("EVERSTEP_CHECKPOINT_DIR is not set") == 1
