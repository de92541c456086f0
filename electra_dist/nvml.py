"""Read the state and the health of this node's GPUs through NVML (package nvidia-ml-py).

Guarantee: `GpuProbe.open` returns None, and raises nothing, on a machine without nvidia-ml-py, NVIDIA driver or GPU. A
quantity that a device does not report (ECC on consumer cards, power on MIG slices) is None and does not affect the
others. A GPU that has fallen off the bus is reported as lost; the other GPUs are still read. `GpuSampler` combines the
GPUs to the worst of each quantity, and counts memory errors as new by the counter of the same GPU.

Cost: opening takes about 20 ms, a sample of eight GPUs a few milliseconds, and their health some tens of milliseconds.
NVML does not disturb running kernels. This module does not import torch.

Limits: NVML reports every GPU that the operating system shows to this process; those that CUDA_VISIBLE_DEVICES hides,
which may be another job's, are left out. NVML numbers GPUs by their PCI address, as CUDA numbers GPUs of one model.
This module only reads; `electra_launcher/preflight/gpu_checks.py` decides which readings make a node unhealthy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
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
_INACTIVE_LINK = 0  # NVML's code of the state of an NVLink
# NVML's codes of the action that the driver asks for in order to recover a GPU.
_NO_RECOVERY_ACTION = 0
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
    """Readings of one GPU at one moment. A value that the GPU does not report is None; `throttle` is then empty."""

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
    """Readings that show whether a GPU can be trusted with a run; values that it does not report are None or empty."""

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
    """GPU that the driver lists, with its NVML handle, or with the error if the driver refused a handle."""

    index: int  # number of the GPU in the driver's order
    handle: Any  # NVML's handle; None if the driver refused one
    error: str  # the driver's reason for refusing a handle; "" if there is a handle


class GpuProbe:
    """Open connection to the NVIDIA driver that reads all GPUs of this node, from `GpuProbe.open` to `close`."""

    def __init__(self) -> None:
        """Get a handle of every GPU that this job sees; if the driver refuses one, keep the GPU with the error."""
        devices: list[_Device] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                devices.append(_Device(index, handle, error=""))
            except pynvml.NVMLError as error:
                belongs_to_another_job = error.value == pynvml.NVML_ERROR_NO_PERMISSION
                if not belongs_to_another_job:
                    devices.append(_Device(index, handle=None, error=str(error)))
        self._devices = _visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))

    @staticmethod
    def open() -> GpuProbe | None:
        """Connect to the NVIDIA driver; return None if nvidia-ml-py, the driver or a GPU is missing."""
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


def _visible(devices: Sequence[_Device], names: str | None) -> list[_Device]:
    """Return the devices that `names` (CUDA_VISIBLE_DEVICES) lists by number, UUID prefix or MIG part; None: all."""
    if names is None:
        return list(devices)
    uuids = [_text(_query("nvmlDeviceGetUUID", device.handle)) or "" for device in devices]
    listed: set[int] = set()
    is_one_missing = False  # whether a listed UUID belongs to no device that reports its UUID
    for name in (part.strip() for part in names.split(",")):
        if name.isdigit():
            listed.add(int(name))
        elif name.startswith(("GPU-", "MIG-")):
            gpu = _gpu_of_part(name) if name.startswith("MIG-") else name
            found = {number for number, uuid in enumerate(uuids) if gpu and uuid.startswith(gpu)}
            listed |= found
            is_one_missing = is_one_missing or not found
        else:
            break  # CUDA ends the list at a name that it does not know.
    if is_one_missing:  # it may be a GPU that has fallen off the bus and no longer reports its UUID
        listed |= {number for number, uuid in enumerate(uuids) if not uuid}
    return [device for number, device in enumerate(devices) if number in listed]


def _gpu_of_part(name: str) -> str:
    """Return the UUID of the GPU of a MIG part, named "MIG-UUID" or "MIG-GPU-UUID/1/0"; "" if it is not known."""
    if name.startswith("MIG-GPU-"):
        return name.removeprefix("MIG-").partition("/")[0]
    part = _query("nvmlDeviceGetHandleByUUID", name)
    return _text(_query("nvmlDeviceGetUUID", _query("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part))) or ""


def _sample(handle: Any) -> GpuSample:
    rates = _query("nvmlDeviceGetUtilizationRates", handle)
    memory = _query("nvmlDeviceGetMemoryInfo", handle)
    power_mw = _query("nvmlDeviceGetPowerUsage", handle)
    return GpuSample(
        uuid=_text(_query("nvmlDeviceGetUUID", handle)) or "",
        name=_text(_query("nvmlDeviceGetName", handle)) or "unknown GPU",
        utilisation=None if rates is None else rates.gpu / 100,  # NVML gives percent
        memory_used_gb=None if memory is None else memory.used / 1e9,
        memory_total_gb=None if memory is None else memory.total / 1e9,
        power_w=None if power_mw is None else power_mw / 1000,
        sm_clock_mhz=_query("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM),
        temperature_c=_query("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU),
        ecc_uncorrected=_uncorrected_errors(handle, pynvml.NVML_VOLATILE_ECC),
        throttle=_throttle_reasons(handle),
    )


def _throttle_reasons(handle: Any) -> tuple[str, ...]:
    """Return why the GPU's clock is reduced, such as "power cap"; only limits and faults count, not an idle GPU."""
    mask = _query("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if mask is None:  # Older drivers and libraries have only the older name of the function.
        mask = _query("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if mask is None:
        return ()
    return tuple(text for bit, text in _THROTTLE_BITS.items() if mask & bit)


def _health(device: _Device) -> GpuHealth:
    handle = device.handle
    retired_pages = _query("nvmlDeviceGetRetiredPages", handle, pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    remapping = _query("nvmlDeviceGetRemappedRows", handle)
    if remapping is None:
        remapping = (None, None, None, None)
    _, remapped_for_uncorrected, remap_pending, remap_failed = remapping  # first: rows remapped for corrected errors
    return GpuHealth(
        index=device.index,
        lost=device.error or _lost_error(handle),
        now=_sample(handle),
        ecc_aggregate=_uncorrected_errors(handle, pynvml.NVML_AGGREGATE_ECC),
        retired_pages=None if retired_pages is None else len(retired_pages),
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
    """Return the driver's error if this GPU no longer answers (lost) or must be reset, otherwise ""."""
    try:
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED):
            return str(error)
    return ""


def _uncorrected_errors(handle: Any, counter: int) -> int | None:
    """Return the GPU's uncorrected memory errors; `counter` selects all, or those since the driver was loaded."""
    return _query("nvmlDeviceGetTotalEccErrors", handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)


def _recovery_action(handle: Any) -> str:
    """Return what the driver (R570 or later) asks for to repair this GPU, such as "reset the GPU"; "" for nothing."""
    field = getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return ""
    values = _query("nvmlDeviceGetFieldValues", handle, [field])
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return ""
    action = values[0].value.uiVal
    if action == _NO_RECOVERY_ACTION:
        return ""
    return _RECOVERY_ACTIONS.get(action, f"take recovery action {action}")


def _nvlinks(handle: Any) -> tuple[bool, ...]:
    """Return for each NVLink of the GPU whether it is active; a link that sleeps to save power counts as active."""
    are_active = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = _query("nvmlDeviceGetNvLinkState", handle, link)
        if state is not None:  # None: the GPU has no such link
            are_active.append(state != _INACTIVE_LINK)
    return tuple(are_active)


def _query(function: str, *args: Any) -> Any:
    """Call an NVML function by name; return None if pynvml lacks it, or the GPU does not report the value.

    The first argument of most functions is a GPU's handle. It is None for a lost GPU, which reports nothing.
    """
    nvml_function = getattr(pynvml, function, None)
    is_lost = len(args) > 0 and args[0] is None
    if nvml_function is None or is_lost:
        return None
    try:
        return nvml_function(*args)
    except (pynvml.NVMLError, UnicodeDecodeError):  # pynvml decodes names, which may hold any byte
        return None


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _text(value: str | bytes | None) -> str | None:
    """Return a string of NVML as str; some versions of pynvml give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """Readings of all GPUs of a node, combined into one value per quantity: the worst one or, where noted, the sum.

    A quantity is None if no GPU reports it.
    """

    gpu_temperature_c: int | None  # highest
    gpu_power_w: float | None  # sum
    gpu_sm_clock_mhz: int | None  # lowest
    gpu_memory_used_gb: float | None  # highest, by all processes, in 1e9 bytes
    gpu_ecc_uncorrected: int | None  # sum, since the driver was loaded
    gpu_throttle: tuple[str, ...]  # all reasons for slowing down that any GPU reports, sorted


class GpuSampler:
    """Connection to the GPU driver (NVML) that reads the GPUs of this node, until `close`."""

    def __init__(self, probe: GpuProbe) -> None:
        self._probe = probe
        self._first_errors: dict[str, int] = {}  # UUID -> uncorrected memory errors when they were first read
        self._new_errors = 0  # of all GPUs, at the newest reading

    @staticmethod
    def open() -> GpuSampler | None:
        """Connect to the NVIDIA driver; return None if nvidia-ml-py, the driver or a GPU is missing."""
        probe = GpuProbe.open()
        return None if probe is None else GpuSampler(probe)

    def read(self) -> GpuReading:
        """Read all GPUs of this node, and return the worst value of each quantity."""
        samples = self._probe.sample()
        self._new_errors = 0
        for gpu in samples:
            if gpu.uuid and gpu.ecc_uncorrected is not None:
                first_errors = self._first_errors.setdefault(gpu.uuid, gpu.ecc_uncorrected)
                self._new_errors += max(0, gpu.ecc_uncorrected - first_errors)
        return worst(samples)

    @property
    def fault(self) -> str:
        """Return why the GPUs of the newest reading cannot be trusted, in one line; "" if they can.

        GPUs are not trusted if they have had uncorrected memory errors since their first reading, because these damage
        results. Heat and throttling do not count: they make a run slow, not wrong.
        """
        if self._new_errors == 0:
            return ""
        return f"{self._new_errors} uncorrected memory errors since the run started"

    def close(self) -> None:
        """End the connection to the driver; the sampler cannot be used afterwards."""
        self._probe.close()


def worst(samples: Iterable[GpuSample]) -> GpuReading:
    """Combine the samples of several GPUs into one reading, as the fields of `GpuReading` say."""
    gpus = list(samples)
    temperatures = [gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None]
    powers = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
    clocks = [gpu.sm_clock_mhz for gpu in gpus if gpu.sm_clock_mhz is not None]
    memories = [gpu.memory_used_gb for gpu in gpus if gpu.memory_used_gb is not None]
    errors = [gpu.ecc_uncorrected for gpu in gpus if gpu.ecc_uncorrected is not None]
    throttle_reasons = {reason for gpu in gpus for reason in gpu.throttle}
    return GpuReading(
        gpu_temperature_c=max(temperatures, default=None),
        gpu_power_w=sum(powers) if powers else None,
        gpu_sm_clock_mhz=min(clocks, default=None),
        gpu_memory_used_gb=max(memories, default=None),
        gpu_ecc_uncorrected=sum(errors) if errors else None,
        gpu_throttle=tuple(sorted(throttle_reasons)),
    )
