"""The policy of host and network probes: the part of ``probes`` that needs no GPU.

Not here: GPU keys and the section itself (``policy``), and what the probes do with it
(``everstep.machine.probes``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from everstep.spec.base import StrictModel
from everstep.spec.spans import Count, Span

Share = Annotated[float, Field(ge=0, le=1)]
Mebibytes = Annotated[int, Field(ge=0, le=1 << 30)]
Names = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.:/@-]+(,[A-Za-z0-9_.:/@-]+)*$", max_length=2000)
]


class HostProbesPolicy(StrictModel):
    """Thresholds of host and network probes."""

    kernel_log: Annotated[str, Field(pattern=r"^(auto|kmsg|journal|/.+)$", max_length=500)]
    """Where the kernel's log is read: `kmsg`, `journal`, a file's path, or `auto` (the first that
    can be read)."""
    kernel_event_hold: Span
    """How long what the kernel's log says counts as faulty without a new line about it."""
    disk_free_mib_min: Mebibytes
    """A disk is full with less free than this, or than the share, whichever is smaller."""
    disk_free_share_min: Share
    """The same as a share of the disk; also for inodes."""
    disk_low_factor: Annotated[float, Field(ge=1, le=100)]
    """At so many times the limit a disk is worth a warning."""
    inodes_free_min: Count
    """A disk is full with fewer free inodes than this, or than the share, whichever is smaller."""
    disk_deadline: Span
    """A file system that does not answer within this hangs."""
    disk_write_interval: Span
    """How often a block is written into the agent's own folder, to see that it can be."""
    memory_available_share_min: Share
    """Less available memory than this share is worth a warning."""
    memory_pressure_share_max: Share
    """More of the last ten seconds with every task waiting for memory is worth a warning."""
    swap_mib_per_s_max: Annotated[float, Field(ge=0, le=1_000_000)]
    """More swapping in and out than this, together, is a swap storm."""
    shm_size_mib_min: Mebibytes
    """A smaller /dev/shm than this is too small for NCCL and data loaders."""
    shm_free_share_min: Share
    """Less of /dev/shm free than this is worth a warning."""
    cpu_load_max: Annotated[float, Field(gt=0, le=1000)]
    """Load of a minute for each processor; above it, and with pressure, they are overloaded."""
    cpu_pressure_share_max: Share
    """Share of a minute in which some task waited for a processor; see `cpu_load_max`."""
    cpu_steal_share_max: Share
    """More processor time than this share given to other virtual machines is worth a warning."""
    hung_task_after: Span
    """A process that sleeps uninterruptibly for this long without being run once hangs."""
    hung_task_interval: Span
    """How often all processes are looked at for that."""
    edac_corrected_per_hour_max: Count
    """More corrected memory errors of one controller within an hour are worth a warning."""
    clock_offset_max: Span
    """A clock that is further off by the kernel's own estimate is worth a warning."""
    clock_step_max: Span
    """A jump of the wall clock beyond this between two looks is worth a warning."""
    open_files_share_max: Share
    """A machine or rank that has more of its limit of open files in use is worth a warning."""
    network_interfaces: Names
    """Interfaces that have to be up, comma-separated; `auto`: physical ones that have been up, and
    those of the default route."""
    rdma_ports: Names
    """RDMA ports that have to be active, like `mlx5_0/1`; `auto`: those that have been."""
    gateways: Names
    """IPv4 addresses that have to answer (a switch, a router); `auto`: the default gateway."""
    gateway_deadline: Span
    """How long a gateway may take to answer."""
    gateway_misses_min: Annotated[int, Field(ge=1, le=1000)]
    """So many misses in a row of a gateway that has answered before, and it is out of reach."""
    link_errors_per_minute_max: Count
    """More receive and transmit errors of one interface in a minute are worth a warning."""
    link_drops_per_minute_min: Count
    """Fewer dropped packets in a minute than this are none."""
    link_drops_share_max: Share
    """More dropped packets than this share are worth a warning."""
    rdma_errors_per_minute_max: Count
    """More symbol, receive and integrity errors of one port in a minute are worth a warning."""


HOST_KEYS_SINCE_HISTORIES: Final[Mapping[str, Any]] = {
    "kernel_log": "auto",
    "kernel_event_hold": "10m",
    "disk_free_mib_min": 1024,
    "disk_free_share_min": 0.01,
    "disk_low_factor": 2.0,
    "inodes_free_min": 10000,
    "disk_deadline": "5s",
    "disk_write_interval": "30s",
    "memory_available_share_min": 0.02,
    "memory_pressure_share_max": 0.2,
    "swap_mib_per_s_max": 100.0,
    "shm_size_mib_min": 1024,
    "shm_free_share_min": 0.01,
    "cpu_load_max": 4.0,
    "cpu_pressure_share_max": 0.8,
    "cpu_steal_share_max": 0.1,
    "hung_task_after": "2m",
    "hung_task_interval": "10s",
    "edac_corrected_per_hour_max": 100,
    "clock_offset_max": "100ms",
    "clock_step_max": "500ms",
    "open_files_share_max": 0.9,
    "network_interfaces": "auto",
    "rdma_ports": "auto",
    "gateways": "auto",
    "gateway_deadline": "1s",
    "gateway_misses_min": 2,
    "link_errors_per_minute_max": 60,
    "link_drops_per_minute_min": 600,
    "link_drops_share_max": 0.01,
    "rdma_errors_per_minute_max": 60,
}
"""See ``policy.KEYS_SINCE_HISTORIES``."""
