"""How much memory and time does the generator's head take on a CPU, beside eager torch?

    python benchmarks/run.py head                 # 8192 masked rows of width 1024 over 30522 tokens, fp32
    python benchmarks/run.py head --width 64      # the same memory in a few seconds

Guarantee: the exit code is 1 unless our peak is at most a third of eager torch's and the two losses agree to 1e-5
(relative). Each head runs once, in a process of its own; its peak is the growth of the resident memory.

Shapes: M masked rows, D features, V padded vocabulary.
"""

from __future__ import annotations

import argparse
import time

import psutil
import torch
import torch.nn.functional as F
from electra_kernels.mlm_head import mlm_head_loss_and_sample
from measure import Found, ResultLine, in_new_process, peak_memory

VOCAB, PADDED = 30522, 30592
MOST_MEMORY, MOST_DIFFERENCE = 1 / 3, 1e-5  # of eager's


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=8192, help="masked rows (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="features of a row (default: %(default)s)")


def ours(x_MD: torch.Tensor, table_VD: torch.Tensor, bias_V: torch.Tensor, target_M: torch.Tensor) -> torch.Tensor:
    """Run our fused head, with samples; return the summed loss."""
    row_M = torch.arange(len(x_MD))
    weight_M = torch.ones(len(x_MD))
    return mlm_head_loss_and_sample(
        x_MD, table_VD, bias_V, target_M, weight_M, seed=1, step=2, row_M=row_M, vocab_size=VOCAB
    ).loss_sum


def eager(x_MD: torch.Tensor, table_VD: torch.Tensor, bias_V: torch.Tensor, target_M: torch.Tensor) -> torch.Tensor:
    """Run the head in plain torch, with Gumbel-max samples; return the summed loss."""
    logits_MV = x_MD @ table_VD[:VOCAB].t() + bias_V
    loss = F.cross_entropy(logits_MV, target_M, reduction="sum")
    noise_MV = -torch.log(-torch.log(torch.rand_like(logits_MV) + 1e-9) + 1e-9)  # As in Google's code.
    (logits_MV.detach() + noise_MV).argmax(1)
    return loss


def measure_head(name: str, num_rows: int, width: int) -> dict[str, float]:
    """Run one head forward and backward once in this process; return `loss`, `seconds` and `extra_peak_bytes`."""
    head = {"ours": ours, "eager": eager}[name]
    generator = torch.Generator().manual_seed(0)
    x_MD = torch.randn(num_rows, width, generator=generator).requires_grad_()
    table_VD = (torch.randn(PADDED, width, generator=generator) * width**-0.5).requires_grad_()
    bias_V = torch.zeros(VOCAB, requires_grad=True)
    target_M = torch.randint(VOCAB, (num_rows,), generator=generator)
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    loss = head(x_MD, table_VD, bias_V, target_M)
    loss.backward()
    elapsed = time.perf_counter() - started
    return {"loss": loss.item(), "extra_peak_bytes": peak_memory() - before, "seconds": elapsed}


def measure(arguments: argparse.Namespace) -> Found:
    num_rows, width = arguments.rows, arguments.width
    if arguments.smoke:
        # With fewer rows, the memory that the process uses for other things would hide the head's.
        num_rows, width = 2048, 32
    heads = {name: in_new_process("head", "measure_head", name, num_rows, width) for name in ("ours", "eager")}
    memory, time_ratio = (heads["ours"][key] / heads["eager"][key] for key in ("extra_peak_bytes", "seconds"))
    loss_error = abs(heads["ours"]["loss"] / heads["eager"]["loss"] - 1)
    threads = torch.get_num_threads()
    print(f"{num_rows} rows x {width}, vocabulary {VOCAB}, fp32, {threads} CPU thread(s)")
    for name, head in heads.items():
        gigabytes = head["extra_peak_bytes"] / 1e9
        print(f"{name:<6} extra peak {gigabytes:6.2f} GB   {head['seconds']:7.1f} s   loss {head['loss']:.2f}")
    limits = f"memory {memory:.3f} of eager's (at most 0.333), loss differs by {loss_error:.1e} (at most 1e-05)"
    print(limits)
    fault = ""
    if memory > MOST_MEMORY or loss_error > MOST_DIFFERENCE:
        fault = f"the head exceeds a limit: {limits}; look for the cause in kernels/electra_kernels/mlm_head.py"
    line = ResultLine(
        f"generator head, {num_rows:,} masked rows x {width}, vocabulary {VOCAB:,}, fp32",
        f"{heads['ours']['extra_peak_bytes'] / 1e9:.2f} GB at its peak",
        f"{memory:.3f} of plain PyTorch's memory, {time_ratio:.2f} of its time",
    )
    sizes = {"threads": threads, "rows": num_rows, "width": width, "vocab": VOCAB}
    return Found(
        [line], sizes | {"heads": heads, "memory_ratio": memory, "loss_relative_difference": loss_error}, fault
    )
