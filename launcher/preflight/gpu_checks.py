"""Which GPUs can be trusted with a run: pure, from what NVML says (`electra_dist/nvml.py`) and from measured speeds.

Unhealthy (the node is left out): lost, memory damaged since the driver was loaded, repairs of memory pending or
failed, a recovery that the driver asks for, slowed by the hardware, at the slowdown temperature, fewer NVLinks than
its neighbours, much slower than the others. Warning: what may go on but should be looked at.

Where it stops: no single number tells all failures; a GPU that passes may still fail, and one that is slow only next
to others of its kind is found only when there are others to compare with.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from electra_dist.nvml import GpuHealth
from launcher.preflight.findings import Finding, Severity

SLOW_FACTOR = 1.3  # slower than the median by more: unhealthy. Sound GPUs of one kind differ by some 5 %
HOT_MARGIN_C = 5  # this close to the slowdown temperature: warning
ASSUMED_SLOWDOWN_C = 90  # of a device that does not tell
MIN_CLOCK = 0.5  # part of the highest clock, under load
_RESET = "drain the node and reset this GPU"
_TROUBLE = ("hardware slowdown", "hardware thermal slowdown", "power brake")

_Fault = tuple[Severity, str, str]


def classify_gpus(gpus: Sequence[GpuHealth], node: str) -> list[Finding]:
    """At rest: the faults of each GPU, or one line that it is sound."""
    most_links = max((sum(gpu.nvlinks) for gpu in gpus), default=0)
    findings = []
    for gpu in gpus:
        faults = [*_memory(gpu), *_recovery(gpu), *_slowed(gpu), *_links(gpu, most_links)]
        if gpu.lost:
            faults = [("unhealthy", f"lost: {gpu.lost}", "reboot the node")]
        findings += _findings(gpu, node, faults, f"{gpu.now.name}: {_state(gpu)}")
    return findings


def classify_load(gpus: Sequence[GpuHealth], node: str) -> list[Finding]:
    """Under a matrix product: what only shows when the GPU works."""
    findings = []
    for gpu in gpus:
        clock, top = gpu.now.sm_clock_mhz, gpu.max_sm_clock_mhz
        faults = list(_slowed(gpu))
        if clock is not None and top is not None and clock < MIN_CLOCK * top:
            faults.append(("warning", f"clock {clock} of {top} MHz under load", "look at its power limit and cooling"))
        findings += _findings(gpu, node, faults, f"under load: {_state(gpu)}")
    return findings


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a device reached on a matrix product."""

    node: str
    device: str
    tflops: float


def classify_speeds(speeds: Sequence[Speed], factor: float = SLOW_FACTOR) -> list[Finding]:
    """Devices slower than the median by more than `factor`; one line per node that all of its are in line."""
    median = statistics.median(speed.tflops for speed in speeds) if speeds else 0.0
    findings, slow_nodes = [], set()
    for speed in speeds:
        if speed.tflops * factor < median:
            slow_nodes.add(speed.node)
            what = f"matrix product at {speed.tflops:.0f} TFLOP/s, the median is {median:.0f}"
            findings.append(_unhealthy(speed.node, speed.device, what, "leave the node out and look at its GPU"))
    for node in dict.fromkeys(speed.node for speed in speeds if speed.node not in slow_nodes):
        own = [speed.tflops for speed in speeds if speed.node == node]
        what = f"matrix product at {min(own):.0f} to {max(own):.0f} TFLOP/s; median of {len(speeds)}: {median:.0f}"
        findings.append(Finding(severity="ok", node=node, what=what))
    return findings


def _memory(gpu: GpuHealth) -> Iterator[_Fault]:
    if gpu.now.ecc_uncorrected:
        errors = f"{gpu.now.ecc_uncorrected} uncorrected memory errors since the driver was loaded"
        yield "unhealthy", errors, _RESET
    elif gpu.ecc_aggregate:
        yield "warning", f"{gpu.ecc_aggregate} uncorrected memory errors in its life", "replace it if there are more"
    if gpu.remap_failed:
        yield "unhealthy", "a row of its memory could not be replaced by a spare", "replace this GPU"
    if gpu.remap_pending:
        yield "unhealthy", "a row of its memory waits to be replaced by a spare", _RESET
    if gpu.retirement_pending:
        yield "unhealthy", "a page of its memory waits to be retired", _RESET
    if gpu.retired_pages:
        yield "warning", f"{gpu.retired_pages} pages of its memory were retired", "replace it if there are more"


def _recovery(gpu: GpuHealth) -> Iterator[_Fault]:
    if gpu.recovery_action:
        yield "unhealthy", f"the driver asks to {gpu.recovery_action}", "do as it asks, then run this check again"


def _slowed(gpu: GpuHealth) -> Iterator[_Fault]:
    for reason in gpu.now.throttle:
        if reason in _TROUBLE:
            yield "unhealthy", f"slowed down: {reason}", "look at the node's cooling and power supply"
    if "software thermal slowdown" in gpu.now.throttle:
        yield "warning", "slowed down: software thermal slowdown", "look at the node's cooling"
    limit = ASSUMED_SLOWDOWN_C if gpu.slowdown_c is None else gpu.slowdown_c
    heat = gpu.now.temperature_c
    if heat is not None and heat >= limit - HOT_MARGIN_C:
        severity: Severity = "unhealthy" if heat >= limit else "warning"
        yield severity, f"{heat} C, it slows down at {limit} C", "look at the node's cooling"


def _links(gpu: GpuHealth, most_links: int) -> Iterator[_Fault]:
    active = sum(gpu.nvlinks)
    if active < most_links:
        yield "unhealthy", f"{active} active NVLinks, its neighbours have {most_links}", _RESET
    elif 0 < active < len(gpu.nvlinks):  # on every GPU of the node alike: perhaps it is wired so
        yield "warning", f"{active} of {len(gpu.nvlinks)} NVLinks active", "compare with another node of this kind"


def _findings(gpu: GpuHealth, node: str, faults: Sequence[_Fault], sound: str) -> list[Finding]:
    device = f"GPU {gpu.index}"
    if not faults:
        return [Finding(severity="ok", node=node, device=device, what=sound)]
    return [Finding(severity=s, node=node, device=device, what=what, next_step=step) for s, what, step in faults]


def _unhealthy(node: str, device: str, what: str, next_step: str) -> Finding:
    return Finding(severity="unhealthy", node=node, device=device, what=what, next_step=next_step)


def _state(gpu: GpuHealth) -> str:
    now = gpu.now
    known = [
        f"{now.temperature_c} C" if now.temperature_c is not None else "",
        f"{now.power_w:.0f} W" if now.power_w is not None else "",
        f"{now.sm_clock_mhz} MHz" if now.sm_clock_mhz is not None else "",
        *now.throttle,
    ]
    return ", ".join(text for text in known if text) or "it tells nothing"
