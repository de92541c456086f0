"""Check and time every fused operation and whole training steps on the local GPU.

    python benchmarks/gpu.py            # planned for 9 minutes of one H200; writes JSON to benchmarks/results/
    python benchmarks/gpu.py --smoke    # the same code at toy sizes on the CPU; no file, and its times mean nothing

It has three parts:

1. Correctness (`gpu_parts/checks.py`): each operation and its reference, in fp32 and bf16, against float64;
   chi-squared tests on 1e6 draws; the head without host synchronisation and in a CUDA graph. The discriminator tail is
   also checked in the CUDA library, which is built first if nvcc is on PATH.
2. Time (median of CUDA events, forward and backward) and peak memory above the inputs, against eager torch,
   torch.compile, and Liger and cut-cross-entropy with a separate sampler where these are installed.
3. Training steps of the large model (`gpu_parts/steps.py`, `gpu_parts/breakdown.py`): several micro-batches, kernels
   and references, eager and compiled, each fusion alone, the time by part of the step, and Hugging Face's modules.

Guarantee: the script runs all parts and then exits with an error if one of our results is wrong or one of our
operations failed. No time makes it fail. A rival that fails, or anything that does not fit into memory, is a row of
the table that states so. The JSON is written after each part, so an interrupted run keeps the finished parts.

Limits: one GPU; our side runs without DeepSpeed. It needs scipy, pydantic and pyyaml.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from electra_kernels import BackendUnavailable
from electra_kernels.backend_choice import resolve
from electra_kernels.native import discriminator_tail
from gpu_parts.breakdown import breakdown, time_rivals
from gpu_parts.cases import LARGE, TOY, GpuCase, Sizes, cases, head_inputs, our_head, rival_heads
from gpu_parts.checks import chi_square, integers, values, without_host
from gpu_parts.steps import StepBench, time_fusions, time_steps

PACKAGES = ("torch", "triton", "liger_kernel", "cut_cross_entropy")
REPEATS, WARM_UP = 20, 5
_NO_MEMORY = "out of memory"
# The device sleeps for about 20 ms while the host queues the calls, so that the times of short calls do not include
# gaps in which the device waits for the host.
_AHEAD_CYCLES = 40_000_000
Rows = list[dict[str, Any]]


def time_and_peak(run: Callable[[], object], on_gpu: bool, repeats: int) -> dict[str, float]:
    """Time a call after a warm-up, and measure its peak memory.

    Args:
        run: The call.
        on_gpu: Whether to time it with CUDA events; otherwise one call is timed by the wall clock.
        repeats: Timed calls on a GPU.

    Returns:
        `ms`, the median milliseconds, and `peak_bytes`, the peak of device memory above what was allocated before the
        timed calls; 0 without a GPU.
    """
    for _ in range(WARM_UP if on_gpu else 1):
        run()
    if not on_gpu:
        start = time.perf_counter()
        run()
        return {"ms": 1e3 * (time.perf_counter() - start), "peak_bytes": 0}
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


def row_of(operation: str, by: str, run: Callable[[], object], smoke: bool, repeats: int = REPEATS) -> dict[str, Any]:
    """Time a call and return it as one row of the table; an error of the call is recorded and not raised.

    Args:
        operation: What is measured; first column of the row.
        by: Implementation that is measured; those of this project begin with "ours".
        run: The call.
        smoke: Whether to time it on the CPU.
        repeats: Timed calls on a GPU.

    Returns:
        `operation` and `by`, with `ms` and `peak_bytes`, or with `failed`: "out of memory" or the error.
    """
    row: dict[str, Any] = {"operation": operation, "by": by}
    try:
        return row | time_and_peak(run, not smoke, repeats)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return row | {"failed": _NO_MEMORY}
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, NotImplementedError) as error:
        first_line = str(error).splitlines()[0] if str(error) else ""
        return row | {"failed": f"{type(error).__name__}: {first_line}"[:160]}


def time_heads(sizes: Sizes, device: str, backend: str, smoke: bool) -> Rows:
    """Time forward, sample and backward of our generator head and its rivals at each number of masked rows.

    Args:
        sizes: Sizes of the inputs; `masked` holds the numbers of rows.
        device: Device of the inputs.
        backend: Implementation of our head.
        smoke: Whether to time on the CPU in fp32, without torch.compile.
    """
    heads = {f"ours ({backend})": lambda inputs: our_head(inputs, sizes.vocab, backend)}
    heads |= rival_heads(sizes.vocab, with_compile=not smoke)
    rows = []
    for num_rows in sizes.masked:
        inputs = head_inputs(sizes, num_rows, device, torch.float32 if smoke else torch.bfloat16)
        for name, head in heads.items():

            def run(head: Any = head, inputs: Any = inputs) -> None:
                loss, _ = head(inputs)
                torch.autograd.grad(loss, inputs.differentiable())

            rows.append(row_of(f"head M={num_rows}", name, run, smoke))
    return rows


def time_cases(sizes: Sizes, device: str, backends: list[str], smoke: bool) -> Rows:
    """Time forward and backward of every operation except the head: ours, eager torch and torch.compile.

    A row that has a time also has `tb_per_s`: the least memory traffic of the operation divided by its time, in TB/s.

    Args:
        sizes: Sizes of the inputs.
        device: Device of the inputs.
        backends: Implementations of ours; only the discriminator tail is timed with all, the others with the first.
        smoke: Whether to time on the CPU in fp32, without torch.compile.
    """
    rows = []
    for case in cases(sizes, device, torch.float32 if smoke else torch.bfloat16):
        our_backends = backends if case.name == "discriminator tail" else backends[:1]
        functions: dict[str, Any] = {
            f"ours ({backend})": functools.partial(_run_ours, case, backend) for backend in our_backends
        }
        functions["eager"] = case.eager
        if not smoke:
            functions["torch.compile"] = torch.compile(case.eager, dynamic=False)
        upstream = torch.ones_like(case.eager(case.inputs)) if case.inputs else None
        for name, function in functions.items():

            def run(function: Any = function, case: Any = case, upstream: Any = upstream) -> None:
                out = function(case.inputs)
                if case.inputs:
                    torch.autograd.grad(out, case.inputs, upstream.to(out.dtype))

            row = row_of(case.name, name, run, smoke)
            if "ms" in row:
                row["tb_per_s"] = case.num_bytes / row["ms"] / 1e9
            rows.append(row)
    return rows


def _run_ours(case: GpuCase, backend: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Run our implementation of an operation; with the first two arguments bound, it takes inputs as the rivals do."""
    return case.ours(inputs, backend)


def hardware() -> dict[str, Any]:
    """Return facts about the machine for the record: versions of the compared packages, and properties of the GPU.

    A package that is missing has the version "not installed". Without a GPU its properties are left out.
    """
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "not installed"
    facts: dict[str, Any] = {"host": platform.machine(), "python": platform.python_version(), "versions": installed}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability()),
            "cuda": torch.version.cuda,
        }
    return facts


def main() -> None:
    """Run all parts, print and write their rows, and exit with an error if a result of ours is wrong or failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="run the same code at toy sizes on the CPU")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder of the JSON file (default: benchmarks/results/; with --smoke the default writes no file)",
    )
    arguments = parser.parse_args()
    smoke = arguments.smoke
    if not smoke and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device: run on a machine with a GPU, or pass --smoke for toy sizes on the CPU")
    device, sizes = ("cpu", TOY) if smoke else ("cuda", LARGE)
    backends = [resolve("auto", device)]
    if not smoke and shutil.which("nvcc"):
        try:
            discriminator_tail.build(discriminator_tail.library_path())
            backends.append("cuda")
        except BackendUnavailable as error:
            print(f"the CUDA library was not built and is left out of the comparison: {error}")
    name = "CPU, smoke run: figures without meaning" if smoke else torch.cuda.get_device_name()
    record: dict[str, Any] = {
        "benchmark": "gpu-smoke" if smoke else "gpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": name,
        **hardware(),
        "backends": backends,
    }
    print(f"{name} | kernels: {', '.join(backends)} | " + " ".join(f"{k} {v}" for k, v in record["versions"].items()))
    folder = arguments.output or (None if smoke else Path(__file__).parent / "results")
    torch.manual_seed(0)
    draws = 20_000 if smoke else 1_000_000

    @functools.cache
    def bench() -> StepBench:
        """Return the large model for the step parts; it is built when the first of them starts."""
        return StepBench(device, backends[0], smoke, row_of)

    parts: dict[str, Callable[[], Rows]] = {
        "values": lambda: values(sizes, device, backends),
        "integers": lambda: integers(sizes, device, backends[0]),
        "chi_square": lambda: chi_square(device, backends[0], draws, sizes.vocab),
        "without_host": lambda: [] if smoke else without_host(sizes),
        "heads": lambda: time_heads(sizes, device, backends[0], smoke),
        "operations": lambda: time_cases(sizes, device, backends, smoke),
        "steps": lambda: time_steps(bench()),
        "fusions": lambda: time_fusions(bench()),
        "breakdown": lambda: breakdown(bench()),
        "rivals": lambda: time_rivals(bench()),
    }
    for part, run in parts.items():
        started = time.perf_counter()
        record[part] = run()
        print_part(part, record[part], time.perf_counter() - started)
        if folder:
            write(record, folder)
    rows = [row for part in parts for row in record[part]]
    if not all(row.get("right", True) for row in rows):
        sys.exit("a result of our operations is wrong: search the output for WRONG and correct that operation")
    if any(_is_failure_of_ours(row) for row in rows):
        sys.exit("an operation of ours raised an error: search the output for `failed` in the rows of `ours`")


def _is_failure_of_ours(row: dict[str, Any]) -> bool:
    """Return whether a row records an error of this project's code; too little memory does not count as one."""
    is_ours = row.get("by", "").startswith("ours")
    return is_ours and row.get("failed", _NO_MEMORY) != _NO_MEMORY


def write(record: dict[str, Any], folder: Path) -> None:
    """Write the record to FOLDER/<benchmark>-<YYYYMMDD>.json, over an earlier file of the same run or day."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['benchmark']}-{record['date'][:10].replace('-', '')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


def print_part(part: str, rows: Rows, seconds: float) -> None:
    """Print the rows of one part, one line each, with WRONG behind a result that failed its check.

    Args:
        part: Key of the part in the record.
        rows: Rows of any part; a fact that a row does not have is left out of its line.
        seconds: Time that the part took.
    """
    print(f"\n{part.replace('_', ' ')} ({seconds:.0f} s)", flush=True)
    for row in rows:
        label = " ".join(str(row[key]) for key in ("operation", "what", "logits", "by", "dtype") if key in row)
        facts = [f"{key} {row[key]:.1e}" for key in ("error", "reference_error") if key in row]
        facts += [f"{key} {row[key]}" for key in ("share_equal", "found", "p", "failed") if key in row]
        if "ms" in row:
            facts.append(f"{row['ms']:>9.3f} ms  peak {row['peak_bytes'] / 1e9:.2f} GB")
        if "tb_per_s" in row:
            facts.append(f"{row['tb_per_s']:.2f} TB/s")
        if "tokens_per_s" in row:
            facts.append(f"{row['tokens_per_s']:.0f} tokens/s")
        if "mfu" in row:
            facts.append(f"MFU {row['mfu']:.1%}")
        if not row.get("right", True):
            facts.append("WRONG")
        print(f"  {label:<44} {'  '.join(facts)}", flush=True)


if __name__ == "__main__":
    main()
