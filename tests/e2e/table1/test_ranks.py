"""Classes of Table 1 that a rank meets: the real thing where one machine can make it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.decide.words import Action, JobPhase, Rung, Side, Symptom
from tests.e2e.table1.conftest import Fleet, told
from tests.support import judge
from tests.support.counting import Counter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="package"),
]

PRINTED = {
    "cuda-error": (
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        Symptom.CUDA_ERROR,
        Side.UNCLEAR,
        {Action.STOP_TIME_CHECK},
    ),
    "hdfs": (
        "hdfs.util.HdfsError: Call From host to nn:8020 failed: java.net.ConnectException: refused",
        Symptom.FILESYSTEM_IO,
        Side.EXTERNAL,
        {Action.WAIT_EXTERNAL},
    ),
    "external-service": (
        "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://h.x",
        Symptom.NETWORK_HOST,
        Side.EXTERNAL,
        {Action.WAIT_EXTERNAL},
    ),
    "container": (
        "docker: Error response from daemon: failed to create shim task: OCI runtime create failed",
        Symptom.CONFIG_ERROR,
        Side.USER_CODE,
        {Action.FIX_CONFIG_GIVE_UP},
    ),
    "infiniband": (
        "NCCL WARN NET/IB : Got completion from peer 10.0.0.7 with error 12, opcode 0, len 0",
        Symptom.NETWORK_NCCL,
        Side.INFRASTRUCTURE,
        {Action.STOP_TIME_CHECK, Action.RETRY_IN_PLACE},
    ),
}


@pytest.mark.parametrize("name", PRINTED)
async def test_what_a_rank_prints_before_it_ends(fleet: Fleet, name: str) -> None:
    line, symptom, side, actions = PRINTED[name]
    async with told(fleet, name) as job:
        await job.running()
        job.order(1, print=[line], exit=1)
        (decision, *_) = (await job.incident()).decisions
        finding = decision.finding
        assert (finding.symptom, finding.side) == (symptom, side), finding
        assert finding.action in actions, finding
        assert (finding.suspects, decision.decision.evict) == ((), ())


async def test_a_cuda_error_beside_an_xid_of_a_program_is_not_the_machines_fault(
    fleet: Fleet,
) -> None:
    async with told(fleet, "cuda-xid") as job:
        _, machine = await job.running()
        fleet.kernel_says(
            machine,
            "NVRM: Xid (PCI:0000:41:00): 31, pid=123, name=python, Ch 00000008, intr 10000000. "
            "MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7fa2_00000000",
        )
        job.order(1, print=[PRINTED["cuda-error"][0]], exit=1)
        incident = await job.incident()
        finding = incident.decisions[0].finding
        assert (finding.symptom, finding.suspects) == (Symptom.CUDA_ERROR, ())
        reports = [r for r in incident.rounds[0].reports if r["machine_id"] == machine]
        assert [s["observation"]["rule"] for s in reports[0]["observations"]] == ["xid_31"]


@contextmanager
def mounted(path: Path, *options: str) -> Iterator[Path]:
    """A small disk of the test's own; unmounted whatever happens."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount the disk of this test")
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", ",".join(("size=2m", *options)), "everstep", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no disk to mount: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def memory_limit(pid: int, limit: int) -> Iterator[None]:
    """A control group with a limit, and a process in it; gone whatever happens."""
    root = Path("/sys/fs/cgroup/memory")
    if os.geteuid() != 0 or not (root / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and a memory controller of control groups, version 1")
    group = root / f"everstep-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        swap = group / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text(str(limit))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(left)
        group.rmdir()


async def test_a_rank_that_outgrows_its_control_group(fleet: Fleet) -> None:
    async with told(fleet, "cgroup-oom") as job:
        _, machine = await job.running()
        with memory_limit((await job.pids())[1], 96 << 20):
            await fleet.looked(machine)
            job.order(1, allocate=True)
            incident = await job.incident()
        finding = incident.decisions[0].finding
        assert (finding.symptom, finding.side) == (Symptom.CPU_OOM, Side.USER_CODE), finding
        assert (finding.rule, finding.first_failed_rank) == ("oom_killed", 1)
        assert finding.suspects == ()
        ends = [r for n in incident.rounds[0].reports for r in n["ranks"] if r["rank"] == 1]
        assert ends[0]["signal"] == 9


async def test_a_disk_that_is_full(fleet: Fleet, tmp_path: Path) -> None:
    with mounted(tmp_path / "small") as disk:
        async with told(fleet, "disk-full") as job:
            await job.running()
            job.order(1, write=str(disk / "checkpoint"))
            (decision, *_) = (await job.incident()).decisions
            finding = decision.finding
            assert (finding.symptom, finding.side) == (Symptom.DISK_FULL, Side.USER_CODE), finding
            assert (finding.first_failed_rank, finding.suspects) == (1, ())


async def test_a_mount_that_cannot_be_written(fleet: Fleet, tmp_path: Path) -> None:
    with mounted(tmp_path / "readonly", "ro") as disk:
        async with told(fleet, "mount") as job:
            await job.running()
            job.order(1, write=str(disk / "checkpoint"))
            (decision, *_) = (await job.incident()).decisions
            finding = decision.finding
            assert finding.symptom is Symptom.FILESYSTEM_IO, finding
            assert finding.side is Side.INFRASTRUCTURE
            assert (finding.first_failed_rank, finding.suspects) == (1, ())


async def test_a_machine_that_goes_dark_is_lost_and_evicted(fleet: Fleet) -> None:
    world = fleet.world
    policy = {"detection": {"machine_lost_after": "2s"}}
    counter = Counter("dark", world.folder, steps=120, policy=policy)
    async with world.job(counter) as job:
        gone = max((await job.at_step(5)).answered)
        world.embedded.power_off(gone)
        await job.trains_in(2)
        world.embedded.power_on(gone)
        (incident,) = await job.succeeded()
        (decision,) = incident.decisions
        assert decision.finding.symptom is Symptom.KERNEL_PANIC
        assert (decision.finding.side, decision.finding.suspects) == (Side.INFRASTRUCTURE, (gone,))
        assert decision.decision.action is Action.EVICT_MACHINE
        await job.stage.back(gone)
        await fleet.release_all(job.stage.ledger)


async def test_a_job_that_hangs(fleet: Fleet) -> None:
    world = fleet.world
    policy = {"detection": {"hang_min": "3s", "hang_factor": 10}}
    counter = Counter("hangs", world.folder, steps=120, policy=policy)
    counter.order("sigstop", rank=3, step=20)
    async with world.job(counter) as job:
        (incident,) = await job.succeeded()
        assert [note["name"] for note in counter.fired()] == ["sigstop.rank3.step20"]
        (decision,) = incident.decisions
        finding = decision.finding
        assert (finding.symptom, finding.first_failed_rank) == (Symptom.HANG, 3), finding
        assert (finding.suspects, decision.decision.rung) == ((), Rung.REATTEMPT)


async def test_a_loss_that_is_not_a_number(fleet: Fleet) -> None:
    world = fleet.world
    counter = Counter("nan", world.folder, steps=80)
    counter.order("nan", rank=2, step=30)
    async with world.job(counter) as job:
        (incident,) = await job.succeeded()
        assert [note["name"] for note in counter.fired()] == ["nan.rank2.step30"]
        (decision,) = incident.decisions
        finding = decision.finding
        assert (finding.symptom, finding.side) == (Symptom.NAN_VALUE, Side.UNCLEAR), finding
        assert finding.suspects == ()
        second = (await job.runs())[1]
        assert second.restore is None or second.restore.step < 30


async def test_a_restart_that_a_person_wants_is_no_incident(fleet: Fleet) -> None:
    world = fleet.world
    counter = Counter("manual", world.folder, steps=150)
    async with world.job(counter) as job:
        await job.at_step(10)
        await job.client.pause(counter.name, reason="other data")
        await job.in_phase(JobPhase.PAUSED)
        await job.client.resume(counter.name)
        assert await job.succeeded() == []
        assert [run.start_reason for run in await job.runs()] == ["launch", "resume"]
        assert judge.blocked(world.ledger_url) == []
