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
    "dmesg -H": "[  +0.000419] {}",
    "dmesg -H, next minute": "[Feb 9 16:24] {}",
    "dmesg -H, two figures": "[Feb19 16:24] {}",
    "dmesg -d": "[   12.201934 <    0.000419>] {}",
    "dmesg -d -T": "[Sun Feb  9 16:24:18 2025 <    0.000419>] {}",
    "dmesg delta": "[<    0.000419>] {}",
    "dmesg -x -H": "kern  :err   : [  +0.000419] {}",
    "journal delta": "[   12.201934 <    0.000419 >] gpu-b kernel: {}",
    "pdsh dmesg": "gpu-b: [   12.201934] {}",
    "pdsh dmesg -H": "gpu-b: [  +0.000419] {}",
    "pdsh dmesg -T": "gpu-b.example: [Sun Feb  9 16:24:18 2025] {}",
    "pdsh dmesg -x": "gpu-b: kern  :err   : [   12.201934] {}",
    "pdsh raw level": "gpu-b: <3>[   12.201934] {}",
    "pdsh kmsg": "gpu-b: 3,48211,998877665544,-;{}",
    "pdsh syslog": "10.4.0.17: Mar  3 11:02:17 gpu-b kernel: [ 8123.445566] {}",
    "pdsh journal iso": "gpu-b: 2025-06-11T07:08:09+0200 gpu-b kernel: {}",
    "parallel --tag": "gpu-b\t[   12.201934] {}",
    "compose": "gpu-b | [   12.201934] {}",
    "grep": "/var/log/kern.log:Mar  3 11:02:17 gpu-b kernel: {}",
    "grep -n": "/var/log/kern.log:4711:Mar  3 11:02:17 gpu-b kernel: {}",
    "Talos": "10.4.0.17: kern: warning: [2025-06-11T07:08:09.123456789Z]: {}",
    "syslog with level": "<3>Mar  3 11:02:17 gpu-b kernel: [ 8123.445566] {}",
    "syslog 5424": "<3>1 2025-06-11T07:08:09.123456Z gpu-b kernel - - - {}",
    "syslog 5424, stamp": "<3>1 2025-06-11T07:08:09+02:00 gpu-b kernel - - - [ 8123.445566] {}",
    "syslog 5424, data": '<3>1 2025-06-11T07:08:09Z gpu-b kernel - - [a@1 k="v"][b] \ufeff{}',
    "syslog 5424, no level": "1 2025-06-11T07:08:09Z gpu-b kernel - - - {}",
    "syslog 5424, no time": "<3>1 - gpu-b kernel - - - {}",
    "busybox syslog": "Mar  3 11:02:17 gpu-b kern.err kernel: [ 8123.445566] {}",
    "slashes": "2025/06/11 07:08:09 gpu-b kernel: {}",
    "kubectl --timestamps": "2025-06-11T07:08:09.123456789Z [   12.201934] {}",
    "kubectl --prefix": "[pod/watch-x2/dmesg] [   12.201934] {}",
    "container runtime": "2025-06-11T07:08:09.123456789Z stdout F [   12.201934] {}",
    "Loki": '2025-06-11T07:08:09Z {{host="gpu-b", job="node"}} [   12.201934] {}',
    "Loki, journal": '2025-06-11T07:08:09Z {{host="gpu-b", transport="kernel"}} {}',
    "ts": "Mar 03 11:02:17 [   12.201934] {}",
    "collector before syslog": "2025-06-11T07:08:09Z Mar  3 11:02:17 gpu-b kernel: {}",
    "quoted in a ticket": "> [   12.201934] {}",
    "quoted, gathered": "> gpu-b: [   12.201934] {}",
    "indented": "    [   12.201934] {}",
}


@pytest.mark.parametrize("shape", OURS.values(), ids=OURS)
def test_the_kernel_s_own_lines_are_read_behind_every_prefix(shape: str) -> None:
    line = parse(shape.format(SAID))

    assert line.from_kernel
    assert line.message == SAID
    assert line.sure is (shape not in (OURS["bare"], OURS["iso, bare"]))


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
        "gpu-b: Mar  3 11:02:17 gpu-b train.py[8812]: " + SAID,
        "gpu-b: <11>[   12.201934] " + SAID,
        "10.4.0.17: user: warning: [2025-06-11T07:08:09.123456789Z]: " + SAID,
        "<11>1 2025-06-11T07:08:09Z gpu-b kernel - - - " + SAID,
        "<3>1 2025-06-11T07:08:09Z gpu-b train.py 8812 - - " + SAID,
        "1 2025-06-11T07:08:09Z gpu-b dcgm - - - [   12.201934] " + SAID,
        "2025-06-11T07:08:09.123456789Z stdout F " + SAID,
        "2025-06-11T07:08:09.123456789Z stderr F Mar  3 11:02:17 gpu-b dcgm[7]: " + SAID,
        '2025-06-11T07:08:09Z {host="gpu-b", unit="dcgm.service"} ' + SAID,
        "2025-06-11T07:08:09Z Mar  3 11:02:17 gpu-b dcgm: " + SAID,
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

    assert (
        time.at(parse(second).time) - time.at(parse(first).time) == 0.0
    )  # set back: it stands still
    time = LineTime()
    start = time.at(parse(first).time)
    assert time.at(parse(second).time) - start == pytest.approx(seconds)


def test_two_clocks_are_never_compared() -> None:
    time = LineTime()
    time.at(parse("[  100.0] a").time)
    time.at(parse("[  110.0] b").time)

    assert time.at(parse("Mar  3 11:02:17 h kernel: c").time) == pytest.approx(10.0)
    assert time.at(parse("Mar  3 11:02:20 h kernel: d").time) == pytest.approx(13.0)


def test_a_clock_of_both_kinds_counts_by_the_kernel_s_own() -> None:
    line = parse("Mar  3 11:02:17 h kernel: [ 55.5] a")

    assert (line.time.at_s, line.time.clock) == (55.5, Clock.BOOT)


@pytest.mark.parametrize(
    "line",
    [
        "dcgm: " + SAID,
        "Mar  3 11:02:17 gpu-a dcgm: kernel: " + SAID,
        "[rank3]: " + SAID,
        "2025-06-11T07:08:09Z dcgm: [   12.201934] " + SAID,
    ],
)
def test_a_name_alone_before_the_words_is_a_program_s(line: str) -> None:
    parsed = parse(line)

    assert not (parsed.from_kernel and parsed.message == SAID)


def test_lines_that_print_the_time_since_the_one_before() -> None:
    time = LineTime()
    lines = ("[Feb 9 16:24] a", "[  +2.500000] b", "[ +10.250000] c", "[<    0.250000>] d")
    start, *later = [time.at(parse(line).time) for line in lines]

    assert [at - start for at in later] == pytest.approx([2.5, 12.75, 13.0])
    assert time.at(parse("[Feb 9 16:25] e").time) - start == pytest.approx(60.0)
    assert time.timed


@given(st.text(max_size=300))
def test_any_text_is_a_line(text: str) -> None:
    line = parse(text)

    assert isinstance(line.message, str)


@given(
    st.from_regex(r"(\[ {0,3}\d{1,15}\.\d{1,12}\] |\w{3} \d\d \d\d:\d\d:\d\d h kernel: )?.{0,60}")
)
def test_almost_lines_are_lines(text: str) -> None:
    LineTime().at(parse(text).time)
