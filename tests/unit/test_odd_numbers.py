"""What scripts print in place of numbers, from the line to the last rule: nothing may fail."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.machine.framework_log import LineParser, LogStep
from tests.unit.test_log_monitor import Script

MEGATRON = (
    " iteration {step}/ 500 | elapsed time per iteration (ms): {} | "
    "throughput per GPU (TFLOP/s/GPU): {} | lm loss: {} | grad norm: {} |"
)
FORMS = (
    MEGATRON,
    "step: {step}  loss: {}  grad_norm: {}  tps: {}  mfu: {}%",
    "steps: {step} loss: {} iter time (s): {}",
    "step {step} loss {} grad_norm {} mfu {} tflops {}",
    " 10%|#  | {step}/500 [00:01<00:05, {}it/s, loss={}]",
)
ODD = (
    "0",
    "0.0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "-1",
    "1e308",
    "5e-324",
    "1e-320",
    "",
    "-",
    "9" * 30,
)


@pytest.mark.parametrize("speed", ["0.0", "-1.0", "nan", "inf"])
def test_a_speed_that_is_none_is_not_taken(speed: str) -> None:
    told = LineParser().feed(MEGATRON.format("20.0", speed, "2.5", "0.5", step=7))
    assert isinstance(told, LogStep)
    assert (told.step, told.step_time_s, told.speed_kind, told.speed) == (7, 0.02, None, None)


@settings(max_examples=60)
@given(
    form=st.sampled_from(FORMS),
    lines=st.lists(
        st.tuples(
            st.sampled_from((0.0, 1.0, 60.0, 700.0)),
            st.lists(st.sampled_from(ODD) | st.just("2.5"), min_size=5, max_size=5),
        ),
        max_size=60,
    ),
)
def test_no_number_harms_a_rule(form: str, lines: list[tuple[float, list[str]]]) -> None:
    parser, script = LineParser(), Script(ranks=1)
    for step, (pause_s, numbers) in enumerate(lines, 1):
        script.wait(pause_s)
        told = parser.feed(form.format(*numbers, step=step))
        if isinstance(told, LogStep):
            script.prints(**dataclasses.asdict(told))
        script.look()
    for fact in script.found:
        assert len(json.dumps(fact.data, allow_nan=False)) < 1500
