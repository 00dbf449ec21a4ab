"""Host probes over trees that look like /proc and /sys: what this machine does not have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from everstep.decide.observation import Observation
from everstep.decide.words import Action, Confidence, Symptom, Verdict
from everstep.machine.probes.host_clock import (
    ClockProbe,
    ClockSettings,
    Discipline,
    read_discipline,
)
from everstep.machine.probes.host_hardware import EdacProbe, EdacSettings, StorageProbe
from everstep.machine.probes.host_kernel import (
    DescriptorProbe,
    DescriptorSettings,
    KernelStateProbe,
)
from everstep.machine.probes.host_load import (
    HungTaskProbe,
    HungTaskSettings,
    LoadProbe,
    LoadSettings,
)
from everstep.machine.probes.host_memory import (
    MemoryProbe,
    MemorySettings,
    OomProbe,
    ShmProbe,
    ShmSettings,
    cgroup_folders,
)
from tests.support.roots import BOOT_ID, process, write

MEMORY = MemorySettings(available_min=0.02, pressure_max=0.2, swap_bytes_per_s_max=100 << 20)
LOAD = LoadSettings(load_per_cpu_max=4, pressure_max=0.8, steal_max=0.1)
HUNG = HungTaskSettings(hung_after_s=120, look_every_s=10)
EDAC = EdacSettings(corrected_per_hour_max=100)


def only(seen: Sequence[Observation]) -> Observation:
    assert len(seen) == 1, seen
    return seen[0]


def rules(seen: Sequence[Observation]) -> list[str]:
    return [one.rule for one in seen if one.verdict is Verdict.FAULTY]


# --- OOM


def test_an_oom_kill_of_the_machine_is_seen_once_and_what_was_before_is_no_news(
    tmp_path: Path,
) -> None:
    probe = OomProbe(proc=tmp_path)
    write(tmp_path, "vmstat", "nr_free_pages 5\noom_kill 7")
    assert only(probe.look(0)).verdict is Verdict.HEALTHY
    write(tmp_path, "vmstat", "oom_kill 9")

    seen = only(probe.look(2))

    assert (seen.symptom, seen.action) == (Symptom.CPU_OOM, Action.WARN_ONLY)
    assert seen.values["kills"] == 2
    assert only(probe.look(4)).verdict is Verdict.HEALTHY


@pytest.mark.parametrize("name", ["memory.events", "memory.oom_control"])
def test_an_oom_kill_of_a_control_group_is_the_groups_not_the_machines(
    tmp_path: Path, name: str
) -> None:
    group = tmp_path / "cgroup" / "job"
    limit = "memory.max" if name == "memory.events" else "memory.limit_in_bytes"
    write(group, limit, 64 << 20)
    write(group, name, "oom_kill_disable 0\nunder_oom 0\noom_kill 0")
    write(tmp_path, "vmstat", "oom_kill 0")
    probe = OomProbe(proc=tmp_path, cgroups=lambda: [group])
    assert rules(probe.look(0)) == []
    write(group, name, "oom_kill 1")
    write(tmp_path, "vmstat", "oom_kill 1")

    seen = probe.look(2)

    assert rules(seen) == ["oom_kill_cgroup"]
    assert seen[0].action is Action.FIX_CONFIG_GIVE_UP
    assert seen[0].target == "cgroup job"
    assert "64 MiB" in seen[0].reason


def test_control_groups_of_a_process_are_found_in_both_versions(tmp_path: Path) -> None:
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, "7/cgroup", "9:cpu,memory:/jobs/a\n0::/jobs/b\n3:memory:/../escape")
    write(mount, "memory/jobs/a/memory.oom_control", "oom_kill 0")
    write(mount, "jobs/b/memory.events", "oom_kill 0")

    assert cgroup_folders(proc, mount, 7) == [mount / "memory/jobs/a", mount / "jobs/b"]


# --- memory, shared memory


def test_little_memory_left_pressure_and_swapping_warn(tmp_path: Path) -> None:
    write(tmp_path, "meminfo", "MemTotal: 1000000 kB\nMemAvailable: 10000 kB")
    write(tmp_path, "pressure/memory", "full avg10=31.50 avg60=0.00 avg300=0.00 total=1")
    write(tmp_path, "vmstat", "pswpin 0\npswpout 0")
    probe = MemoryProbe(MEMORY, proc=tmp_path)
    assert rules(probe.look(0)) == ["memory_low", "memory_pressure"]
    pages = 300 * (1 << 20) // os.sysconf("SC_PAGE_SIZE")
    write(tmp_path, "vmstat", f"pswpin {pages}\npswpout {pages}")

    seen = probe.look(2)

    assert rules(seen) == ["memory_low", "memory_pressure", "swap_storm"]
    assert {one.action for one in seen} == {Action.WARN_ONLY}


def test_memory_is_well_and_without_meminfo_unknown(tmp_path: Path) -> None:
    probe = MemoryProbe(MEMORY, proc=tmp_path)
    assert only(probe.look(0)).verdict is Verdict.UNKNOWN
    write(tmp_path, "meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB")
    assert only(probe.look(2)).verdict is Verdict.HEALTHY


def test_shared_memory_that_is_too_small(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    total = found.f_blocks * found.f_frsize
    well = ShmProbe(ShmSettings(size_min=1, free_min=0), folder=tmp_path)
    small = ShmProbe(ShmSettings(size_min=total + 1, free_min=0), folder=tmp_path)
    full = ShmProbe(ShmSettings(size_min=1, free_min=1), folder=tmp_path)
    absent = ShmProbe(ShmSettings(size_min=1, free_min=0), folder=tmp_path / "none")

    assert only(well.look(0)).verdict is Verdict.HEALTHY
    assert rules(small.look(0)) == ["shm_small"]
    assert rules(full.look(0)) == ["shm_full"]
    assert absent.look(0) == []
    assert absent.not_here()


# --- load and hung tasks


def stat(cpus: int, ticks: str) -> str:
    return f"cpu  {ticks}\n" + "".join(f"cpu{n} 1 2 3\n" for n in range(cpus))


def test_overload_takes_load_and_pressure(tmp_path: Path) -> None:
    write(tmp_path, "stat", stat(2, "0 0 0 100 0 0 0 0"))
    write(tmp_path, "loadavg", "9.00 1 1 1/2 3")
    probe = LoadProbe(LOAD, proc=tmp_path)
    assert rules(probe.look(0)) == ["cpu_overload"]  # a kernel without PSI
    write(tmp_path, "pressure/cpu", "some avg10=0 avg60=50.00 avg300=0 total=0")
    assert rules(probe.look(2)) == []
    write(tmp_path, "pressure/cpu", "some avg10=0 avg60=90.00 avg300=0 total=0")

    seen = only(probe.look(4))

    assert (seen.rule, seen.symptom, seen.action) == (
        "cpu_overload",
        Symptom.MFU_DECLINE,
        Action.WARN_ONLY,
    )


def test_steal_is_a_share_of_the_time_between_two_looks(tmp_path: Path) -> None:
    write(tmp_path, "loadavg", "0.10 1 1 1/2 3")
    write(tmp_path, "stat", stat(2, "0 0 0 100 0 0 0 50"))
    probe = LoadProbe(LOAD, proc=tmp_path)
    assert rules(probe.look(0)) == []
    write(tmp_path, "stat", stat(2, "0 0 0 180 0 0 0 70"))

    seen = only(probe.look(2))

    assert seen.rule == "cpu_steal"
    assert seen.values["steal_share"] == 0.2


def test_a_task_hangs_when_it_was_never_run_for_long_enough(tmp_path: Path) -> None:
    process(tmp_path, 7, state="D", switches=5, comm="python3", wchan="rpc_wait_bit_killable")
    process(tmp_path, 8, state="D", switches=1)
    process(tmp_path, 9)
    probe = HungTaskProbe(HUNG, proc=tmp_path)
    assert rules(probe.look(0)) == []
    process(tmp_path, 8, state="D", switches=2)  # it was run in between
    assert rules(probe.look(5)) == []  # too early for another look

    assert rules(probe.look(60)) == []
    seen = only(probe.look(121))

    assert (seen.rule, seen.values["pid"], seen.values["hung_tasks"]) == ("hung_task", 7, 1)
    assert (seen.symptom, seen.action) == (Symptom.FILESYSTEM_IO, Action.WAIT_EXTERNAL)
    assert seen.confidence is Confidence.LOW
    process(tmp_path, 7, state="S", switches=6)
    assert rules(probe.look(140)) == []


def test_a_hung_program_goes_before_a_kernel_thread_and_what_is_frozen_is_no_fault(
    tmp_path: Path,
) -> None:
    process(tmp_path, 5, state="D", parent=2, comm="kworker/0:1", wchan="poll_schedule_timeout")
    process(tmp_path, 6, state="D", comm="frozen", wchan="__refrigerator")
    probe = HungTaskProbe(HUNG, proc=tmp_path)
    probe.look(0)
    assert only(probe.look(121)).action is Action.WARN_ONLY
    process(tmp_path, 9, state="D", comm="python3", stack="[<0>] os_acquire_rwlock+0x1 [nvidia]")
    probe.look(140)

    seen = only(probe.look(300))

    assert (seen.values["pid"], seen.values["hung_tasks"]) == (9, 2)
    assert (seen.symptom, seen.action) == (Symptom.GPU_UNAVAILABLE, Action.STOP_TIME_CHECK)


# --- EDAC, machine checks, disks


def test_an_uncorrected_memory_error_while_we_look_evicts(tmp_path: Path) -> None:
    sys, proc = tmp_path / "sys", tmp_path / "proc"
    for name, value in (("ce_count", 0), ("ue_count", 1)):
        write(sys, f"devices/system/edac/mc/mc0/{name}", value)
    probe = EdacProbe(EDAC, proc=proc, sys=sys)
    before = only(probe.look(0))
    assert (before.rule, before.action) == ("edac_uncorrected", Action.WARN_ONLY)
    assert only(probe.look(2)).verdict is Verdict.HEALTHY
    write(sys, "devices/system/edac/mc/mc0/ue_count", 2)

    seen = only(probe.look(4))

    assert (seen.rule, seen.action, seen.target) == (
        "edac_uncorrected",
        Action.EVICT_MACHINE,
        "memory mc0",
    )
    assert probe.not_here() == {}


def test_many_corrected_memory_errors_warn(tmp_path: Path) -> None:
    write(tmp_path, "devices/system/edac/mc/mc1/ce_count", 5000)
    probe = EdacProbe(EDAC, proc=tmp_path, sys=tmp_path)
    assert rules(probe.look(0)) == []
    write(tmp_path, "devices/system/edac/mc/mc1/ce_count", 5100)
    assert rules(probe.look(1800)) == []
    write(tmp_path, "devices/system/edac/mc/mc1/ce_count", 5101)
    assert rules(probe.look(1900)) == ["edac_corrected"]
    assert rules(probe.look(4000)) == []  # another hour


def test_a_machine_check_exception_is_counted_once_for_all_processors(tmp_path: Path) -> None:
    write(tmp_path, "interrupts", " MCE:   0   0   Machine check exceptions\n MCP:  9  9  polls")
    probe = EdacProbe(EDAC, proc=tmp_path, sys=tmp_path)
    assert rules(probe.look(0)) == []
    write(tmp_path, "interrupts", " MCE:   1   1   Machine check exceptions")

    seen = only(probe.look(2))

    assert (seen.rule, seen.action) == ("machine_check", Action.STOP_TIME_CHECK)
    assert "1 new" in seen.reason


def test_disks_that_say_that_they_have_failed(tmp_path: Path) -> None:
    for name, state in (("nvme0", "live"), ("nvme1", "live"), ("nvme10", "resetting")):
        write(tmp_path, f"class/nvme/{name}/state", state)
    write(tmp_path, "block/sda/device/state", "running")
    write(tmp_path, "block/sda/device/ioerr_cnt", "0x1f")
    write(tmp_path, "block/md0/md/degraded", 1)
    write(tmp_path, "fs/ext4/sda1/errors_count", 3)
    write(tmp_path, "fs/btrfs/aaaa/devinfo/1/error_stats", "write_errs 0\nread_errs 0")
    probe = StorageProbe(sys=tmp_path)
    first = probe.look(0)
    assert rules(first) == ["nvme_resetting", "array_degraded", "filesystem_errors"]
    assert {one.action for one in first if one.action} == {Action.WARN_ONLY}
    assert [one.target for one in first if one.target.startswith("nvme")] == [
        "nvme0",
        "nvme1",
        "nvme10",
    ]
    write(tmp_path, "class/nvme/nvme1/state", "dead")
    write(tmp_path, "block/sda/device/ioerr_cnt", "0x20")
    write(tmp_path, "fs/ext4/sda1/errors_count", 4)
    write(tmp_path, "fs/btrfs/aaaa/devinfo/1/error_stats", "write_errs 2\nread_errs 0")

    seen = {one.target: one for one in probe.look(2) if one.verdict is Verdict.FAULTY}

    assert seen["nvme1"].action is Action.EVICT_MACHINE
    assert seen["sda"].rule == "disk_errors"
    assert seen["ext4 sda1"].action is Action.EVICT_MACHINE
    assert seen["btrfs aaaa device 1"].rule == "filesystem_errors"
    write(tmp_path, "block/sda/device/state", "offline")
    assert "disk_offline" in rules(probe.look(4))


# --- clock, kernel state, open files


def test_the_kernels_clock_can_be_asked() -> None:
    found = read_discipline()

    assert abs(found.offset_s) < 1
    assert 0 <= found.error_max_s < 1000


def test_a_clock_that_is_set_or_not_kept_warns() -> None:
    wall = 1000.0
    said = Discipline(synchronised=True, offset_s=0.001, error_max_s=0.01)
    probe = ClockProbe(
        ClockSettings(offset_max_s=0.1, step_max_s=0.5),
        wall=lambda: wall,
        steady=lambda: 50.0,
        discipline=lambda: said,
    )
    assert only(probe.look(0)).verdict is Verdict.HEALTHY
    wall -= 3.0
    step = only(probe.look(2))
    assert (step.rule, step.values["step_s"]) == ("clock_step", -3.0)
    said = Discipline(synchronised=True, offset_s=-0.2, error_max_s=0.3)
    assert rules(probe.look(4)) == ["clock_offset"]
    said = Discipline(synchronised=False, offset_s=0.0, error_max_s=16.0)
    assert rules(probe.look(6)) == ["clock_unsynchronised"]


def test_a_clock_that_cannot_be_asked_is_unknown() -> None:
    def refuse() -> Discipline:
        raise OSError(1, "not permitted")

    probe = ClockProbe(ClockSettings(offset_max_s=0.1, step_max_s=0.5), discipline=refuse)

    assert only(probe.look(0)).verdict is Verdict.UNKNOWN


def kernel(proc: Path, *, boot_id: str = BOOT_ID, tainted: int = 0) -> None:
    write(proc, "sys/kernel/random/boot_id", boot_id)
    write(proc, "sys/kernel/tainted", tainted)
    write(proc, "uptime", "60.00 1.00")


def test_an_oops_while_we_look_evicts_and_an_old_one_warns(tmp_path: Path) -> None:
    kernel(tmp_path, tainted=1 << 12)  # an out-of-tree module, as with every NVIDIA driver
    probe = KernelStateProbe(proc=tmp_path, sys=tmp_path)
    assert only(probe.look(0)).verdict is Verdict.HEALTHY
    kernel(tmp_path, tainted=1 << 12 | 1 << 7)
    seen = only(probe.look(2))
    assert (seen.rule, seen.action) == ("kernel_oops", Action.EVICT_MACHINE)
    assert only(probe.look(4)).action is Action.WARN_ONLY


def test_a_reboot_is_told_by_the_boot_id_of_the_last_life(tmp_path: Path) -> None:
    file = tmp_path / "boot_id"
    kernel(tmp_path)

    def look() -> Observation:
        probe = KernelStateProbe(proc=tmp_path, sys=tmp_path, remembered=file)
        return only(probe.look(0))

    assert look().verdict is Verdict.HEALTHY
    assert look().verdict is Verdict.HEALTHY
    kernel(tmp_path, boot_id=BOOT_ID.replace("0f", "ff"))
    assert look().rule == "rebooted"
    assert look().verdict is Verdict.HEALTHY
    assert sorted(p.name for p in tmp_path.iterdir()) == ["boot_id", "sys", "uptime"]


def test_records_of_a_panic_are_told(tmp_path: Path) -> None:
    kernel(tmp_path)
    write(tmp_path, "fs/pstore/dmesg-efi-170000001", "Panic#1 Part1")

    assert rules(KernelStateProbe(proc=tmp_path, sys=tmp_path).look(0)) == ["panic_record"]


def test_open_files_of_the_machine_and_of_a_process(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/file-nr", "950\t0\t1000")
    write(tmp_path, "7/limits", "Limit   Soft  Hard  Units\nMax open files   4   8   files")
    for number in range(4):
        write(tmp_path, f"7/fd/{number}", "")
    probe = DescriptorProbe(DescriptorSettings(used_max=0.9), proc=tmp_path, pids=lambda: [7, 8])

    assert rules(probe.look(0)) == ["open_files_machine", "open_files_process"]
    write(tmp_path, "sys/fs/file-nr", "950\t0\t9223372036854775807")
    assert rules(probe.look(2)) == ["open_files_process"]
