"""Times calls on the GPU with CUDA events, and names the kernels that a call launches."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

REPEATS, WARM_UP = 20, 5
# The device sleeps for about 20 ms while the host queues the calls, so that the times of short calls do not include
# gaps in which the device waits for the host.
_AHEAD_CYCLES = 40_000_000


def time_and_peak(run: Callable[[], object], repeats: int = REPEATS, warm_up: int = WARM_UP) -> dict[str, float]:
    """Time a call after a warm-up, and measure its peak memory.

    Without a GPU one call is timed by the wall clock, after one warm-up.

    Args:
        run: The call.
        repeats: Timed calls on a GPU.
        warm_up: Calls before these.

    Returns:
        `ms`, the median milliseconds, and `peak_bytes`, the peak of device memory above what was allocated before the
        timed calls; 0 without a GPU.
    """
    if not torch.cuda.is_available():
        run()
        start = time.perf_counter()
        run()
        return {"ms": 1e3 * (time.perf_counter() - start), "peak_bytes": 0}
    for _ in range(warm_up):
        run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    event_pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda._sleep(_AHEAD_CYCLES)
    for start_event, end_event in event_pairs:
        start_event.record()
        run()
        end_event.record()
    torch.cuda.synchronize()
    times = [start_event.elapsed_time(end_event) for start_event, end_event in event_pairs]
    return {"ms": statistics.median(times), "peak_bytes": torch.cuda.max_memory_allocated() - before}


def host_ms(run: Callable[[], object], repeats: int = 3) -> float:
    """Return the median milliseconds until a call returns to the host, from an idle device; the device may go on."""
    times = []
    for _ in range(repeats):
        synchronize()
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    synchronize()
    return statistics.median(times)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profile_kernels(run: Callable[[], object]) -> tuple[Counter[str], Counter[str], int]:
    """Run a call once under torch's profiler and return what it spent where.

    Args:
        run: The call; it must have run before, so that nothing is compiled now.

    Returns:
        Milliseconds by kernel name, launches by kernel name, and the number of operators that the host called. Without
        a GPU the operators of the CPU take the place of kernels.
    """
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        synchronize()
    spent: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    num_operators = 0
    for event in profiler.key_averages():
        # A range that is only a label, such as "Optimizer.step", would count its kernels twice.
        if getattr(event, "is_user_annotation", False) or event.key.startswith("Optimizer."):
            continue
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        if event.key.startswith("aten::"):
            num_operators += event.count
        if is_kernel == on_gpu:
            microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            spent[event.key] += microseconds / 1e3
            launches[event.key] += event.count
    return spent, launches, num_operators


def facts_of(run: Callable[[], object]) -> dict[str, Any]:
    """Return the kernels of a call, longest first, at most four, each cut to 80 characters, as the fact `kernels`."""
    spent, _, _ = profile_kernels(run)
    return {"kernels": [name[:80] for name, _ in spent.most_common(4)]}
