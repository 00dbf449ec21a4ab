"""Spikes, slow steps and ceased traffic: what must be told, and above all what must not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decide.anomaly import (
    BUCKETS,
    BUCKETS_SKIPPED,
    GRAD_NORM_FLOOR,
    LOSS_FLOOR,
    Change,
    PaceRule,
    SpikeRule,
    TrafficRule,
)

SUSTAINED = 5
WARMUP = 20


def spike_rule(floor: float = LOSS_FLOOR) -> SpikeRule:
    """With the policy's default numbers."""
    return SpikeRule(factor=5, window=50, sustained=SUSTAINED, warmup=WARMUP, floor=floor)


def told(rule: SpikeRule, values: Iterable[float]) -> list[tuple[int, Change]]:
    changes = ((index, rule.add(value)) for index, value in enumerate(values))
    return [(index, change) for index, change in changes if change is not None]


# --- spikes ------------------------------------------------------------------------------------

Shape = Callable[[random.Random, int], float]
"""One reading of a healthy series."""

STATIONARY: dict[str, Shape] = {
    "constant": lambda r, i: 2.0,
    "normal, 10 %": lambda r, i: r.gauss(2.0, 0.2),
    "normal, 50 %": lambda r, i: r.gauss(2.0, 1.0),
    "lognormal, σ = 0.5": lambda r, i: r.lognormvariate(0.0, 0.5),
    "lognormal, σ = 1": lambda r, i: r.lognormvariate(0.0, 1.0),
    "exponential": lambda r, i: r.expovariate(1.0),
    "near zero": lambda r, i: abs(r.gauss(0.0, 1e-4)),
    "around zero": lambda r, i: r.gauss(0.0, 1.0),
    "negative": lambda r, i: r.gauss(-3.0, 0.5),
    "one reading in ten is a hundred times": lambda r, i: 200.0 if r.random() < 0.1 else 2.0,
    "two levels": lambda r, i: r.choice([1.0, 3.0]),
    "rounded to nothing": lambda r, i: round(abs(r.gauss(0, 0.004)), 2),
    "a long wave": lambda r, i: 2.0 + math.sin(i / 40) + r.gauss(0, 0.1),
    "a saw": lambda r, i: 1.0 + (i % 30) / 10,
    "every fourth batch is of other data": lambda r, i: 8.0 if i % 4 == 0 else 1.0,
}


@pytest.mark.parametrize("shape", STATIONARY.values(), ids=STATIONARY)
@pytest.mark.parametrize("floor", [LOSS_FLOOR, GRAD_NORM_FLOOR], ids=["loss", "gradient norm"])
def test_no_false_alarm_in_a_stationary_series(shape: Shape, floor: float) -> None:
    """20,000 readings of each shape and floor: 600,000 in all, and no alarm."""
    dice = random.Random(7)
    assert told(spike_rule(floor), (shape(dice, index) for index in range(20_000))) == []


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    level=st.floats(1e-6, 1e6),
    spread=st.floats(0.0, 0.6),
    trend=st.floats(-0.01, 0.01),
)
def test_no_false_alarm_at_any_level_noise_and_slow_trend(
    seed: int, level: float, spread: float, trend: float
) -> None:
    """200,000 readings a test run; a trend of one per cent a reading is fast for training."""
    dice = random.Random(seed)
    values = (level * dice.lognormvariate(0, spread) * math.exp(trend * i) for i in range(1000))
    assert told(spike_rule(0.0), values) == []


def _warmup(i: int) -> float:
    return 11.0 * math.exp(-i / 60) + 2.0


LIFE: dict[str, list[float]] = {
    "a run from scratch": [_warmup(i) for i in range(500)],
    "gradient norms that settle": [100.0 / (1 + i) + 0.3 for i in range(500)],
    "a learning rate that warms up": [0.2 + min(i, 200) / 200 * 0.7 for i in range(600)],
    "a resumed run": [2.1 + (i % 3) / 50 for i in range(100)],
    "one spike": [2.0] * 100 + [40.0] + [2.0] * 100,
    "a spike that recovers within four readings": [2.0] * 100 + [30, 20, 14, 11] + [3.0] * 50,
    "spikes every ten readings": ([2.0] * 9 + [50.0]) * 30,
    "harder data: the loss doubles": [2.0] * 100 + [4.0] * 100,
    "harder data: the loss is four times": [0.5] * 100 + [2.0] * 100,
    "a loss that falls to nothing and back": [2.0 * 0.97**i for i in range(400)] + [0.03] * 50,
    "a reward that changes sign": [(i - 100) / 50 for i in range(300)],
    "not finite": [2.0] * 100 + [math.nan, math.inf] * 10 + [2.0] * 20,
    "high from the start": [100.0] * 5 + [2.0] * 300,
    "a spike in the warm-up": [2.0] * 10 + [40.0] * 6 + [2.0] * 100,
}


@pytest.mark.parametrize("values", LIFE.values(), ids=LIFE)
def test_what_happens_in_real_life_is_no_alarm(values: list[float]) -> None:
    assert told(spike_rule(), values) == []


@pytest.mark.parametrize("level", [1e-3, 0.5, 2.0, 1e4])
def test_five_times_is_told_after_the_debounce_and_once(level: float) -> None:
    changes = told(spike_rule(0.0), [level] * 60 + [5 * level] * 500)
    assert changes == [(60 + SUSTAINED - 1, Change.BEGUN)]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    before=st.integers(WARMUP, 400),
    factor=st.floats(7.0, 1000.0),
)
def test_a_true_jump_is_told_within_the_debounce(seed: int, before: int, factor: float) -> None:
    """With ten per cent of noise; at exactly five times noise decides, so it is a bit more."""
    dice = random.Random(seed)
    noise = [max(0.7, min(1.3, dice.gauss(1, 0.1))) for _ in range(before + SUSTAINED)]
    values = [2.0 * n * (factor if i >= before else 1) for i, n in enumerate(noise)]
    assert told(spike_rule(), values) == [(before + SUSTAINED - 1, Change.BEGUN)]


def test_the_end_of_a_spike_is_told_and_the_next_one_too() -> None:
    values = [2.0] * 60 + [20.0] * 30 + [2.0] * 60 + [20.0] * 30
    changes = told(spike_rule(), values)
    assert [change for _, change in changes] == [Change.BEGUN, Change.OVER, Change.BEGUN]
    assert [index for index, _ in changes] == [64, 94, 154]


def test_a_new_normal_after_a_spike_has_its_own_warm_up() -> None:
    values = [2.0] * 60 + [20.0] * 30 + [0.1] * 10 + [2.0] * 60
    assert [change for _, change in told(spike_rule(), values)] == [Change.BEGUN, Change.OVER]


def test_a_rule_shows_what_it_compared_with() -> None:
    rule = spike_rule()
    told(rule, [2.0] * 60 + [20.0] * 5)
    assert (rule.baseline, rule.limit, rule.high) == (2.0, 10.0, True)


# --- pace --------------------------------------------------------------------------------------

WINDOW_S = 600.0


def pace_changes(
    rule: PaceRule, costs: Iterable[float], start_s: float = 0.0
) -> list[tuple[float, Change]]:
    """Steps that take what they cost, one after the other."""
    now_s, found = start_s, []
    for cost in costs:
        now_s += cost
        change = rule.add(now_s, cost)
        if change is not None:
            found.append((now_s, change))
    return found


def pace_rule() -> PaceRule:
    return PaceRule(factor=1.2, window_s=WINDOW_S)


PACES: dict[str, Shape] = {
    "constant": lambda r, i: 1.0,
    "5 %": lambda r, i: r.gauss(1.0, 0.05),
    "30 %": lambda r, i: max(0.1, r.gauss(1.0, 0.3)),
    "heavy tail": lambda r, i: 0.5 + r.expovariate(2.0),
    "slow steps that vary by a tenth": lambda r, i: max(10.0, r.gauss(60.0, 6.0)),
    "slow steps that vary by a third": lambda r, i: max(10.0, r.gauss(60.0, 20.0)),
    "every hundredth step saves": lambda r, i: 30.0 if i % 100 == 0 else 1.0,
    "garbage collection": lambda r, i: 6.0 if i % 37 == 0 else 1.0,
    "first steps compile": lambda r, i: 120.0 if i < 2 else 1.0,
    "caches warm up for an hour": lambda r, i: 1.0 + 2.0 * math.exp(-i / 1000),
    "a daily wave of a twentieth": lambda r, i: 1.0 + 0.05 * math.sin(i / 3000),
}


@pytest.mark.parametrize("shape", PACES.values(), ids=PACES)
def test_no_false_alarm_at_a_steady_pace(shape: Shape) -> None:
    """20,000 steps of each shape, with four seeds: weeks of training, and no alarm."""
    for seed in range(4):
        dice = random.Random(seed)
        assert pace_changes(pace_rule(), (shape(dice, i) for i in range(20_000))) == []


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), step_s=st.floats(0.05, 100.0), spread=st.floats(0.0, 0.3))
def test_no_false_alarm_for_any_length_and_noise(seed: int, step_s: float, spread: float) -> None:
    dice = random.Random(seed)
    costs = (step_s * dice.lognormvariate(0, spread) for _ in range(3000))
    assert pace_changes(pace_rule(), costs) == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), step_s=st.floats(0.5, 30.0), slowdown=st.floats(1.35, 10.0))
def test_a_true_slowdown_is_told_within_the_window(
    seed: int, step_s: float, slowdown: float
) -> None:
    """With five per cent of noise."""
    dice = random.Random(seed)

    def steps(scale: float) -> Iterable[float]:
        while True:
            yield scale * max(0.8, min(1.2, dice.gauss(1.0, 0.05)))

    rule = pace_rule()
    now_s = 0.0
    for cost in steps(step_s):
        now_s += cost
        assert rule.add(now_s, cost) is None
        if now_s > 4 * WINDOW_S:
            break
    began_s = now_s
    for cost in steps(step_s * slowdown):
        now_s += cost
        if rule.add(now_s, cost) is Change.BEGUN:
            break
        assert now_s - began_s < 1.2 * WINDOW_S + 25 * step_s * slowdown
    assert rule.told
    for cost in steps(step_s):
        now_s += cost
        if rule.add(now_s, cost) is Change.OVER:
            break
    assert not rule.told


def test_an_interruption_costs_no_more_than_its_bucket() -> None:
    rule = pace_rule()
    assert pace_changes(rule, [1.0] * 2000) == []
    rule.interrupted()
    assert pace_changes(rule, [1.0] * 2000, start_s=10_000.0) == []
    assert rule.best == 1.0


def test_nothing_is_judged_before_a_whole_window() -> None:
    rule = pace_rule()
    assert pace_changes(rule, [1.0] * 300 + [9.0] * 40) == []
    assert rule.best is None
    assert BUCKETS + BUCKETS_SKIPPED > 300 / 30


def test_costs_that_make_no_sense_are_left_out() -> None:
    rule = pace_rule()
    for cost in (0.0, -1.0, math.nan, math.inf):
        assert rule.add(1.0, cost) is None
    assert rule.add(1.0, 1.0, 0) is None


# --- traffic -----------------------------------------------------------------------------------


class Port:
    """A counter that is looked at every thirty seconds."""

    def __init__(self) -> None:
        self.rule = TrafficRule(after_s=600.0)
        self.now_s = 0.0
        self.total = 10**12

    def run(self, seconds: float, rate: float) -> list[Change]:
        found = []
        for _ in range(int(seconds / 30)):
            self.now_s += 30
            self.total += int(rate * 30)
            change = self.rule.add(self.now_s, self.total)
            if change is not None:
                found.append(change)
        return found


def test_traffic_that_ceases_is_told_after_ten_minutes_and_so_is_its_return() -> None:
    port = Port()
    assert port.run(600, 1e9) == []
    assert port.run(570, 0) == []
    assert port.run(60, 0) == [Change.BEGUN]
    assert port.rule.idle_s(port.now_s) >= 600
    assert port.run(3600, 0) == []
    assert port.run(60, 1e9) == [Change.OVER]


def test_a_whisper_is_no_traffic() -> None:
    port = Port()
    port.run(600, 1e9)
    assert port.run(700, 1e4) == [Change.BEGUN], "keepalives of a link that is used no more"


def test_a_machine_without_traffic_never_tells() -> None:
    assert Port().run(10 * 3600, 0) == []


def test_pauses_shorter_than_ten_minutes_and_uneven_traffic_are_in_order() -> None:
    port = Port()
    for _ in range(50):
        assert port.run(300, 1e9) == []
        assert port.run(540, 0) == []
        assert port.run(120, 3e7) == []


def test_a_counter_that_begins_anew_is_no_silence() -> None:
    port = Port()
    port.run(600, 1e9)
    port.total = 0
    assert port.run(570, 0) == []
    assert port.run(60, 1e9) == []


def test_time_in_sections_does_not_count() -> None:
    port = Port()
    port.run(600, 1e9)
    for _ in range(60):
        port.rule.excuse()
        port.now_s += 30
    assert port.run(570, 0) == []
    assert port.run(90, 0) == [Change.BEGUN]
