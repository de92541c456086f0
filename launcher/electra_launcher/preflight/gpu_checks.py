"""Judge whether GPUs are fit for a run or not, from NVML's values (`electra_dist/nvml.py`) and from measured speeds.

A GPU is unhealthy, so that its node must be left out, if one of these holds:
- it does not answer any more (lost), or the driver asks for a recovery such as a reset;
- it had uncorrected memory errors since the driver was loaded, or repairs of its memory are pending or have failed;
- the hardware slows it down, or it is at its slowdown temperature;
- it has fewer active NVLinks than another GPU of its node;
- its matrix products are slower than those of the median GPU by more than a factor of 1.3.
A GPU that may be used but should be examined gets a warning.

Guarantee: all functions but `check_gpus`, which reads NVML, are pure.

Limits: a GPU that passes may still fail later. A slow GPU is found only if there are others to compare it with.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from electra_dist.nvml import GpuHealth, GpuProbe
from electra_launcher.preflight.findings import Finding, Severity

SLOW_FACTOR = 1.3  # A GPU slower than the median by more than this factor is unhealthy; sound ones differ by some 5 %.
HOT_MARGIN_C = 5  # A GPU this close to its slowdown temperature gets a warning.
ASSUMED_SLOWDOWN_C = 90  # slowdown temperature of a device that does not report one
MIN_CLOCK = 0.5  # fraction of the highest clock below which a GPU under load gets a warning
_RESET = "drain the node and reset this GPU"
_TROUBLE = ("hardware slowdown", "hardware thermal slowdown", "power brake")  # throttle reasons of an unhealthy GPU

_Fault = tuple[Severity, str, str]  # severity, what was found, next step


def check_gpus(node: str) -> list[Finding]:
    """Return what NVML shows about this node's idle GPUs.

    If there is no GPU, or nvidia-ml-py is missing, the result is a single finding of severity "ok".
    """
    probe = GpuProbe.open()
    if probe is None:
        what = "no GPU to check: NVML finds none, or nvidia-ml-py is not installed"
        return [Finding(severity="ok", node=node, what=what)]
    try:
        return classify_gpus(probe.health(), node)
    finally:
        probe.close()


def classify_gpus(gpus: Sequence[GpuHealth], node: str) -> list[Finding]:
    """Return the faults of idle GPUs in memory, driver, temperature and NVLinks, and one "ok" for each sound GPU.

    Pass all GPUs of one node, because their numbers of active NVLinks are compared.
    """
    most_links = max((sum(gpu.nvlinks) for gpu in gpus), default=0)
    findings = []
    for gpu in gpus:
        faults: list[_Fault]
        if gpu.lost:
            faults = [("unhealthy", f"does not answer (lost): {gpu.lost}", "reboot the node")]
        else:
            faults = [*_memory(gpu), *_recovery(gpu), *_slowed(gpu), *_links(gpu, most_links)]
        findings += _findings(gpu, node, faults, sound=f"{gpu.now.name}: {_state(gpu)}")
    return findings


def classify_load(gpus: Sequence[GpuHealth], node: str) -> list[Finding]:
    """Return the faults of GPUs under load (slowdown, heat, low clock), and one "ok" finding for each sound GPU."""
    findings = []
    for gpu in gpus:
        faults = list(_slowed(gpu))
        clock_mhz = gpu.now.sm_clock_mhz
        max_clock_mhz = gpu.max_sm_clock_mhz
        is_clock_low = clock_mhz is not None and max_clock_mhz is not None and clock_mhz < MIN_CLOCK * max_clock_mhz
        if is_clock_low:
            what = f"clock of only {clock_mhz} MHz under load, of {max_clock_mhz} MHz possible"
            faults.append(("warning", what, "check its power limit and cooling"))
        findings += _findings(gpu, node, faults, sound=f"under load: {_state(gpu)}")
    return findings


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed of one device on a bf16 matrix product, in TFLOP/s."""

    node: str
    device: str  # torch's name, for example "cuda:0"
    tflops: float


def classify_speeds(speeds: Sequence[Speed]) -> list[Finding]:
    """Return an "unhealthy" finding for each slow device, and an "ok" finding for each node without a slow device.

    The devices must be of one kind. A device is slow if the median speed of all devices is more than 1.3 times
    its speed (SLOW_FACTOR). A single device is never slow.
    """
    if not speeds:
        return []
    median = statistics.median(speed.tflops for speed in speeds)
    slow = [speed for speed in speeds if speed.tflops * SLOW_FACTOR < median]
    findings = []
    for speed in slow:
        what = f"matrix product at {speed.tflops:.0f} TFLOP/s, but the median is {median:.0f}"
        next_step = "leave the node out; check the clock and cooling of this GPU"
        findings.append(
            Finding(severity="unhealthy", node=speed.node, device=speed.device, what=what, next_step=next_step)
        )
    slow_nodes = {speed.node for speed in slow}
    sound_nodes = dict.fromkeys(speed.node for speed in speeds if speed.node not in slow_nodes)  # each once, in order
    for node in sound_nodes:
        tflops = [speed.tflops for speed in speeds if speed.node == node]
        what = (
            f"matrix product at {min(tflops):.0f} to {max(tflops):.0f} TFLOP/s; median of {len(speeds)}: {median:.0f}"
        )
        findings.append(Finding(severity="ok", node=node, what=what))
    return findings


def _memory(gpu: GpuHealth) -> Iterator[_Fault]:
    """Yield the memory faults of a GPU; uncorrected errors before the driver was loaded give only a warning."""
    new_errors = gpu.now.ecc_uncorrected
    if new_errors:
        yield "unhealthy", f"{new_errors} uncorrected memory errors since the driver was loaded", _RESET
    elif gpu.ecc_aggregate:
        yield "warning", f"{gpu.ecc_aggregate} uncorrected memory errors in its life", "replace it if the number grows"
    if gpu.remap_failed:
        yield "unhealthy", "a row of its memory could not be replaced by a spare", "replace this GPU"
    if gpu.remap_pending:
        yield "unhealthy", "a row of its memory waits to be replaced by a spare", _RESET
    if gpu.retirement_pending:
        yield "unhealthy", "a page of its memory waits to be retired", _RESET
    if gpu.retired_pages:
        yield "warning", f"{gpu.retired_pages} pages of its memory were retired", "replace it if the number grows"


def _recovery(gpu: GpuHealth) -> Iterator[_Fault]:
    if gpu.recovery_action:
        yield "unhealthy", f"the driver asks to {gpu.recovery_action}", "do this, then run preflight again"


def _slowed(gpu: GpuHealth) -> Iterator[_Fault]:
    """Yield a GPU's slowdowns, by hardware (unhealthy) or software (warning), and a temperature near its limit."""
    for reason in gpu.now.throttle:
        if reason in _TROUBLE:
            yield "unhealthy", f"slowed down: {reason}", "check the node's cooling and power supply"
    if "software thermal slowdown" in gpu.now.throttle:
        yield "warning", "slowed down: software thermal slowdown", "check the node's cooling"
    limit_c = ASSUMED_SLOWDOWN_C if gpu.slowdown_c is None else gpu.slowdown_c
    temperature_c = gpu.now.temperature_c
    if temperature_c is not None and temperature_c >= limit_c - HOT_MARGIN_C:
        severity: Severity = "unhealthy" if temperature_c >= limit_c else "warning"
        yield severity, f"is at {temperature_c} C and slows down at {limit_c} C", "check the node's cooling"


def _links(gpu: GpuHealth, most_links: int) -> Iterator[_Fault]:
    """Yield a fault if a GPU has fewer active NVLinks than `most_links`, the most of its node, or inactive ones."""
    num_active = sum(gpu.nvlinks)  # one boolean per link
    num_links = len(gpu.nvlinks)
    if num_active < most_links:
        yield "unhealthy", f"{num_active} active NVLinks, but its neighbours have {most_links}", _RESET
    elif 0 < num_active < num_links:
        what = f"only {num_active} of {num_links} NVLinks are active"
        yield "warning", what, "compare with another node of this kind"


def _findings(gpu: GpuHealth, node: str, faults: Sequence[_Fault], sound: str) -> list[Finding]:
    """Convert the faults of a GPU to findings; if there are none, return one "ok" finding with the text `sound`."""
    device = f"GPU {gpu.index}"
    if not faults:
        return [Finding(severity="ok", node=node, device=device, what=sound)]
    return [
        Finding(severity=severity, node=node, device=device, what=what, next_step=next_step)
        for severity, what, next_step in faults
    ]


def _state(gpu: GpuHealth) -> str:
    """Return the known values of a GPU as text, for example "61 C, 652 W, 1755 MHz"."""
    now = gpu.now
    parts = []
    if now.temperature_c is not None:
        parts.append(f"{now.temperature_c} C")
    if now.power_w is not None:
        parts.append(f"{now.power_w:.0f} W")
    if now.sm_clock_mhz is not None:
        parts.append(f"{now.sm_clock_mhz} MHz")
    parts += now.throttle
    return ", ".join(parts) or "it reports nothing"
