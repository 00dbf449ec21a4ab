"""Kernel lines taken apart: every prefix that tools write, and who wrote the line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.kernel_text import Clock, LineTime, parse

SAID = "NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus."

OURS = {
    "bare": "{}",
    "tag": "kernel: {}",
    "dmesg": "[1284821.201934] {}",
    "dmesg -T": "[Sun Feb  9 16:24:18 2025] {}",
    "dmesg -x": "kern  :err   : [   12.201934] {}",
    "dmesg -x iso": "kern  :warn  : 2025-01-21T04:41:44,283575+00:00 {}",
    "raw level": "<3>[ 2315.098863] {}",
    "caller": "[   12.201934] [   T812] {}",
    "syslog": "Mar  3 11:02:17 gpu-a kernel: [ 8123.445566] {}",
    "syslog, no stamp": "Mar 13 11:02:17 gpu-a.example kernel: {}",
    "journal, no host": "Mar  3 11:02:17 kernel: {}",
    "journal precise": "Mar  3 11:02:17.123456 gpu-a kernel: {}",
    "journal iso": "2025-06-11T07:08:09+0200 gpu-b kernel: {}",
    "journal iso precise": "2025-06-11T07:08:09.123456+02:00 gpu-b kernel: {}",
    "journal unix": "1737434504.283575 gpu-b kernel: {}",
    "journal monotonic": "[ 8123.445566] gpu-b kernel: {}",
    "journal full": "Tue 2025-01-21 04:41:44 UTC gpu-b kernel: {}",
    "rsyslog": "2025-06-11T07:08:09.123456Z gpu-b kernel: [ 8123.445566] {}",
    "iso, bare": "2025-06-11T07:08:09.123456Z {}",
    "kmsg": "3,48211,998877665544,-;{}",
    "kmsg with caller": "3,48211,998877665544,-,caller=T812;{}",
    "colours": "\x1b[32m[   12.201934] \x1b[0m{}",
}


@pytest.mark.parametrize("shape", OURS.values(), ids=OURS)
def test_the_kernel_s_own_lines_are_read_behind_every_prefix(shape: str) -> None:
    line = parse(shape.format(SAID))

    assert line.from_kernel
    assert line.message == SAID


@pytest.mark.parametrize(
    "line",
    [
        "Mar  3 11:02:17 gpu-a train.py[8812]: " + SAID,
        "Mar  3 11:02:17 gpu-a dcgm: " + SAID,
        "2025-06-11T07:08:09.123456Z gpu-b dcgm[7]: " + SAID,
        "2025-06-11T07:08:09+0000 gpu-b python: " + SAID,
        "12,48211,998877665544,-;" + SAID,
        "<11>[   12.201934] " + SAID,
        "user  :notice: [   12.201934] " + SAID,
        "daemon:err   : [   12.201934] " + SAID,
        " SUBSYSTEM=pci",
        " DEVICE=+pci:0000:5d:00.0",
    ],
)
def test_what_a_program_wrote_is_not_the_kernel_s_word(line: str) -> None:
    assert not parse(line).from_kernel


def test_a_newline_in_a_record_does_not_smuggle_in_a_second_message() -> None:
    assert parse(r"6,1,2,-;python[1]: hello\x0aNVRM: Xid (PCI:0000:05:00): 79").message == (
        "python[1]: hello NVRM: Xid (PCI:0000:05:00): 79"
    )


def test_the_second_line_of_a_message_is_indented_and_has_no_date() -> None:
    assert parse("               NVRM: fallen off the bus").message == "NVRM: fallen off the bus"


@pytest.mark.parametrize(
    "first, second, seconds",
    [
        ("[  100.5] a", "[  161.0] b", 60.5),
        ("6,1,1000000,-;a", "6,2,3500000,-;b", 2.5),
        ("Dec 31 23:59:50 h kernel: a", "Dec 31 23:59:58 h kernel: b", 8.0),
        ("[Sun Feb  9 16:24:18 2025] a", "[Sun Feb  9 16:25:18 2025] b", 60.0),
        ("2025-01-21T04:41:44,250000+01:00 a", "2025-01-21T03:41:45,000000+00:00 b", 0.75),
    ],
)
def test_the_distance_between_two_lines(first: str, second: str, seconds: float) -> None:
    time = LineTime()

    assert time.at(parse(second)) - time.at(parse(first)) == 0.0  # set back: it stands still
    time = LineTime()
    start = time.at(parse(first))
    assert time.at(parse(second)) - start == pytest.approx(seconds)


def test_two_clocks_are_never_compared() -> None:
    time = LineTime()
    time.at(parse("[  100.0] a"))
    time.at(parse("[  110.0] b"))

    assert time.at(parse("Mar  3 11:02:17 h kernel: c")) == pytest.approx(10.0)
    assert time.at(parse("Mar  3 11:02:20 h kernel: d")) == pytest.approx(13.0)


def test_a_clock_of_both_kinds_counts_by_the_kernel_s_own() -> None:
    line = parse("Mar  3 11:02:17 h kernel: [ 55.5] a")

    assert (line.at_s, line.clock) == (55.5, Clock.BOOT)


@given(st.text(max_size=300))
def test_any_text_is_a_line(text: str) -> None:
    line = parse(text)

    assert isinstance(line.message, str)


@given(
    st.from_regex(r"(\[ {0,3}\d{1,15}\.\d{1,12}\] |\w{3} \d\d \d\d:\d\d:\d\d h kernel: )?.{0,60}")
)
def test_almost_lines_are_lines(text: str) -> None:
    LineTime().at(parse(text))
