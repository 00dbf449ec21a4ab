"""Restore points: only checkpoints on the job's own line of history count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.restore import CheckpointId, LineageEntry, newest_restorable, on_lineage


def _at(step: int, generation: int) -> CheckpointId:
    return CheckpointId(step=step, generation=generation)


def _run(generation: int, restored: CheckpointId | None = None) -> LineageEntry:
    return LineageEntry(generation=generation, restored=restored)


def test_without_checkpoints_a_run_starts_from_scratch() -> None:
    assert newest_restorable([], [_run(1)]) is None


def test_the_newest_checkpoint_of_the_run_before_is_taken() -> None:
    assert _at(8, 1) == newest_restorable([_at(4, 1), _at(8, 1)], [_run(1)])


def test_a_commit_of_a_replaced_run_after_its_replacement_started_does_not_count() -> None:
    lineage = [_run(1), _run(2, _at(8, 1))]

    assert _at(10, 2) == newest_restorable([_at(8, 1), _at(12, 1), _at(10, 2)], lineage)
    assert _at(8, 1) == newest_restorable([_at(8, 1), _at(12, 1)], lineage)


def test_what_a_run_from_scratch_left_behind_does_not_come_back() -> None:
    lineage = [_run(1), _run(2)]

    assert newest_restorable([_at(8, 1)], lineage) is None
    assert _at(3, 2) == newest_restorable([_at(8, 1), _at(3, 2)], lineage)


def test_a_run_that_is_not_known_contributes_nothing() -> None:
    assert newest_restorable([_at(8, 7)], [_run(1)]) is None


def test_a_run_cannot_contribute_steps_before_its_own_start() -> None:
    assert not on_lineage(_at(5, 2), [_run(1), _run(2, _at(8, 1))])


def test_saving_the_restored_state_again_changes_nothing() -> None:
    lineage = [_run(1), _run(2, _at(8, 1)), _run(3, _at(8, 2))]

    assert on_lineage(_at(8, 1), lineage)
    assert _at(8, 2) == newest_restorable([_at(8, 1), _at(8, 2)], lineage)


def test_what_was_saved_at_or_after_a_spoilt_step_is_passed_over() -> None:
    lineage = [_run(1), _run(2, _at(8, 1))]
    complete = [_at(4, 1), _at(8, 1), _at(9, 2), _at(12, 2)]

    assert newest_restorable(complete, lineage, before_step=12) == _at(9, 2)
    assert newest_restorable(complete, lineage, before_step=9) == _at(8, 1)
    assert newest_restorable(complete, lineage, before_step=4) is None
    # The run that started before it takes them off the line for good.
    assert newest_restorable(complete, [*lineage, _run(3, _at(8, 1))]) == _at(8, 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.booleans()), max_size=8))
def test_a_zombie_never_changes_where_a_job_continues(
    story: list[tuple[int, int, bool]],
) -> None:
    """Every run saves some steps; afterwards the run before it goes on committing as a zombie."""
    lineage: list[LineageEntry] = []
    honest: list[CheckpointId] = []
    all_commits: list[CheckpointId] = []
    position = 0
    for generation, (steps, zombie_steps, damaged) in enumerate(story, start=1):
        restored = newest_restorable(all_commits, lineage)
        assert restored == newest_restorable(honest, lineage)
        position = restored.step if restored else 0
        lineage.append(_run(generation, restored))
        all_commits += [_at(position + 1 + more, generation - 1) for more in range(zombie_steps)]
        mine = [_at(position + step, generation) for step in range(1, steps + 1)]
        if damaged:
            mine = mine[:-1]
        honest += mine
        all_commits += mine

    for commit in honest:
        later = [run.restored for run in lineage if run.generation > commit.generation]
        if on_lineage(commit, lineage):
            assert all(point is not None and point.step >= commit.step for point in later)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_of_runs_does_not_matter(*, reverse: bool) -> None:
    lineage = [_run(1), _run(2, _at(8, 1)), _run(3, _at(9, 2))]
    if reverse:
        lineage.reverse()

    assert _at(9, 2) == newest_restorable([_at(8, 1), _at(9, 2), _at(10, 2)], lineage)
