"""A part or a COMPLETE.json that is cut off, changed or of somebody else is never loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everstep_trainer import CheckpointUnreadable, WorldSizeChanged
from hypothesis import given
from hypothesis import strategies as st

from everstep.machine import checkpoints
from tests.trainer.kit import Job, same

STATE = {"weights": np.arange(40, dtype="<f4"), "note": "é", "blob": b"\0" * 9, "n": 3}
FOLDER = "step-000000000005.g000001"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of two ranks with one complete checkpoint."""
    job = Job(tmp_path_factory.mktemp("damage"), world_size=2)
    for session in job.sessions():
        assert session.save(5, STATE)
    assert (job.checkpoints / FOLDER / "COMPLETE.json").is_file()
    return job


@pytest.fixture
def load(saved: Job) -> Callable[[], Any]:
    """Load rank 1's part the way a restarted rank does."""

    def attempt() -> Any:
        return saved.session(1, generation=2, restore=FOLDER).load()

    return attempt


def part(job: Job, rank: int = 1) -> Path:
    return job.checkpoints / FOLDER / f"rank-{rank}.part"


class Changed:
    """A file with other content for a while."""

    def __init__(self, path: Path, content: bytes | None) -> None:
        self._path, self._content = path, content

    def __enter__(self) -> None:
        self._before = self._path.read_bytes()
        if self._content is None:
            self._path.unlink()
        else:
            self._path.write_bytes(self._content)

    def __exit__(self, *exc: object) -> None:
        self._path.write_bytes(self._before)


def refused(load: Callable[[], Any], path: Path) -> str:
    """The error, after a look at whether it is one line that names the file."""
    with pytest.raises(CheckpointUnreadable) as caught:
        load()
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_undamaged_it_loads(load: Callable[[], Any]) -> None:
    step, state = load()
    assert step == 5
    assert same(state, STATE)


def test_a_part_cut_off_anywhere_is_refused(saved: Job, load: Callable[[], Any]) -> None:
    whole = part(saved).read_bytes()
    for length in range(len(whole)):
        with Changed(part(saved), whole[:length]):
            refused(load, part(saved))
            # The controller's own reader must not offer it either.
            assert not checkpoints.scan(saved.checkpoints, job_id="tests").complete


def test_any_changed_byte_is_found(saved: Job, load: Callable[[], Any]) -> None:
    whole = part(saved).read_bytes()
    for at in range(len(whole)):
        with Changed(part(saved), whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]):
            refused(load, part(saved))


@given(at=st.integers(0, 10**6), value=st.binary(min_size=1, max_size=40))
def test_overwriting_finds_no_way_in(saved: Job, at: int, value: bytes) -> None:
    whole = part(saved).read_bytes()
    at %= len(whole)
    changed = whole[:at] + value + whole[at + len(value) :]
    if changed == whole:
        return
    with Changed(part(saved), changed), pytest.raises(CheckpointUnreadable):
        saved.session(1, generation=2, restore=FOLDER).load()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\0" * 4096, id="zeros"),
        pytest.param(b"EVSTCKP1", id="magic only"),
        pytest.param(b"EVSTCKP1" + struct.pack("<Q", 2**63) + b"\0" * 99, id="endless header"),
        pytest.param(b"EVSTCKP1" + struct.pack("<Q", 2) + b"[]" + b"\0" * 32, id="no object"),
        pytest.param(b"EVSTCKP1" + struct.pack("<Q", 2) + b"{}" + b"\0" * 32, id="no fields"),
        pytest.param(b"\x80\x04\x95\x0b\x00cposix\nsystem\n" * 9, id="a pickle"),
    ],
)
def test_a_file_that_is_no_part_is_refused(
    saved: Job, load: Callable[[], Any], content: bytes
) -> None:
    with Changed(part(saved), content):
        refused(load, part(saved))


def test_a_longer_part_is_refused(saved: Job, load: Callable[[], Any]) -> None:
    with Changed(part(saved), part(saved).read_bytes() + b"\0"):
        refused(load, part(saved))


def test_another_ranks_part_is_refused(saved: Job, load: Callable[[], Any]) -> None:
    with Changed(part(saved), part(saved, 0).read_bytes()):
        assert "it says rank 0, but 1 is expected" in refused(load, part(saved))


def test_a_whole_part_of_another_save_is_refused(
    saved: Job, load: Callable[[], Any], tmp_path: Path
) -> None:
    """Everything about it is right, except that it is not the one that was completed."""
    twin = Job(tmp_path / "twin", world_size=2)
    for session in twin.sessions():
        session.save(5, {**STATE, "n": 4})
    with Changed(part(saved), part(twin).read_bytes()):
        assert "COMPLETE.json has noted" in refused(load, part(saved))


def test_another_jobs_part_is_refused(saved: Job) -> None:
    other = saved.environ(1, generation=2, restore=FOLDER, EVERSTEP_JOB_ID="somebody-else")
    from everstep_trainer import Session

    with pytest.raises(CheckpointUnreadable, match="says job_id 'tests'"):
        Session(other).load()


def test_a_missing_part_is_refused(saved: Job, load: Callable[[], Any]) -> None:
    with Changed(part(saved), None):
        assert "No such file" in refused(load, part(saved))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(None, "No such file", id="missing"),
        pytest.param("{", "not JSON", id="not JSON"),
        pytest.param("[" * 100_000, "not JSON", id="bottomless"),
        pytest.param("[]", "names no parts", id="a list"),
        pytest.param({"step": 6}, "says step 6, but 5", id="another step"),
        pytest.param({"generation": 2}, "says generation 2, but 1", id="another run"),
        pytest.param({"parts": 3}, "names no parts", id="no parts"),
        pytest.param({"parts": {}}, "no part of rank 1", id="not this rank"),
        pytest.param({"parts": {"1": {"sha256": 5}}}, "no part of rank 1", id="no checksum"),
    ],
)
def test_a_broken_complete_file_is_refused(
    saved: Job, load: Callable[[], Any], change: Any, message: str
) -> None:
    path = saved.checkpoints / FOLDER / "COMPLETE.json"
    content: bytes | None
    if isinstance(change, dict):
        content = json.dumps({**json.loads(path.read_bytes()), **change}).encode()
    else:
        content = None if change is None else change.encode()
    with Changed(path, content):
        assert message in refused(load, path)


def test_another_number_of_ranks_is_said_plainly(saved: Job) -> None:
    wider = Job(saved.root, world_size=4)
    with pytest.raises(WorldSizeChanged) as caught:
        wider.session(1, generation=2, restore=FOLDER).load()
    assert "it was saved by 2 ranks and this run has 4" in str(caught.value)
