"""The policy file: every value is there, tagged and documented, and survives JSON."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from everstep.spec.base import Duration
from everstep.spec.load import load_policy, snapshot_for_job
from everstep.spec.policy import KEYS_SINCE_HISTORIES, Policy, PolicySnapshot
from scripts.render_docs import policy_leaves

TAG = re.compile(r"^(paper: \S.*\([\d.]+\)|ours: \S.{9,})$")
LEAVES = policy_leaves()


@pytest.mark.parametrize("key, default, tag, meaning", LEAVES, ids=lambda value: str(value)[:40])
def test_every_value_is_tagged_and_explained(
    key: str, default: str, tag: str, meaning: str
) -> None:
    assert TAG.match(tag), f"{key}: {tag!r} is neither `paper: where (section)` nor `ours: reason`"
    assert default
    assert len(meaning) > 20


def test_every_key_of_the_model_is_in_the_file() -> None:
    keys = {
        f"{section}.{key}"
        for section, field in Policy.model_fields.items()
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    }

    assert keys == {key for key, *_ in LEAVES}


def test_the_default_policy_loads_and_survives_json() -> None:
    policy = load_policy(None, environ={}).policy

    assert policy == Policy.model_validate_json(policy.model_dump_json())
    assert policy == Policy.model_validate(policy.model_dump(mode="json"))


@given(st.integers(0, 400 * 86_400_000))
def test_durations_survive_their_own_text(milliseconds: int) -> None:
    durations: TypeAdapter[timedelta] = TypeAdapter(Duration)
    value = timedelta(milliseconds=milliseconds)

    assert value == durations.validate_json(durations.dump_json(value))


@pytest.mark.parametrize(
    "text, seconds",
    [("500ms", 0.5), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("720h", 2_592_000), ("0s", 0)],
)
def test_durations_are_written_with_units(text: str, seconds: float) -> None:
    assert seconds == TypeAdapter(Duration).validate_python(text).total_seconds()


def test_no_document_names_a_default_that_is_not_the_policys() -> None:
    """The page is generated, and its example line is what the program says."""
    page = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()

    for key, default, _, _ in LEAVES:
        assert f"| `{key}` | `{default}` |" in page


@pytest.mark.parametrize("text", ["1us", "5m-3s", "5", "", "soon", "1.5.5s", "-1s", "1mo"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValidationError, match="a duration "):
        TypeAdapter(Duration).validate_python(text)


def test_a_snapshot_of_before_a_key_existed_is_read() -> None:
    """Jobs run for months: their histories hold policies of every version since."""
    loaded = load_policy(None, environ={})
    today = snapshot_for_job(loaded, {})
    recorded = today.model_dump(mode="json")
    for section, keys in KEYS_SINCE_HISTORIES.items():
        for key in keys:
            del recorded["policy"][section][key]
        if not recorded["policy"][section]:
            del recorded["policy"][section]

    read = PolicySnapshot.model_validate(recorded)

    assert read.hash == today.hash
    assert read.policy.detection == today.policy.detection
    for section, keys in KEYS_SINCE_HISTORIES.items():
        held = getattr(read.policy, section).model_dump(mode="json")
        assert {key: held[key] for key in keys} == keys


def test_what_a_snapshot_holds_is_not_replaced_by_the_reading_of_old_ones() -> None:
    recorded = snapshot_for_job(load_policy(None, environ={}), {}).model_dump(mode="json")
    del recorded["policy"]["probes"]["gpus_expected"]
    recorded["policy"]["probes"]["host_interval"] = "7s"

    read = PolicySnapshot.model_validate(recorded)

    assert read.policy.probes.host_interval == timedelta(seconds=7)
    assert read.policy.probes.gpus_expected == 0
