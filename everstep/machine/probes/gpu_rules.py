"""What each sign of a GPU is called and what it means for the machine, by itself.

One row for each rule that the GPU probe can give; Xids have their own catalogue. Data, no code.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from everstep.decide.words import Action, Confidence, Symptom


class GpuRule(NamedTuple):
    """The judgement that follows from one sign."""

    symptom: Symptom
    action: Action
    confidence: Confidence
    when: str
    """The sign, for people."""


_LOST, _ECC, _LINK = Symptom.GPU_UNAVAILABLE, Symptom.GPU_MEMORY_ECC, Symptom.NVLINK_PCIE
_EVICT, _CHECK, _WARN = Action.EVICT_MACHINE, Action.STOP_TIME_CHECK, Action.WARN_ONLY
_HIGH, _LOW = Confidence.HIGH, Confidence.LOW

GPU_RULES: Final[dict[str, GpuRule]] = {
    "gpu_lost": GpuRule(_LOST, _EVICT, _HIGH, "a GPU that was there is gone, or says it is lost"),
    "gpus_missing": GpuRule(_LOST, _EVICT, _HIGH, "fewer GPUs than the policy expects"),
    "driver_hang": GpuRule(_LOST, _EVICT, _HIGH, "a driver call does not return"),
    "gpu_reset_required": GpuRule(_LOST, _EVICT, _HIGH, "the GPU says that it needs a reset"),
    "gpu_unknown_error": GpuRule(
        _LOST, _EVICT, _HIGH, "the driver answers with an unknown error, twice in a row"
    ),
    "gpu_call_fails": GpuRule(_LOST, _CHECK, _LOW, "a driver call fails, twice in a row"),
    "nvml_fails": GpuRule(_LOST, _CHECK, _LOW, "the driver cannot be talked to at all"),
    "driver_not_loaded": GpuRule(
        Symptom.ENVIRONMENT_MISMATCH, _EVICT, _HIGH, "there should be GPUs, but there is no driver"
    ),
    "driver_version_mismatch": GpuRule(
        Symptom.ENVIRONMENT_MISMATCH, _CHECK, _HIGH, "library and kernel module differ in version"
    ),
    "recovery_reset": GpuRule(_LOST, _EVICT, _HIGH, "the driver asks for a reset or a reboot"),
    "recovery_drain": GpuRule(_LINK, _CHECK, _HIGH, "the driver asks to drain peer traffic"),
    "ecc_uncorrectable": GpuRule(_ECC, _EVICT, _HIGH, "uncorrectable memory errors rose"),
    "ecc_before": GpuRule(
        _ECC, _WARN, _LOW, "uncorrectable errors since the last reset, none while we looked"
    ),
    "ecc_aggregate": GpuRule(_ECC, _WARN, _LOW, "many uncorrectable errors in the GPU's life"),
    "sram_threshold": GpuRule(_ECC, _EVICT, _HIGH, "SRAM errors beyond what NVIDIA replaces for"),
    "row_remap_failed": GpuRule(_ECC, _EVICT, _HIGH, "a memory row could not be remapped"),
    "row_remap_pending": GpuRule(_ECC, _WARN, _HIGH, "a remapped row waits for a reset"),
    "retired_pages_pending": GpuRule(_ECC, _WARN, _HIGH, "a retired page waits for a reset"),
    "thermal_slowdown": GpuRule(
        Symptom.MFU_DECLINE, _WARN, _LOW, "clocks are lowered for heat, and it is hot"
    ),
    "thermal_slowdown_lasting": GpuRule(
        Symptom.MFU_DECLINE, _EVICT, _HIGH, "the same, for several looks in a row"
    ),
    "power_slowdown": GpuRule(
        Symptom.MFU_DECLINE, _WARN, _LOW, "clocks are lowered by the power supply's brake"
    ),
    "power_slowdown_lasting": GpuRule(
        Symptom.MFU_DECLINE, _CHECK, _HIGH, "the same, for several looks in a row"
    ),
    "pcie_width": GpuRule(_LINK, _CHECK, _HIGH, "a busy GPU has fewer PCIe lanes than it could"),
    "pcie_generation": GpuRule(
        _LINK, _CHECK, _LOW, "a busy GPU's PCIe link is slower than it could"
    ),
    "pcie_replays": GpuRule(_LINK, _CHECK, _LOW, "many PCIe replays in a minute"),
    "nvlink_down": GpuRule(_LINK, _EVICT, _HIGH, "an NVLink that was up is down"),
    "nvlink_fewer": GpuRule(_LINK, _WARN, _LOW, "fewer NVLinks up than on the GPUs beside it"),
    "nvlink_errors": GpuRule(_LINK, _CHECK, _LOW, "many NVLink errors in a minute"),
    "fabric_failed": GpuRule(_LINK, _EVICT, _HIGH, "the GPU could not join its NVLink fabric"),
    "fabric_not_ready": GpuRule(
        Symptom.ENVIRONMENT_MISMATCH, _CHECK, _HIGH, "the GPU stays outside of its NVLink fabric"
    ),
    "fabric_degraded": GpuRule(_LINK, _CHECK, _LOW, "the NVLink fabric has less bandwidth"),
    "process_left": GpuRule(_LOST, _CHECK, _LOW, "a process that no run knows holds the GPU"),
    "xid": GpuRule(Symptom.UNKNOWN, _CHECK, _LOW, "an Xid without a catalogue to judge it by"),
}
