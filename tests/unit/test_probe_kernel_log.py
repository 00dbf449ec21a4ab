"""The kernel log probe: sources that overrun, rotate, vanish and come back, and what stands.

The judge and its catalogue are the real ones. Real lines of this machine's own log are in
``tests/process/test_probes_real.py``.
"""

from __future__ import annotations

import errno
import math
import os
import select
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from everstep.decide.kernel import KernelJudge
from everstep.decide.kernel_rules import KernelRules
from everstep.decide.observation import Observation
from everstep.decide.words import Action, Verdict
from everstep.machine.probes import kernel_log_sources
from everstep.machine.probes.board import ProbeBoard
from everstep.machine.probes.kernel_log import (
    RECENT_LINES_MAX,
    RETRY_S,
    KernelLogProbe,
    KernelLogSettings,
)
from everstep.machine.probes.kernel_log_sources import (
    LINE_CHARS_MAX,
    FileSource,
    JournalSource,
    KmsgSource,
    Splitter,
    parse_record,
)
from everstep.spec.kernel_catalogue import load_kernel_catalogue
from tests.support.roots import write

LOST = "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off"
DRAINED = "NVRM: Xid (PCI:0000:05:00): 154, GPU recovery action changed from 0x1 (GPU Reset) to 0x0 (None)"  # noqa: E501
ENDED = "NVRM: Xid (PCI:0000:05:00): 45, pid=7, name=python, Ch 00000010"
HOLD_S = 600.0


@pytest.fixture(scope="module")
def rules() -> KernelRules:
    return load_kernel_catalogue(environ={})


class Kmsg:
    """A pipe in the place of /dev/kmsg: the same records, one on each line."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.number = 0

    def say(self, text: str, *, at_s: float = 1.0, level: int = 6, skip: int = 0) -> None:
        self.number += 1 + skip
        record = f"{level},{self.number},{int(at_s * 1e6)},-;{text}\n SUBSYSTEM=pci\n"
        os.write(self._fd, record.encode())

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def kmsg(tmp_path: Path) -> Iterator[Kmsg]:
    (tmp_path / "dev").mkdir()
    made = Kmsg(tmp_path / "dev" / "kmsg")
    yield made
    made.close()


def probe_of(
    root: Path, rules: KernelRules, source: str = "auto", *, past_s: float = 0.0
) -> KernelLogProbe:
    settings = KernelLogSettings(source=source, hold_s=HOLD_S, past_s=past_s)
    return KernelLogProbe(
        settings,
        KernelJudge(rules),
        proc=root / "proc",
        dev=root / "dev",
        files=[str(root / "var" / "kern.log"), str(root / "var" / "messages")],
        steady=lambda: 10.0,
    )


def faults(seen: Sequence[Observation]) -> list[tuple[str, Action | None]]:
    return [(one.rule, one.action) for one in seen if one.verdict is Verdict.FAULTY]


def itself(seen: Sequence[Observation]) -> Observation:
    (one,) = [one for one in seen if not one.target]
    return one


# --- what stands


def test_a_line_is_judged_and_stands_until_nothing_new_came_for_long(
    tmp_path: Path, kmsg: Kmsg, rules: KernelRules
) -> None:
    probe = probe_of(tmp_path, rules, past_s=60)
    assert faults(probe.look(0)) == []
    kmsg.say(LOST, at_s=9.0)

    first = probe.look(2)

    assert faults(first) == [("xid_79", Action.EVICT_MACHINE)]
    assert next(one for one in first if one.target).values["age_s"] == 1
    assert faults(probe.look(HOLD_S)) == faults(first)
    over = probe.look(HOLD_S + 2)
    assert faults(over) == []
    assert [one.verdict for one in over if one.target] == [Verdict.HEALTHY]
    assert [one.target for one in probe.look(HOLD_S + 4)] == [""]
    assert [LOST in line.text for line in probe.recent()] == [True]
    probe.close()


def test_what_a_later_line_clears_no_longer_stands(
    tmp_path: Path, kmsg: Kmsg, rules: KernelRules
) -> None:
    probe = probe_of(tmp_path, rules, past_s=60)
    kmsg.say(LOST, at_s=2.0)
    assert faults(probe.look(0))
    kmsg.say(DRAINED, at_s=9.0)

    assert faults(probe.look(2)) == []
    probe.close()


def test_what_our_teardown_prints_is_nothing_however_late_it_is_read(
    tmp_path: Path, rules: KernelRules
) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    teardowns: list[tuple[float, float]] = []
    probe = KernelLogProbe(
        KernelLogSettings(source=str(log), hold_s=HOLD_S, look_every_s=30),
        KernelJudge(rules),
        proc=tmp_path / "proc",
        dev=tmp_path / "dev",
        teardowns=lambda: teardowns,
    )
    with log.open("a") as out:

        def rules_after(now_s: float) -> list[str]:
            out.write(f"{ENDED}\n{LOST}\n")
            out.flush()
            return sorted(rule for rule, _ in faults(probe.look(now_s)))

        probe.look(0)
        teardowns.append((5, math.inf))
        assert rules_after(30) == ["xid_79"]
        teardowns[:] = [(5, 31)]
        assert rules_after(60) == ["xid_79"], "printed at 31, read at 60"
        assert rules_after(90) == ["xid_45", "xid_79"], "long after it"
    probe.close()


def test_a_gpu_has_one_name_once_it_is_known(tmp_path: Path, rules: KernelRules) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    names: dict[str, str] = {}
    probe = KernelLogProbe(
        KernelLogSettings(source=str(log), hold_s=HOLD_S),
        KernelJudge(rules),
        proc=tmp_path / "proc",
        dev=tmp_path / "dev",
        gpu_names=lambda: names,
    )
    board = ProbeBoard()

    def look(now_s: float, *lines: str) -> dict[str, list[str]]:
        with log.open("a") as out:
            out.writelines(f"{line}\n" for line in lines)
        board.landed(probe.name, probe.look(now_s), now_s)
        held = [one for one, _ in board.state(now_s) if one.verdict is Verdict.FAULTY]
        found: dict[str, list[str]] = {}
        for one in held:
            found.setdefault(one.target, []).append(one.rule)
        return found

    look(0)
    assert look(2, LOST) == {"gpu 0000:05:00": ["xid_79"]}
    names["00000000:05:00.0"] = "gpu 3"
    assert look(4) == {"gpu 3": ["xid_79"]}
    assert look(6, LOST.replace(" 79,", " 62,")) == {"gpu 3": ["xid_79", "xid_62"]}
    assert look(8, DRAINED) == {}
    probe.close()


def test_recent_lines_are_bounded(tmp_path: Path, kmsg: Kmsg, rules: KernelRules) -> None:
    probe = probe_of(tmp_path, rules, past_s=60)
    probe.look(0)
    for number in range(RECENT_LINES_MAX + 10):
        kmsg.say(f"line {number}")
        if number % 100 == 0:
            probe.look(number)
    seen = probe.look(1000)

    lines = probe.recent()
    assert len(lines) == RECENT_LINES_MAX
    assert lines[-1].text.endswith(f"line {RECENT_LINES_MAX + 9}")
    assert itself(seen).values["lines"] == RECENT_LINES_MAX + 10
    probe.close()


# --- /dev/kmsg


def test_only_what_comes_is_read_unless_the_past_is_asked_for(tmp_path: Path, kmsg: Kmsg) -> None:
    path = tmp_path / "dev" / "kmsg"
    kmsg.say("old", at_s=3.0)
    kmsg.say("young", at_s=8.0)

    source = KmsgSource(path, past_s=5, steady=lambda: 10.0)

    assert [(line.text.partition("] ")[2], line.age_s) for line in source.read().lines] == [
        ("young", 2.0)
    ]
    source.close()


def test_the_number_of_the_last_record_is_where_the_next_life_goes_on(
    tmp_path: Path, kmsg: Kmsg
) -> None:
    path = tmp_path / "dev" / "kmsg"
    for text in ("one", "two", "three"):
        kmsg.say(text)

    source = KmsgSource(path, after=2)

    assert [line.sequence for line in source.read().lines] == [3]
    assert source.position == 3
    source.close()


def test_the_next_life_of_an_agent_judges_what_came_in_between(
    tmp_path: Path, kmsg: Kmsg, rules: KernelRules
) -> None:
    file = tmp_path / "position"

    def life(boot_id: str) -> list[tuple[str, Action | None]]:
        write(tmp_path, "proc/sys/kernel/random/boot_id", boot_id)
        settings = KernelLogSettings(source="kmsg", hold_s=HOLD_S, remembered=file)
        probe = KernelLogProbe(
            settings, KernelJudge(rules), proc=tmp_path / "proc", dev=tmp_path / "dev"
        )
        found = faults(probe.look(0))
        probe.close()
        return found

    kmsg.say(LOST)
    assert life("a") == [("xid_79", Action.EVICT_MACHINE)]
    kmsg.number -= 1  # the real device shows old records again, a pipe has lost them
    kmsg.say(LOST)
    assert life("a") == []
    kmsg.say(LOST)
    assert life("a") == [("xid_79", Action.EVICT_MACHINE)]
    kmsg.number = 0  # another boot counts anew
    kmsg.say(LOST)
    assert life("b") == [("xid_79", Action.EVICT_MACHINE)]
    assert [path.name for path in tmp_path.glob("position*")] == ["position"]


def test_what_a_daemon_writes_is_not_the_kernels_word(tmp_path: Path, kmsg: Kmsg) -> None:
    kmsg.say("of systemd", level=3 << 3 | 6)
    kmsg.say("of root", level=1 << 3 | 6)
    kmsg.say("of the kernel")
    source = KmsgSource(tmp_path / "dev" / "kmsg", past_s=100, steady=lambda: 10.0)

    assert [line.text.partition("] ")[2] for line in source.read().lines] == [
        "of root",
        "of the kernel",
    ]
    source.close()


def test_an_overrun_is_counted_and_reading_goes_on_behind_the_gap(
    tmp_path: Path, kmsg: Kmsg, rules: KernelRules
) -> None:
    """EPIPE is what the real device says; it cannot be made to here without losing real lines."""
    answers: list[bytes | int] = [b"6,1,1,-;one", errno.EPIPE, b"6,7,1,-;two", errno.EAGAIN]

    def read(fd: int, size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer

    source = KmsgSource(tmp_path / "dev" / "kmsg", read=read)
    batch = source.read()

    assert [line.sequence for line in batch.lines] == [1, 7]
    assert batch.lost == 5
    source.close()


@pytest.mark.parametrize(
    "raw, text",
    [
        (b"6,1,2000000,-;plain\n SUBSYSTEM=pci\n", "plain"),
        (b"4,7,1,c,caller=T1;tab\\x09and \\x5cslash", "tab and \\slash"),
        (b"6,1,2000000,-;", ""),
        (b"", None),
        (b"garbage", None),
        (b"6,x,1,-;text", None),
        (b"6,-1,1,-;text", None),
        (b"6,1;text", None),
        (b"\xff\xfe;\x00", None),
    ],
)
def test_records(raw: bytes, text: str | None) -> None:
    record = parse_record(raw)

    assert (record.text if record else None) == text


def test_another_device_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not the kernel's log"):
        KmsgSource(Path("/dev/null"))


# --- files


def test_a_file_is_followed_over_rotation_and_cutting(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text("before\n")
    source = FileSource(path)

    def read() -> list[str]:
        return [line.text for line in source.read().lines]

    assert read() == []
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert read() == ["one"]
        file.write("o\nlast")
    path.rename(tmp_path / "kern.log.1")
    path.write_text("new\n")
    assert read() == ["two", "last", "new"]
    path.write_text("n\n")  # shorter than what was read: cut off in place
    batch = source.read()
    assert [line.text for line in batch.lines] == ["n"]
    assert "cut off" in batch.notes[0]
    path.unlink()
    assert read() == []
    path.write_text("again\n")
    assert read() == ["again"]
    source.close()


def test_a_file_may_come_later(tmp_path: Path, rules: KernelRules) -> None:
    path = tmp_path / "kern.log"
    probe = probe_of(tmp_path, rules, str(path))
    assert itself(probe.look(0)).verdict is Verdict.UNKNOWN
    path.write_text(f"[    1.000000] {LOST}\n")

    assert faults(probe.look(2)) == [("xid_79", Action.EVICT_MACHINE)]
    probe.close()


def test_a_line_without_an_end_is_bounded_and_given_once() -> None:
    splitter = Splitter()
    lines = [line for _ in range(40) for line in splitter.feed(b"x" * 10_000)]
    lines += splitter.feed(b"tail\nnext\n\n  \n")

    assert [len(line) for line in lines] == [LINE_CHARS_MAX, 4]
    assert lines[-1] == "next"


# --- the journal


FAKE_JOURNAL = """
import sys, time
if "-f" not in sys.argv:
    print("[    1.000000] host kernel: a line"); sys.exit()
print("[    5.000000] host kernel: {line}", flush=True)
sys.stdin.read()
{then}
"""


def journal(then: str) -> tuple[str, ...]:
    text = FAKE_JOURNAL.format(line=LOST.replace('"', "'"), then=then)
    return (sys.executable, "-c", text)


def lines_of(source: JournalSource, count: int) -> list[str]:
    found: list[str] = []
    for _ in range(60):
        found += [line.text for line in source.read().lines]
        if len(found) >= count:
            break
        assert source._process.stdout is not None
        select.select([source._process.stdout], [], [], 1)
    return found


def test_the_journal_is_read_as_it_comes(rules: KernelRules) -> None:
    source = JournalSource(program=journal("time.sleep(600)"))
    try:
        (line,) = lines_of(source, 1)
        assert KernelJudge(rules).feed(line, 0.0)[0].rule == "xid_79"
    finally:
        source.close()


def test_a_journal_that_ends_is_an_error_with_its_own_words() -> None:
    source = JournalSource(program=journal("print('no more', file=sys.stderr); sys.exit(3)"))
    try:
        with pytest.raises(OSError, match=r"ended \(3\): no more"):
            lines_of(source, 2)
    finally:
        source.close()


@pytest.mark.parametrize(
    "program, why",
    [
        ((sys.executable, "-c", ""), "no kernel line"),
        ((sys.executable, "-c", "import sys; sys.exit('not yours')"), "not yours"),
        (("everstep-no-such-program",), "no such program"),
    ],
)
def test_a_journal_that_shows_nothing_is_refused(program: tuple[str, ...], why: str) -> None:
    with pytest.raises(OSError, match=why):
        JournalSource(program=program)


# --- which source


def test_without_any_source_it_is_unknown_once_and_says_what_is_needed(
    tmp_path: Path, rules: KernelRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    probe = probe_of(tmp_path, rules)

    first, second = itself(probe.look(0)), itself(probe.look(2))

    assert first == second
    assert first.verdict is Verdict.UNKNOWN
    assert "CAP_SYSLOG" in first.reason
    write(tmp_path, "var/kern.log", "[    1.000000] Linux version")
    assert itself(probe.look(RETRY_S - 1)).verdict is Verdict.UNKNOWN
    assert itself(probe.look(RETRY_S)).values["source"] == "file"
    probe.close()


def test_a_source_that_breaks_clears_nothing(
    tmp_path: Path, rules: KernelRules, kmsg: Kmsg
) -> None:
    probe = probe_of(tmp_path, rules, "kmsg", past_s=60)
    kmsg.say(LOST)
    standing = faults(probe.look(0))
    assert standing
    source = probe._source
    assert isinstance(source, KmsgSource)
    folder = os.open("/", os.O_RDONLY)
    os.dup2(folder, source._fd)
    os.close(folder)

    seen = probe.look(2)

    assert faults(seen) == standing
    assert itself(seen).verdict is Verdict.UNKNOWN
    probe.close()


def test_reads_are_as_large_as_the_kernel_wants_them() -> None:
    """Smaller ones are refused (EINVAL) when a record is larger; the kernel's limit is 8 KiB."""
    assert kernel_log_sources.RECORD_BYTES_MAX >= 8192
