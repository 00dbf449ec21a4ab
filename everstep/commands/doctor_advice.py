"""What a person can do about what a probe found, in one line each.

By rule where there is something better to say than by action. Not here: what Everstep itself does
about it (``everstep.decide``).
"""

from __future__ import annotations

from everstep.decide.observation import Observation
from everstep.decide.words import Action, Verdict

_BY_RULE = {
    "oom_kill": "see the kernel log for whose process it was; give it more memory or less to do",
    "oom_kill_cgroup": "raise the job's memory limit, or let its data loaders hold less",
    "memory_low": "find what uses it (ps --sort -rss) before the kernel kills something",
    "memory_pressure": "find what uses it (ps --sort -rss); training waits for memory",
    "swap_storm": "turn swap off on training machines, or free memory",
    "shm_small": "make it larger: remount with size=…, or docker --shm-size, or a Memory volume",
    "shm_full": "remove what dead processes left in it",
    "disk_full": "free room: old runs, checkpoints, core files",
    "disk_low": "free room soon: old runs, checkpoints, core files",
    "inodes_full": "remove small files: caches, unpacked data sets",
    "inodes_low": "remove small files soon: caches, unpacked data sets",
    "disk_read_only": "see the kernel log for the error; check the file system before it is used",
    "disk_write_failed": "see the kernel log; replace the disk",
    "mount_hangs": "does its server answer other machines? If so: remount it, or reboot",
    "mount_error": "does its server answer other machines? If so: remount it, or reboot",
    "nvme_dead": "power-cycle the machine, then replace the disk",
    "nvme_resetting": "look again in a minute; if it stays, replace the disk",
    "disk_offline": "replace the disk, or its cable",
    "disk_errors": "see smartctl -a; replace the disk if it repeats",
    "array_degraded": "replace the missing disk; the array has no reserve",
    "filesystem_errors": "check the file system (fsck) while it is not mounted",
    "edac_uncorrected": "replace the memory module; its counter restarts at a reboot",
    "edac_corrected": "replace the memory module at leisure",
    "machine_check": "see the kernel log (mcelog, rasdaemon); have the processor tested",
    "kernel_oops": "reboot the machine; keep the kernel log",
    "kernel_tainted": "reboot the machine; keep the kernel log",
    "panic_record": "keep the files in /sys/fs/pstore, then remove them there",
    "rebooted": "if nobody planned it, find out why (BMC log, last -x)",
    "cpu_overload": "find what runs beside the training, or start fewer data loader workers",
    "cpu_steal": "ask for a machine without neighbours",
    "hung_task": "see the stack in the values; what it waits for is the fault",
    "clock_step": "see whether two time services fight, or somebody set the clock",
    "clock_unsynchronised": "start a time service (chronyd, systemd-timesyncd, ntpd)",
    "clock_offset": "see chronyc tracking; is its source right?",
    "open_files_machine": "raise fs.file-max, or find what leaks",
    "open_files_process": "raise its limit (ulimit -n, LimitNOFILE), or find what leaks",
    "link_down": "check cable, transceiver and switch port",
    "link_missing": "see lspci and the kernel log: the card is gone",
    "link_flap": "check cable, transceiver and switch port",
    "link_slow": "check cable and switch port; it negotiated less than before",
    "link_half_duplex": "check the switch port's settings",
    "link_errors": "check cable and transceiver",
    "link_drops": "look at ring sizes (ethtool -g), interrupts, and flow control at the switch",
    "rdma_port_down": "check cable and switch port; see ibstat",
    "rdma_port_missing": "see lspci and the kernel log: the card is gone",
    "rdma_port_never_up": "connect it, or name the ports that matter (policy: probes.rdma_ports)",
    "rdma_link_downed": "check cable and switch port",
    "rdma_slow": "check cable and switch port; it negotiated less than before",
    "rdma_errors": "clean or replace the cable",
    "gateway_unreachable": "do other machines reach it? If so, check this one's network",
}
_BY_ACTION = {
    Action.EVICT_MACHINE: "take the machine out of use and repair it",
    Action.STOP_TIME_CHECK: "take it out of training and test it",
    Action.OVER_EVICT_GROUP: "take its group out of training and test it",
    Action.RETRY_IN_PLACE: "restart what failed",
    Action.ROLLBACK_CODE: "go back to code that worked",
    Action.FIX_CONFIG_GIVE_UP: "the job's owner has to change something",
    Action.WAIT_EXTERNAL: "wait for the service, then go on",
    Action.WARN_ONLY: "keep an eye on it",
}


def advice(one: Observation) -> str:
    """What to do; empty when it is well."""
    if one.verdict is Verdict.HEALTHY:
        return ""
    if one.verdict is Verdict.UNKNOWN:
        return "not judged"
    by_action = _BY_ACTION[one.action] if one.action is not None else ""
    return _BY_RULE.get(one.rule, by_action)
