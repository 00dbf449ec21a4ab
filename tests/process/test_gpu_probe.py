"""The GPU probe against a stand-in for NVIDIA's library, through the real pynvml."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep.decide.kernel import KernelJudge
from everstep.decide.words import Action, Confidence, Symptom, Verdict
from everstep.machine.probes.catalogue import Surroundings, probes_of_machine
from everstep.machine.probes.gpu_rules import GPU_RULES, GpuRule
from everstep.machine.probes.gpu_xids import by_catalogue
from everstep.machine.probes.kernel_log import KernelLogProbe, KernelLogSettings
from everstep.spec.kernel_catalogue import load_kernel_catalogue
from everstep.spec.policy import ProbesPolicy
from tests.process.gpus import Gpus, gpus, nvml_built, quick_policy, rules
from tests.support.nvml import build

__all__ = ["gpus", "nvml_built"]

WELL: dict[str, list[str]] = {"gpu 0": [], "gpu 1": []}


def test_gpus_that_are_well(gpus: Gpus) -> None:
    probe = gpus.probe()

    seen = gpus.look(probe)

    assert [(o.target, o.verdict) for o in seen] == [
        ("gpu 0", Verdict.HEALTHY),
        ("gpu 1", Verdict.HEALTHY),
    ]
    assert seen[1].values["temperature_c"] == 45
    assert seen[1].values["memory_total_gib"] == 80.0
    assert seen[1].values["links_up"] == 4
    assert probe.not_here() == {}
    assert probe.not_looked_at() == {"gpu 0": [], "gpu 1": []}


STATES: list[tuple[str, dict[str, Any]]] = [
    ("gpu_lost", {"error": 15}),
    ("gpu_lost", {"error__nvmlDeviceGetPowerUsage": 15}),
    ("gpu_reset_required", {"error": 16}),
    ("recovery_reset", {"recovery_action": 1}),
    ("recovery_reset", {"recovery_action": 2}),
    ("recovery_drain", {"recovery_action": 3}),
    ("sram_threshold", {"sram": 1}),
    ("row_remap_failed", {"remap_failed": 1}),
    ("row_remap_pending", {"remap_pending": 1}),
    ("retired_pages_pending", {"pages_pending": 1}),
    ("ecc_uncorrectable", {"ecc_volatile": 3}),
    ("ecc_uncorrectable", {"ecc_aggregate": 2}),
    ("thermal_slowdown", {"temperature": 88, "slowdown_reasons": 0x40}),
    ("thermal_slowdown", {"temperature": 60, "memory_temperature": 103, "slowdown_reasons": 0x20}),
    ("power_slowdown", {"slowdown_reasons": 0x88}),
    ("nvlink_down", {"links": "1101"}),
    ("pcie_replays", {"pcie_replays": 500}),
    ("nvlink_errors", {"nvlink_errors": 5000}),
    ("fabric_failed", {"fabric_state": 3, "fabric_status": 999}),
    ("fabric_degraded", {"fabric_state": 3, "fabric_health": 1}),
]


@pytest.mark.parametrize("rule, says", STATES, ids=lambda value: str(value)[:60])
def test_a_fault_is_seen_at_the_next_look(gpus: Gpus, rule: str, says: dict[str, Any]) -> None:
    probe = gpus.probe()
    assert rules(gpus.look(probe)) == WELL
    gpus.library.set(1, **says)

    seen = gpus.look(probe)

    assert rules(seen)["gpu 0"] == []
    assert rule in rules(seen)["gpu 1"]
    found = next(o for o in seen if o.rule == rule)
    wanted = GPU_RULES[rule]
    assert (found.symptom, found.action, found.confidence) == wanted[:3]
    assert found.reason.startswith("gpu 1: ")


TWICE: list[tuple[str, dict[str, Any]]] = [
    ("pcie_width", {"busy": 90, "pcie_width": 8}),
    ("pcie_generation", {"busy": 90, "pcie_generation": 3}),
    ("gpu_unknown_error", {"error__nvmlDeviceGetPowerUsage": 999}),
    ("gpu_call_fails", {"error__nvmlDeviceGetPowerUsage": 17}),
]


@pytest.mark.parametrize("rule, says", TWICE, ids=lambda value: str(value)[:60])
def test_what_may_pass_is_a_fault_when_it_is_seen_twice(
    gpus: Gpus, rule: str, says: dict[str, Any]
) -> None:
    probe = gpus.probe()
    assert rules(gpus.look(probe)) == WELL
    gpus.library.set(1, **says)

    assert rules(gpus.look(probe))["gpu 1"] == []
    assert rules(gpus.look(probe))["gpu 1"] == [rule]
    gpus.library.unset(1, *says)
    assert rules(gpus.look(probe)) == WELL


HARMLESS: list[dict[str, Any]] = [
    {"temperature": 95},
    {"temperature": 60, "slowdown_reasons": 0x40},
    {"temperature": 95, "slowdown_reasons": 0x4},
    {"busy": 0, "pcie_generation": 1},
    {"busy": 100, "temperature": 70},
    {"links": "none"},
    {"links": "0000"},
    {"busy": "none", "mig": 1},
    {"ecc_volatile": "none", "ecc_aggregate": "none"},
    {"recovery_action": "none", "memory_temperature": "none", "nvlink_errors": "none"},
    {"fabric_state": 3},
    {"pcie_replays": 3},
    {"error__nvmlDeviceGetPowerUsage": 17},
    {"error__nvmlDeviceGetUtilizationRates": 21},
]


@pytest.mark.parametrize("says", HARMLESS, ids=str)
def test_what_is_no_fault(gpus: Gpus, says: dict[str, Any]) -> None:
    """On both GPUs from the start: cards that are so, or work that makes them so."""
    for gpu in (0, 1):
        gpus.library.set(gpu, **says)
    probe = gpus.probe()

    for _ in range(3):
        seen = gpus.look(probe)

    assert rules(seen) == WELL
    assert {o.verdict for o in seen} == {Verdict.HEALTHY}


def test_a_slowdown_that_lasts_is_the_machines(gpus: Gpus) -> None:
    probe = gpus.probe()
    gpus.library.set(0, temperature=93, slowdown_reasons=0x40)

    for _ in range(5):
        assert rules(gpus.look(probe))["gpu 0"] == ["thermal_slowdown"]
    seen = gpus.look(probe)

    lasting = next(o for o in seen if o.rule == "thermal_slowdown_lasting")
    assert lasting.action is Action.EVICT_MACHINE
    assert lasting.values["temperature_c"] == 93
    gpus.library.set(0, temperature=60, slowdown_reasons=0)
    assert rules(gpus.look(probe)) == WELL


def test_counters_that_rose_count_for_the_hold_time_and_no_longer(gpus: Gpus) -> None:
    probe = gpus.probe(quick_policy(gpu_event_hold="1m"))
    gpus.library.set(0, ecc_volatile=1)
    before = gpus.look(probe)
    assert rules(before)["gpu 0"] == ["ecc_before"]
    assert before[0].action is Action.WARN_ONLY

    gpus.library.set(0, ecc_volatile=2)
    assert "ecc_uncorrectable" in rules(gpus.look(probe))["gpu 0"]
    assert "ecc_uncorrectable" in rules(gpus.look(probe, 59))["gpu 0"]
    assert "ecc_uncorrectable" not in rules(gpus.look(probe, 2))["gpu 0"]


def test_fewer_links_than_the_gpu_beside_it_is_a_warning(gpus: Gpus) -> None:
    gpus.library.set(1, links="1110")
    probe = gpus.probe()

    seen = gpus.look(probe)

    assert rules(seen) == {"gpu 0": [], "gpu 1": ["nvlink_fewer"]}
    assert seen[1].action is Action.WARN_ONLY


def test_a_fabric_that_does_not_come_up(gpus: Gpus) -> None:
    gpus.library.set(0, fabric_state=2)
    probe = gpus.probe()

    for _ in range(5):
        assert rules(gpus.look(probe)) == WELL
    assert rules(gpus.look(probe))["gpu 0"] == ["fabric_not_ready"]


def test_processes_of_no_run_are_seen_only_when_it_is_known_who_may_be_there(gpus: Gpus) -> None:
    expected: set[int] | None = None
    probe = gpus.probe(expected_pids=lambda: expected)
    mine = os.getpid()
    gpus.library.set(0, pid=mine)
    gpus.look(probe)
    assert rules(gpus.look(probe)) == WELL

    expected = {mine}
    gpus.look(probe)
    assert rules(gpus.look(probe)) == WELL

    expected = set()
    assert rules(gpus.look(probe)) == WELL  # it may be ending
    assert rules(gpus.look(probe))["gpu 0"] == ["process_left"]

    gpus.library.set(0, pid=2**30)  # of another pid namespace: nobody here can say whose it is
    assert rules(gpus.look(probe)) == WELL
    assert rules(gpus.look(probe)) == WELL


# --- Xids


def test_an_xid_is_heard_and_judged_by_the_catalogue(gpus: Gpus) -> None:
    asked: list[int] = []

    def judge(number: int) -> GpuRule | None:
        asked.append(number)
        off_bus = Symptom.GPU_UNAVAILABLE, Action.EVICT_MACHINE, Confidence.HIGH
        return GpuRule(*off_bus, "fallen off the bus") if number == 79 else None

    woken: list[bool] = []
    probe = gpus.probe(quick_policy(gpu_event_hold="1m"), judge_xid=judge)
    probe.on_news(lambda: woken.append(True))
    assert rules(gpus.look(probe)) == WELL

    gpus.library.set(1, xid="79:1")
    seen = gpus.until(probe, lambda seen: "xid_79" in rules(seen)["gpu 1"], after_s=0.0)
    assert woken  # it need not wait for the next look
    found = next(o for o in seen if o.rule == "xid_79")
    assert (found.symptom, found.action) == (Symptom.GPU_UNAVAILABLE, Action.EVICT_MACHINE)
    assert "fallen off the bus" in found.reason
    assert rules(seen)["gpu 0"] == []

    gpus.library.set(1, xid="13:2")
    gpus.until(probe, lambda _: 13 in asked, after_s=0.0)
    assert rules(gpus.look(probe, 61)) == WELL  # the catalogue says that 13 is an application's


def test_the_catalogue_of_the_kernel_log_judges_bare_numbers_with_care() -> None:
    judge = by_catalogue(load_kernel_catalogue())

    off_bus = judge(79)
    assert off_bus is not None
    assert (off_bus.action, off_bus.confidence) == (Action.EVICT_MACHINE, Confidence.HIGH)
    for application_or_told_by_the_rest_of_the_line in (13, 31, 43, 45, 154):
        assert judge(application_or_told_by_the_rest_of_the_line) is None
    for severity_is_not_known in (144, 149):
        rule = judge(severity_is_not_known)
        assert rule is not None
        assert (rule.action, rule.confidence) == (Action.STOP_TIME_CHECK, Confidence.LOW)
    unknown = judge(9999)
    assert unknown is not None
    assert unknown.action is not Action.EVICT_MACHINE


def test_all_probes_of_a_machine_include_those_of_gpus(tmp_path: Path) -> None:
    around = Surroundings(sys=tmp_path)
    probes = probes_of_machine(quick_policy(dcgm_url=""), around)
    try:
        assert [probe.name for probe in probes][:2] == ["gpu", "dcgm"]
    finally:
        for probe in probes:
            probe.close()


def test_the_kernel_log_speaks_of_the_same_gpus(gpus: Gpus, tmp_path: Path) -> None:
    probe = gpus.probe()
    log = tmp_path / "kern.log"
    log.touch()
    kernel_log = KernelLogProbe(
        KernelLogSettings(source=str(log), hold_s=600),
        KernelJudge(load_kernel_catalogue(environ={})),
        proc=tmp_path,
        dev=tmp_path,
        gpu_names=probe.pci_names,
    )
    kernel_log.look(gpus.now_s)
    assert probe.pci_names() == {}
    gpus.look(probe)
    assert probe.pci_names(wait_s=60) == {"00000000:10:00.0": "gpu 0", "00000000:11:00.0": "gpu 1"}

    gpus.library.set(1, error=15)
    log.write_text("NVRM: Xid (PCI:0000:11:00): 79, pid=7, name=x, GPU has fallen off the bus.\n")

    assert rules(gpus.look(probe)) == {"gpu 0": [], "gpu 1": ["gpu_lost"]}
    found = rules(kernel_log.look(gpus.now_s))
    assert found == {"gpu 1": ["xid_79"], "": []}
    kernel_log.close()


def test_nobody_waits_for_names_longer_than_for_a_look(gpus: Gpus) -> None:
    gpus.library.set(error=9)
    refused = gpus.probe()
    gpus.look(refused)
    assert refused.pci_names(wait_s=60) == {}
    closed = gpus.probe()
    closed.close()
    assert closed.pci_names(wait_s=60) == {}


# --- A driver that hangs


@pytest.mark.parametrize("call", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperatureV"])
def test_a_call_that_hangs_is_a_fault_of_its_gpu_and_the_others_are_looked_at(
    gpus: Gpus, call: str
) -> None:
    woken: list[float] = []
    probe = gpus.probe()
    probe.on_news(lambda: woken.append(time.monotonic()))
    assert rules(gpus.look(probe)) == WELL

    gpus.library.set(1, **{f"hang__{call}": 1})
    seen = gpus.look(probe, 0.0)
    assert rules(seen) == {"gpu 0": [], "gpu 1": ["driver_hang"]}
    hang = next(o for o in seen if o.rule == "driver_hang")
    assert hang.action is Action.EVICT_MACHINE
    assert call in hang.reason
    deadline = time.monotonic() + 10
    while not woken:  # by the pulse, or by the look itself
        assert time.monotonic() < deadline
        time.sleep(0.01)

    # It is known to hang: the next look need not wait for it again.
    seen = gpus.look(probe, 0.0)
    assert rules(seen) == {"gpu 0": [], "gpu 1": ["driver_hang"]}

    gpus.library.unset(1, f"hang__{call}")
    gpus.until(probe, lambda seen: rules(seen) == WELL, after_s=0.0)


def test_a_hang_between_two_looks_asks_for_a_look(gpus: Gpus) -> None:
    woken: list[bool] = []
    probe = gpus.probe()
    gpus.look(probe)
    probe.on_news(lambda: woken.append(True))

    gpus.library.set(0, hang=1)

    deadline = time.monotonic() + 10
    while not woken:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert rules(gpus.look(probe, 0.0)) == {"gpu 0": ["driver_hang"], "gpu 1": []}


def test_a_helper_with_a_hung_call_is_replaced_and_killed(gpus: Gpus) -> None:
    """The pauses double; GPUs that answer are looked at all the time."""
    probe = gpus.probe()
    gpus.look(probe)
    gpus.library.set(1, hang=1)
    assert rules(gpus.look(probe)) == {"gpu 0": [], "gpu 1": ["driver_hang"]}
    first = probe.helper_pid
    assert first is not None

    assert rules(gpus.look(probe, 0.5)) == {"gpu 0": [], "gpu 1": ["driver_hang"]}
    assert probe.helper_pid == first
    assert rules(gpus.look(probe, 1.0)) == {"gpu 0": [], "gpu 1": ["driver_hang"]}
    second = probe.helper_pid
    assert second != first
    assert not psutil.pid_exists(first)
    assert probe.helpers_left == 0
    assert rules(gpus.look(probe, 1.5)) == {"gpu 0": [], "gpu 1": ["driver_hang"]}
    assert probe.helper_pid == second
    gpus.look(probe, 1.0)
    assert probe.helper_pid != second


def test_a_driver_that_hangs_in_its_start(gpus: Gpus) -> None:
    gpus.library.set(hang__nvmlInitWithFlags=1)
    probe = gpus.probe(quick_policy(gpu_start_deadline="2s", look_deadline="2s"))

    (first,) = gpus.look(probe)
    assert first.verdict is Verdict.UNKNOWN
    assert "has not come up yet" in first.reason
    seen = gpus.until(probe, lambda seen: rules(seen) == {"": ["driver_hang"]}, after_s=0.0)
    assert seen[0].symptom is Symptom.GPU_UNAVAILABLE

    gpus.library.unset(None, "hang__nvmlInitWithFlags")
    assert rules(gpus.look(probe)) == WELL


# --- Helpers that die


def test_a_helper_that_is_killed_is_replaced_and_nothing_is_forgotten(gpus: Gpus) -> None:
    probe = gpus.probe()
    gpus.look(probe)
    gpus.library.set(0, links="1011")
    assert rules(gpus.look(probe))["gpu 0"] == ["nvlink_down"]
    assert probe.helper_pid is not None
    psutil.Process(probe.helper_pid).kill()

    seen = gpus.until(probe, lambda seen: rules(seen)["gpu 0"] == ["nvlink_down"])

    assert rules(seen)["gpu 1"] == []


def test_a_helper_that_is_stopped_is_unknown_first_and_replaced(gpus: Gpus) -> None:
    probe = gpus.probe()
    gpus.look(probe)
    assert probe.helper_pid is not None
    psutil.Process(probe.helper_pid).suspend()

    seen = gpus.look(probe)

    assert {(o.target, o.verdict) for o in seen} == {
        ("gpu 0", Verdict.UNKNOWN),
        ("gpu 1", Verdict.UNKNOWN),
    }
    assert rules(gpus.look(probe)) == WELL


def test_a_helper_ends_with_its_parent(gpus: Gpus, tmp_path: Path) -> None:
    """Killed with -9, the parent can tell nobody."""
    import subprocess
    import sys

    program = (
        "import sys, time\n"
        "from everstep.machine.probes.gpu import GpuProbe\n"
        "from everstep.spec.load import load_policy\n"
        "probe = GpuProbe(load_policy(None, environ={}).policy.probes)\n"
        "probe.look(time.monotonic())\n"
        "print(probe.helper_pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        env=gpus.library.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        helper = psutil.Process(int(parent.stdout.readline()))
        assert helper.is_running()
        parent.kill()
        parent.wait()
        gone, _ = psutil.wait_procs([helper], timeout=10)
        assert gone == [helper]


def test_a_library_that_prints_does_not_speak_for_the_helper(gpus: Gpus) -> None:
    gpus.library.set(prints=1)

    assert rules(gpus.look(gpus.probe())) == WELL


# --- GPUs that go


def test_a_gpu_that_is_gone_after_a_new_start_keeps_its_name(gpus: Gpus) -> None:
    """The driver gives new numbers; the UUIDs say who is missing."""
    gpus.library.set(count=3)
    probe = gpus.probe()
    assert rules(gpus.look(probe)) == {"gpu 0": [], "gpu 1": [], "gpu 2": []}

    gpus.library.set(count=2)
    gpus.library.set(1, uuid=2)
    assert probe.helper_pid is not None
    psutil.Process(probe.helper_pid).kill()
    seen = gpus.until(probe, lambda seen: any(o.rule == "gpu_lost" for o in seen))

    assert rules(seen) == {"gpu 0": [], "gpu 1": ["gpu_lost"], "gpu 2": []}


def test_a_gpu_without_a_handle_is_lost(gpus: Gpus) -> None:
    gpus.library.set(1, error__nvmlDeviceGetHandleByIndex_v2=999)
    probe = gpus.probe()

    assert rules(gpus.look(probe)) == {"gpu 0": [], "gpu 1": ["gpu_lost"]}

    gpus.library.unset(1, "error__nvmlDeviceGetHandleByIndex_v2")
    gpus.until(probe, lambda seen: rules(seen) == WELL)


def test_fewer_gpus_than_the_policy_expects(gpus: Gpus) -> None:
    seen = gpus.look(gpus.probe(quick_policy(gpus_expected=8)))

    assert rules(seen) == {"": ["gpus_missing"], "gpu 0": [], "gpu 1": []}
    assert seen[0].reason == "2 GPUs, the policy expects 8"


# --- Drivers that are not there, too new, or too old


@pytest.mark.parametrize(
    "error, rule", [(9, "driver_not_loaded"), (18, "driver_version_mismatch"), (999, "nvml_fails")]
)
def test_a_driver_that_refuses(gpus: Gpus, error: int, rule: str) -> None:
    gpus.library.set(error__nvmlInitWithFlags=error)
    probe = gpus.probe(quick_policy(gpus_expected=2))

    assert rules(gpus.look(probe)) == {"": [rule]}

    gpus.library.unset(None, "error__nvmlInitWithFlags")
    assert rules(gpus.look(probe)) == WELL


def test_a_driver_that_is_not_loaded_on_a_machine_without_gpus(gpus: Gpus, tmp_path: Path) -> None:
    gpus.library.set(error__nvmlInitWithFlags=9)
    probe = gpus.probe(sys_root=tmp_path / "sys")

    assert gpus.look(probe) == []

    assert "no NVIDIA GPU is on the PCI bus" in probe.not_here()["gpu"]
    assert gpus.look(probe) == []
    assert probe.helper_pid is None


def test_a_driver_that_is_not_loaded_where_a_gpu_is_on_the_bus(gpus: Gpus, tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:41:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    gpus.library.set(error__nvmlInitWithFlags=9)

    seen = gpus.look(gpus.probe(sys_root=tmp_path / "sys"))

    assert rules(seen) == {"": ["driver_not_loaded"]}
    assert seen[0].symptom is Symptom.ENVIRONMENT_MISMATCH


def test_a_machine_without_the_library_has_nothing_to_look_at(gpus: Gpus) -> None:
    (gpus.library.folder / "libnvidia-ml.so.1").unlink()
    probe = gpus.probe()
    seen = gpus.look(probe)
    if probe.not_looked_at():
        pytest.skip("this machine has NVIDIA's library itself")

    assert seen == []
    assert probe.not_here() == {"gpu": "NVIDIA's library libnvidia-ml.so.1 is not installed"}


def test_an_old_driver_is_looked_at_as_far_as_it_goes(gpus: Gpus, tmp_path: Path) -> None:
    old = build(tmp_path / "old", "-DOLD")
    probe = Gpus(old).probe()
    gpus.probes.append(probe)

    seen = gpus.look(probe)

    assert {o.verdict for o in seen} == {Verdict.HEALTHY}
    assert seen[0].values["temperature_c"] == 45
    assert seen[0].values["memory_total_gib"] == 80.0
    assert set(probe.not_looked_at()["gpu 0"]) >= {"SRAM ECC", "fabric", "processes", "MIG"}
    old.set(1, temperature=92, slowdown_reasons=0x40)
    assert rules(gpus.look(probe))["gpu 1"] == ["thermal_slowdown"]


# --- The real thing


@pytest.mark.gpu
def test_a_real_gpu(real_policy: ProbesPolicy) -> None:
    from everstep.machine.probes.gpu import GpuProbe

    probe = GpuProbe(real_policy)
    try:
        seen = probe.look(time.monotonic())
        if probe.not_here():
            pytest.skip(probe.not_here()["gpu"])
        assert seen
        assert all(o.verdict is not Verdict.UNKNOWN for o in seen), seen
        again = probe.look(time.monotonic())
        assert [o.target for o in again] == [o.target for o in seen]
    finally:
        probe.close()


@pytest.fixture
def real_policy() -> ProbesPolicy:
    from everstep.spec.load import load_policy

    return load_policy(None, environ={}).policy.probes
