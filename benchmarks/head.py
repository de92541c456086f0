"""How much memory and time does the generator's head take on a CPU, beside eager torch?

    python benchmarks/run.py head                 # 8192 masked rows of width 1024 over 30522 tokens, fp32
    python benchmarks/run.py head --width 64      # the same memory in a few seconds

Guarantee: the exit code is 1 unless our peak is at most a third of eager torch's and the two losses agree to 1e-5
(relative). Each head runs once, in a process of its own; its peak is the growth of the resident memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import psutil
import torch
from gpu_parts.operations import LARGE, head_operation
from measure import Found, Json, ResultLine, environment, run_child

MOST_MEMORY, MOST_DIFFERENCE = 1 / 3, 1e-5  # of eager's


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=8192, help="masked rows (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="features of a row (default: %(default)s)")


def measure_head(name: str, num_rows: int, width: int) -> dict[str, float]:
    """Run one head forward and backward once in this process; return `loss`, `seconds` and `extra_peak_bytes`."""
    torch.manual_seed(0)
    head = head_operation("head", LARGE._replace(embedding=width), num_rows, "cpu", torch.float32)
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    loss = head.ours(head.inputs, "auto") if name == "ours" else head.rivals[name](head.inputs)
    loss.backward()
    elapsed = time.perf_counter() - started
    # `ru_maxrss` would include the memory of the process that started this one.
    peak_kib = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    return {"loss": loss.item(), "extra_peak_bytes": 1024 * int(peak_kib) - before, "seconds": elapsed}


def in_new_process(name: str, num_rows: int, width: int) -> Json:
    """Return what `measure_head` finds in a process of its own."""
    code = f"import json, head; print(json.dumps(head.measure_head({name!r}, {num_rows}, {width})))"
    return json.loads(run_child([sys.executable, "-c", code], env=environment()).splitlines()[-1])


def measure(arguments: argparse.Namespace) -> Found:
    num_rows, width = arguments.rows, arguments.width
    if arguments.smoke:
        # With fewer rows, the memory that the process uses for other things would hide the head's.
        num_rows, width = 2048, 32
    heads = {name: in_new_process(name, num_rows, width) for name in ("ours", "eager")}
    memory, time_ratio = (heads["ours"][key] / heads["eager"][key] for key in ("extra_peak_bytes", "seconds"))
    loss_error = abs(heads["ours"]["loss"] / heads["eager"]["loss"] - 1)
    threads = torch.get_num_threads()
    print(f"{num_rows} rows x {width}, vocabulary {LARGE.vocab}, fp32, {threads} CPU thread(s)")
    for name, head in heads.items():
        gigabytes = head["extra_peak_bytes"] / 1e9
        print(f"{name:<6} extra peak {gigabytes:6.2f} GB   {head['seconds']:7.1f} s   loss {head['loss']:.2f}")
    limits = f"memory {memory:.3f} of eager's (at most 0.333), loss differs by {loss_error:.1e} (at most 1e-05)"
    print(limits)
    fault = ""
    if memory > MOST_MEMORY or loss_error > MOST_DIFFERENCE:
        fault = f"the head exceeds a limit: {limits}; look for the cause in kernels/electra_kernels/mlm_head.py"
    line = ResultLine(
        f"generator head, {num_rows:,} masked rows x {width}, vocabulary {LARGE.vocab:,}, fp32",
        f"{heads['ours']['extra_peak_bytes'] / 1e9:.2f} GB at its peak",
        f"{memory:.3f} of plain PyTorch's memory, {time_ratio:.2f} of its time",
    )
    sizes = {"threads": threads, "rows": num_rows, "width": width, "vocab": LARGE.vocab}
    return Found(
        [line], sizes | {"heads": heads, "memory_ratio": memory, "loss_relative_difference": loss_error}, fault
    )
