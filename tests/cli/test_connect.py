"""Where things are: who wins, and what is said about the winner."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from everstep.connect import UP_FILE, UpFile, find_places
from everstep.errors import ConfigurationProblem
from everstep.spec.errors import SpecError


def up_file(**changes: object) -> UpFile:
    values: dict[str, object] = {
        "temporal": "127.0.0.1:1111",
        "namespace": "default",
        "ui": "http://127.0.0.1:2222",
        "ledger": "sqlite:////x/ledger.db",
        "secrets": "/x/secrets",
        **changes,
    }
    return UpFile(**values)  # type: ignore[arg-type]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    config = tmp_path / "config"
    config.mkdir()
    return {"HOME": str(tmp_path), "EVERSTEP_CONFIG": str(config)}


def state_of(env: dict[str, str]) -> Path:
    state = Path(env["HOME"]) / ".local/state/everstep"
    state.mkdir(parents=True)
    return state


def test_nothing_is_known_where_nobody_says_anything(env: dict[str, str]) -> None:
    (Path(env["EVERSTEP_CONFIG"]) / "temporal.toml").write_text("")
    places = find_places(env=env)
    assert places.temporal is None
    assert places.namespace.value == "default"
    with pytest.raises(ConfigurationProblem, match="everstep up"):
        places.require_ledger()
    with pytest.raises(ConfigurationProblem, match="EVERSTEP_SECRETS_DIR"):
        places.require_secrets()


def test_the_server_is_looked_up_in_the_documented_order(env: dict[str, str]) -> None:
    toml = Path(env["EVERSTEP_CONFIG"]) / "temporal.toml"
    toml.write_text('[profile.default]\naddress = "toml:1"\nnamespace = "n"\n')
    found = [find_places(env=env).temporal]
    up_file(temporal="up:1").write(state_of(env))
    found.append(find_places(env=env).temporal)
    env["TEMPORAL_ADDRESS"] = "theirs:1"
    found.append(find_places(env=env).temporal)
    env["EVERSTEP_TEMPORAL_ADDRESS"] = "ours:1"
    found.append(find_places(env=env).temporal)
    found.append(find_places(env=env, temporal="flag:1").temporal)
    values = [where.value for where in found if where is not None]
    assert values == ["toml:1", "up:1", "theirs:1", "ours:1", "flag:1"]
    sources = [where.source for where in found if where is not None]
    assert sources[0] == str(toml)
    assert sources[1].endswith(UP_FILE)
    assert sources[2:] == ["TEMPORAL_ADDRESS", "EVERSTEP_TEMPORAL_ADDRESS", "--temporal"]


def test_ledger_and_secrets_are_looked_up_apart_from_the_server(env: dict[str, str]) -> None:
    up_file().write(state_of(env))
    env["EVERSTEP_LEDGER_URL"] = "postgresql://db/ledger"
    places = find_places(env=env, secrets="/run/secrets")
    assert places.require_ledger() == "postgresql://db/ledger"
    assert str(places.require_secrets()) == "/run/secrets"
    assert places.temporal is not None
    assert places.temporal.value == "127.0.0.1:1111"


def test_the_state_directory_comes_from_flag_then_variable_then_xdg(
    env: dict[str, str], tmp_path: Path
) -> None:
    env["XDG_STATE_HOME"] = "relative/values/do/not/count"
    assert find_places(env=env).state == tmp_path / ".local/state/everstep"
    env["XDG_STATE_HOME"] = str(tmp_path / "xdg")
    assert find_places(env=env).state == tmp_path / "xdg/everstep"
    env["EVERSTEP_STATE"] = str(tmp_path / "variable")
    assert find_places(env=env).state == tmp_path / "variable"
    assert find_places(env=env, state=tmp_path / "flag").state == tmp_path / "flag"


def test_a_server_that_ended_is_said_to_have_ended(env: dict[str, str]) -> None:
    state = state_of(env)
    up_file(pid=None).write(state)
    assert "has ended" in find_places(env=env).describe_temporal()
    up_file(pid=os.getpid()).write(state)
    assert "has ended" not in find_places(env=env).describe_temporal()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"temporal": 3}', json.dumps({"temporal": "x", "namespace": None})],
)
def test_a_damaged_up_file_is_named_with_what_to_do(env: dict[str, str], content: str) -> None:
    path = state_of(env) / UP_FILE
    path.write_text(content)
    with pytest.raises(ConfigurationProblem, match="delete it") as caught:
        find_places(env=env)
    assert str(path) in str(caught.value)


def test_a_state_directory_that_is_a_file_is_said_to_be_one(
    env: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigurationProblem, match="is a file"):
        find_places(env=env, state=path)


def test_a_config_directory_that_is_not_there_is_refused(env: dict[str, str]) -> None:
    env["EVERSTEP_CONFIG"] = "/nowhere/at/all"
    with pytest.raises(SpecError, match="EVERSTEP_CONFIG"):
        find_places(env=env)


def test_toml_that_cannot_be_read_is_named(env: dict[str, str]) -> None:
    path = Path(env["EVERSTEP_CONFIG"]) / "temporal.toml"
    path.write_text("not = = toml")
    with pytest.raises(ConfigurationProblem, match=r"temporal\.toml"):
        find_places(env=env)
