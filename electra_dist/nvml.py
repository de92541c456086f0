"""What the GPUs of this node say about themselves, through NVML (nvidia-ml-py).

Guarantees: `GpuProbe.open` is None on a machine without nvidia-ml-py, an NVIDIA driver or a GPU, never an error; a
quantity that a device does not report (ECC on consumer cards, power on MIG slices) is None and spoils no other; a GPU
that has fallen off the bus is reported as lost, beside the others that still answer.

Cost: opening some 20 ms, a sample of eight GPUs a few milliseconds, their health some tens; NVML does not disturb
running kernels. Imports no torch.

Where it stops: it sees all GPUs that the operating system shows this process, also those that CUDA_VISIBLE_DEVICES
hides; match by `uuid`. What the numbers mean for a run is decided elsewhere (`launcher/preflight/gpu_checks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

try:
    import pynvml
except ImportError:  # an installation without it, as a CPU image may be
    pynvml = None

# Bits of NVML's clock event ("throttle") reasons that tell of trouble or of a limit; fixed since NVML 4.
_THROTTLE_BITS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
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
    """One GPU at one moment."""

    uuid: str
    name: str
    utilisation: float | None  # part of the last sampling period in which a kernel ran, in [0, 1]
    memory_used_gb: float | None  # by all processes, in 1e9 bytes
    memory_total_gb: float | None
    power_w: float | None
    sm_clock_mhz: int | None
    temperature_c: int | None
    ecc_uncorrected: int | None  # errors since the driver was loaded; not zero: do not trust the device
    throttle: tuple[str, ...]  # why the clock is not higher, where that is a limit or trouble


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """What decides whether a GPU can be trusted with a run. None: the device does not tell."""

    index: int  # the driver's order
    lost: str  # the driver's words when the GPU no longer answers (then all else is unknown); "" when it does
    now: GpuSample
    ecc_aggregate: int | None  # uncorrected errors in the life of the device
    retired_pages: int | None  # for double-bit errors (before Ampere)
    retirement_pending: bool | None
    remapped_rows: int | None  # for uncorrected errors (Ampere and later)
    remap_pending: bool | None
    remap_failed: bool | None
    recovery_action: str  # what the driver asks for; "" for nothing
    nvlinks: tuple[bool, ...]  # whether each link that the device has is active
    slowdown_c: int | None  # temperature at which the hardware slows down
    max_sm_clock_mhz: int | None


class GpuProbe:
    """An open connection to the driver; `close` ends it."""

    def __init__(self) -> None:
        self._handles: list[tuple[int, Any, str]] = []  # index, handle, why there is none
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                self._handles.append((index, pynvml.nvmlDeviceGetHandleByIndex(index), ""))
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_NO_PERMISSION:  # it belongs to another job of this node
                    self._handles.append((index, None, str(error)))

    @staticmethod
    def open() -> GpuProbe | None:
        """A probe of all GPUs of this node; None without nvidia-ml-py, without a driver or without GPUs."""
        if pynvml is None:
            return None
        try:
            pynvml.nvmlInit()
            probe = GpuProbe()
        except pynvml.NVMLError:
            return None
        if not probe._handles:
            probe.close()
            return None
        return probe

    def driver_version(self) -> str | None:
        """Version of the NVIDIA driver."""
        return _text(_ask("nvmlSystemGetDriverVersion"))

    def sample(self) -> list[GpuSample]:
        """All GPUs now, in the driver's order; a lost one knows nothing."""
        return [_sample(handle) for _, handle, _ in self._handles]

    def health(self) -> list[GpuHealth]:
        """All GPUs now, in the driver's order."""
        return [_health(index, handle, lost) for index, handle, lost in self._handles]

    def close(self) -> None:
        """Let the driver go."""
        pynvml.nvmlShutdown()


def _sample(handle: Any) -> GpuSample:
    rates = _ask("nvmlDeviceGetUtilizationRates", handle)
    memory = _ask("nvmlDeviceGetMemoryInfo", handle)
    power_mw = _ask("nvmlDeviceGetPowerUsage", handle)
    reasons = _ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:  # a driver older than the name
        reasons = _ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return GpuSample(
        uuid=_text(_ask("nvmlDeviceGetUUID", handle)) or "",
        name=_text(_ask("nvmlDeviceGetName", handle)) or "unknown GPU",
        utilisation=None if rates is None else rates.gpu / 100,
        memory_used_gb=None if memory is None else memory.used / 1e9,
        memory_total_gb=None if memory is None else memory.total / 1e9,
        power_w=None if power_mw is None else power_mw / 1000,
        sm_clock_mhz=_ask("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM),
        temperature_c=_ask("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU),
        ecc_uncorrected=_uncorrected(handle, pynvml.NVML_VOLATILE_ECC),
        throttle=tuple(text for bit, text in _THROTTLE_BITS.items() if (reasons or 0) & bit),
    )


def _health(index: int, handle: Any, lost: str) -> GpuHealth:
    retired = _ask("nvmlDeviceGetRetiredPages", handle, pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    _, remapped, pending, failed = _ask("nvmlDeviceGetRemappedRows", handle) or (None, None, None, None)
    return GpuHealth(
        index=index,
        lost=lost or _lost(handle),
        now=_sample(handle),
        ecc_aggregate=_uncorrected(handle, pynvml.NVML_AGGREGATE_ECC),
        retired_pages=None if retired is None else len(retired),
        retirement_pending=_flag(_ask("nvmlDeviceGetRetiredPagesPendingStatus", handle)),
        remapped_rows=remapped,
        remap_pending=_flag(pending),
        remap_failed=_flag(failed),
        recovery_action=_recovery_action(handle),
        nvlinks=_nvlinks(handle),
        slowdown_c=_ask("nvmlDeviceGetTemperatureThreshold", handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        max_sm_clock_mhz=_ask("nvmlDeviceGetMaxClockInfo", handle, pynvml.NVML_CLOCK_SM),
    )


def _lost(handle: Any) -> str:
    """The driver's words if it has given this GPU up, else ""."""
    try:
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED):
            return str(error)
    return ""


def _uncorrected(handle: Any, counter: int) -> int | None:
    return _ask("nvmlDeviceGetTotalEccErrors", handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)


def _recovery_action(handle: Any) -> str:
    """NVML has it as a field value, not as a function of its own; drivers before R570 do not."""
    field = getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    values = None if field is None else _ask("nvmlDeviceGetFieldValues", handle, [field])
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return ""
    action = values[0].value.uiVal
    return "" if action == 0 else _RECOVERY_ACTIONS.get(action, f"take recovery action {action}")


def _nvlinks(handle: Any) -> tuple[bool, ...]:
    states = (_ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS))
    return tuple(state != 0 for state in states if state is not None)  # asleep is not inactive


def _ask(function: str, *args: Any) -> Any:
    """The answer of the driver; None if this device, driver or library does not have one, or the device is lost."""
    query = getattr(pynvml, function, None)
    if query is None or (args and args[0] is None):
        return None
    try:
        return query(*args)
    except pynvml.NVMLError:
        return None


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
