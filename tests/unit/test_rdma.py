"""RDMA counters of made-up machines: what all ports have carried, and when that is silence."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.machine.facts import Facts
from everstep.machine.job_signals import JobSignals
from everstep.machine.observed import NS
from everstep.machine.rdma import LOOK_EVERY_S, Traffic, Watch, carried, ports, risen
from everstep.spec.agent_api import EventKind
from everstep.spec.load import load_policy
from tests.support.roots import rdma_port, write
from tests.unit.test_log_monitor import SIGNALS

DETECTION = load_policy(None, environ={}).policy.detection
SILENT_S = DETECTION.rdma_silent_after.total_seconds()
STUCK = 2**32 - 1
GARBAGE = ["", "many", "-5", "0x", "1e9", "9" * 40, "\x00", "12 34"]


def counters(sys: Path, name: str, received: object, sent: object) -> None:
    rdma_port(sys, name, port_rcv_data=received, port_xmit_data=sent)


def folder(sys: Path, name: str) -> Path:
    device, _, port = name.partition("/")
    return sys / "class/infiniband" / device / "ports" / port


# --- One look


def test_ports_of_several_devices_by_name(tmp_path: Path) -> None:
    for name in ("mlx5_10/1", "mlx5_2/1", "mlx5_2/2"):
        counters(tmp_path, name, 1, 2)
    write(tmp_path, "class/infiniband/mlx5_0/fw_ver", "28.39")  # a device that has no port
    assert list(ports(tmp_path)) == ["mlx5_2/1", "mlx5_2/2", "mlx5_10/1"]
    assert ports(tmp_path / "none") == {}


def test_counters_are_words_of_four_bytes_and_may_have_64_bits(tmp_path: Path) -> None:
    counters(tmp_path, "mlx5_0/1", 10, 2**60)
    assert carried(folder(tmp_path, "mlx5_0/1")) == (40, 2**62)


@pytest.mark.parametrize("text", [*GARBAGE, STUCK])
def test_a_counter_that_does_not_tell(tmp_path: Path, text: object) -> None:
    counters(tmp_path, "mlx5_0/1", text, 5)
    assert carried(folder(tmp_path, "mlx5_0/1")) == (None, 20)


def test_what_a_counter_has_counted_at_least() -> None:
    assert risen(10, 10) == 0
    assert risen(10, 25) == 15
    assert risen(2**34 - 4, 100) == 100, "it was reset, or began anew at its end"


# --- Over time


def test_all_ports_and_both_ways_count_from_the_first_look(tmp_path: Path) -> None:
    counters(tmp_path, "mlx5_0/1", 1000, 2000)
    counters(tmp_path, "mlx5_1/1", 3000, 4000)
    traffic = Traffic(tmp_path)
    assert traffic.total_bytes() == 0
    counters(tmp_path, "mlx5_0/1", 1001, 2010)
    counters(tmp_path, "mlx5_1/1", 3100, 5000)
    assert traffic.total_bytes() == 4 * (1 + 10 + 100 + 1000)
    assert traffic.total_bytes() == 4 * 1111


def test_a_machine_without_ports_or_without_counters_cannot_tell(tmp_path: Path) -> None:
    traffic = Traffic(tmp_path)
    assert traffic.total_bytes() is None
    rdma_port(tmp_path, "mlx5_0/1")
    assert traffic.total_bytes() is None
    counters(tmp_path, "mlx5_1/1", "garbage", "garbage")
    assert traffic.total_bytes() is None


def test_a_port_that_never_told_silences_no_other(tmp_path: Path) -> None:
    rdma_port(tmp_path, "mlx5_0/1")
    counters(tmp_path, "mlx5_0/2", "garbage", "garbage")
    counters(tmp_path, "mlx5_1/1", 5, 5)
    traffic = Traffic(tmp_path)
    traffic.total_bytes()
    counters(tmp_path, "mlx5_1/1", 6, 5)
    assert traffic.total_bytes() == 4


def test_a_counter_that_begins_anew_takes_nothing_back(tmp_path: Path) -> None:
    counters(tmp_path, "mlx5_0/1", 2**32 - 100, 2**40)
    traffic = Traffic(tmp_path)
    traffic.total_bytes()
    counters(tmp_path, "mlx5_0/1", 50, 2**40 + 7)
    assert traffic.total_bytes() == 4 * (50 + 7)


def test_a_port_that_comes_later_brings_no_past_with_it(tmp_path: Path) -> None:
    counters(tmp_path, "mlx5_0/1", 0, 0)
    traffic = Traffic(tmp_path)
    traffic.total_bytes()
    counters(tmp_path, "mlx5_1/1", 10**12, 10**12)
    assert traffic.total_bytes() == 0
    counters(tmp_path, "mlx5_1/1", 10**12 + 1, 10**12)
    assert traffic.total_bytes() == 4


def test_a_port_that_is_removed_and_comes_back(tmp_path: Path) -> None:
    counters(tmp_path, "mlx5_0/1", 100, 0)
    counters(tmp_path, "mlx5_1/1", 100, 0)
    traffic = Traffic(tmp_path)
    traffic.total_bytes()
    shutil.rmtree(tmp_path / "class/infiniband/mlx5_1")
    counters(tmp_path, "mlx5_0/1", 110, 0)
    assert traffic.total_bytes() == 40, "the other one still tells"
    counters(tmp_path, "mlx5_1/1", 3, 0)
    assert traffic.total_bytes() == 52, "a device that was reset counts from nothing"
    shutil.rmtree(tmp_path / "class/infiniband")
    assert traffic.total_bytes() is None


@pytest.mark.parametrize("text", ["garbage", STUCK, None], ids=["garbage", "at its end", "missing"])
def test_while_a_counter_that_told_does_not_nobody_can_tell(
    tmp_path: Path, text: object | None
) -> None:
    counters(tmp_path, "mlx5_0/1", 100, 0)
    counters(tmp_path, "mlx5_1/1", 100, 0)
    traffic = Traffic(tmp_path)
    traffic.total_bytes()
    if text is None:
        (folder(tmp_path, "mlx5_0/1") / "counters/port_rcv_data").unlink()
    else:
        counters(tmp_path, "mlx5_0/1", text, 0)
    counters(tmp_path, "mlx5_1/1", 101, 0)
    assert traffic.total_bytes() is None
    counters(tmp_path, "mlx5_0/1", 120, 0)
    assert traffic.total_bytes() == 4 * (20 + 1), "what was carried meanwhile is not lost"


TEXT = st.one_of(
    st.integers(-(2**70), 2**70).map(str), st.sampled_from(GARBAGE), st.binary(max_size=30)
)
LOOK = st.dictionaries(st.sampled_from(["a/1", "a/2", "b/1"]), st.tuples(TEXT, TEXT), max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(LOOK, max_size=6))
def test_the_total_never_falls_whatever_sysfs_says(
    looks: list[dict[str, tuple[object, ...]]],
) -> None:
    sys = Path(tempfile.mkdtemp())
    try:
        traffic, last = Traffic(sys), 0
        for look in looks:
            shutil.rmtree(sys / "class", ignore_errors=True)
            for name, values in look.items():
                for counter, value in zip(("rcv", "xmit"), values, strict=True):
                    path = folder(sys, name) / f"counters/port_{counter}_data"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(value if isinstance(value, bytes) else str(value).encode())
            total = traffic.total_bytes()
            assert total is None or total >= last
            last = last if total is None else total
    finally:
        shutil.rmtree(sys)


# --- From the agent's loop


def taken(watch: Watch, now_s: float) -> int:
    """What the next look that comes back has found."""
    deadline = time.monotonic() + 20
    while (found := watch.total_bytes(now_s)) is None:
        assert time.monotonic() < deadline
    return found


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()  # lets the thread end


def test_a_look_every_half_minute_is_told_once() -> None:
    totals = iter(range(1, 100))
    watch = Watch(lambda: next(totals))
    assert taken(watch, 100.0) == 1
    assert [watch.total_bytes(100.0 + s) for s in range(int(LOOK_EVERY_S))] == [None] * 30
    assert taken(watch, 100.0 + LOOK_EVERY_S) == 2


def test_a_driver_that_hangs_keeps_nobody_waiting_and_is_asked_once(gate: threading.Event) -> None:
    asked: list[float] = []

    def look() -> int:
        asked.append(time.monotonic())
        gate.wait(20)
        return 7

    watch = Watch(look)
    assert all(watch.total_bytes(float(second)) is None for second in range(300))
    assert len(asked) <= 1
    gate.set()
    assert taken(watch, 300.0) == 7


# --- The rule


class Training:
    """A run on a machine with two ports, in invented time."""

    def __init__(self, sys: Path) -> None:
        self.sys = sys
        self.words = {"mlx5_0/1": 10**9, "mlx5_1/1": 7}
        self.now_s = 1000.0
        self.traffic = Traffic(sys)
        policy = SIGNALS.model_copy(update={"rdma_silent_after_s": SILENT_S})
        self.signals = JobSignals(policy, Facts(), hang_factor=10.0)

    def run(self, seconds: float, *, rate: float = 0.0, port: str = "mlx5_0/1") -> list[EventKind]:
        """Train on, with so many bytes a second on one port; what is told meanwhile."""
        told = []
        for _ in range(round(seconds / LOOK_EVERY_S)):
            self.now_s += LOOK_EVERY_S
            if port in self.words:
                self.words[port] += int(rate * LOOK_EVERY_S / 4)
            for name, words in self.words.items():
                counters(self.sys, name, words, words // 2)
            told += self.look()
        return told

    def look(self) -> list[EventKind]:
        total = self.traffic.total_bytes()
        if total is None:
            return []
        found = self.signals.traffic(int(self.now_s * NS), total, excused=False)
        return [one.kind for one in found]


@pytest.fixture
def training(tmp_path: Path) -> Training:
    made = Training(tmp_path)
    assert made.run(900, rate=40e9) == []
    return made


def test_ten_minutes_without_traffic_are_told_once_and_so_is_its_return(training: Training) -> None:
    assert SILENT_S == 600, "the paper's"
    assert training.run(SILENT_S - LOOK_EVERY_S) == []
    assert training.run(LOOK_EVERY_S) == [EventKind.RDMA_SILENT]
    assert training.run(7200) == []
    assert training.run(60, rate=40e9) == [EventKind.SIGNAL_RECOVERED]


def test_traffic_on_any_port_is_traffic(training: Training) -> None:
    assert training.run(3600, rate=40e9, port="mlx5_1/1") == []


def test_counters_of_32_bits_that_begin_anew_are_no_silence(training: Training) -> None:
    for start in range(120):
        training.words["mlx5_0/1"] = (start * 1_500_000_007) % STUCK
        assert training.run(LOOK_EVERY_S) == []


def test_a_counter_that_stands_at_its_end_is_no_silence(training: Training) -> None:
    training.words["mlx5_0/1"] = STUCK
    assert training.run(3600) == []


def test_a_port_that_comes_while_all_is_silent_is_no_traffic(training: Training) -> None:
    assert training.run(SILENT_S / 2) == []
    training.words["mlx5_2/1"] = 10**13
    assert training.run(SILENT_S / 2) == [EventKind.RDMA_SILENT]


def test_a_removed_port_that_carried_all_leaves_silence(training: Training) -> None:
    del training.words["mlx5_0/1"]
    shutil.rmtree(training.sys / "class/infiniband/mlx5_0")
    assert training.run(SILENT_S) == [EventKind.RDMA_SILENT]


def test_time_in_which_nobody_could_tell_counts_by_what_was_carried_in_it(
    training: Training,
) -> None:
    path = folder(training.sys, "mlx5_0/1") / "counters/port_rcv_data"
    for _ in range(60):
        training.now_s += LOOK_EVERY_S
        path.write_text("garbage")
        assert training.look() == []
    assert training.run(LOOK_EVERY_S, rate=40e9) == [], "it rose meanwhile"
    assert training.run(SILENT_S) == [EventKind.RDMA_SILENT]
