"""Classes of Table 1 that a kernel tells about: lines in the log that an agent follows."""

from __future__ import annotations

import os
import signal

import pytest

from everstep.decide.words import Action, Rung, Side, Symptom
from tests.e2e.table1.conftest import Fleet, told
from tests.support import judge

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="package"),
]

SICK = {
    "gpu-unavailable": (
        ("NVRM: Xid (PCI:0000:5e:00): 79, pid=0, name=x, GPU has fallen off the bus.",),
        Symptom.GPU_UNAVAILABLE,
    ),
    "gpu-memory": (
        ("NVRM: Xid (PCI:0000:5e:00): 95, pid=1, Uncontained: LTC TAG. RST: Yes, D-RST: No",),
        Symptom.GPU_MEMORY_ECC,
    ),
    "disk-fault": (
        (
            "nvme nvme1: I/O tag 3 (1003) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller",
            "nvme nvme1: Disabling device after reset failure: -19",
        ),
        Symptom.FILESYSTEM_IO,
    ),
    "kernel-panic": (
        ("Kernel panic - not syncing: Fatal exception in interrupt",),
        Symptom.KERNEL_PANIC,
    ),
}


@pytest.mark.parametrize("name", SICK)
async def test_a_machine_that_its_kernel_calls_sick_is_evicted(fleet: Fleet, name: str) -> None:
    lines, symptom = SICK[name]
    async with told(fleet, name) as job:
        _, sick = await job.running()
        fleet.kernel_says(sick, *lines)
        incident = await job.incident()
        (decision,) = incident.decisions
        finding = decision.finding
        assert (finding.symptom, finding.side) == (symptom, Side.INFRASTRUCTURE), finding
        assert finding.suspects == (sick,)
        assert decision.decision.action is Action.EVICT_MACHINE
        assert (decision.decision.rung, decision.decision.evict) == (Rung.EVICT, (sick,))
        assert [o.kind for o in incident.observations][:1] == ["probe"]
        replacements = await job.running(generation=2)
        assert sick not in replacements
        assert judge.blocked(fleet.world.ledger_url) == [sick]


async def test_a_kill_is_one_for_memory_only_with_the_kernels_word(fleet: Fleet) -> None:
    async with told(fleet, "cpu-oom") as job:
        await job.running()
        os.kill((await job.pids())[1], signal.SIGKILL)
        (decision,) = (await job.incident()).decisions
        assert decision.finding.symptom is Symptom.UNKNOWN
        assert decision.finding.suspects == ()
        _, machine = await job.running(generation=2)
        pid = (await job.pids())[1]
        fleet.kernel_says(
            machine,
            f"Memory cgroup out of memory: Killed process {pid} (python) total-vm:26184840kB, "
            "anon-rss:15370088kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:38964kB",
        )
        os.kill(pid, signal.SIGKILL)
        (_, decision) = (await job.incident(decisions=2)).decisions
        finding = decision.finding
        assert (finding.symptom, finding.side) == (Symptom.CPU_OOM, Side.USER_CODE), finding
        assert (finding.rule, finding.first_failed_rank) == ("oom_killed", 1)
        assert finding.suspects == ()
        assert finding.action is Action.FIX_CONFIG_GIVE_UP


async def test_a_storage_server_that_two_machines_miss_evicts_neither(fleet: Fleet) -> None:
    async with told(fleet, "storage") as job:
        machines = await job.running()
        for machine in machines:
            fleet.kernel_says(machine, "nfs: server 10.9.9.9 not responding, timed out")
        job.order(1, print=["OSError: [Errno 5] Input/output error: '/data/x'"], exit=1)
        (decision, *_) = (await job.incident()).decisions
        finding = decision.finding
        assert (finding.symptom, finding.side) == (Symptom.FILESYSTEM_IO, Side.EXTERNAL), finding
        assert finding.suspects == ()
        assert finding.action is Action.WAIT_EXTERNAL
        assert judge.blocked(fleet.world.ledger_url) == []
