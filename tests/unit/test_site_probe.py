"""A site's own checks: files in a folder, where what cannot be read is unknown and never faulty."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from everstep.decide.words import Action, Confidence, Symptom, Verdict
from everstep.machine.probes.base import Probe
from everstep.machine.probes.site import BYTES_MAX, FILES_MAX, SiteProbe

FAULTY = {
    "verdict": "faulty",
    "reason": "the pump of rack 7 stands still",
    "symptom": "gpu_unavailable",
    "action": "evict_machine",
    "rule": "pump",
    "values": {"flow_l_per_s": 0.0},
}


def put(folder: Path, name: str, content: Any) -> None:
    folder.mkdir(exist_ok=True)
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / f"{name}.json").write_bytes(raw)


def test_a_folder_that_is_not_there_or_empty_says_nothing(tmp_path: Path) -> None:
    probe: Probe = SiteProbe(tmp_path / "checks")
    assert list(probe.look(0)) == []
    (tmp_path / "checks").mkdir()
    assert list(probe.look(0)) == []


def test_a_file_is_an_observation_until_it_is_gone(tmp_path: Path) -> None:
    probe = SiteProbe(tmp_path)
    put(tmp_path, "cooling", FAULTY)
    (seen,) = probe.look(0)
    assert (seen.probe, seen.target, seen.rule) == ("site", "cooling", "pump")
    assert (seen.verdict, seen.confidence) == (Verdict.FAULTY, Confidence.HIGH)
    assert (seen.symptom, seen.action) == (Symptom.GPU_UNAVAILABLE, Action.EVICT_MACHINE)
    assert seen.values == {"flow_l_per_s": 0.0}
    (tmp_path / "cooling.json").unlink()
    assert list(probe.look(2)) == []


def test_little_is_enough_and_evicts_nobody(tmp_path: Path) -> None:
    put(tmp_path, "fan", {"verdict": "faulty", "reason": "fan 2 is slow"})
    put(tmp_path, "psu", {"verdict": "healthy"})
    fan, psu = SiteProbe(tmp_path).look(0)
    assert (fan.symptom, fan.action, fan.rule) == (Symptom.UNKNOWN, Action.WARN_ONLY, "site_fan")
    assert psu.verdict is Verdict.HEALTHY


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ([], "must be an object"),
        ({"reason": "x"}, "verdict is missing"),
        ({"verdict": "broken"}, "verdict: 'broken' is none of healthy, faulty, unknown"),
        (FAULTY | {"action": "evict"}, "action: 'evict' is none of evict_machine"),
        (FAULTY | {"symptom": 7}, "symptom: '7' is none of"),
        (b" " * (BYTES_MAX + 1), "more than"),
    ],
)
def test_what_cannot_be_read_is_unknown(tmp_path: Path, content: Any, said: str) -> None:
    put(tmp_path, "check", content)
    (seen,) = SiteProbe(tmp_path).look(0)
    assert seen.verdict is Verdict.UNKNOWN
    assert said in seen.reason


def test_a_pipe_or_a_folder_does_not_hold_it_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    assert [o.verdict for o in SiteProbe(tmp_path).look(0)] == [Verdict.UNKNOWN] * 2


def test_so_many_files_are_read_and_no_more(tmp_path: Path) -> None:
    for n in range(FILES_MAX + 5):
        put(tmp_path, f"c{n:03}", FAULTY)
    seen = SiteProbe(tmp_path).look(0)
    assert len(seen) == FILES_MAX + 1
    assert seen[-1].verdict is Verdict.UNKNOWN
