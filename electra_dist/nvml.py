"""Read the state and the health of this node's GPUs through NVML (package nvidia-ml-py).

Guarantee: `GpuProbe.open` returns None, and raises nothing, on a machine without nvidia-ml-py, NVIDIA driver or GPU. A
quantity that a device does not report (ECC on consumer cards, power on MIG slices) is None and does not affect the
others. A GPU that has fallen off the bus is reported as lost; the other GPUs are still read.

Cost: opening takes about 20 ms, a sample of eight GPUs a few milliseconds, and their health some tens of milliseconds.
NVML does not disturb running kernels. This module does not import torch.

Limits: NVML reports every GPU that the operating system shows to this process, including those that
CUDA_VISIBLE_DEVICES hides; match GPUs by `uuid`. This module only reads; `launcher/preflight/gpu_checks.py` decides
which readings make a node unhealthy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

try:
    import pynvml
except ImportError:  # The package is optional; a CPU image may lack it.
    pynvml = None

# Bits of NVML's clock event ("throttle") reasons that mean a limit or a fault. Their values are fixed since NVML 4.
_THROTTLE_BITS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# NVML's codes of the action that the driver asks for; 0 means none.
_RECOVERY_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain its peer-to-peer traffic",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset its bus",
    7: "reboot the system",
}


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """Readings of one GPU at one moment; a reading is None where the device does not report it or is lost."""

    uuid: str  # "" if it cannot be read
    name: str
    utilisation: float | None  # fraction of the last sampling period in which a kernel ran, in [0, 1]
    memory_used_gb: float | None  # by all processes, in units of 1e9 bytes
    memory_total_gb: float | None  # in units of 1e9 bytes
    power_w: float | None
    sm_clock_mhz: int | None
    temperature_c: int | None
    ecc_uncorrected: int | None  # errors since the driver was loaded; above 0 the results may be wrong
    throttle: tuple[str, ...]  # reasons why the clock is reduced, limits and faults only


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """Readings that show whether a GPU can be trusted with a run; None where the device does not report a value."""

    index: int  # number of the GPU in the driver's order
    lost: str  # the driver's error if the GPU no longer answers, and then every other reading is unknown; otherwise ""
    now: GpuSample
    ecc_aggregate: int | None  # uncorrected errors in the life of the device
    retired_pages: int | None  # memory pages retired for double-bit errors (before Ampere)
    retirement_pending: bool | None  # whether a page is retired only at the next reboot
    remapped_rows: int | None  # memory rows remapped for uncorrected errors (Ampere and later)
    remap_pending: bool | None  # whether a row is remapped only at the next reset
    remap_failed: bool | None
    recovery_action: str  # the action that the driver asks for; "" if none
    nvlinks: tuple[bool, ...]  # for each NVLink of the device, whether it is active
    slowdown_c: int | None  # temperature at which the hardware slows down, in degrees Celsius
    max_sm_clock_mhz: int | None


@dataclass(frozen=True)
class _Device:
    """One GPU that the driver lists."""

    index: int
    handle: Any  # NVML's handle; None if the driver refused one
    error: str  # the driver's reason for refusing a handle; "" if there is a handle


class GpuProbe:
    """Open connection to the NVIDIA driver that reads all GPUs of this node.

    Create it with `GpuProbe.open`, and call `close` at the end.
    """

    def __init__(self) -> None:
        """Get a handle of every GPU; NVML must have been initialised. Callers use `open` instead."""
        self._devices: list[_Device] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                self._devices.append(_Device(index, pynvml.nvmlDeviceGetHandleByIndex(index), ""))
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_NO_PERMISSION:  # Another job of this node has that GPU.
                    self._devices.append(_Device(index, None, str(error)))

    @staticmethod
    def open() -> GpuProbe | None:
        """Connect to the driver; return None without nvidia-ml-py, without a driver or without GPUs."""
        if pynvml is None:
            return None
        try:
            pynvml.nvmlInit()
            probe = GpuProbe()
        except pynvml.NVMLError:
            return None
        if not probe._devices:
            probe.close()
            return None
        return probe

    def driver_version(self) -> str | None:
        """Return the version of the NVIDIA driver, for example "580.65", or None if it cannot be read."""
        return _text(_query("nvmlSystemGetDriverVersion"))

    def sample(self) -> list[GpuSample]:
        """Return the current readings of all GPUs in the driver's order; those of a lost GPU are None."""
        return [_sample(device.handle) for device in self._devices]

    def health(self) -> list[GpuHealth]:
        """Return the current health of all GPUs, lost ones included, in the driver's order."""
        return [_health(device) for device in self._devices]

    def close(self) -> None:
        """Close the connection to the driver; the probe cannot be used afterwards."""
        pynvml.nvmlShutdown()


def _sample(handle: Any) -> GpuSample:
    """Return the current readings of one GPU.

    Args:
        handle: NVML's handle of the GPU; None stands for a lost GPU, whose readings are unknown.
    """
    rates = _query("nvmlDeviceGetUtilizationRates", handle)
    memory = _query("nvmlDeviceGetMemoryInfo", handle)
    power_mw = _query("nvmlDeviceGetPowerUsage", handle)
    reasons = _query("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:  # Older drivers and libraries have only the older name of the function.
        reasons = _query("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return GpuSample(
        uuid=_text(_query("nvmlDeviceGetUUID", handle)) or "",
        name=_text(_query("nvmlDeviceGetName", handle)) or "unknown GPU",
        utilisation=None if rates is None else rates.gpu / 100,
        memory_used_gb=None if memory is None else memory.used / 1e9,
        memory_total_gb=None if memory is None else memory.total / 1e9,
        power_w=None if power_mw is None else power_mw / 1000,
        sm_clock_mhz=_query("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM),
        temperature_c=_query("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU),
        ecc_uncorrected=_uncorrected_errors(handle, pynvml.NVML_VOLATILE_ECC),
        throttle=tuple(text for bit, text in _THROTTLE_BITS.items() if (reasons or 0) & bit),
    )


def _health(device: _Device) -> GpuHealth:
    """Return the current health of one GPU."""
    handle = device.handle
    retired = _query("nvmlDeviceGetRetiredPages", handle, pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    remapping = _query("nvmlDeviceGetRemappedRows", handle)
    if remapping is None:
        remapping = (None, None, None, None)
    _, remapped_for_uncorrected, remap_pending, remap_failed = remapping
    return GpuHealth(
        index=device.index,
        lost=device.error or _lost_error(handle),
        now=_sample(handle),
        ecc_aggregate=_uncorrected_errors(handle, pynvml.NVML_AGGREGATE_ECC),
        retired_pages=None if retired is None else len(retired),
        retirement_pending=_flag(_query("nvmlDeviceGetRetiredPagesPendingStatus", handle)),
        remapped_rows=remapped_for_uncorrected,
        remap_pending=_flag(remap_pending),
        remap_failed=_flag(remap_failed),
        recovery_action=_recovery_action(handle),
        nvlinks=_nvlinks(handle),
        slowdown_c=_query("nvmlDeviceGetTemperatureThreshold", handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        max_sm_clock_mhz=_query("nvmlDeviceGetMaxClockInfo", handle, pynvml.NVML_CLOCK_SM),
    )


def _lost_error(handle: Any) -> str:
    """Return the driver's error if this GPU is lost or must be reset, otherwise ""."""
    try:
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED):
            return str(error)
    return ""


def _uncorrected_errors(handle: Any, counter: int) -> int | None:
    """Return the number of uncorrected memory errors, or None if the GPU does not count them.

    Args:
        handle: NVML's handle of the GPU.
        counter: NVML_VOLATILE_ECC counts since the driver was loaded, NVML_AGGREGATE_ECC in the life of the device.
    """
    return _query("nvmlDeviceGetTotalEccErrors", handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)


def _recovery_action(handle: Any) -> str:
    """Return the action that the driver asks for in order to recover this GPU, or "" if it asks for none.

    NVML offers this as a field value and not as a function. Drivers before R570 lack it, which also gives "".
    """
    field = getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return ""
    values = _query("nvmlDeviceGetFieldValues", handle, [field])
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return ""
    action = values[0].value.uiVal
    if action == 0:
        return ""
    return _RECOVERY_ACTIONS.get(action, f"take recovery action {action}")


def _nvlinks(handle: Any) -> tuple[bool, ...]:
    """Return whether each NVLink of the GPU is active, in the order of links; () if it has none or is lost."""
    states = (_query("nvmlDeviceGetNvLinkState", handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS))
    return tuple(state != 0 for state in states if state is not None)  # 0 is inactive; a sleeping link is not 0.


def _query(function: str, *args: Any) -> Any:
    """Call a function of NVML; return None if the device, the driver or the library does not support it.

    Args:
        function: Name of the function in pynvml.
        args: Its arguments; a first argument of None stands for a lost device and gives None.
    """
    nvml_function = getattr(pynvml, function, None)
    is_lost = bool(args) and args[0] is None
    if nvml_function is None or is_lost:
        return None
    try:
        return nvml_function(*args)
    except pynvml.NVMLError:
        return None


def _flag(value: int | None) -> bool | None:
    """Return NVML's 0 or 1 as a bool; None stays None."""
    return None if value is None else bool(value)


def _text(value: str | bytes | None) -> str | None:
    """Return a string of NVML, which some versions give as bytes, as str; None stays None."""
    return value.decode() if isinstance(value, bytes) else value
