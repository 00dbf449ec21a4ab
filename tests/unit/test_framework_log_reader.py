"""Logs as they grow on a disk: in pieces, endless, binary, truncated, and with a bad pattern."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.machine import framework_log_reader as reader
from everstep.machine.framework_log_reader import LogFollower, LogReading, RunLogs

LINE = b"step %d loss %.3f\n"


def write(path: Path, *parts: bytes) -> None:
    with path.open("ab") as file:
        for part in parts:
            file.write(part)


def follow(path: Path, **options: object) -> LogFollower:
    path.touch()
    return LogFollower(path, **options)  # type: ignore[arg-type]


def look(follower: LogFollower, share: int = 1 << 20, **options: bool) -> LogReading:
    return follower.look(share, 10_000, **options)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


def test_a_log_that_grows(log: Path) -> None:
    follower = follow(log)
    assert look(follower) == LogReading()
    write(log, LINE % (1, 3.0), b"noise\n", LINE % (2, 2.5))
    told = look(follower)
    assert (told.step, told.loss, told.steps) == (2, 2.5, 2)
    assert [step.step for step in told.fresh] == [1, 2]
    again = look(follower)
    assert (again.step, again.position, again.fresh) == (2, told.position, ())
    write(log, b"step 3 los")
    assert look(follower).step == 2, "the line is not whole yet"
    write(log, b"s 2.0\n")
    assert look(follower).step == 3


def test_a_bar_never_ends_its_line(log: Path) -> None:
    follower = follow(log)
    for step in range(1, 4):
        write(log, b"\r%d%%|#  | %d/100 [00:01<00:05, 1.0it/s, loss=2.0]" % (step, step))
    assert look(follower).step == 2
    assert look(follower, final=True).step == 3, "what a dead rank has written is whole"


@pytest.mark.parametrize(
    "noise",
    [
        bytes(300_000),
        b"x" * 300_000,
        b"step 9 loss 9.0 " * 20_000,
        bytes(range(256)) * 500,
        b"\r" * 100_000,
        "é".encode("latin-1") * 3000,
    ],
    ids=["holes", "one endless line", "one endless telling line", "binary", "returns", "latin-1"],
)
def test_what_is_not_text_is_skipped(log: Path, noise: bytes) -> None:
    follower = follow(log)
    write(log, LINE % (1, 3.0), noise, b"\n", LINE % (2, 2.0))
    for _ in range(40):
        look(follower, share=32 * 1024)
    assert follower.reading.step == 2
    assert follower.reading.steps == 2
    assert len(follower._held) <= reader.LINE_BYTES_MAX


@pytest.mark.parametrize("share", [1, 7, 64, 5000])
def test_positions_do_not_depend_on_how_it_was_read(log: Path, share: int) -> None:
    """The next agent finds the same line at the same place."""
    text = b"\r\nnoise\r" + LINE % (1, 3.0) + b"y" * 20_000 + b"\n" + LINE % (2, 2.0) + b"tail"
    follower = follow(log)
    for start in range(0, len(text), share):
        write(log, text[start : start + share])
        look(follower, share)
    whole = look(follow(log))
    assert (follower.reading.position, follower.reading.step) == (whole.position, 2)
    assert look(follow(log, fresh=False)).position == whole.position


def test_a_truncated_log_begins_anew_and_positions_only_rise(log: Path) -> None:
    follower = follow(log)
    write(log, LINE % (1, 3.0), LINE % (2, 2.0))
    before = look(follower)
    log.write_bytes(LINE % (3, 1.0))
    after = look(follower)
    assert after.step == 3
    assert after.position > before.position
    assert after.bytes_seen > before.bytes_seen


def test_a_log_that_was_moved_away_is_followed(log: Path, tmp_path: Path) -> None:
    follower = follow(log)
    write(log, LINE % (1, 3.0))
    look(follower)
    moved = log.rename(tmp_path / "rank-0.log.1")
    write(moved, LINE % (2, 2.0))
    assert look(follower).step == 2


def test_who_writes_too_fast_is_caught_up_with_at_the_end(log: Path) -> None:
    follower = follow(log)
    write(log, *(LINE % (step, 1.0) for step in range(20_000)))
    told = look(follower, share=1000)
    assert told.step == 19_999
    assert follower.skipped_bytes > 0


def test_a_look_reads_no_more_than_its_share(log: Path) -> None:
    follower = follow(log)
    line = LINE % (1, 1.0)
    write(log, line * 10)
    seen = [look(follower, share=2 * len(line)).steps for _ in range(6)]
    assert seen == [2, 4, 6, 8, 10, 10]


def test_only_the_last_lines_of_a_look_are_parsed(log: Path) -> None:
    follower = follow(log)
    write(log, *(LINE % (step, 1.0) for step in range(100)))
    assert [step.step for step in follower.look(1 << 20, 3).fresh] == [97, 98, 99]


def test_a_missing_or_strange_file_is_no_log(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        assert look(LogFollower(path)) == LogReading()
    link = tmp_path / "link"
    link.symlink_to("/etc/passwd")
    assert look(LogFollower(link)) == LogReading()


@pytest.mark.parametrize("loss", [b"nan", b"inf", b"-inf", b"NaN"])
def test_a_loss_that_is_not_finite_counts_at_once(log: Path, loss: bytes) -> None:
    follower = follow(log)
    write(log, LINE % (1, 3.0), b"step 2 loss %s\n" % loss, LINE % (3, 3.0))
    assert look(follower).nonfinite_step == 2


def test_a_gradient_norm_that_is_not_finite_has_to_stay_so(log: Path) -> None:
    follower = follow(log)
    bad, good = b"step %d loss 2.0 grad_norm inf\n", b"step %d loss 2.0 grad_norm 1.0\n"
    write(log, bad % 1, bad % 2, good % 3, bad % 4, bad % 5)
    assert look(follower).nonfinite_step is None
    write(log, bad % 6)
    assert look(follower).nonfinite_step == 6


def test_updates_that_the_scaler_skips_are_in_order(log: Path) -> None:
    follower = follow(log)
    line = b" iteration %d/ 500 | grad norm: inf | number of skipped iterations: 1 |\n"
    write(log, *(line % step for step in range(20)))
    told = look(follower)
    assert (told.step, told.nonfinite_step) == (19, None)
    assert told.grad_norm == math.inf


def test_a_phase_lasts_until_the_next_step(log: Path) -> None:
    follower = follow(log)
    write(log, LINE % (1, 3.0), b"saving checkpoint at step 1\n")
    told = look(follower)
    assert told.phase == "save"
    write(log, LINE % (2, 3.0))
    later = look(follower)
    assert later.phase is None
    assert later.position > told.position


def test_the_next_agent_begins_near_the_end(log: Path) -> None:
    write(log, *(LINE % (step, 1.0) for step in range(60_000)))
    follower = follow(log, fresh=False)
    told = look(follower, share=reader.ADOPT_BYTES)
    assert told.step == 59_999
    assert told.steps < 60_000


def test_a_pattern_that_takes_for_ever_is_stopped(log: Path) -> None:
    """On this line it would try 2^40 ways; the timer stops it, and other signals are as before."""
    before = signal.getsignal(signal.SIGVTALRM)
    follower = follow(log, pattern=r"(?P<step>(\d|\d\d)+)!")
    write(log, b"4!\n")
    assert look(follower).step == 4
    write(log, b"1" * 60 + b"\n")
    look(follower)
    write(log, b"5!\n")
    assert look(follower).step == 4, "it is not used again"
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_all_ranks_share_the_cost_of_a_look(tmp_path: Path) -> None:
    paths = {rank: tmp_path / f"rank-{rank}.log" for rank in range(8)}
    for path in paths.values():
        write(path, *(LINE % (step, 1.0) for step in range(20_000)))
    logs = RunLogs(paths)
    told = logs.look()
    assert sum(reading.steps for reading in told.values()) <= reader.LOOK_LINES_MAX + 8
    for _ in range(10):
        told = logs.look()
    assert {reading.step for reading in told.values()} == {19_999}
    logs.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.binary(max_size=60) | st.sampled_from([b"step 3 loss 1.0\n", b"\r", b"\n", b"loss"]),
        max_size=30,
    ),
    st.integers(min_value=1, max_value=200),
)
def test_no_bytes_harm_the_reader(tmp_path: Path, parts: list[bytes], share: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    follower = LogFollower(path)
    position = 0
    for part in parts:
        write(path, part)
        told = look(follower, share)
        assert told.position >= position
        position = told.position
    look(follower, final=True)
    follower.close()
