"""What the driver is asked about one GPU, through ``pynvml``. Runs in the helper process only.

Everything is read, nothing is set. A function that the driver or the card does not have leaves out
its item alone. Imports only the standard library and ``pynvml``: the helper stays small.

Not here: threads and deadlines (``gpu_helper``), and what the values mean (``gpu_judge``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml

Values = dict[str, Any]
Call = Callable[..., Any]
"""``call(function, *args)``: the only way to the driver, so that it is known which call hangs."""

PROCESSES_MAX = 64
"""Pids named for one GPU; a machine has fewer ranks than this on one."""

_GONE = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})
_NOT_OFFERED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_DEPRECATED,
        pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_DATA,
        pynvml.NVML_ERROR_NOT_READY,
    }
)
_ALWAYS_TOLD = _GONE | {
    pynvml.NVML_ERROR_UNKNOWN,
    pynvml.NVML_ERROR_IRQ_ISSUE,
    pynvml.NVML_ERROR_CORRUPTED_INFOROM,
}
"""Errors that mean trouble even where the item has never been read."""
_NAMES: dict[int, str] = {
    value: name.removeprefix("NVML_ERROR_").lower()
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(value, int)
}
_NVLINK_TOTALS = (
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
)
_NVLINK_COUNTERS = (
    pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
    pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
    pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
)
_VALUE_MEMBERS = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


def error_name(error: pynvml.NVMLError) -> str:
    """``gpu_is_lost``, ``driver_not_loaded``, ...; a stable word for a code."""
    return _NAMES.get(error.value, f"error_{error.value}")


def identify(call: Call, index: int) -> tuple[Any, Values]:
    """Handle and identity of a GPU.

    Raises:
        pynvml.NVMLError: there is no such device, or it does not answer.
    """
    handle = call(pynvml.nvmlDeviceGetHandleByIndex, index)
    who: Values = {"uuid": _text(call(pynvml.nvmlDeviceGetUUID, handle))}
    for key, function in (
        ("name", lambda: _text(call(pynvml.nvmlDeviceGetName, handle))),
        ("bus", lambda: _text(call(pynvml.nvmlDeviceGetPciInfo, handle).busId)),
        (
            "slowdown_c",
            lambda: _threshold(call, handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        ),
        (
            "memory_max_c",
            lambda: _threshold(call, handle, pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
        ),
    ):
        try:
            who[key] = function()
        except pynvml.NVMLError as error:
            if error.value in _GONE:
                raise
    return handle, who


def pulse(call: Call, handle: Any) -> None:
    """One cheap question that the driver answers from the device.

    Raises:
        pynvml.NVMLError: what it answered instead; not when it does not offer this.
    """
    try:
        _temperature(call, handle)
    except pynvml.NVMLError as error:
        if error.value not in _NOT_OFFERED:
            raise


def read(call: Call, handle: Any, worked: set[str]) -> tuple[Values, list[str], dict[str, str]]:
    """All items of one GPU.

    Args:
        call: the way to the driver.
        handle: the GPU.
        worked: items that could be read before; added to. An item that never could, and fails in
            some odd way, is one that this driver does not offer.

    Returns values, the items that the driver or the card does not offer, and by item the errors of
    those that failed. A device that says it is lost is not asked further.
    """
    values: Values = {}
    skipped: list[str] = []
    errors: dict[str, str] = {}
    for item, function in ITEMS.items():
        try:
            values.update(function(call, handle))
            worked.add(item)
        except pynvml.NVMLError as error:
            odd = item not in worked and error.value not in _ALWAYS_TOLD
            if error.value in _NOT_OFFERED or odd:
                skipped.append(item)
                continue
            errors[item] = error_name(error)
            if error.value in _GONE:
                break
        except Exception as error:  # noqa: BLE001 - an odd library costs its item, not the GPU
            errors[item] = type(error).__name__
    return values, skipped, errors


def address(handle: Any) -> int | None:
    """What tells the handles of two devices apart, without asking the driver."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _threshold(call: Call, handle: Any, which: int) -> int:
    return int(call(pynvml.nvmlDeviceGetTemperatureThreshold, handle, which))


def _temperature(call: Call, handle: Any) -> Values:
    try:
        value = call(pynvml.nvmlDeviceGetTemperatureV, handle, pynvml.NVML_TEMPERATURE_GPU)
    except pynvml.NVMLError as error:
        if error.value not in _NOT_OFFERED:
            raise
        value = call(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    return {"temperature_c": int(value)}


def _memory_temperature(call: Call, handle: Any) -> Values:
    return {"memory_temperature_c": _field(call, handle, pynvml.NVML_FI_DEV_MEMORY_TEMP)}


def _slowdown(call: Call, handle: Any) -> Values:
    try:
        reasons = call(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    except pynvml.NVMLError as error:
        if error.value not in _NOT_OFFERED:
            raise
        reasons = call(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return {"slowdown_reasons": int(reasons)}


def _utilisation(call: Call, handle: Any) -> Values:
    return {"busy_percent": int(call(pynvml.nvmlDeviceGetUtilizationRates, handle).gpu)}


def _memory(call: Call, handle: Any) -> Values:
    try:
        memory = call(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value not in _NOT_OFFERED:
            raise
        memory = call(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return {"memory_used_bytes": int(memory.used), "memory_total_bytes": int(memory.total)}


def _power(call: Call, handle: Any) -> Values:
    return {"power_w": int(call(pynvml.nvmlDeviceGetPowerUsage, handle)) / 1000}


def _ecc(kind: int, key: str) -> Callable[[Call, Any], Values]:
    def read_ecc(call: Call, handle: Any) -> Values:
        uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return {key: int(call(pynvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, kind))}

    return read_ecc


def _sram(call: Call, handle: Any) -> Values:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    call(pynvml.nvmlDeviceGetSramEccErrorStatus, handle, ctypes.byref(status))
    return {"sram_threshold_exceeded": bool(status.bThresholdExceeded)}


def _remapped_rows(call: Call, handle: Any) -> Values:
    correctable, uncorrectable, pending, failed = call(pynvml.nvmlDeviceGetRemappedRows, handle)
    return {
        "rows_remapped": int(correctable) + int(uncorrectable),
        "remap_pending": bool(pending),
        "remap_failed": bool(failed),
    }


def _retired_pages(call: Call, handle: Any) -> Values:
    return {"pages_pending": bool(call(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle))}


def _pcie_width(call: Call, handle: Any) -> Values:
    return {
        "pcie_width": int(call(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle)),
        "pcie_width_max": int(call(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle)),
    }


def _pcie_generation(call: Call, handle: Any) -> Values:
    return {
        "pcie_generation": int(call(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)),
        "pcie_generation_max": int(call(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)),
    }


def _pcie_replays(call: Call, handle: Any) -> Values:
    return {"pcie_replays": int(call(pynvml.nvmlDeviceGetPcieReplayCounter, handle))}


def _nvlink(call: Call, handle: Any) -> Values:
    """State of each link up to the last one that the card has, as a row of 0 and 1."""
    states = ""
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            states += str(int(bool(call(pynvml.nvmlDeviceGetNvLinkState, handle, link))))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:  # beyond the card's last link
                break
            if error.value not in _NOT_OFFERED:
                raise
            if not states:
                raise  # a card without NVLink
            break
    return {"links": states}


def _nvlink_errors(call: Call, handle: Any) -> Values:
    total, offered = 0, False
    for value in call(pynvml.nvmlDeviceGetFieldValues, handle, list(_NVLINK_TOTALS)):
        if value.nvmlReturn == pynvml.NVML_SUCCESS:
            total, offered = total + int(_number(value)), True
    if offered:
        return {"nvlink_errors": total}
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            for counter in _NVLINK_COUNTERS:
                total += int(call(pynvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, counter))
        except pynvml.NVMLError as error:
            if link and error.value in {*_NOT_OFFERED, pynvml.NVML_ERROR_INVALID_ARGUMENT}:
                break
            raise
    return {"nvlink_errors": total}


def _recovery_action(call: Call, handle: Any) -> Values:
    return {
        "recovery_action": int(_field(call, handle, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION))
    }


def _fabric(call: Call, handle: Any) -> Values:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    call(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info))
    return {
        "fabric_state": int(info.state),
        "fabric_status": int(info.status),
        "fabric_health": int(info.healthMask),
    }


def _processes(call: Call, handle: Any) -> Values:
    try:
        found = call(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    except pynvml.NVMLError as error:
        if error.value not in _NOT_OFFERED:
            raise
        found = call(pynvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
    return {"pids": [int(process.pid) for process in found[:PROCESSES_MAX]]}


def _mig(call: Call, handle: Any) -> Values:
    return {"mig": bool(call(pynvml.nvmlDeviceGetMigMode, handle)[0])}


def _field(call: Call, handle: Any, field: int) -> Any:
    (value,) = call(pynvml.nvmlDeviceGetFieldValues, handle, [field])
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        if value.nvmlReturn == pynvml.NVML_ERROR_INVALID_ARGUMENT:  # older than the field
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        raise pynvml.NVMLError(value.nvmlReturn)
    return _number(value)


def _number(value: Any) -> Any:
    return getattr(value.value, _VALUE_MEMBERS.get(value.valueType, "ullVal"))


ITEMS: dict[str, Callable[[Call, Any], Values]] = {
    "temperature": _temperature,
    "memory temperature": _memory_temperature,
    "slowdown reasons": _slowdown,
    "utilisation": _utilisation,
    "memory": _memory,
    "power": _power,
    "volatile ECC": _ecc(pynvml.NVML_VOLATILE_ECC, "ecc_volatile"),
    "aggregate ECC": _ecc(pynvml.NVML_AGGREGATE_ECC, "ecc_aggregate"),
    "SRAM ECC": _sram,
    "remapped rows": _remapped_rows,
    "retired pages": _retired_pages,
    "PCIe width": _pcie_width,
    "PCIe generation": _pcie_generation,
    "PCIe replays": _pcie_replays,
    "NVLink": _nvlink,
    "NVLink errors": _nvlink_errors,
    "recovery action": _recovery_action,
    "fabric": _fabric,
    "processes": _processes,
    "MIG": _mig,
}
"""What one look at a GPU reads, in order."""
