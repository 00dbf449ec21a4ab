"""The progress file: both sides agree on it, and nothing in it can harm the reader."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from everstep_trainer._progress import BLOCK_BYTES, ProgressBlock, map_block
from hypothesis import given
from hypothesis import strategies as st

from everstep.machine import progress
from everstep.machine.progress import MAGIC, PROGRESS_BYTES, ProgressReader, parse


def block(**reports: float) -> bytes:
    memory = bytearray(BLOCK_BYTES)
    writer = ProgressBlock(memory, generation=3)
    if reports:
        writer.report(**reports)  # type: ignore[arg-type]
    return bytes(memory)


def test_the_library_and_the_agent_agree() -> None:
    memory = bytearray(BLOCK_BYTES)
    writer = ProgressBlock(memory, generation=3)
    seen = parse(memory)
    assert seen is not None
    assert (seen.attached, seen.finished, seen.step, seen.step_at_ns) == (True, False, None, 0)
    assert (seen.loss, seen.grad_norm, seen.nonfinite_step, seen.steps_reported) == (
        None, None, None, 0,
    )  # fmt: skip

    writer.report(7, 0.5, 1.5)
    writer.report(8, float("nan"))
    writer.write_section(1, 1234, 60.0, "eval")
    writer.write_committed(6)
    writer.write_failed_save(8, "no space left")
    seen = parse(memory)
    assert seen is not None
    assert seen.pid == os.getpid()
    assert (seen.step, seen.steps_reported, seen.nonfinite_step) == (8, 2, 8)
    assert seen.loss is not None
    assert seen.loss != seen.loss, "a NaN stays one"
    assert seen.grad_norm is None, "it was not given with the last step"
    assert seen.step_at_ns > 0
    assert (seen.section, seen.section_entered_ns, seen.section_left_ns) == ("eval", 1234, 0)
    assert seen.section_max_s == 60.0
    assert (seen.committed_step, seen.save_failed_step) == (6, 8)
    assert seen.save_error == "no space left"

    writer.write_section(0, 5678, 0.0, "")
    writer.write_finished()
    seen = parse(memory)
    assert seen is not None
    assert (seen.section, seen.section_entered_ns, seen.section_left_ns) == (None, 0, 5678)
    assert seen.section_max_s is None
    assert seen.finished


def test_what_counts_as_moving() -> None:
    memory = bytearray(BLOCK_BYTES)
    writer = ProgressBlock(memory, generation=1)
    before = parse(memory)
    assert before is not None
    assert before.activity == progress.NO_ACTIVITY, "attaching is no activity"
    writer.write_committed(3)
    writer.write_failed_save(4, "x")
    after = parse(memory)
    assert after is not None
    assert after.activity == before.activity, "nor is what a background saver does"
    seen = {after.activity}
    changes: list[Callable[[], None]] = [
        lambda: writer.report(1),
        lambda: writer.write_section(1, 10, 0.0, "save"),
        lambda: writer.write_section(0, 20, 0.0, ""),
        writer.write_finished,
    ]
    for change in changes:
        change()
        now = parse(memory)
        assert now is not None
        assert now.activity not in seen
        seen.add(now.activity)


def test_no_progress_before_a_rank_has_attached(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.bin"
    reader = ProgressReader(path)
    assert reader.read() is None, "no file"
    progress.create(path)
    assert path.stat().st_size == PROGRESS_BYTES
    assert path.stat().st_blocks * 512 >= PROGRESS_BYTES, "no hole: that is SIGBUS on a full disk"
    assert reader.read() is None
    ProgressBlock(map_block(str(path)), generation=1).report(5)
    seen = reader.read()
    assert seen is not None
    assert seen.step == 5
    reader.close()


def test_a_block_that_is_cleared_for_writing_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.bin"
    path.write_bytes(block(step=5))
    reader = ProgressReader(path)
    first = reader.read()
    path.write_bytes(MAGIC + bytes(BLOCK_BYTES - len(MAGIC)))  # what pack_into does first
    assert reader.read() is first
    assert reader.read(final=True) is first
    reader.close()


def test_a_block_that_is_being_written_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.bin"
    path.write_bytes(block(step=5))
    reader = ProgressReader(path)
    first = reader.read()
    assert first is not None
    torn = bytearray(block(step=6))
    seq = int.from_bytes(torn[8:16], "little")
    struct.pack_into("<Q", torn, 8, seq + 1)
    path.write_bytes(torn)
    assert reader.read() is first, "the last whole block stands"
    last = reader.read(final=True)
    assert last is not None
    assert last.step == 6, "a dead writer will not finish it"
    reader.close()


def test_a_reader_never_sees_two_reports_mixed(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.bin"
    progress.create(path)
    program = (
        "import time\n"
        "from everstep_trainer._progress import ProgressBlock, map_block\n"
        f"block = ProgressBlock(map_block({str(path)!r}), 1)\n"
        "print('ready', flush=True)\n"
        "for step in range(10**9):\n"
        "    block.report(step, float(step), float(step))\n"
        "    if step % 4 == 0: time.sleep(0)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "trainer")}
    reader = ProgressReader(path)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            steps: set[int] = set()
            while len(steps) < 500:
                seen = reader.read()
                if seen is not None and seen.step is not None:
                    assert seen.loss == seen.grad_norm == float(seen.step)
                    assert seen.steps_reported == seen.step + 1
                    steps.add(seen.step)
        finally:
            writer.kill()
    reader.close()


def test_a_file_that_a_rank_cuts_or_deletes_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.bin"
    path.write_bytes(block(step=5))
    reader = ProgressReader(path)
    before = reader.read()
    assert before is not None
    path.write_bytes(b"")
    assert reader.read() is before, "what was seen last stands"
    path.write_bytes(MAGIC)
    assert reader.read(final=True) is before
    path.unlink()
    assert reader.read() is before
    reader.close()


@given(st.binary(min_size=440, max_size=440))
def test_any_content_can_be_read(content: bytes) -> None:
    seen = parse(MAGIC + content[8:])
    assert seen is not None
    for text in (seen.section, seen.save_error):
        assert text is None or (text.isprintable() and len(text) <= 256)
    assert seen.section_max_s is None or seen.section_max_s > 0
    assert seen.step is None or seen.step >= 0


@given(st.binary(max_size=600))
def test_foreign_content_is_no_progress(content: bytes) -> None:
    assert parse(content) is None or content.startswith(MAGIC)
