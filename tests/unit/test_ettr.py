"""ETTR: what counts as productive, and that repeated work counts once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.ettr import RunTimes, ettr, productive_intervals


def test_nothing_is_known_before_time_has_passed() -> None:
    assert ettr([], 5.0, since_s=5.0) is None


def test_waiting_and_starting_are_not_productive() -> None:
    run = RunTimes(opened_s=10.0, first_step_s=30.0)

    assert ettr([RunTimes(opened_s=10.0)], 50.0, since_s=0.0) == 0.0
    assert ettr([run], 50.0, since_s=0.0) == 0.4


def test_a_closed_run_no_longer_grows() -> None:
    run = RunTimes(opened_s=0.0, first_step_s=0.0, closed_s=50.0, last_step=50)

    assert ettr([run], 100.0, since_s=0.0) == 0.5


def test_steps_that_are_repeated_are_taken_out_by_the_runs_own_rate() -> None:
    runs = [
        RunTimes(opened_s=0.0, first_step_s=0.0, trouble_s=100.0, last_step=100),
        RunTimes(opened_s=100.0, first_step_s=110.0, restored_step=80, last_step=120),
    ]

    # Step 0 was finished at 0 s; of 100 steps in 100 s the last 20 are computed again.
    assert productive_intervals(runs, 150.0) == ((0.0, 80.0), (110.0, 150.0))
    assert ettr(runs, 150.0, since_s=0.0) == pytest.approx(120 / 150)


def test_a_restore_to_before_the_last_run_takes_out_two_runs() -> None:
    runs = [
        RunTimes(opened_s=0.0, first_step_s=0.0, trouble_s=10.0, last_step=10),
        RunTimes(opened_s=10.0, first_step_s=10.0, trouble_s=20.0, restored_step=8, last_step=19),
        RunTimes(opened_s=20.0, first_step_s=20.0, restored_step=5),
    ]

    assert productive_intervals(runs, 30.0) == ((0.0, 5.0), (10.0, 10.0), (20.0, 30.0))


def test_starting_from_scratch_again_takes_out_everything() -> None:
    runs = [
        RunTimes(opened_s=0.0, first_step_s=0.0, trouble_s=50.0, last_step=50),
        RunTimes(opened_s=50.0, first_step_s=60.0),
    ]

    assert ettr(runs, 100.0, since_s=0.0) == 0.4


def test_a_hang_is_not_productive_although_it_is_noticed_late() -> None:
    run = RunTimes(opened_s=0.0, first_step_s=0.0, trouble_s=100.0, last_step=9, stalled_s=60.0)

    assert ettr([run], 100.0, since_s=0.0) == 0.4


def test_the_sliding_window_forgets_old_trouble() -> None:
    runs = [
        RunTimes(opened_s=0.0, first_step_s=50.0, trouble_s=100.0, last_step=100),
        RunTimes(opened_s=100.0, first_step_s=100.0, restored_step=100),
    ]

    assert ettr(runs, 200.0, since_s=0.0) == 0.75
    assert ettr(runs, 200.0, since_s=0.0, window_s=100.0) == 1.0
    assert ettr(runs, 200.0, since_s=0.0, window_s=1e9) == ettr(runs, 200.0, since_s=0.0)


def test_a_script_that_reports_no_steps_keeps_its_time() -> None:
    runs = [
        RunTimes(opened_s=0.0, first_step_s=0.0, trouble_s=50.0),
        RunTimes(opened_s=50.0, first_step_s=50.0),
    ]

    assert ettr(runs, 100.0, since_s=0.0) == 1.0


@st.composite
def _history(draw: st.DrawFn) -> tuple[list[RunTimes], float]:
    runs: list[RunTimes] = []
    now, step = 0.0, -1
    for _ in range(draw(st.integers(0, 6))):
        opened = now
        now += draw(st.floats(0, 50))
        first = draw(st.sampled_from([None, now]))
        restored = draw(st.sampled_from([None, max(0, step // 2), step])) if step >= 0 else None
        begins = 0 if restored is None else restored + 1
        length = draw(st.floats(0, 100))
        now += length
        last = begins + draw(st.integers(0, 50)) if first is not None else None
        step = last if last is not None else step
        runs.append(
            RunTimes(
                opened_s=opened,
                first_step_s=first,
                trouble_s=now,
                closed_s=now,
                restored_step=restored,
                last_step=last,
                stalled_s=draw(st.floats(0, length)),
            )
        )
    return runs, now + draw(st.floats(0, 10))


@given(_history(), st.one_of(st.none(), st.floats(0.5, 500)))
def test_it_is_a_share_and_the_intervals_do_not_overlap(
    history: tuple[list[RunTimes], float], window_s: float | None
) -> None:
    runs, now_s = history
    share = ettr(runs, now_s, since_s=0.0, window_s=window_s)

    assert share is None or 0.0 <= share <= 1.0
    intervals = productive_intervals(runs, now_s)
    assert all(begin <= end <= now_s + 1e-9 for begin, end in intervals)
    for (_, end), (begin, _) in pairwise(intervals):
        assert end <= begin + 1e-9


@given(_history())
def test_repeating_steps_never_raises_it(history: tuple[list[RunTimes], float]) -> None:
    runs, now_s = history
    kept = [
        RunTimes(
            opened_s=r.opened_s,
            first_step_s=r.first_step_s,
            trouble_s=r.trouble_s,
            closed_s=r.closed_s,
            stalled_s=r.stalled_s,
        )
        for r in runs
    ]  # without step numbers nothing is known to be repeated

    share, best = ettr(runs, now_s, since_s=0.0), ettr(kept, now_s, since_s=0.0)
    assert share is None or best is None or share <= best + 1e-9
