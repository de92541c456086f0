"""Measure peak memory and time of the generator's head on a CPU, ours against eager torch.

    python benchmarks/head.py                 # 8192 masked rows of width 1024 over 30522 tokens, fp32
    python benchmarks/head.py --width 64      # the same memory in a few seconds

Guarantee: the script exits with an error unless our peak is at most a third of eager torch's and the two losses agree
to 1e-5 (relative).

How: each head runs forward, sample and backward once, in a process of its own. Its peak is the growth of the process's
resident memory above the inputs.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil
import torch
import torch.nn.functional as F
from electra_kernels.mlm_head import mlm_head_loss_and_sample
from measure import ResultLine, finish, parser

VOCAB, PADDED = 30522, 30592


class HeadInputs(NamedTuple):
    """Inputs of a generator head: M masked rows of D features, and a table of V padded vocabulary entries.

    The weights of the rows, which the head also takes, are all 1 and therefore not stored.
    """

    x_MD: torch.Tensor
    table_VD: torch.Tensor
    bias_V: torch.Tensor
    target_M: torch.Tensor


def inputs(num_rows: int, width: int) -> HeadInputs:
    """Return random inputs of M = `num_rows` rows and D = `width` features; equal arguments give equal inputs."""
    generator = torch.Generator().manual_seed(0)
    return HeadInputs(
        x_MD=torch.randn(num_rows, width, generator=generator).requires_grad_(),
        table_VD=(torch.randn(PADDED, width, generator=generator) * width**-0.5).requires_grad_(),
        bias_V=torch.zeros(VOCAB, requires_grad=True),
        target_M=torch.randint(VOCAB, (num_rows,), generator=generator),
    )


def ours(given: HeadInputs) -> float:
    """Run our fused head forward, with samples, and backward; return the summed loss."""
    row_M = torch.arange(len(given.x_MD))
    weight_M = torch.ones(len(row_M))
    out = mlm_head_loss_and_sample(*given, weight_M, seed=1, step=2, row_M=row_M, vocab_size=VOCAB)
    out.loss_sum.backward()
    return out.loss_sum.item()


def eager(given: HeadInputs) -> float:
    """Run the head in plain torch forward, with Gumbel-max samples, and backward; return the summed loss."""
    logits = given.x_MD @ given.table_VD[:VOCAB].t() + given.bias_V
    loss = F.cross_entropy(logits, given.target_M, reduction="sum")
    noise = -torch.log(-torch.log(torch.rand_like(logits) + 1e-9) + 1e-9)  # As in Google's code.
    (logits.detach() + noise).argmax(1)
    loss.backward()
    return loss.item()


def measure(name: str, num_rows: int, width: int) -> dict[str, float]:
    """Run one head once in this process and measure it.

    The peak is the process's own since its start, so a process must measure only one head.

    Args:
        name: "ours" or "eager".
        num_rows: Masked rows.
        width: Features of a row.

    Returns:
        `loss`, `seconds`, and `extra_peak_bytes`, the peak of resident memory above the inputs.
    """
    head = {"ours": ours, "eager": eager}[name]
    given = inputs(num_rows, width)
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    loss = head(given)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"loss": loss, "extra_peak_bytes": peak - before, "seconds": time.perf_counter() - started}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both heads, print and record the comparison, and exit with an error if a limit is exceeded.

    With `--only`, measure one head in this process and print its JSON, which the comparison reads.
    """
    parse = parser(__doc__)
    parse.add_argument("--rows", type=int, default=8192, help="masked rows (default: %(default)s)")
    parse.add_argument("--width", type=int, default=1024, help="features of a row (default: %(default)s)")
    parse.add_argument("--only", choices=["ours", "eager"], help="measure one head in this process and print JSON")
    arguments = parse.parse_args(argv)
    if arguments.smoke:
        # With fewer rows, the memory that the process uses for other things would hide the head's.
        arguments.rows, arguments.width = 2048, 32
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.rows, arguments.width)))
        return
    shape = ["--rows", str(arguments.rows), "--width", str(arguments.width)]
    found = {}
    for name in ("ours", "eager"):
        command = [sys.executable, __file__, "--only", name, *shape]
        found[name] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    ratio = found["ours"]["extra_peak_bytes"] / found["eager"]["extra_peak_bytes"]
    loss_error = abs(found["ours"]["loss"] / found["eager"]["loss"] - 1)
    threads = torch.get_num_threads()
    print(f"{arguments.rows} rows x {arguments.width}, vocabulary {VOCAB}, fp32, {threads} CPU thread(s)")
    for name, row in found.items():
        gigabytes = row["extra_peak_bytes"] / 1e9
        print(f"{name:<6} extra peak {gigabytes:6.2f} GB   {row['seconds']:7.1f} s   loss {row['loss']:.2f}")
    print(f"ours / eager: memory {ratio:.3f} (at most 0.333), loss differs by {loss_error:.1e} (at most 1e-05)")
    line = ResultLine(
        f"generator head, {arguments.rows:,} masked rows x {arguments.width}, vocabulary {VOCAB:,}, fp32",
        f"{found['ours']['extra_peak_bytes'] / 1e9:.2f} GB at its peak",
        f"{ratio:.3f} of plain PyTorch's memory, "
        f"{found['ours']['seconds'] / found['eager']['seconds']:.2f} of its time",
    )
    finish(
        "head",
        arguments,
        argv,
        [line],
        threads=threads,
        rows=arguments.rows,
        width=arguments.width,
        vocab=VOCAB,
        heads=found,
        memory_ratio=ratio,
        loss_relative_difference=loss_error,
    )
    if ratio > 1 / 3 or loss_error > 1e-5:
        sys.exit(
            f"the head exceeds a limit: memory {ratio:.3f} of eager's (at most 0.333), loss differs by "
            f"{loss_error:.1e} (at most 1e-05); look for the cause in kernels/electra_kernels/mlm_head.py"
        )


if __name__ == "__main__":
    main()
