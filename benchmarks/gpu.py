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
import importlib
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "numpy", "deepspeed", "transformers", "liger_kernel", "cut_cross_entropy")
# Part -> its module in `gpu_parts`, and the function there that yields its cases, in the order of the parts.
PARTS = {
    "ceilings": ("operations", "ceilings"),
    "profile": ("steps", "profile_cases"),
    "attention": ("attention", "attention_cases"),
    "deepspeed": ("steps", "engine_cases"),
    "steps": ("steps", "large_steps"),
    "values": ("operations", "value_cases"),
    "integers": ("operations", "integer_cases"),
    "heads": ("operations", "head_cases"),
    "operations": ("operations", "operation_cases"),
    "fusions": ("steps", "fusion_cases"),
    "rivals": ("steps", "rival_cases"),
    "more_steps": ("steps", "more_steps"),
    "modern": ("steps", "modern_steps"),
}


def our_backends(device: str) -> tuple[str, ...]:
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
    return tuple(backends)


def cases_of(part: str, setup: Any) -> Iterator[Any]:
    """Return the cases of a part.

    Its module is imported now, so that a package or a kernel that cannot be imported costs one part and not the run.
    """
    module, function = PARTS[part]
    return getattr(importlib.import_module(f"gpu_parts.{module}"), function)(setup)


def main() -> None:
    """Run all parts, and exit with 1 if a result of ours is wrong or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="run the same code at toy sizes on the CPU")
    parser.add_argument("--minutes", type=float, help="leave out the cases that no longer fit into this time")
    parser.add_argument("--parts", metavar="A,B", help="run these parts only, in this order")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder of the JSON file (default: "
                        "benchmarks/results/; with --smoke the default writes no file)")  # fmt: skip
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue an earlier record behind its last case")
    arguments = parser.parse_args()
    if arguments.smoke:
        # Threads that wait for one another on a busy machine cost more than toy sizes do. OpenMP reads it at import.
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # A smoke run uses the CPU, also where there is a GPU.
    import torch
    from gpu_parts.recording import DeviceLost, Recorder, Setup, is_failure_of_ours
    from measure import RESULTS, record_file

    smoke = arguments.smoke
    if not smoke and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device: run on a machine with a GPU, or pass --smoke for toy sizes on the CPU")
    device = "cpu" if smoke else "cuda"
    setup = Setup(device, smoke, our_backends(device))
    if arguments.resume:
        record = json.loads(arguments.resume.read_text())
        path = arguments.resume
    else:
        record = _header(smoke, setup.backends)
        folder = arguments.output or (None if smoke else RESULTS)
        path = record_file(record, folder) if folder else None
    torch.manual_seed(0)
    recorder = Recorder(record, path, None if arguments.minutes is None else 60 * arguments.minutes)
    chosen = arguments.parts.split(",") if arguments.parts else list(PARTS)
    if not set(chosen) <= PARTS.keys():
        sys.exit(f"--parts {arguments.parts} names a part that does not exist; the parts are {', '.join(PARTS)}")
    for part in chosen:
        try:
            recorder.run_part(part, functools.partial(cases_of, part, setup))
        except DeviceLost as error:
            print(f"the GPU refuses this process ({error}); a new one continues", flush=True)
            _start_again(recorder)
    if not all(row.get("right", True) for row in recorder.rows() if str(row.get("by")).startswith("ours")):
        sys.exit("a result of our operations is wrong: search the output for WRONG and correct that operation")
    if any(is_failure_of_ours(row) for row in recorder.rows()):
        sys.exit("an operation of ours raised an error: search the output for `failed` in the rows of `ours`")


def _header(smoke: bool, backends: Sequence[str]) -> dict[str, Any]:
    """Return the record's header, and print it as one line."""
    import torch
    from measure import installed, make_record

    name = "CPU, smoke run: figures without meaning" if smoke else torch.cuda.get_device_name()
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    record = make_record("gpu-smoke" if smoke else "gpu", command, smoke, gpu=name)
    record["versions"] = record["versions"] | installed(PACKAGES)
    versions = " ".join(f"{package} {version}" for package, version in record["versions"].items())
    print(f"{name} | kernels: {', '.join(backends)} | {versions}")
    record |= {"host": platform.machine(), "backends": backends}
    if not smoke:
        properties = torch.cuda.get_device_properties(0)
        record |= {
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability()),
            "cudnn": torch.backends.cudnn.version(),
        }
    return record


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


if __name__ == "__main__":
    main()
