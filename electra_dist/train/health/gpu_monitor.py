"""Watch the local GPUs during a run: a few numbers at logged steps, and whether a GPU has gone bad since the start.

Guarantees: readings are None where NVML is absent. The numbers are those of the worst local GPU, so that a single
faulty GPU among eight is visible. Memory errors count as new by the counter of the same GPU.

Cost: one probe, a few milliseconds for eight GPUs, at logged steps only; no thread, no torch, no CUDA context.

Limits: only the GPUs of this process's node are read; the GPUs of other nodes are read by the ranks there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from electra_dist.nvml import GpuProbe, GpuSample


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
    """A connection to the GPU driver (NVML) that reads the GPUs of this node; `close` ends it."""

    def __init__(self) -> None:
        self._probe = GpuProbe.open()
        self._first_errors: dict[str, int] = {}  # UUID -> uncorrected memory errors when they were first read
        self._new_errors = 0  # of all GPUs, at the newest reading

    def read(self) -> GpuReading | None:
        """Read all GPUs of this node, and return the worst value of each quantity; None without NVML or GPUs."""
        if self._probe is None:
            return None
        samples = self._probe.sample()
        self._new_errors = 0
        for gpu in samples:
            if gpu.uuid and gpu.ecc_uncorrected is not None:
                first_errors = self._first_errors.setdefault(gpu.uuid, gpu.ecc_uncorrected)
                self._new_errors += max(0, gpu.ecc_uncorrected - first_errors)
        return worst(samples)

    @property
    def fault(self) -> str:
        """Return one line on why the GPUs of the newest reading cannot be trusted; "" if they can be trusted.

        GPUs are not trusted if they have had uncorrected memory errors since their first reading, because these damage
        results. Heat and throttling do not count: they make a run slow, not wrong.
        """
        if self._new_errors == 0:
            return ""
        return f"{self._new_errors} uncorrected memory errors since the run started"

    def close(self) -> None:
        """End the connection to the driver; later reads return None. Calling it twice is fine."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None


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
