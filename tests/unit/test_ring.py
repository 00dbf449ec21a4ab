"""The event ring: cursors, gaps, what survives a kill, damage and a full disk."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.machine import slots
from everstep.machine.ring import RING, EventRing, parse_cursor
from everstep.machine.slots import HEADER_BYTES, SlotShape
from everstep.spec.agent_api import EventKind

SMALL = SlotShape(kind=b"everstep-ring", slots=8, slot_bytes=2048)


def fill(ring: EventRing, number: int) -> None:
    for _ in range(number):
        ring.emit(EventKind.RANK_EXITED, job_id="job", run_id="r", generation=1, rank=ring.next_seq)


def sequence(ring: EventRing, after: int) -> list[int]:
    return [event.seq for event in ring.read(after, 1000).events]


def test_events_come_back_in_order_and_after_reopening(tmp_path: Path) -> None:
    ring = EventRing(tmp_path / "ring", SMALL)
    fill(ring, 5)
    ring.close()

    again = EventRing(tmp_path / "ring", SMALL)

    assert again.ring_id == ring.ring_id
    assert sequence(again, 0) == [1, 2, 3, 4, 5]
    assert again.read(0, 1000).events == ring.read(0, 1000).events
    fill(again, 1)
    assert sequence(again, 4) == [5, 6]


@given(written=st.integers(0, 30), after=st.integers(0, 40), reopen=st.booleans())
def test_a_reading_is_complete_or_says_gap(
    tmp_path_factory: pytest.TempPathFactory, written: int, after: int, reopen: bool
) -> None:
    path = tmp_path_factory.mktemp("ring") / "ring"
    ring = EventRing(path, SMALL)
    fill(ring, written)
    if reopen:
        ring.close()
        ring = EventRing(path, SMALL)

    reading = ring.read(after, 1000)

    found = [event.seq for event in reading.events]
    wanted = list(range(after + 1, written + 1))
    assert found == wanted[-8:]
    assert reading.gap == (found != wanted or after > written)
    ring.close()
    path.unlink()


@pytest.mark.parametrize(
    "text", ["", "x", "0123456789abcdef", "0123456789abcdef:", "0123456789ABCDEF:1", "../:1"]
)
def test_what_is_no_cursor(text: str) -> None:
    assert parse_cursor(text) is None


def test_a_cursor() -> None:
    assert parse_cursor("0123456789abcdef:17") == ("0123456789abcdef", 17)


def test_a_torn_slot_is_skipped_and_its_number_used_again(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    ring = EventRing(path, SMALL)
    fill(ring, 12)
    ring.close()
    # Event 13 was being written over event 5 when the process was killed.
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + (13 % 8) * SMALL.slot_bytes)
        file.write(b"\x07" * 100)

    again = EventRing(path, SMALL)

    assert again.next_seq == 13
    assert sequence(again, 0) == [6, 7, 8, 9, 10, 11, 12]
    assert again.ring_id == ring.ring_id


def test_a_damaged_slot_in_the_middle_is_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    ring = EventRing(path, SMALL)
    fill(ring, 6)
    ring.close()
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 3 * SMALL.slot_bytes + 20)
        file.write(b"\0\0\0")

    again = EventRing(path, SMALL)

    assert sequence(again, 0) == [1, 2, 4, 5, 6]
    assert again.read(0, 1000).gap
    assert not again.read(3, 1000).gap


def test_a_slot_that_reads_well_and_is_not_what_was_written_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    ring = EventRing(path, SMALL)
    fill(ring, 3)
    ring.close()
    content = path.read_bytes()
    assert content.count(b'"rank":2,') == 1
    path.write_bytes(content.replace(b'"rank":2,', b'"rank":9,'))

    assert sequence(EventRing(path, SMALL), 0) == [1, 3]


@pytest.mark.parametrize("damage", ["truncated", "header", "garbage", "longer", "other_kind"])
def test_a_file_that_is_no_ring_is_made_anew(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ring"
    ring = EventRing(path, SMALL)
    fill(ring, 3)
    ring.close()
    if damage == "truncated":
        os.truncate(path, HEADER_BYTES + 100)
    elif damage == "longer":
        os.truncate(path, SMALL.file_bytes * 2)
    elif damage == "garbage":
        path.write_bytes(random.Random(1).randbytes(SMALL.file_bytes))
    elif damage == "header":
        with path.open("r+b") as file:
            file.write(b"\xff" * 40)
    else:
        path.unlink()
        slots.SlotFile(
            path, SlotShape(kind=b"other", slots=8, slot_bytes=2048), keep_over_reboot=True
        )

    again = EventRing(path, SMALL)

    assert again.ring_id != ring.ring_id
    assert again.next_seq == 1
    assert again.problem is None
    assert path.stat().st_size == SMALL.file_bytes
    told = [line for line in capsys.readouterr().out.splitlines() if "made anew" in line]
    assert len(told) == 1
    fill(again, 2)
    again.close()
    assert sequence(EventRing(path, SMALL), 0) == [1, 2]


def test_a_ring_does_not_outlive_the_boot_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ring"
    ring = EventRing(path, SMALL)
    fill(ring, 3)
    ring.close()
    # The kernel's boot id cannot be changed for a test, so the file is made to carry another one.
    content = bytearray(path.read_bytes())
    boot = slots.machine_boot_id().encode()
    assert content.count(boot) == 1
    at = content.index(boot)
    content[at : at + 4] = b"0000" if boot[:4] != b"0000" else b"1111"
    body = bytes(content[: 16 + slots._HEADER.size - 4])
    content[len(body) : len(body) + 4] = zlib.crc32(body).to_bytes(4, "little")
    path.write_bytes(content)

    again = EventRing(path, SMALL)

    assert again.ring_id != ring.ring_id
    assert again.next_seq == 1


def test_an_event_that_is_too_large_is_cut_and_reads_the_same_from_memory_and_disk(
    tmp_path: Path,
) -> None:
    ring = EventRing(tmp_path / "ring", SMALL)
    data: dict[Any, Any] = {
        "lines": ["x" * 1000] * 50,
        "exit_code": 7,
        "deep": {"a": "y" * 5000},
        3: "three",
    }
    ring.emit(EventKind.RANK_EXITED, job_id="job", rank=3, reason="z" * 5000, data=data)
    ring.emit(EventKind.RANK_EXITED, job_id="j" * 4000, run_id="r" * 4000)
    in_memory = ring.read(0).events
    ring.close()

    assert EventRing(tmp_path / "ring", SMALL).read(0).events == in_memory
    assert in_memory[0].rank == 3
    assert in_memory[0].data["exit_code"] == 7
    assert in_memory[0].data["cut"] is True


WRITER = """
import sys
import zlib
from pathlib import Path
from typing import Any
from everstep.machine.ring import EventRing
from everstep.spec.agent_api import EventKind
ring = EventRing(Path(sys.argv[1]))
for number in range(10_000_000):
    ring.emit(EventKind.RANK_EXITED, job_id="job", rank=ring.next_seq, data={"pad": "p" * 1500})
    if number == 3000:
        print("going", flush=True)
"""


@pytest.mark.parametrize("round_number", range(3))
def test_a_writer_killed_at_any_moment_leaves_a_dense_ring(
    tmp_path: Path, round_number: int
) -> None:
    path = tmp_path / "ring"
    for _ in range(2):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "going\n"
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()

        ring = EventRing(path)
        reading = ring.read(ring.oldest_seq - 1, RING.slots)
        assert not reading.gap
        assert len(reading.events) >= RING.slots - 1
        assert all(event.rank == event.seq for event in reading.events)
        ring.close()


async def test_wait_returns_for_an_event_from_another_thread(tmp_path: Path) -> None:
    ring = EventRing(tmp_path / "ring", SMALL)
    waiting = asyncio.create_task(ring.wait(0, 60.0))
    await asyncio.sleep(0)
    await asyncio.to_thread(fill, ring, 1)

    assert await waiting
    assert not await ring.wait(1, 0.01)
