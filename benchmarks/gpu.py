"""Check and time every fused operation and whole training steps on the local GPU.

    python benchmarks/gpu.py                 # all parts; writes JSON to benchmarks/results/
    python benchmarks/gpu.py --minutes 9     # ends by itself: cases that no longer fit are left out
    python benchmarks/gpu.py --smoke         # the same code at toy sizes on the CPU; its times mean nothing

The parts run in the order in which their answers are needed; docs/gpu.md has the question of each.

Guarantee: a case that fails is a row with the error, and the next one runs; the JSON is written after every case. The
exit code is 1 at the end if one of our results was wrong or one of our operations failed, else 0. No time makes it
fail.

Limits: one GPU; only the part `deepspeed` runs under DeepSpeed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "numpy", "deepspeed", "transformers", "liger_kernel", "cut_cross_entropy")


def hardware() -> dict[str, Any]:
    """Return the versions of the compared packages, and properties of the GPU, if there is one."""
    import torch

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
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def our_backends(device: str) -> list[str]:
    """Return the implementations of our operations on this device; the CUDA library is built first if nvcc exists."""
    from electra_kernels.backend_choice import resolve
    from electra_kernels.native import discriminator_tail

    backends = [resolve("auto", device)]
    if device == "cuda" and shutil.which("nvcc"):
        try:
            discriminator_tail.build(discriminator_tail.library_path())
            backends.append("cuda")
        except Exception as error:  # noqa: BLE001  Whatever a compiler says, the Triton kernels can be measured.
            print(f"the CUDA library was not built and is left out of the comparison: {error}")
    return backends


def all_parts(device: str, smoke: bool, backends: list[str]) -> dict[str, Callable[[], Iterator[Any]]]:
    """Return the parts in their order: name -> function that yields the part's cases.

    A part's modules are imported when it begins, so that a package or a kernel that cannot be imported costs one part
    and not the run. Where only one implementation of our operations is measured, it is the first of `backends`.
    """
    import torch

    backend = backends[0]
    dtype = torch.float32 if smoke else torch.bfloat16
    rows, heads, tokens = (2, 2, 64) if smoke else (64, 16, 512)

    def of_operations(make: Callable[[Any, Any], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        def cases() -> Iterator[Any]:
            from gpu_parts import operations

            return make(operations, operations.TOY if smoke else operations.LARGE)

        return cases

    @functools.cache
    def bench(architecture: str) -> Any:
        from gpu_parts.steps import StepBench

        return StepBench(device, backend, smoke, architecture)

    def of_steps(make: Callable[[Any, Any], Iterator[Any]], architecture: str = "bert") -> Callable[[], Iterator[Any]]:
        def cases() -> Iterator[Any]:
            from gpu_parts import steps

            return make(steps, bench(architecture))

        return cases

    def attention() -> Iterator[Any]:
        from gpu_parts.attention import attention

        return attention(rows, heads, tokens, device, dtype)

    both = dict.fromkeys((backend, "reference"))
    return {
        "ceilings": of_operations(lambda part, sizes: part.ceilings(bench("bert").config.model, sizes, device, dtype)),
        "profile": of_steps(lambda part, bench: part.profile_cases(bench)),
        "attention": attention,
        "deepspeed": of_steps(lambda part, bench: part.engine_cases(bench)),
        "steps": of_steps(lambda part, bench: part.step_cases(bench, bench.batches[2:], [backend])),
        "values": of_operations(lambda part, sizes: part.value_cases(sizes, device, backends)),
        "integers": of_operations(lambda part, sizes: part.integer_cases(sizes, device, backend)),
        "heads": of_operations(
            lambda part, sizes: part.timing_cases(part.heads(sizes, device, dtype), device, backends)
        ),
        "operations": of_operations(
            lambda part, sizes: part.timing_cases(part.operations(sizes, device, dtype), device, backends)
        ),
        "fusions": of_steps(lambda part, bench: part.fusion_cases(bench)),
        "rivals": of_steps(lambda part, bench: part.rival_cases(bench)),
        "more_steps": of_steps(lambda part, bench: part.step_cases(bench, bench.batches[:2], both)),
        "modern": of_steps(
            lambda part, bench: part.step_cases(bench, bench.batches, [backend], "ours, modern"), "modern"
        ),
    }


def main() -> None:
    """Run all parts, and exit with 1 if a result of ours is wrong or failed."""
    arguments = _parse()
    if arguments.smoke:
        # Threads that wait for one another on a busy machine cost more than toy sizes do. OpenMP reads it at import.
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # A smoke run uses the CPU, also where there is a GPU.
    import torch
    from gpu_parts.recording import DeviceLost, Recorder, is_failure_of_ours

    smoke = arguments.smoke
    if not smoke and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device: run on a machine with a GPU, or pass --smoke for toy sizes on the CPU")
    device = "cpu" if smoke else "cuda"
    backends = our_backends(device)
    if arguments.resume:
        record = json.loads(arguments.resume.read_text())
        path = arguments.resume
    else:
        record = _header(smoke, backends)
        folder = arguments.output or (None if smoke else Path(__file__).parent / "results")
        path = folder / f"{record['benchmark']}-{record['date'][:10].replace('-', '')}.json" if folder else None
    torch.manual_seed(0)
    recorder = Recorder(record, path, None if arguments.minutes is None else 60 * arguments.minutes)
    parts = all_parts(device, smoke, backends)
    chosen = arguments.parts.split(",") if arguments.parts else list(parts)
    if not set(chosen) <= parts.keys():
        sys.exit(f"--parts {arguments.parts} names a part that does not exist; the parts are {', '.join(parts)}")
    for part in chosen:
        try:
            recorder.run_part(part, parts[part])
        except DeviceLost as error:
            print(f"the GPU refuses this process ({error}); a new one continues", flush=True)
            _start_again(recorder)
    if not all(row.get("right", True) for row in recorder.rows() if str(row.get("by")).startswith("ours")):
        sys.exit("a result of our operations is wrong: search the output for WRONG and correct that operation")
    if any(is_failure_of_ours(row) for row in recorder.rows()):
        sys.exit("an operation of ours raised an error: search the output for `failed` in the rows of `ours`")


def _header(smoke: bool, backends: list[str]) -> dict[str, Any]:
    """Return the record's header, and print it as one line."""
    import torch

    name = "CPU, smoke run: figures without meaning" if smoke else torch.cuda.get_device_name()
    facts = hardware()
    print(f"{name} | kernels: {', '.join(backends)} | " + " ".join(f"{k} {v}" for k, v in facts["versions"].items()))
    return {
        "benchmark": "gpu-smoke" if smoke else "gpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": name,
        **facts,
        "backends": backends,
    }


def _start_again(recorder: Any) -> None:
    """Replace this process by one that goes on behind the cases of the record; without a file the run ends."""
    if recorder.path is None:
        sys.exit("there is no file from which to continue: pass --output")
    command = [sys.executable, __file__, "--resume", str(recorder.path)]
    options = iter(sys.argv[1:])
    for option in options:
        if option in ("--minutes", "--resume"):
            next(options)
        else:
            command.append(option)
    if recorder.seconds_left is not None:
        command += ["--minutes", str(max(recorder.seconds_left / 60, 0))]
    os.execv(sys.executable, command)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="run the same code at toy sizes on the CPU")
    parser.add_argument("--minutes", type=float, help="leave out the cases that no longer fit into this time")
    parser.add_argument("--parts", metavar="A,B", help="run these parts only, in this order")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder of the JSON file (default: "
                        "benchmarks/results/; with --smoke the default writes no file)")  # fmt: skip
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue an earlier record behind its last case")
    return parser.parse_args()


if __name__ == "__main__":
    main()
