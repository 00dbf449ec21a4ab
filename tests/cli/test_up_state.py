"""The state directory of ``up``: everything that can be wrong with it is one line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from everstep.errors import ConfigurationProblem
from workers.up_state import FORMAT, STATE_FILE, StateDir, port_is_free


def test_a_state_is_made_and_remembers_its_ports(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state"
    first = StateDir.open(path)
    port = first.port("temporal")
    first.close()
    second = StateDir.open(path)
    assert second.port("temporal") == port
    second.close()
    assert path.stat().st_mode & 0o777 == 0o700


def test_ports_differ_and_lie_below_those_of_outgoing_connections(tmp_path: Path) -> None:
    state = StateDir.open(tmp_path)
    ports = [state.port(f"part-{n}") for n in range(50)]
    state.close()
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    lowest = int(text.split()[0])
    assert len(set(ports)) == 50
    assert lowest < 17_000 or max(ports) < lowest


def test_a_remembered_port_that_is_taken_is_replaced(tmp_path: Path) -> None:
    state = StateDir.open(tmp_path)
    port = state.port("temporal")
    with socket.create_server(("127.0.0.1", port)):
        assert not port_is_free(port)
        assert state.port("temporal") != port
    state.close()


def test_a_port_that_was_asked_for_and_is_taken_is_refused(tmp_path: Path) -> None:
    state = StateDir.open(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationProblem, match=f"port {port} .*ui.* taken"):
            state.port("ui", port)
    state.close()


def test_two_supervisors_cannot_share_a_state(tmp_path: Path) -> None:
    state = StateDir.open(tmp_path)
    with pytest.raises(ConfigurationProblem, match=f"process {os.getpid()}"):
        StateDir.open(tmp_path)
    state.close()
    StateDir.open(tmp_path).close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "corrupted"),
        ("[]", "corrupted"),
        ("{}", "corrupted"),
        (json.dumps({"format": 1, "ports": {"x": "y"}}), "corrupted"),
        (json.dumps({"format": 1, "ports": [1]}), "corrupted"),
        (json.dumps({"format": FORMAT + 1, "ports": {}}), "newer Everstep"),
    ],
)
def test_a_state_that_is_not_ours_to_read_is_refused(
    tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(ConfigurationProblem, match=said) as caught:
        StateDir.open(tmp_path)
    assert str(tmp_path / STATE_FILE) in str(caught.value)
    (tmp_path / STATE_FILE).unlink()
    StateDir.open(tmp_path).close()  # a refused state is not left locked


def test_a_state_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    for wrong in (path, path / "below"):
        with pytest.raises(ConfigurationProblem, match="file"):
            StateDir.open(wrong)


def test_a_state_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigurationProblem, match="/proc/everstep"):
        StateDir.open(Path("/proc/everstep"))


@pytest.mark.root
def test_a_full_disk_is_said_to_be_full(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk to fill")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "everstep-test", str(disk)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        with pytest.raises(OSError, match="28"):
            (disk / "ballast").write_bytes(bytes(1 << 20))
        with pytest.raises(ConfigurationProblem, match="disk is full"):
            StateDir.open(disk / "state")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
