"""How long a script may be silent: never too short for what it has done before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.rhythm import (
    BURSTS_MIN,
    SILENCE_FACTOR,
    STEADY_S,
    OutputRhythm,
    Patience,
    StepRhythm,
    quantile,
)


def steps() -> StepRhythm:
    return StepRhythm(floor_s=480, factor=10, first_s=600, phase_s=1800)


def test_nothing_is_known_before_the_first_step() -> None:
    rhythm = steps()
    assert rhythm.patience() is None
    rhythm.announced(5.0)
    assert rhythm.patience() == Patience(5.0, 1800)


@given(
    st.lists(st.floats(min_value=0.01, max_value=300), min_size=3, max_size=200),
    st.floats(min_value=1, max_value=1800),
)
def test_a_usual_gap_and_a_pause_that_recurs_are_within_the_limit(
    gaps_s: list[float], pause_s: float
) -> None:
    rhythm, now_s = steps(), 0.0
    rhythm.stepped(now_s)
    for gap_s in gaps_s:
        patience = rhythm.patience()
        assert patience is not None
        assert gap_s <= patience.limit_s
        now_s += gap_s
        rhythm.stepped(now_s)
    now_s += pause_s  # however it ended, this run came back from it
    rhythm.stepped(now_s)
    after = rhythm.patience()
    assert after is not None
    assert after.since_s == now_s
    assert after.limit_s >= min(2 * pause_s, 1800) or after.limit_s >= 10 * max(gaps_s)


def test_gaps_in_announced_phases_are_no_rhythm_but_pauses() -> None:
    rhythm, now_s = steps(), 0.0
    for _ in range(20):
        now_s += 1
        rhythm.stepped(now_s)
    for _ in range(20):
        rhythm.announced(now_s)
        now_s += 400
        rhythm.stepped(now_s)
    assert rhythm.gap_s == 1.0
    assert rhythm.patience() == Patience(now_s, 800.0)


def test_time_that_is_excused_does_not_count() -> None:
    rhythm = steps()
    rhythm.stepped(0.0)
    rhythm.excuse(3600)
    assert rhythm.patience() == Patience(3600.0, 600)


@given(st.lists(st.floats(min_value=0.1, max_value=5000), min_size=BURSTS_MIN + 10, max_size=200))
def test_output_that_stays_within_three_times_its_longest_gap_is_never_silent(
    gaps_s: list[float],
) -> None:
    rhythm, now_s, longest_s = OutputRhythm(after_s=10, factor=2), 0.0, 0.0
    rhythm.wrote(now_s)
    for index, gap_s in enumerate(gaps_s):
        allowed_s = gap_s if index < BURSTS_MIN else min(gap_s, SILENCE_FACTOR * longest_s)
        assert index < BURSTS_MIN or rhythm.silent(now_s + allowed_s) is None
        now_s += allowed_s
        longest_s = max(longest_s, allowed_s)
        rhythm.wrote(now_s)


@pytest.mark.parametrize("every_s", [1.0, 60.0])
def test_a_silence_is_told_once_and_over_once(every_s: float) -> None:
    rhythm, now_s = OutputRhythm(after_s=100, factor=10), 0.0
    while now_s <= STEADY_S + BURSTS_MIN * every_s:
        assert not rhythm.wrote(now_s)
        now_s += every_s
    quiet_s = now_s + 10 * 100
    assert rhythm.silent(quiet_s) is not None
    assert rhythm.silent(quiet_s + 1000) is None
    assert rhythm.wrote(quiet_s + 2000)
    assert not rhythm.wrote(quiet_s + 2001)


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.9) == 3.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
