"""Kernel lines that tools write as JSON, whole and over several lines."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.kernel_json import Reader
from everstep.decide.kernel_text import KernelLine
from everstep.decide.kernel_times import Clock, Stamp

SAID = "NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus."
DMESG = """{
   "dmesg": [
      {
         "pri": 6,
         "time":      12.201934,
         "msg": "usb 1-1: new device"
      },{
         "pri": 12,
         "time":      13.000000,
         "msg": "SAID"
      },{
         "pri": 3,
         "time":      14.500000,
         "msg": "SAID"
      }
   ]
}""".replace("SAID", SAID)
DECODED = (
    '{\n"fac": "kern",\n"pri": "err",\n"time": "2025-06-11T07:08:09,25+02:00",\n"msg": "%s"\n}'
)
JOURNAL = {
    "__REALTIME_TIMESTAMP": "1749625689123456",
    "_SOURCE_MONOTONIC_TIMESTAMP": "12201934",
    "_TRANSPORT": "kernel",
    "SYSLOG_FACILITY": "0",
    "SYSLOG_IDENTIFIER": "kernel",
    "MESSAGE": SAID,
}


def read(text: str) -> list[KernelLine]:
    reader = Reader()
    return [line for line in map(reader.read, text.split("\n")) if line is not None]


def kernel_s(text: str) -> list[KernelLine]:
    return [line for line in read(text) if line.from_kernel and line.sure]


def test_dmesg_json_is_read_record_by_record() -> None:
    first, last = kernel_s(DMESG)

    assert first == KernelLine("usb 1-1: new device", Stamp(12.201934, Clock.BOOT), True, True)
    assert last == KernelLine(SAID, Stamp(14.5, Clock.BOOT), True, True)


@pytest.mark.parametrize("host", ["gpu-b: ", "10.4.0.17: "])
def test_a_host_before_each_line_changes_nothing(host: str) -> None:
    assert kernel_s("\n".join(host + line for line in DMESG.split("\n"))) == kernel_s(DMESG)


def test_a_decoded_record_and_what_follows_the_document() -> None:
    (line, after) = kernel_s(DECODED % SAID + f"\n[   99.5] {SAID}")

    assert (line.message, line.time.clock) == (SAID, Clock.WALL)
    assert after == KernelLine(SAID, Stamp(99.5, Clock.BOOT), True, True)
    assert kernel_s((DECODED % SAID).replace("kern", "user")) == []


@pytest.mark.parametrize("indent", [None, 8], ids=["one line", "pretty"])
def test_the_journal_s_records(indent: int | None) -> None:
    def written(**changes: object) -> str:
        return json.dumps({**JOURNAL, **changes}, indent=indent)

    wanted = KernelLine(SAID, Stamp(12.201934, Clock.BOOT), True, True)
    assert kernel_s(written() + "\n" + written()) == [wanted, wanted]
    assert kernel_s(written(_TRANSPORT="stdout")) == []
    assert kernel_s(written(SYSLOG_FACILITY="1")) == []
    (no_stamp,) = kernel_s(written(_SOURCE_MONOTONIC_TIMESTAMP=None))
    assert no_stamp.time == Stamp(1749625689.123456, Clock.WALL)


def test_a_message_that_is_bytes_and_one_that_is_nothing() -> None:
    (line,) = kernel_s(json.dumps({**JOURNAL, "MESSAGE": list(SAID.encode())}))

    assert line.message == SAID
    assert [line.message for line in read(json.dumps({**JOURNAL, "MESSAGE": None}))] == [""]


@pytest.mark.parametrize(
    "record, ours",
    [
        ({"log": f"[   12.201934] {SAID}\n", "stream": "stdout"}, True),
        ({"log": f"Mar  3 11:02:17 gpu-b kernel: {SAID}"}, True),
        ({"line": SAID, "program": "kernel"}, True),
        ({"message": SAID, "facility": "kern", "host": "gpu-b"}, True),
        ({"log": SAID, "stream": "stdout"}, False),
        ({"log": f"Mar  3 11:02:17 gpu-b dcgm[7]: {SAID}"}, False),
        ({"message": SAID, "ident": "dcgm"}, False),
        ({"message": SAID, "facility": "daemon"}, False),
    ],
)
def test_what_a_collector_wraps_has_to_say_whose_it_is(record: dict[str, str], ours: bool) -> None:
    (line,) = read(json.dumps(record))

    assert line.from_kernel is ours
    assert (line.message == SAID) or not ours


def test_a_message_does_not_smuggle_in_keys() -> None:
    text = json.dumps({"_TRANSPORT": "stdout", "MESSAGE": f'", "_TRANSPORT": "kernel", "{SAID}'})

    assert kernel_s(text) == []


@pytest.mark.parametrize("text", ['{"a": ' + "[" * 5000, "{" * 300, '{"MESSAGE": "cut'])
def test_broken_records_are_lines_that_say_nothing(text: str) -> None:
    assert kernel_s(text) == []
    assert len(kernel_s(f"{text}\n[ 1.5] {SAID}")) == 1, "and do not hide what follows"


@given(st.lists(st.sampled_from([*DMESG.split("\n"), "{", "}", "[ 1.5] x", '"a": 1'])))
def test_any_order_of_lines_is_read(lines: list[str]) -> None:
    assert len(read("\n".join(lines))) <= max(1, len(lines))
