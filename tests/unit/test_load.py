"""Files of people: every bad one gives one line, every good one is found, merged and hashed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from everstep.spec import load
from everstep.spec.errors import SpecError, format_validation_error
from everstep.spec.job import JobSpec
from everstep.spec.policy import FleetOnly, Policy
from everstep.spec.yaml_text import locator, plain_data
from tests.unit.bad_inputs import BAD_POLICIES, BAD_SPECS, BadInput

ROOT = Path(__file__).parents[2]


def _write(folder: Path, content: str | bytes) -> Path:
    path = folder / "input.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _line(read: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        read(path)
    (line,) = caught.value.lines
    assert line == str(caught.value)
    return line


@pytest.mark.parametrize("bad", BAD_SPECS, ids=lambda bad: bad.name)
def test_a_bad_spec_gives_one_line(bad: BadInput, tmp_path: Path) -> None:
    path = _write(tmp_path, bad.content)

    assert bad.line.replace("{file}", str(path)) == _line(load.load_job_spec, path)


@pytest.mark.parametrize("bad", BAD_POLICIES, ids=lambda bad: bad.name)
def test_a_bad_policy_gives_one_line(bad: BadInput, tmp_path: Path) -> None:
    path = _write(tmp_path, bad.content)

    assert bad.line.replace("{file}", str(path)) == _line(load.load_policy, path)


def test_the_tables_are_long_enough_and_show_no_secrets() -> None:
    lines = [bad.line for bad in (*BAD_SPECS, *BAD_POLICIES)]

    assert len(lines) >= 25
    assert len({bad.name for bad in BAD_SPECS}) == len(BAD_SPECS)
    assert not [line for line in lines if "12345" in line or "hooks.example" in line]


def test_all_problems_of_a_file_are_named_in_the_order_of_its_lines(tmp_path: Path) -> None:
    path = _write(tmp_path, "name: NO\nmachines: 0\ncommand: x\nenv: 5\n")
    with pytest.raises(SpecError) as caught:
        load.load_job_spec(path)

    assert [problem.line for problem in caught.value.problems] == [1, 2, 4]


@pytest.mark.parametrize("read", [load.load_job_spec, load.load_policy])
def test_what_is_no_readable_file(read: Callable[[Path], Any], tmp_path: Path) -> None:
    absent, device = tmp_path / "absent", Path("/dev/zero")

    assert f"{absent}: got no such file; the path of a YAML or JSON file is needed" == _line(
        read, absent
    )
    assert f"{tmp_path}: got a directory; a YAML or JSON file is needed" == _line(read, tmp_path)
    assert f"{device}: got a device or socket; a YAML or JSON file is needed" == _line(read, device)
    assert "got a file that cannot be read" in _line(read, Path("a\0b"))
    assert "got a file that cannot be read; File name too long" in _line(read, Path("x" * 5000))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = _write(tmp_path, "name: job\n")
    path.chmod(0)

    assert f"{path}: got a file that may not be read; give this user read permission" == _line(
        load.load_job_spec, path
    )


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    path = _write(tmp_path, b"\xef\xbb\xbfname: job\ncommand: x\n")

    assert load.load_job_spec(path).name == "job"


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "config" / "jobs").glob("*.yaml")), *sorted(ROOT.glob("examples/*/job.yaml"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_examples_load(path: Path) -> None:
    spec = load.load_job_spec(path)

    assert spec == JobSpec.model_validate_json(spec.model_dump_json())


def test_there_are_examples() -> None:
    assert len(list((ROOT / "config" / "jobs").glob("*.yaml"))) >= 3


def test_json_is_accepted_with_json_meaning(tmp_path: Path) -> None:
    data = {"name": "job", "command": ["a/b", "\u00e9\U0001f600"], "env": {"A": "x\ty"}}
    path = _write(tmp_path, json.dumps(data, indent="\t").replace("/", "\\/"))
    spec = load.load_job_spec(path)

    assert spec.command == ("a/b", "\u00e9\U0001f600")
    assert spec.env == {"A": "x\ty"}


def test_yaml_means_what_yaml_1_2_says() -> None:
    text = "a: yes\nb: &x true\nc: *x\nd: 0x10\ne: 1e3\nf: ~\ng: [1, 'x']\nh: {i: 'on'}\n"

    assert plain_data(text) == {
        "a": "yes",
        "b": True,
        "c": True,
        "d": 16,
        "e": 1000.0,
        "f": None,
        "g": [1, "x"],
        "h": {"i": "on"},
    }


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.text(max_size=20)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_json_text_is_its_own_data(data: Any) -> None:
    document = {"data": data}

    assert document == plain_data(json.dumps(document))


@given(
    st.one_of(st.text(max_size=200), st.text(alphabet="{}[]:,-&*!|>'\"#%@ \n\tab01", max_size=60))
)
def test_any_text_is_data_or_one_clear_problem(text: str) -> None:
    try:
        data = plain_data(text, "file")
    except SpecError as error:
        (line,) = error.lines
        assert line.startswith("file")
        assert "; " in line
        assert line.isprintable()
    else:
        assert data == json.loads(json.dumps(data)) or data != data  # noqa: PLR0124 - nan


def test_the_locator_finds_keys_and_falls_back_to_parents() -> None:
    locate = locator("a:\n  b: [1,\n    2]\nc: {d: 1}\n")

    assert tuple(
        locate(loc) for loc in (("a",), ("a", "b"), ("a", "b", 1), ("c", "d"), ("c", "missing"))
    ) == (1, 2, 3, 4, 4)
    assert locator("a: [")(("a",)) is None


# --- policies


def test_a_partial_policy_is_laid_over_the_default(tmp_path: Path) -> None:
    default = load.load_policy(None, environ={})
    path = _write(tmp_path, "detection:\n  hang_min: 5m\n")
    loaded = load.load_policy(path, environ={})
    expected = default.policy.model_dump()
    expected["detection"]["hang_min"] = loaded.policy.detection.hang_min

    assert loaded.policy.detection.hang_min.total_seconds() == 300
    assert expected == loaded.policy.model_dump()
    assert default.hash != loaded.hash
    assert (str(path), "detection:\n  hang_min: 5m\n") == (loaded.source, loaded.text)


def test_the_hash_is_of_the_values_and_not_of_the_text(tmp_path: Path) -> None:
    default = load.load_policy(None, environ={})
    same = _write(tmp_path, "# nothing new\ndetection:\n  hang_min: 1m0s\n")

    assert default.hash == load.load_policy(same, environ={}).hash
    assert len(default.hash) == 16
    assert int(default.hash, 16) >= 0


def test_a_jobs_overrides_make_its_own_snapshot() -> None:
    loaded = load.load_policy(None, environ={})
    plain = load.snapshot_for_job(loaded, {})
    own = load.snapshot_for_job(loaded, {"ladder": {"stable_after": "1m"}})

    assert (loaded.hash, loaded.source) == (plain.hash, plain.source)
    assert plain.hash != own.hash
    assert own.policy.ladder.stable_after.total_seconds() == 60
    assert f"{loaded.source} with the job's overrides" == own.source
    assert own == type(own).model_validate_json(own.model_dump_json())


def test_bad_overrides_are_refused_under_their_key() -> None:
    loaded = load.load_policy(None, environ={})
    with pytest.raises(SpecError) as caught:
        load.snapshot_for_job(loaded, {"ladder": {"stable_after": 5}})

    assert caught.value.lines == (
        "policy.ladder.stable_after: got 5; a duration needs a unit: write 5s, 5m or 5h",
    )


def _keys_of_the_fleet() -> list[tuple[str, str]]:
    """Every (section, key) that is marked, by itself or with its section."""

    def marked(field: FieldInfo) -> bool:
        return any(isinstance(mark, FleetOnly) for mark in field.metadata)

    return [
        (section, key)
        for section, above in Policy.model_fields.items()
        for key, field in above.annotation.model_fields.items()  # type: ignore[union-attr]
        if marked(above) or marked(field)
    ]


def test_the_page_lists_what_is_the_fleets_alone() -> None:
    page = (ROOT / "docs" / "policy.md").read_text()
    lines = re.findall(r"^- `(\w+)\.(\w+|\*)`$", page, re.MULTILINE)
    whole = load.load_policy(None, environ={}).policy.model_dump(mode="json")
    listed = [
        (section, key)
        for section, keys in lines
        for key in (whole[section] if keys == "*" else [keys])
    ]

    assert _keys_of_the_fleet() == listed
    assert ("machines", "register_interval") in listed


def test_a_job_may_override_every_key_but_the_fleets() -> None:
    """Each with the default's own value: nothing but the mark decides."""
    loaded = load.load_policy(None, environ={})
    marked = _keys_of_the_fleet()
    for section, values in loaded.policy.model_dump(mode="json").items():
        for key, value in values.items():
            over = {section: {key: value}}
            file = load.policy_from_text(json.dumps(over), "fleet.yaml")
            assert loaded.hash == file.hash
            if (section, key) in marked:
                with pytest.raises(SpecError, match="is the fleet's") as caught:
                    load.snapshot_for_job(loaded, over)
                (line,) = caught.value.lines
                assert line.startswith(f"policy.{section}.{key}: got ")
                with pytest.raises(ValidationError, match="is the fleet's"):
                    JobSpec.model_validate({"name": "job", "command": "x", "policy": over})
            else:
                assert loaded.hash == load.snapshot_for_job(loaded, over).hash


def test_a_section_of_the_fleet_that_a_job_leaves_empty_overrides_nothing() -> None:
    loaded = load.load_policy(None, environ={})

    assert loaded.hash == load.snapshot_for_job(loaded, {"retention": {}, "notify": {}}).hash


def test_order_of_lookup(tmp_path: Path) -> None:
    chosen, flag = tmp_path / "chosen", tmp_path / "flag.yaml"
    chosen.mkdir()
    environ = {load.CONFIG_ENV: str(chosen)}
    checkout = load.checkout_config()
    assert checkout is not None

    assert flag == load.find_config("policy.yaml", flag=flag, environ=environ)
    assert checkout / "policy.yaml" == load.find_config("policy.yaml", environ=environ)
    (chosen / "policy.yaml").write_text("ladder: {stable_after: 1m}\n")
    assert chosen / "policy.yaml" == load.find_config("policy.yaml", environ=environ)
    assert checkout / "policy.yaml" == load.find_config("policy.yaml", environ={})


def test_the_working_directory_is_never_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "policy.yaml").write_text("not: ours\n")
    before = load.load_policy(None, environ={})
    monkeypatch.chdir(tmp_path)

    assert before == load.load_policy(None, environ={})


def test_a_config_directory_that_is_not_there_is_said() -> None:
    with pytest.raises(SpecError) as caught:
        load.find_config("policy.yaml", environ={load.CONFIG_ENV: "/no/such"})

    assert caught.value.lines == (
        "EVERSTEP_CONFIG: got '/no/such'; the directory that holds policy.yaml is needed",
    )


# --- input without a file


def test_workflow_input_is_blamed_by_key_alone() -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate({"name": "job", "machnies": 2, "command": ["x"], "env": {"A": 1}})

    lines = format_validation_error(caught.value)

    assert len(lines) == 2
    lines = tuple(sorted(lines, reverse=True))
    assert lines[0].startswith("machnies: got a key that is not known; did you mean machines? ")
    assert lines[1].startswith("env.A: got a value that is not shown; text is needed ")
    (first, *_) = format_validation_error(caught.value, "input", "name: job\nmachnies: 2\n")
    assert first.startswith("input:")


def test_input_that_is_no_mapping_is_said_too() -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate([1, 2])

    assert format_validation_error(caught.value) == ("got a list of 2; a mapping is needed",)


def test_the_default_policy_is_valid_yaml_for_others_too() -> None:
    text = (ROOT / "config" / "policy.yaml").read_text()

    assert plain_data(text) == YAML(typ="safe", pure=True).load(text)


def test_directories_that_begin_with_a_dot_are_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "jobs" / "job.yaml"
    path.parent.mkdir()
    path.write_text(
        "name: n\ncommand: c\ncode: ../src\nworking_dir: .\ncheckpoint: {dir: ./ckpt}\n",
        encoding="utf-8",
    )
    spec = load.load_job_spec(path)
    assert spec.code == str(tmp_path / "src")
    assert spec.working_dir == str(path.parent)
    assert spec.checkpoint.dir == str(path.parent / "ckpt")
