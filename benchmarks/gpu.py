"""Every fused operation on the GPU at hand: right first, then how fast, then one whole training step.

    python benchmarks/gpu.py            # under 8 minutes on one H200; JSON under benchmarks/results/
    python benchmarks/gpu.py --smoke    # toy sizes on the CPU: the same code, no file, figures without meaning

1. Correctness: each operation and its reference, in bf16, against float64; a chi-square on 1e6 draws; no host sync and
   capture in a CUDA graph for the head.
2. Time (median of events, forward + backward) and peak memory above the inputs, against eager torch, torch.compile,
   and Liger and cut-cross-entropy with a separate sampler where they are installed.
3. One training step of the large model (64 rows of 512, bf16 weights, fused AdamW), with the references and with the
   kernels.

It fails if a result is wrong; a time is only reported. Where it stops: one GPU, no DeepSpeed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from electra_kernels.backend import resolve
from electra_kernels.sampling import sample
from gpu_cases import LARGE, TOY, Sizes, cases, head_inputs, our_head, rival_heads
from scipy.stats import chisquare

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model.init import build_towers
from electra_dist.model.rows import SpecialIds
from electra_dist.objectives.rtd import ReplacedTokenDetection

PACKAGES = ("torch", "triton", "liger_kernel", "cut_cross_entropy")
REPEATS, WARM_UP = 20, 5


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
    pairs = []
    for _ in range(repeats):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        run()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in pairs]
    return {"ms": statistics.median(times), "peak_bytes": torch.cuda.max_memory_allocated() - before}


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Root-mean-square error over root-mean-square value."""
    return ((value.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def check(sizes: Sizes, device: str, backend: str) -> list[dict[str, Any]]:
    """Ours and the reference in bf16 against the reference in float64: output and every gradient."""
    dtype = torch.bfloat16
    small = sizes._replace(batch=min(sizes.batch, 4))
    head = head_inputs(small, sizes.exact_rows, device, dtype)
    subjects = [("head", lambda given, b: our_head(type(head)(*given, *head[3:]), sizes.vocab, b)[0], head[:3])]
    subjects += [(case.name, case.ours, case.inputs) for case in cases(small, device, dtype) if case.inputs]
    found = []
    for name, run, inputs in subjects:

        def outputs(tensors: list[torch.Tensor], implementation: str, run: Any = run) -> list[torch.Tensor]:
            out = run(tensors, implementation)
            upstream = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape) if out.dim() else None
            return [out.detach(), *torch.autograd.grad(out, tensors, None if upstream is None else upstream.to(out))]

        exact = outputs([t.detach().double().requires_grad_() for t in inputs], "reference")
        ours, reference = (outputs(list(inputs), b) for b in (backend, "reference"))
        errors = [[relative_error(v, e) for v, e in zip(values, exact)] for values in (ours, reference)]
        # One rounding to bf16 is granted: the two may round a tie apart.
        right = all(a <= b + 2.0**-8 for a, b in zip(*errors))
        found.append({"operation": name, "error": max(errors[0]), "reference_error": max(errors[1]), "right": right})
    return found


def chi_square(device: str, backend: str, draws: int) -> dict[str, float]:
    """p-values of the drawn frequencies for flat and peaked logits."""
    found = {}
    for name, logits in (("flat", torch.zeros(64)), ("peaked", torch.linspace(0, 8, 64))):
        rows = torch.arange(draws, device=device)
        drawn = sample(logits.to(device).expand(draws, -1), seed=3, step=4, row_M=rows, backend=backend)
        expected = logits.double().softmax(0).numpy() * draws
        found[name] = float(chisquare(drawn.bincount(minlength=64).cpu().numpy(), expected).pvalue)
    return found


def head_runs_without_host(sizes: Sizes) -> dict[str, bool]:
    """Forward, sample and backward of the head with every wait for the device made an error, then in a CUDA graph."""
    given = head_inputs(sizes, sizes.masked[0], "cuda", torch.bfloat16)

    def run() -> torch.Tensor:
        loss, sampled = our_head(given, sizes.vocab, "triton")
        torch.autograd.grad(loss, given.differentiable())
        return sampled

    expected = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    return {"no_host_sync": True, "cuda_graph_gives_the_same_tokens": torch.equal(captured, expected)}


def time_heads(sizes: Sizes, device: str, backend: str, smoke: bool) -> list[dict[str, Any]]:
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

            found.append({"operation": f"head M={num_rows}", "by": name, **time_and_peak(run, not smoke, REPEATS)})
    return found


def time_cases(sizes: Sizes, device: str, backend: str, smoke: bool) -> list[dict[str, Any]]:
    """Forward and backward of the other operations: ours, eager, compiled."""
    found = []
    for case in cases(sizes, device, torch.float32 if smoke else torch.bfloat16):
        by = {f"ours ({backend})": lambda given, case=case: case.ours(given, backend), "eager": case.eager}
        if not smoke:
            by["torch.compile"] = torch.compile(case.eager)
        for name, function in by.items():

            def run(function: Any = function, inputs: Any = case.inputs) -> None:
                out = function(inputs)
                if inputs:
                    torch.autograd.grad(out, inputs, None if not out.dim() else torch.ones_like(out))

            measured = time_and_peak(run, not smoke, REPEATS)
            rate = case.num_bytes / measured["ms"] / 1e9
            found.append({"operation": case.name, "by": name, **measured, "tb_per_s": rate})
    return found


def time_step(sizes: Sizes, device: str, backend: str, smoke: bool) -> list[dict[str, Any]]:
    """Forward, backward and optimizer of both towers on one device."""
    wide = sizes.widths[1]
    layers = 1 if smoke else 24
    towers = [
        TowerConfig(hidden_size=w, num_layers=layers, num_heads=max(1, w // 64), intermediate_size=4 * w)
        for w in sizes.widths
    ]
    model = ModelConfig(
        vocab_size=sizes.vocab, embedding_size=wide, max_positions=sizes.seq_len, generator=towers[0],
        discriminator=towers[1],
    )  # fmt: skip
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    ids = torch.randint(5, sizes.vocab, (sizes.batch, sizes.seq_len), device=device)
    ids[:, 0], ids[:, sizes.seq_len // 2], ids[:, -1] = special.cls, special.sep, special.sep
    rows, tokens = torch.arange(sizes.batch, device=device), ids.numel()
    found = []
    for name in dict.fromkeys(("reference", backend)):
        module = ReplacedTokenDetection(build_towers(model, 1), ObjectiveConfig(mask_prob=0.25), special, name)
        module = module.to(device, torch.float32 if smoke else torch.bfloat16).train()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=not smoke)

        def run(module: Any = module, optimizer: Any = optimizer) -> None:
            out = module(ids, rows, 0, 1, 4 / tokens, 1 / tokens)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        measured = time_and_peak(run, not smoke, repeats=5)
        rate = 1e3 * tokens / measured["ms"]
        found.append({"operation": "training step", "by": name, **measured, "tokens_per_s": rate})
        del module, optimizer, run
    return found


def versions() -> dict[str, str]:
    """Versions of what is compared; a rival that is absent here is absent from the table."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--output", type=Path, help="folder of the JSON; default: results/ here, none for --smoke")
    arguments = parser.parse_args()
    smoke = arguments.smoke
    if not smoke and not torch.cuda.is_available():
        sys.exit("no CUDA device here: run with --smoke for the toy run on the CPU")
    device, sizes = ("cpu", TOY) if smoke else ("cuda", LARGE)
    backend = resolve("auto", device)
    hardware = "CPU, smoke run: figures without meaning" if smoke else torch.cuda.get_device_name()
    record: dict[str, Any] = {
        "benchmark": "gpu-smoke" if smoke else "gpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware,
        "host": platform.machine(),
        "versions": versions(),
        "backend": backend,
    }
    print(f"{hardware} | kernels: {backend} | " + " ".join(f"{k} {v}" for k, v in record["versions"].items()))
    torch.manual_seed(0)
    record["correctness"] = check(sizes, device, backend)
    record["chi_square_p"] = chi_square(device, backend, 100_000 if smoke else 1_000_000)
    record["without_host"] = {} if smoke else head_runs_without_host(sizes)
    record["times"] = [
        *time_heads(sizes, device, backend, smoke),
        *time_cases(sizes, device, backend, smoke),
        *time_step(sizes, device, backend, smoke),
    ]
    print_tables(record)
    folder = arguments.output or (None if smoke else Path(__file__).parent / "results")
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{record['benchmark']}-{record['date'][:10].replace('-', '')}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written to {path}")
    right = all(row["right"] for row in record["correctness"]) and min(record["chi_square_p"].values()) > 1e-3
    if not right or not all(record["without_host"].values()):
        sys.exit("a result is wrong: see above")


def print_tables(record: dict[str, Any]) -> None:
    """Correctness, then times."""
    print("\nerror against float64 in bf16, relative, the worst of output and gradients")
    print(f"{'operation':<24} {'ours':>9} {'reference':>9}")
    for row in record["correctness"]:
        verdict = "" if row["right"] else "  WRONG"
        print(f"{row['operation']:<24} {row['error']:>9.1e} {row['reference_error']:>9.1e}{verdict}")
    print("chi-square p: " + ", ".join(f"{name} {p:.3f}" for name, p in record["chi_square_p"].items()))
    for name, holds in record["without_host"].items():
        print(f"{name.replace('_', ' ')}: {'yes' if holds else 'NO'}")
    print(f"\n{'operation':<24} {'by':<20} {'ms':>9} {'peak GB':>8} {'TB/s':>6} {'tokens/s':>9}")
    for row in record["times"]:
        rate = f"{row['tb_per_s']:.2f}" if "tb_per_s" in row else ""
        tokens = f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else ""
        peak = row["peak_bytes"] / 1e9
        print(f"{row['operation']:<24} {row['by']:<20} {row['ms']:>9.3f} {peak:>8.2f} {rate:>6} {tokens:>9}")


if __name__ == "__main__":
    main()
