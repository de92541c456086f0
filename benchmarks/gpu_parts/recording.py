"""Runs the cases of `gpu.py` one by one, times them with CUDA events, and writes the record after each.

Guarantee: an exception in a case is a row of the table with `failed`, and the next case runs. The JSON file is
replaced atomically after every case, so a run that is cut keeps all finished cases. A case that no longer fits into
the time limit is a row with `skipped`. A CUDA error that leaves the process unusable ends only the process:
`Recorder.run_part` raises `DeviceLost`, and `gpu.py` starts itself again to continue behind the case.

How: a part of the benchmark is a function that yields cases. torch.compile is reset before each case, because after 8
compilations of one function it would silently run eagerly.

Limits: how long a case takes is known only after one of its kind ran; before, a guess in `EXPECTED_S` is used. A case
that hangs is ended from outside (docs/gpu.md).
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from electra_dist.store.atomic_files import replacing

Row = dict[str, Any]
Rows = list[Row]

NO_MEMORY = "out of memory"
# Guesses of a case's seconds on one H200, by kind, for the first case of each kind. Measured times replace them.
EXPECTED_S = {"product": 2, "attention": 10, "step": 15, "compiled step": 60, "engine step": 40, "check": 10}
_UNKNOWN_KIND_S = 10
_LOST_DEVICE = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")


class Case(NamedTuple):
    """Measurement or check, which gives rows of a benchmark's table. Several make up a part of the benchmark."""

    operation: str  # What is measured; first column of its rows.
    by: str  # Implementation that is measured; those of this project begin with "ours".
    kind: str  # Cases of one kind take about equally long.
    run: Callable[[], Rows]  # A row without `operation` and `by` gets those of the case.


class Setup(NamedTuple):
    """What the cases of all parts run on."""

    device: str
    smoke: bool  # Toy sizes in fp32 on a CPU.
    backends: tuple[str, ...]  # Of our operations; where only one is measured, it is the first.

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the measured tensors."""
        return torch.float32 if self.smoke else torch.bfloat16


class DeviceLost(Exception):
    """A CUDA error after which no call of this process can use the GPU."""


class Recorder:
    """Runner of cases that holds the record and writes it."""

    def __init__(self, record: Row, path: Path | None, seconds: float | None) -> None:
        """Start the clock. The JSON file `path`, if any, is written after every case, and `seconds` is the time limit.

        Cases of parts that the record holds already are not run again.
        """
        self.record = record
        self.path = path
        self._end = None if seconds is None else time.monotonic() + seconds
        self._spent_s: dict[str, float] = {}  # kind -> the longest time of a case so far

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the time limit; None without a limit."""
        return None if self._end is None else self._end - time.monotonic()

    def run_part(self, part: str, make_cases: Callable[[], Iterator[Case]]) -> None:
        """Run all cases of a part; rows are appended to `record[part]`, also one if `make_cases` itself fails.

        Raises DeviceLost if a case left the GPU unusable; its row is written.
        """
        rows = self.record.setdefault(part, [])
        done = {(row.get("case_operation"), row.get("case_by")) for row in rows}
        print(f"\n{part.replace('_', ' ')}", flush=True)
        try:
            for case in make_cases():
                if (case.operation, case.by) not in done:
                    self._run(part, case)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  Whatever prevents a part must not prevent the next one.
            self._append(part, part, "ours", [{"failed": describe(error)}])

    def _run(self, part: str, case: Case) -> None:
        """Run one case unless it no longer fits into the time, and append its rows."""
        expected_s = self._spent_s.get(case.kind, EXPECTED_S.get(case.kind, _UNKNOWN_KIND_S))
        left = self.seconds_left
        if left is not None and left < expected_s:
            reason = f"it takes about {expected_s:.0f} s and {max(left, 0):.0f} s are left"
            self._append(part, case.operation, case.by, [{"skipped": reason}])
            return
        torch._dynamo.reset()
        begin = time.monotonic()
        lost = False
        try:
            rows = case.run()
        except torch.OutOfMemoryError:
            rows = [{"failed": NO_MEMORY}]
            free()
        except Exception as error:  # noqa: BLE001  One failed case is one row; the others run.
            rows = [{"failed": describe(error)}]
            lost = any(text in str(error) for text in _LOST_DEVICE)
        case_s = time.monotonic() - begin
        self._spent_s[case.kind] = max(case_s, self._spent_s.get(case.kind, 0))
        self._append(part, case.operation, case.by, rows, case_s)
        if lost:
            raise DeviceLost(rows[0]["failed"])
        if case.kind.endswith("step"):
            free()

    def _append(self, part: str, operation: str, by: str, rows: Rows, case_s: float = 0.0) -> None:
        """Add the rows of a case to the record, print them, and write the record's JSON file anew."""
        of_case = {"case_operation": operation, "case_by": by, "case_s": round(case_s, 2)}
        for row in rows:
            self.record[part].append({"operation": operation, "by": by, **row, **of_case})
            print_row(self.record[part][-1])
        if self.path:
            with replacing(self.path) as file:
                file.write(json.dumps(self.record, indent=1).encode() + b"\n")

    def rows(self) -> Iterator[Row]:
        """Yield the rows of all parts."""
        for value in self.record.values():
            if isinstance(value, list):
                yield from (row for row in value if isinstance(row, dict) and "case_s" in row)


def describe(error: BaseException) -> str:
    """Return the type and the first line of an error's message, at most 200 characters."""
    lines = str(error).splitlines()
    first_line = lines[0] if lines else ""
    return f"{type(error).__name__}: {first_line}"[:200]


def is_failure_of_ours(row: Row) -> bool:
    """Return whether a row records an error of this project's code; too little memory does not count as one."""
    is_ours = str(row.get("by", "")).startswith("ours")
    return is_ours and row.get("failed", NO_MEMORY) != NO_MEMORY


def free() -> None:
    """Return unused GPU memory to the device, so that the next model finds all of it; it takes the host 0.2 s."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


_PLAIN = ("share_equal", "dropped", "graphs", "launches", "host_operators", "failed", "skipped")
# Fact of a row -> how it is printed.
_FORMS = {
    "error": "error {:.1e}",
    "reference_error": "reference_error {:.1e}",
    **{key: f"{key} {{}}" for key in _PLAIN},
    "ms": "{:>9.3f} ms",
    "peak_gb": "peak {:.2f} GB",
    "host_ms": "host {:.1f} ms",
    "tb_per_s": "{:.2f} TB/s",
    "tflop_per_s": "{:.1f} TFLOP/s",
    "tokens_per_s": "{:.0f} tokens/s",
    "mfu": "MFU {:.1%}",
}


def print_row(row: Row) -> None:
    """Print one row as one line, with WRONG behind a result that failed its check; missing facts are left out."""
    label = " ".join(str(row[key]) for key in ("operation", "by", "dtype") if key in row)
    if row.get("peak_bytes"):
        row = row | {"peak_gb": row["peak_bytes"] / 1e9}
    facts = [form.format(row[key]) for key, form in _FORMS.items() if key in row]
    facts += row.get("kernels", [])
    facts += [] if row.get("right", True) else ["WRONG"]
    print(f"  {label:<44} {'  '.join(facts)}", flush=True)


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the root-mean-square error of `value` divided by the root-mean-square of `exact`, which is float64."""
    return ((value.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


# The device sleeps for about 20 ms while the host queues the calls, so that short calls have no gaps between them.
_AHEAD_CYCLES = 40_000_000


def time_and_peak(run: Callable[[], object], repeats: int = 20, warm_up: int = 5) -> Row:
    """Time a call after a warm-up, and measure its peak memory above what was allocated before.

    Return `ms`, the median, and `peak_bytes`. Without a GPU one call is timed by the wall clock.
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
    """Run a call once under torch's profiler; it must have run before, so that nothing is compiled now.

    Return milliseconds by kernel name, launches by kernel name, and the number of operators that the host called.
    Without a GPU the operators of the CPU take the place of kernels.
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
