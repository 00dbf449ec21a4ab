"""All probes of a machine, made from the policy: for the agent and for ``everstep doctor``.

The only place that knows both the policy's keys and the probes' settings. What does not exist on a
machine (no GPU, no RDMA device) has a probe all the same, which says so. Not here: running them
(``runner``), and which of them an agent was told to run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.decide.kernel import KernelJudge
from everstep.decide.kernel_rules import KernelRules
from everstep.machine.probes.base import Probe
from everstep.machine.probes.dcgm import DcgmProbe
from everstep.machine.probes.gpu import GpuProbe
from everstep.machine.probes.gpu_xids import by_catalogue
from everstep.machine.probes.host_clock import ClockProbe, ClockSettings
from everstep.machine.probes.host_disk import DiskProbe, DiskSettings
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
)
from everstep.machine.probes.kernel_log import KernelLogProbe, KernelLogSettings
from everstep.machine.probes.network_gateway import GatewayProbe, GatewaySettings
from everstep.machine.probes.network_links import AlertSettings, LinkProbe, LinkSettings
from everstep.machine.probes.network_rdma import RdmaProbe, RdmaSettings
from everstep.spec.kernel_catalogue import load_kernel_catalogue
from everstep.spec.policy import ProbesPolicy

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where a machine keeps what probes look at, and what of ours is on it."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    paths: Callable[[], Iterable[Path]] = tuple
    """Folders whose disks matter: checkpoints, run folders. Asked for at each look."""
    own_folder: Path | None = None
    """A folder of ours that may be written into; None: nothing is written."""
    pids: Callable[[], Iterable[int]] = tuple
    """Processes of runs, for their open files. Asked for at each look."""
    gpu_pids: Callable[[], Collection[int] | None] = lambda: None
    """Processes that may hold GPUs; None: it is not known. Asked for at each look."""
    cgroups: Callable[[], Iterable[Path]] = tuple
    """Control groups of runs, for their OOM kills. Asked for at each look."""
    teardowns: Callable[[], Iterable[tuple[float, float]]] = tuple
    """From when until when runs are ended on purpose, in the clock of the looks; the end is
    infinity while that goes on. Asked for at each look."""
    boot_id_file: Path | None = None
    """A file of ours that holds the boot id of our last life."""
    kernel_rules: KernelRules | None = None
    """What kernel lines mean; None: the catalogue of the installation."""
    kernel_log_past_s: float = 0.0
    """Kernel lines of the last so many seconds are judged too."""
    gpu_names_wait_s: float = 0.0
    """How long a look at the kernel's log waits for the first look at the GPUs, which tells what
    they are called; for those who look only once."""


def probes_of_machine(policy: ProbesPolicy, around: Surroundings) -> list[Probe]:
    """Every probe there is, in the order in which a person reads them. Nothing is looked at yet."""
    around = replace(around, kernel_rules=around.kernel_rules or load_kernel_catalogue())
    gpus = gpu_probes(policy, around)
    nvml = next(probe for probe in gpus if isinstance(probe, GpuProbe))
    return [
        *gpus,
        *host_probes(policy, around, lambda: nvml.pci_names(around.gpu_names_wait_s)),
        *network_probes(policy, around),
    ]


def gpu_probes(policy: ProbesPolicy, around: Surroundings) -> list[Probe]:
    """Those of the GPUs' interval.

    Raises:
        SpecError: the kernel catalogue is not accepted.
    """
    judge_xid = by_catalogue(around.kernel_rules or load_kernel_catalogue())
    return [
        GpuProbe(
            policy,
            judge_xid=judge_xid,
            expected_pids=around.gpu_pids,
            sys_root=around.sys,
            proc_root=around.proc,
        ),
        DcgmProbe(policy, judge_xid=judge_xid),
    ]


def host_probes(
    policy: ProbesPolicy,
    around: Surroundings,
    gpu_names: Callable[[], Mapping[str, str]] = dict,
) -> list[Probe]:
    """Those of the host's interval.

    Args:
        policy: intervals and thresholds.
        around: the machine.
        gpu_names: what GPUs are called, by PCI address.

    Raises:
        SpecError: the kernel catalogue is not accepted.
    """
    proc, sys, own = around.proc, around.sys, around.own_folder
    rules = around.kernel_rules or load_kernel_catalogue()
    return [
        KernelLogProbe(
            KernelLogSettings(
                source=policy.kernel_log,
                hold_s=policy.kernel_event_hold.total_seconds(),
                look_every_s=policy.host_interval.total_seconds(),
                past_s=around.kernel_log_past_s,
                remembered=own / "kernel_log_position" if own is not None else None,
            ),
            KernelJudge(rules),
            proc=proc,
            dev=around.dev,
            teardowns=around.teardowns,
            gpu_names=gpu_names,
        ),
        KernelStateProbe(proc=proc, sys=sys, remembered=around.boot_id_file),
        OomProbe(proc=proc, cgroups=around.cgroups),
        MemoryProbe(
            MemorySettings(
                available_min=policy.memory_available_share_min,
                pressure_max=policy.memory_pressure_share_max,
                swap_bytes_per_s_max=policy.swap_mib_per_s_max * _MIB,
            ),
            proc=proc,
        ),
        ShmProbe(
            ShmSettings(
                size_min=policy.shm_size_mib_min * _MIB, free_min=policy.shm_free_share_min
            ),
            folder=around.dev / "shm",
        ),
        DiskProbe(
            DiskSettings(
                free_min=policy.disk_free_mib_min * _MIB,
                free_share_min=policy.disk_free_share_min,
                low_factor=policy.disk_low_factor,
                inodes_free_min=policy.inodes_free_min,
                deadline_s=policy.disk_deadline.total_seconds(),
                write_every_s=policy.disk_write_interval.total_seconds(),
            ),
            paths=around.paths,
            own_folder=around.own_folder,
            proc=proc,
        ),
        StorageProbe(sys=sys),
        EdacProbe(
            EdacSettings(corrected_per_hour_max=policy.edac_corrected_per_hour_max),
            proc=proc,
            sys=sys,
        ),
        LoadProbe(
            LoadSettings(
                load_per_cpu_max=policy.cpu_load_max,
                pressure_max=policy.cpu_pressure_share_max,
                steal_max=policy.cpu_steal_share_max,
            ),
            proc=proc,
        ),
        HungTaskProbe(
            HungTaskSettings(
                hung_after_s=policy.hung_task_after.total_seconds(),
                look_every_s=policy.hung_task_interval.total_seconds(),
            ),
            proc=proc,
        ),
        DescriptorProbe(
            DescriptorSettings(used_max=policy.open_files_share_max), proc=proc, pids=around.pids
        ),
        ClockProbe(
            ClockSettings(
                offset_max_s=policy.clock_offset_max.total_seconds(),
                step_max_s=policy.clock_step_max.total_seconds(),
            )
        ),
    ]


def network_probes(policy: ProbesPolicy, around: Surroundings) -> list[Probe]:
    """Those of the network's interval."""
    alerts = AlertSettings(
        alerts_min=policy.network_alerts_min,
        window_s=policy.network_alert_window.total_seconds(),
    )
    return [
        LinkProbe(
            LinkSettings(
                alerts=alerts,
                errors_per_s_max=policy.link_errors_per_minute_max / 60,
                drops_share_max=policy.link_drops_share_max,
                drops_per_s_min=policy.link_drops_per_minute_min / 60,
            ),
            proc=around.proc,
            sys=around.sys,
            interfaces=_names(policy.network_interfaces),
        ),
        RdmaProbe(
            RdmaSettings(alerts=alerts, errors_per_minute_max=policy.rdma_errors_per_minute_max),
            sys=around.sys,
            ports=_names(policy.rdma_ports),
        ),
        GatewayProbe(
            GatewaySettings(
                deadline_s=policy.gateway_deadline.total_seconds(),
                misses_min=policy.gateway_misses_min,
            ),
            proc=around.proc,
            addresses=_names(policy.gateways),
        ),
    ]


def _names(words: str) -> tuple[str, ...]:
    """``a,b``; ``auto`` is no name: it is found out then."""
    return () if words == "auto" else tuple(words.split(","))
