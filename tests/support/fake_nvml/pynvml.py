"""A fake of nvidia-ml-py with GPUs that a test defines. Put its folder before the real library on sys.path.

The environment variable `FAKE_NVML` holds a JSON list of devices, each a dict of differences from a healthy H200
(`HEALTHY`). The value "unsupported" makes a query fail as on a device that lacks it. Without the variable the fake
behaves as if there were no driver. In the same process, call `configure([...])`. Names, values and error codes are
those of the real library; a test compares them.
"""

from __future__ import annotations

import json
import os
import types
from typing import Any

NVML_SUCCESS = 0
NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_DRIVER_NOT_LOADED = 3, 4, 9
NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 15, 16
NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1, 0, 1
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC = 1, 0, 1
NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_NVLINK_MAX_LINKS = 36

HEALTHY: dict[str, Any] = {
    "name": "NVIDIA H200",
    "handle_error": 0,  # of nvmlDeviceGetHandleByIndex
    "query_error": 0,  # of every query
    "utilisation": 97,
    "memory_used": 61_000_000_000,
    "memory_total": 150_754_820_096,
    "power_mw": 651_500,
    "sm_clock": 1755,
    "max_sm_clock": 1980,
    "temperature": 61,
    "slowdown": 87,
    "ecc_volatile": 0,
    "ecc_aggregate": 0,
    "retired_pages": 0,
    "retirement_pending": 0,
    "remapped_rows": [0, 0, 0, 0],
    "recovery_action": 0,
    "throttle": 0,
    "nvlinks": [1] * 18,
}

_devices: list[dict[str, Any]] | None = None
open_count = 0


class NVMLError(Exception):
    """Error of the driver; `value` is NVML's error code."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {15: "GPU is lost", 16: "GPU requires reset", 9: "Driver Not Loaded"}.get(self.value, str(self.value))


def configure(devices: list[dict[str, Any]] | None) -> None:
    """Replace the fake GPUs; None stands for a machine without a driver."""
    global _devices, open_count
    open_count = 0
    _devices = None
    if devices is not None:
        _devices = [{**HEALTHY, "uuid": f"GPU-{i}", **device} for i, device in enumerate(devices)]


configure(json.loads(os.environ["FAKE_NVML"]) if "FAKE_NVML" in os.environ else None)


def _query(device: dict[str, Any], key: str) -> Any:
    """Return a value of a device; raise NVMLError where the device is configured to fail."""
    if device["query_error"]:
        raise NVMLError(device["query_error"])
    if device[key] == "unsupported":
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return device[key]


def nvmlInit() -> None:
    global open_count
    if _devices is None:
        raise NVMLError(NVML_ERROR_DRIVER_NOT_LOADED)
    open_count += 1


def nvmlShutdown() -> None:
    global open_count
    open_count -= 1


def nvmlSystemGetDriverVersion() -> bytes:
    return b"580.65"


def nvmlDeviceGetCount() -> int:
    return len(_devices or [])


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, Any]:
    assert _devices is not None
    if _devices[index]["handle_error"]:
        raise NVMLError(_devices[index]["handle_error"])
    return _devices[index]


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    return uuid


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part: str) -> dict[str, Any]:
    """The part "MIG-of-1" belongs to the GPU number 1."""
    assert _devices is not None
    return _devices[int(part.rpartition("-")[2])]


def nvmlDeviceGetUUID(device: dict[str, Any]) -> str:
    return _query(device, "uuid")


def nvmlDeviceGetName(device: dict[str, Any]) -> bytes:
    return _query(device, "name").encode()


def nvmlDeviceGetUtilizationRates(device: dict[str, Any]) -> Any:
    return types.SimpleNamespace(gpu=_query(device, "utilisation"), memory=40)


def nvmlDeviceGetMemoryInfo(device: dict[str, Any]) -> Any:
    return types.SimpleNamespace(used=_query(device, "memory_used"), total=_query(device, "memory_total"))


def nvmlDeviceGetPowerUsage(device: dict[str, Any]) -> int:
    return _query(device, "power_mw")


def nvmlDeviceGetClockInfo(device: dict[str, Any], clock: int) -> int:
    assert clock == NVML_CLOCK_SM
    return _query(device, "sm_clock")


def nvmlDeviceGetMaxClockInfo(device: dict[str, Any], clock: int) -> int:
    assert clock == NVML_CLOCK_SM
    return _query(device, "max_sm_clock")


def nvmlDeviceGetTemperature(device: dict[str, Any], sensor: int) -> int:
    assert sensor == NVML_TEMPERATURE_GPU
    return _query(device, "temperature")


def nvmlDeviceGetTemperatureThreshold(device: dict[str, Any], threshold: int) -> int:
    assert threshold == NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    return _query(device, "slowdown")


def nvmlDeviceGetTotalEccErrors(device: dict[str, Any], kind: int, counter: int) -> int:
    assert kind == NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return _query(device, "ecc_volatile" if counter == NVML_VOLATILE_ECC else "ecc_aggregate")


def nvmlDeviceGetRetiredPages(device: dict[str, Any], cause: int) -> list[int]:
    assert cause == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
    return list(range(_query(device, "retired_pages")))


def nvmlDeviceGetRetiredPagesPendingStatus(device: dict[str, Any]) -> int:
    return _query(device, "retirement_pending")


def nvmlDeviceGetRemappedRows(device: dict[str, Any]) -> tuple[int, ...]:
    return tuple(_query(device, "remapped_rows"))


def nvmlDeviceGetFieldValues(device: dict[str, Any], fields: list[int]) -> list[Any]:
    assert fields == [NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    if device["recovery_action"] == "unsupported":  # the real call succeeds and reports the error in the field
        return [types.SimpleNamespace(nvmlReturn=NVML_ERROR_NOT_SUPPORTED)]
    value = types.SimpleNamespace(uiVal=_query(device, "recovery_action"))
    return [types.SimpleNamespace(nvmlReturn=NVML_SUCCESS, value=value)]


def nvmlDeviceGetCurrentClocksEventReasons(device: dict[str, Any]) -> int:
    return _query(device, "throttle")


def nvmlDeviceGetNvLinkState(device: dict[str, Any], link: int) -> int:
    links = _query(device, "nvlinks")
    if link >= len(links):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return links[link]
