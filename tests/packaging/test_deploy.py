"""What an operator installs beside the package: systemd units, Temporal's client configuration."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from temporalio.envconfig import ClientConfig, ClientConfigProfile

from tests.packaging.conftest import CHECKOUT

UNITS = sorted((CHECKOUT / "deploy" / "systemd").glob("*.service"))
TEMPORAL_TOML = CHECKOUT / "config" / "temporal.toml"
EVERSTEP = Path(sys.executable).parent / "everstep"


def unit_lines(unit: Path) -> list[str]:
    """The unit's settings, with continued lines joined and comments gone."""
    text = unit.read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_there_is_a_unit_for_each_process() -> None:
    assert [unit.stem for unit in UNITS] == ["everstep-agent", "everstep-controller"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_use_flags_that_exist(unit: Path) -> None:
    (start,) = [line for line in unit_lines(unit) if line.startswith("ExecStart=")]
    command = unit.stem.removeprefix("everstep-")
    assert f"/everstep {command} " in start
    done = subprocess.run(
        [EVERSTEP, command, "--help"],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    used = set(re.findall(r"--[a-z-]+", start))
    assert used <= set(re.findall(r"--[a-z-]+", done.stdout))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_every_variable_of_a_unit_is_explained_in_it(unit: Path) -> None:
    text = unit.read_text()
    for name in re.findall(r"\$\{(\w+)\}", text):
        assert re.search(rf"^#\s+{name}=", text, re.MULTILINE), name


def test_stopping_the_agent_leaves_ranks_alone() -> None:
    assert "KillMode=process" in unit_lines(UNITS[0])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("NOT CHECKED by systemd itself: systemd-analyze is not here")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/everstep/venv/bin/everstep", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_temporals_own_tools_read_the_configuration() -> None:
    profile = ClientConfigProfile.load(config_source=TEMPORAL_TOML, disable_env=True)
    assert profile.namespace == "default"
    assert profile.address is None, "nothing is assumed about where the server is"


def test_the_examples_in_it_are_right() -> None:
    lines = TEMPORAL_TOML.read_text().splitlines()
    bare = [re.sub(r"^# (?=\[|\w+ = \")", "", line) for line in lines]
    profiles = ClientConfig.load(config_source="\n".join(bare)).profiles
    assert profiles["default"].address == "temporal.example.com:7233"
    tls = profiles["default"].tls
    assert tls is not None
    assert tls.server_root_ca_cert == Path("/etc/everstep/temporal-ca.pem")
    assert tls.client_private_key == Path("/etc/everstep/client.key")
    assert profiles["cloud"].namespace == "training.a1b2c"
