"""The local GPUs during a run: a few numbers at log steps, and whether one has gone bad since the start.

Guarantees: nothing (None) where NVML is absent. The numbers are those of the worst local GPU, so one sick device of
eight shows. `gone_bad` is a pure function of two readings.

Cost: one probe, a few milliseconds for eight GPUs, at log steps only; no thread, no torch, no CUDA context.

Where it stops: the GPUs of this process's node; what other nodes' GPUs say is known on their own ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from electra_dist.nvml import GpuProbe, GpuSample


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """The worst of the local GPUs; None where no device tells."""

    gpu_temperature_c: int | None  # highest
    gpu_power_w: float | None  # sum
    gpu_sm_clock_mhz: int | None  # lowest
    gpu_memory_used_gb: float | None  # highest, by all processes, in 1e9 bytes
    gpu_ecc_uncorrected: int | None  # sum, since the driver was loaded
    gpu_throttle: tuple[str, ...]  # all reasons that any of them gives, sorted


class GpuSampler:
    """Reads the local GPUs; `close` ends the connection to the driver."""

    def __init__(self) -> None:
        """Connect; on a machine without NVML or GPUs every `read` is None."""
        self._probe = GpuProbe.open()

    def read(self) -> GpuReading | None:
        """The GPUs now. Call it at log steps."""
        return None if self._probe is None else worst(self._probe.sample())

    def close(self) -> None:
        """Let the driver go. Calling it twice is fine."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None


def worst(samples: Iterable[GpuSample]) -> GpuReading:
    """One reading of several GPUs."""
    gpus = list(samples)
    powers = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
    errors = [gpu.ecc_uncorrected for gpu in gpus if gpu.ecc_uncorrected is not None]
    return GpuReading(
        gpu_temperature_c=max((g.temperature_c for g in gpus if g.temperature_c is not None), default=None),
        gpu_power_w=sum(powers) if powers else None,
        gpu_sm_clock_mhz=min((g.sm_clock_mhz for g in gpus if g.sm_clock_mhz is not None), default=None),
        gpu_memory_used_gb=max((g.memory_used_gb for g in gpus if g.memory_used_gb is not None), default=None),
        gpu_ecc_uncorrected=sum(errors) if errors else None,
        gpu_throttle=tuple(sorted({reason for gpu in gpus for reason in gpu.throttle})),
    )


def gone_bad(first: GpuReading | None, now: GpuReading | None) -> str:
    """Why the node can no longer be trusted (exit 69), from its reading at the start of the run and now; else "".

    Only what damages results counts: uncorrected memory errors. Heat and throttling make a run slow, not wrong.
    """
    if first is None or now is None or now.gpu_ecc_uncorrected is None:
        return ""
    new = now.gpu_ecc_uncorrected - (first.gpu_ecc_uncorrected or 0)
    return f"{new} uncorrected memory errors since the run started" if new > 0 else ""
