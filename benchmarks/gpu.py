"""Every fused operation on the GPU at hand: right first, then how fast, then one whole training step.

    python benchmarks/gpu.py            # meant for 9 minutes of one H200; JSON under benchmarks/results/
    python benchmarks/gpu.py --smoke    # toy sizes on the CPU: the same code, no file, figures without meaning

1. Correctness (`gpu_parts/checks.py`): each operation and its reference, in fp32 and bf16, against float64;
   chi-squares on 1e6 draws; no host sync and capture in a CUDA graph for the head. The discriminator's tail also by
   the CUDA library, which is built here where nvcc is on PATH.
2. Time (median of events, forward + backward) and peak memory above the inputs, against eager torch, torch.compile,
   and Liger and cut-cross-entropy with a separate sampler where they are installed.
3. Training steps of the large model (`gpu_parts/steps.py`): micro-batches, kernels and references, eager and compiled,
   each fusion alone, where the time goes, and Hugging Face's modules on the same card.

It fails, at its end, if a result of ours is wrong or an operation of ours fails; a time is only reported. A rival that
fails, and whatever does not fit into memory, is a row that says so. The JSON is written after each part, so a run that
is cut short keeps what it has.
Where it stops: one GPU; ours without DeepSpeed. Needs scipy, pydantic, pyyaml.
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
from electra_kernels.backend import resolve
from electra_kernels.native import discriminator_tail
from gpu_parts.cases import LARGE, TOY, Sizes, cases, head_inputs, our_head, rival_heads
from gpu_parts.checks import chi_square, integers, values, without_host
from gpu_parts.parts import breakdown, time_rivals
from gpu_parts.steps import StepBench, time_fusions, time_steps

PACKAGES = ("torch", "triton", "liger_kernel", "cut_cross_entropy")
REPEATS, WARM_UP = 20, 5
_NO_MEMORY = "out of memory"
_AHEAD_CYCLES = 40_000_000  # 20 ms in which the host queues the calls: short ones are then not timed with its gaps
Rows = list[dict[str, Any]]


def time_and_peak(run: Callable[[], object], on_gpu: bool, repeats: int) -> dict[str, float]:
    """Median milliseconds of a call and its peak bytes above what was allocated before."""
    for _ in range(WARM_UP if on_gpu else 1):
        run()
    if not on_gpu:
        start = time.perf_counter()
        run()
        return {"ms": 1e3 * (time.perf_counter() - start), "peak_bytes": 0}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda._sleep(_AHEAD_CYCLES)
    for start_event, end_event in pairs:
        start_event.record()
        run()
        end_event.record()
    torch.cuda.synchronize()
    times = [start_event.elapsed_time(end_event) for start_event, end_event in pairs]
    return {"ms": statistics.median(times), "peak_bytes": torch.cuda.max_memory_allocated() - before}


def row_of(operation: str, by: str, run: Callable[[], object], smoke: bool, repeats: int = REPEATS) -> dict[str, Any]:
    """One line of the table; a failure, and memory that does not suffice, are its `failed`."""
    row: dict[str, Any] = {"operation": operation, "by": by}
    try:
        return row | time_and_peak(run, not smoke, repeats)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return row | {"failed": _NO_MEMORY}
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, NotImplementedError) as error:
        return row | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]}


def time_heads(sizes: Sizes, device: str, backend: str, smoke: bool) -> Rows:
    """Forward, sample and backward of every head at each number of rows."""
    heads = {f"ours ({backend})": lambda given: our_head(given, sizes.vocab, backend)}
    heads |= rival_heads(sizes.vocab, with_compile=not smoke)
    found = []
    for num_rows in sizes.masked:
        given = head_inputs(sizes, num_rows, device, torch.float32 if smoke else torch.bfloat16)
        for name, head in heads.items():

            def run(head: Any = head, given: Any = given) -> None:
                loss, _ = head(given)
                torch.autograd.grad(loss, given.differentiable())

            found.append(row_of(f"head M={num_rows}", name, run, smoke))
    return found


def time_cases(sizes: Sizes, device: str, backends: list[str], smoke: bool) -> Rows:
    """Forward and backward of the other operations: ours, eager, compiled."""
    found = []
    for case in cases(sizes, device, torch.float32 if smoke else torch.bfloat16):
        ours = backends if case.name == "discriminator tail" else backends[:1]
        by: dict[str, Any] = {f"ours ({b})": lambda given, case=case, b=b: case.ours(given, b) for b in ours}
        by["eager"] = case.eager
        if not smoke:
            by["torch.compile"] = torch.compile(case.eager, dynamic=False)
        upstream = torch.ones_like(case.eager(case.inputs)) if case.inputs else None
        for name, function in by.items():

            def run(function: Any = function, case: Any = case, upstream: Any = upstream) -> None:
                out = function(case.inputs)
                if case.inputs:
                    torch.autograd.grad(out, case.inputs, upstream.to(out.dtype))

            row = row_of(case.name, name, run, smoke)
            rate = {"tb_per_s": case.num_bytes / row["ms"] / 1e9} if "ms" in row else {}
            found.append(row | rate)
    return found


def hardware() -> dict[str, Any]:
    """The GPU, its driver's CUDA and the versions of what is compared; an absent rival is absent from the table."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "not installed"
    found: dict[str, Any] = {"host": platform.machine(), "python": platform.python_version(), "versions": installed}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability()),
            "cuda": torch.version.cuda,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--output", type=Path, help="folder of the JSON; default: results/ here, none for --smoke")
    arguments = parser.parse_args()
    smoke = arguments.smoke
    if not smoke and not torch.cuda.is_available():
        sys.exit("no CUDA device here: run with --smoke for the toy run on the CPU")
    device, sizes = ("cpu", TOY) if smoke else ("cuda", LARGE)
    backends = [resolve("auto", device)]
    if not smoke and shutil.which("nvcc"):
        try:
            discriminator_tail.build(discriminator_tail.library_path())
            backends.append("cuda")
        except BackendUnavailable as error:
            print(f"without the CUDA library: {error}")
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
    draws, vocab = (20_000, sizes.vocab) if smoke else (1_000_000, sizes.vocab)

    @functools.cache
    def bench() -> StepBench:
        return StepBench(device, backends[0], smoke, row_of)

    parts: dict[str, Callable[[], Rows]] = {
        "values": lambda: values(sizes, device, backends),
        "integers": lambda: integers(sizes, device, backends[0]),
        "chi_square": lambda: chi_square(device, backends[0], draws, vocab),
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
        sys.exit("a result is wrong: see above")
    if any(
        row["by"].startswith("ours") and row.get("failed", _NO_MEMORY) != _NO_MEMORY for row in rows if "by" in row
    ):
        sys.exit("one of ours failed: see above")


def write(record: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['benchmark']}-{record['date'][:10].replace('-', '')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


def print_part(part: str, rows: Rows, seconds: float) -> None:
    """The rows of one part, one line each."""
    print(f"\n{part.replace('_', ' ')} ({seconds:.0f} s)", flush=True)
    for row in rows:
        label = " ".join(str(row[key]) for key in ("operation", "what", "logits", "by", "dtype") if key in row)
        facts = [f"{key} {row[key]:.1e}" for key in ("error", "reference_error") if key in row]
        facts += [f"{key} {row[key]}" for key in ("share_equal", "found", "p", "failed") if key in row]
        if "ms" in row:
            facts.append(f"{row['ms']:>9.3f} ms  peak {row['peak_bytes'] / 1e9:.2f} GB")
        facts += [f"{row['tb_per_s']:.2f} TB/s"] if "tb_per_s" in row else []
        facts += [f"{row['tokens_per_s']:.0f} tokens/s"] if "tokens_per_s" in row else []
        facts += [f"MFU {row['mfu']:.1%}"] if "mfu" in row else []
        print(f"  {label:<44} {'  '.join(facts)}{'' if row.get('right', True) else '  WRONG'}", flush=True)


if __name__ == "__main__":
    main()
