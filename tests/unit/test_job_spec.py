"""The job spec as a model: defaults, sizes, and what survives its own JSON."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from everstep.spec.errors import format_validation_error
from everstep.spec.job import AXES, RESERVED_ENV, JobSpec, Layout


def _spec(**more: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "job", "command": "python train.py", **more})


def _refusal(**more: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        _spec(**more)
    (line,) = format_validation_error(caught.value)
    return line


def test_the_smallest_job_is_one_rank() -> None:
    spec = _spec()

    assert spec.command == ("python", "train.py")
    assert spec.world_size == 1
    assert dict.fromkeys(AXES, 1) == spec.layout.sizes(1)


@pytest.mark.parametrize("name", ["a", "a-b", "0", "x" * 62])
def test_names_that_are_dns_labels(name: str) -> None:
    assert name == _spec(name=name).name


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a_b", "a.b", "x" * 63, "a\n", "../a", "é"])
def test_names_that_are_not(name: str) -> None:
    assert _refusal(name=name).startswith("name: got ")


def test_data_parallel_takes_what_is_left() -> None:
    spec = _spec(machines=4, ranks_per_machine=8, layout={"tp": 4, "pp": 2})

    assert spec.layout.sizes(32) == {"tp": 4, "cp": 1, "ep": 1, "dp": 4, "pp": 2}


def test_sizes_that_do_not_multiply_are_refused_with_the_product() -> None:
    assert _refusal(machines=8, layout={"tp": 2, "dp": 3}) == (
        "layout: got sizes that do not fit; tp*cp*ep*dp*pp = 2*1*1*3*1 = 6, but "
        "machines*ranks_per_machine = 8"
    )


@pytest.mark.parametrize("name", [*sorted(RESERVED_ENV), "EVERSTEP_X", "TORCHELASTIC_RUN_ID"])
def test_what_everstep_sets_cannot_be_overridden(name: str) -> None:
    assert (
        f"env: got a mapping; {name} is set by Everstep for every run and cannot be "
        "overridden" == _refusal(env={name: "1"})
    )


@pytest.mark.parametrize("name", ["", "A=B", "A\0B"])
def test_names_no_variable_can_have(name: str) -> None:
    assert "is not a name an environment variable can have" in _refusal(env={name: "x"})


def test_values_of_variables_are_never_shown() -> None:
    assert "hunter2" not in _refusal(env={"PASSWORD": ["hunter2"]})
    assert "hunter2" not in _refusal(env={"A": "x", "B\0": "hunter2"})


@given(
    st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES if axis != "dp"}),
    st.integers(1, 3),
    st.permutations(AXES),
)
def test_every_layout_that_fits_survives_json(
    sizes: dict[str, int], dp: int, order: list[str]
) -> None:
    layout = Layout.model_validate({**sizes, "dp": dp, "order": order})
    world = dp
    for size in sizes.values():
        world *= size
    spec = _spec(machines=world, layout=layout.model_dump())

    assert {**sizes, "dp": dp} == spec.layout.sizes(world)
    assert spec == JobSpec.model_validate_json(spec.model_dump_json())
