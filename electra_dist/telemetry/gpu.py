"""What the GPUs of this node say about themselves, through NVML (nvidia-ml-py).

Guarantees: `GpuProbe.open` is None on a machine without an NVIDIA driver or without a GPU, never an error; a quantity
that a device does not report (ECC on consumer cards, power on MIG slices) is None and spoils no other.

Cost: opening some 20 ms, a sample of eight GPUs a few milliseconds; NVML does not disturb running kernels.

Where it stops: it sees all GPUs of the node, also those that CUDA_VISIBLE_DEVICES hides; match by `uuid`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

T = TypeVar("T")


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


class GpuProbe:
    """An open connection to the driver; `close` ends it."""

    def __init__(self) -> None:
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    @staticmethod
    def open() -> GpuProbe | None:
        """A probe of all GPUs of this node; None without a driver or without GPUs."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        probe = GpuProbe()
        if not probe._handles:
            probe.close()
            return None
        return probe

    def driver_version(self) -> str | None:
        """Version of the NVIDIA driver."""
        return _text(_ask(pynvml.nvmlSystemGetDriverVersion))

    def sample(self) -> list[GpuSample]:
        """All GPUs now, in the driver's order."""
        return [_sample(handle) for handle in self._handles]

    def close(self) -> None:
        """Let the driver go."""
        pynvml.nvmlShutdown()


def _sample(handle: Any) -> GpuSample:
    rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    power_mw = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    return GpuSample(
        uuid=_text(_ask(pynvml.nvmlDeviceGetUUID, handle)) or "",
        name=_text(_ask(pynvml.nvmlDeviceGetName, handle)) or "unknown GPU",
        utilisation=None if rates is None else rates.gpu / 100,
        memory_used_gb=None if memory is None else memory.used / 1e9,
        memory_total_gb=None if memory is None else memory.total / 1e9,
        power_w=None if power_mw is None else power_mw / 1000,
        sm_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        temperature_c=_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        ecc_uncorrected=_ask(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
    )


def _ask(query: Callable[..., T], *args: Any) -> T | None:
    """The answer of the driver; None if this device does not have one."""
    try:
        return query(*args)
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
