"""Host probes and real faults: full and broken disks, OOM kills, the kernel's own log.

Each test makes the real thing where this user may (root), and says so where not.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.decide.observation import Observation
from everstep.decide.words import Action, Confidence, Symptom, Verdict
from everstep.machine.probes.host_disk import DiskHelper, DiskProbe, DiskSettings
from everstep.machine.probes.host_hardware import StorageProbe
from everstep.machine.probes.host_load import HungTaskProbe, HungTaskSettings
from everstep.machine.probes.host_memory import OomProbe, cgroup_folders
from everstep.machine.probes.kernel_log_sources import KmsgSource
from tests.support.roots import write

PROC = Path("/proc")
SYS = Path("/sys")
DISK = DiskSettings(
    free_min=1 << 20,
    free_share_min=0.01,
    low_factor=10,
    inodes_free_min=1000,
    deadline_s=20,
    write_every_s=30,
)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def need_root(what: str) -> None:
    if os.geteuid() != 0:
        pytest.skip(f"needs root, to {what}")


@contextlib.contextmanager
def mounted(where: Path, *arguments: str | Path) -> Iterator[Path]:
    """A file system at ``where``, gone afterwards whatever happens."""
    where.mkdir()
    done = run("mount", *arguments, where)
    if done.returncode:
        pytest.skip(f"root, but may not mount: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    need_root("mount a file system of 2 MiB")
    with mounted(tmp_path / "tmpfs", "-t", "tmpfs", "-o", "size=2m,nr_inodes=200", "tmpfs") as it:
        yield it


@pytest.fixture
def small_ext4(tmp_path: Path) -> Iterator[Path]:
    need_root("mount ext4 on a loop device")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    made = run("mkfs.ext4", "-q", "-m", "0", image)
    assert made.returncode == 0, made.stderr
    with mounted(tmp_path / "ext4", "-o", "loop", image) as where:
        yield where


MakeProbe = Callable[..., DiskProbe]


@pytest.fixture
def disk() -> Iterator[MakeProbe]:
    """Makes probes, and ends their helper processes."""
    made: list[DiskProbe] = []

    def make(*paths: Path, own: Path | None = None, settings: DiskSettings = DISK) -> DiskProbe:
        made.append(DiskProbe(settings, paths=lambda: paths, own_folder=own, proc=PROC))
        return made[-1]

    yield make
    for probe in made:
        probe.close()


def look(probe: DiskProbe, now_s: float = 0) -> Observation:
    (seen,) = probe.look(now_s)
    return seen


def fill(folder: Path) -> Path:
    """A file that takes all room there is."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65536, 1024):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass
    return filler


# --- disks


@pytest.mark.root
def test_a_tmpfs_that_fills_up(small_tmpfs: Path, disk: MakeProbe) -> None:
    probe = disk(small_tmpfs)
    assert look(probe).verdict is Verdict.HEALTHY
    filler = fill(small_tmpfs)

    seen = look(probe, 2)

    assert (seen.rule, seen.symptom, seen.action) == (
        "disk_full",
        Symptom.DISK_FULL,
        Action.FIX_CONFIG_GIVE_UP,
    )
    assert seen.values["fs"] == "tmpfs"
    os.truncate(filler, (2 << 20) - (100 << 10))  # 5 %: beyond full, below ten times that
    assert look(probe, 4).rule == "disk_low"
    filler.unlink()
    assert look(probe, 6).verdict is Verdict.HEALTHY


@pytest.mark.root
def test_a_file_system_without_inodes_left(small_tmpfs: Path, disk: MakeProbe) -> None:
    probe = disk(small_tmpfs)
    with contextlib.suppress(OSError):
        for number in range(500):
            (small_tmpfs / str(number)).touch()

    assert look(probe).rule == "inodes_full"


@pytest.mark.root
def test_ext4_without_room_is_full_also_when_we_write(small_ext4: Path, disk: MakeProbe) -> None:
    never_full = DiskSettings(
        free_min=0,
        free_share_min=0,
        low_factor=1,
        inodes_free_min=0,
        deadline_s=20,
        write_every_s=30,
    )
    probe = disk(own=small_ext4, settings=never_full)
    assert look(probe).verdict is Verdict.HEALTHY
    before = sorted(small_ext4.iterdir())
    filler = fill(small_ext4)
    assert look(probe, 2).verdict is Verdict.HEALTHY  # not yet time to write again

    seen = look(probe, 32)

    assert (seen.rule, seen.symptom) == ("disk_full", Symptom.DISK_FULL)
    assert "ENOSPC" in seen.reason
    filler.unlink()
    assert look(probe, 34).verdict is Verdict.HEALTHY  # looked at again at once
    assert sorted(small_ext4.iterdir()) == before


@pytest.mark.root
def test_ext4_that_becomes_read_only_evicts(small_ext4: Path, disk: MakeProbe) -> None:
    probe = disk(small_ext4)
    assert look(probe).verdict is Verdict.HEALTHY
    done = run("mount", "-o", "remount,ro", small_ext4)
    assert done.returncode == 0, done.stderr

    seen = look(probe, 2)

    assert (seen.rule, seen.symptom, seen.action, seen.confidence) == (
        "disk_read_only",
        Symptom.FILESYSTEM_IO,
        Action.EVICT_MACHINE,
        Confidence.HIGH,
    )
    # Whoever comes later cannot know that it was otherwise.
    assert look(disk(small_ext4)).action is Action.STOP_TIME_CHECK


@pytest.mark.root
def test_ext4_that_finds_an_error_is_seen_in_its_counter_and_in_its_state(
    small_ext4: Path, disk: MakeProbe
) -> None:
    """``trigger_fs_error`` makes the kernel handle an error as it would a real one."""
    device = small_ext4.stat().st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    trigger = SYS / "fs" / "ext4" / name / "trigger_fs_error"
    if not trigger.exists():
        pytest.skip("this kernel's ext4 offers no trigger_fs_error")
    done = run("mount", "-o", "remount,errors=remount-ro", small_ext4)
    assert done.returncode == 0, done.stderr
    storage, probe = StorageProbe(sys=SYS), disk(small_ext4)
    target = f"ext4 {name}"
    before = {one.target: one for one in storage.look(0)}
    assert before[target].verdict is Verdict.HEALTHY
    assert look(probe).verdict is Verdict.HEALTHY
    trigger.write_text("everstep test\n")

    seen = {one.target: one for one in storage.look(2)}

    assert (seen[target].rule, seen[target].action) == (
        "filesystem_errors",
        Action.EVICT_MACHINE,
    )
    assert look(probe, 2).rule == "disk_read_only"


def test_a_path_that_is_not_there_is_unknown(tmp_path: Path, disk: MakeProbe) -> None:
    seen = look(disk(tmp_path / "none"))

    assert seen.verdict is Verdict.UNKNOWN
    assert "ENOENT" in seen.reason


FIFREEZE, FITHAW = 0xC0045877, 0xC0045878


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Whoever writes to this file system hangs in the kernel meanwhile."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, FIFREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(fd, FITHAW, 0)
    finally:
        os.close(fd)


@pytest.mark.root
def test_a_disk_that_hangs_is_seen_and_the_others_are_too(
    small_ext4: Path, tmp_path: Path, disk: MakeProbe
) -> None:
    """Frozen, ext4 lets a writer sleep uninterruptibly, as a dead disk or file server does."""
    quick = replace(DISK, deadline_s=2.0)
    probe = disk(tmp_path, own=small_ext4, settings=quick)
    assert [one.verdict for one in probe.look(0)] == [Verdict.HEALTHY] * 2
    with frozen(small_ext4):
        for at_s in (31, 33):
            alive, dead = probe.look(at_s)
            assert alive.verdict is Verdict.HEALTHY
            assert (dead.rule, dead.symptom) == ("mount_hangs", Symptom.FILESYSTEM_IO)
            assert (dead.action, dead.confidence) == (Action.EVICT_MACHINE, Confidence.LOW)
            assert dead.values["fs"] == "ext4"
    until(lambda: probe.look(35)[1].verdict is Verdict.HEALTHY)


@pytest.mark.root
def test_a_process_that_hangs_in_the_kernel(small_ext4: Path) -> None:
    hung = HungTaskSettings(hung_after_s=5, look_every_s=0)
    probe = HungTaskProbe(hung, proc=PROC)
    with frozen(small_ext4):
        writes = f"open({str(small_ext4 / 'file')!r}, 'w')"
        rank = subprocess.Popen([sys.executable, "-c", writes])
        until(lambda: "(" in state_of(rank.pid) and state_of(rank.pid).split()[2] == "D")
        until(lambda: found(probe, rank.pid))
        (seen,) = probe.look(next(CLOCK))
    assert rank.wait(30) == 0
    assert (seen.rule, seen.action) == ("hung_task", Action.STOP_TIME_CHECK)
    assert seen.values["pid"] == rank.pid
    (after,) = probe.look(next(CLOCK))
    assert after.values.get("pid") != rank.pid


CLOCK = itertools.count(step=6)


def found(probe: HungTaskProbe, pid: int) -> bool:
    """Others may hang too while other tests freeze theirs: the longest one is told."""
    (seen,) = probe.look(next(CLOCK))
    return seen.values.get("pid") == pid


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


HANGS = """
import sys, json, time
for line in sys.stdin:
    request = json.loads(line)
    for path in request["paths"]:
        if "dead" not in path or request["id"] > 3:
            answer = {"id": request["id"], "path": path, "real": path, "device": "0:0",
                      "total": 100, "free": 90, "inodes": 0, "inodes_free": 0,
                      "read_only": False}
            print(json.dumps(answer), flush=True)
        if "dead" in path and request["id"] == 3:
            print(json.dumps({"id": 1, "path": path}), flush=True)
"""


@pytest.mark.parametrize(
    "kind, action", [("nfs4", Action.WAIT_EXTERNAL), ("xfs", Action.EVICT_MACHINE)]
)
def test_a_mount_that_hangs_is_seen_and_the_others_are_too(
    tmp_path: Path, kind: str, action: Action
) -> None:
    """A file server is a stand-in, as is the helper process; a real disk that hangs is above."""
    write(tmp_path, "self/mountinfo", f"1 2 0:50 / /dead rw - {kind} server:/x rw")
    settings = DiskSettings(
        free_min=0,
        free_share_min=0,
        low_factor=1,
        inodes_free_min=0,
        deadline_s=1.0,
        write_every_s=30,
    )
    probe = DiskProbe(
        settings,
        paths=lambda: [Path("/dead/checkpoints"), Path("/alive")],
        own_folder=None,
        proc=tmp_path,
        helper=DiskHelper([sys.executable, "-c", HANGS]),
    )
    try:
        for at_s in (0, 2):
            dead, alive = probe.look(at_s)
            assert (dead.rule, dead.action) == ("mount_hangs", action)
            assert dead.confidence is Confidence.LOW
            assert alive.verdict is Verdict.HEALTHY
        probe.look(4)  # it answers an old question
        dead, _ = probe.look(6)
        assert dead.verdict is Verdict.HEALTHY
    finally:
        probe.close()


def test_a_helper_that_dies_is_replaced(tmp_path: Path) -> None:
    dies = DiskHelper([sys.executable, "-c", "input()"])
    probe = DiskProbe(DISK, paths=lambda: [tmp_path], own_folder=None, proc=PROC, helper=dies)
    try:
        for at_s in (0, 2):
            (seen,) = probe.look(at_s)
            assert seen.verdict is Verdict.UNKNOWN
            assert "helper process" in seen.reason
    finally:
        probe.close()


OWNER = """
import sys
from everstep.machine.probes.host_disk import DiskHelper
helper = DiskHelper()
helper.ask(["/"], None, 30)
print(helper._process.pid, flush=True)
sys.stdin.read()
"""


def test_the_helper_ends_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        helper = os.pidfd_open(int(owner.stdout.readline()))
    finally:
        owner.kill()
        owner.communicate()
    ended, _, _ = select.select([helper], [], [], 30)
    os.close(helper)
    assert ended


# --- OOM


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory control group of version 1 with 32 MiB."""
    need_root("limit memory by a control group")
    root = Path("/sys/fs/cgroup/memory")
    if not (root / "memory.limit_in_bytes").exists():
        pytest.skip("there is no memory controller of control groups version 1")
    group = root / f"everstep-test-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        write(group, "memory.limit_in_bytes", 32 << 20)
        with contextlib.suppress(OSError):  # where swap is accounted
            write(group, "memory.memsw.limit_in_bytes", 32 << 20)
        yield group
    finally:
        group.rmdir()


EATS = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
print(open("/proc/self/cgroup").read(), flush=True)
sys.stdin.readline()
hold = []
while True:
    hold.append(bytearray(os.urandom(4096)) * 1024)
"""


@pytest.mark.root
def test_a_real_oom_kill_of_a_control_group(memory_group: Path) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", EATS, str(memory_group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert rank.stdout is not None
        assert rank.stdin is not None
        assert rank.stdout.readline()
        groups = cgroup_folders(PROC, Path("/sys/fs/cgroup"), rank.pid)
        assert groups == [memory_group]
        probe = OomProbe(proc=PROC, cgroups=lambda: groups)
        assert all(one.verdict is Verdict.HEALTHY for one in probe.look(0))
        rank.stdin.write("\n")
        rank.stdin.close()
        assert rank.wait(60) == -9
    finally:
        if rank.poll() is None:
            rank.kill()
            rank.wait()
        if rank.stdout is not None:
            rank.stdout.close()

    seen = [one for one in probe.look(2) if one.verdict is Verdict.FAULTY]

    mine = [one for one in seen if one.target == f"cgroup {memory_group.name}"]
    assert [(one.rule, one.symptom, one.action) for one in mine] == [
        ("oom_kill_cgroup", Symptom.CPU_OOM, Action.FIX_CONFIG_GIVE_UP)
    ]
    assert mine[0].values["kills"] == 1
    assert "32 MiB" in mine[0].reason


# --- the kernel's log


@pytest.mark.root
def test_a_line_in_the_real_kernel_log_is_read_once_and_in_order() -> None:
    """The marker means nothing to any catalogue: agents that run here see it too."""
    need_root("write into /dev/kmsg")
    device = Path("/dev/kmsg")
    if not os.access(device, os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/kmsg that may be read and written")
    mark = f"everstep-test-{secrets.token_hex(8)}"
    device.write_text(f"{mark} before\n")
    live, past = KmsgSource(device), KmsgSource(device, past_s=3600)
    try:
        device.write_text(f"{mark} first\n")
        device.write_text(f"{mark} second \x07 bell\n")

        def ours(source: KmsgSource) -> list[str]:
            return [line.text.partition("] ")[2] for line in source.read().lines
                    if mark in line.text]  # fmt: skip

        assert ours(live) == [f"{mark} first", f"{mark} second   bell"]
        assert ours(live) == []
        assert ours(past) == [f"{mark} before", f"{mark} first", f"{mark} second   bell"]
        position = past.position
    finally:
        live.close()
        past.close()
    device.write_text(f"{mark} third\n")
    again = KmsgSource(device, after=position)
    try:
        assert ours(again) == [f"{mark} third"]
    finally:
        again.close()
