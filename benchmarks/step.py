"""How fast is our joint training step on the CPU, beside Hugging Face's?

    python benchmarks/run.py step                            # 2 threads

It takes configs/small.yaml at length 128, 16 rows, fp32 and bf16.

Guarantee: before anything is timed, our step and Hugging Face's compute their losses without dropout on the same
samples. The benchmark ends if these differ by more than 1e-4 (fp32) or 3e-2 (bf16), relative.

How: a step consists of masks, generator, sample, discriminator, backward of both losses, clipping and AdamW, with the
dropout of the config. bf16 is autocast over fp32 parameters on both sides.

Limits: one process, without DeepSpeed and without a loader; rows hold random ids. `electra-dist speed` says where the
time of a step goes, and how long its matrix products take alone.
"""

from __future__ import annotations

import argparse

import torch
from measure import (
    REPOSITORY,
    TOY,
    Found,
    Json,
    ResultLine,
    alternate,
    format_summary,
    print_table,
    ratio,
    summary,
)
from step_ways import (
    BATCH,
    check_agreement,
    ours_and_rivals,
    stepper,
    synthetic_rows,
)

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.model.fused_layer import HAS_BF16_PRODUCTS

ROUNDS = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")


def measure(arguments: argparse.Namespace) -> Found:
    threads = 1 if arguments.smoke else arguments.threads  # The toy model is too small for two threads.
    torch.set_num_threads(threads)
    toy = [*TOY, "model.vocab_size=300", "data.seq_len=32"] if arguments.smoke else []
    config = load_config(REPOSITORY / "configs/small.yaml", toy)
    facts = f"{config.data.seq_len} tokens x {BATCH} rows, {threads} thread(s)"
    found: Json = {}
    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        # Without bf16 products in hardware, a Hugging Face step takes about a minute.
        is_slow = precision == "bf16" and not HAS_BF16_PRODUCTS and not arguments.smoke
        found[precision] = compare(config, precision, 1 if is_slow else arguments.rounds, 0 if is_slow else 1)
    lines = [report(ways, precision, facts) for precision, ways in found.items()]
    return Found(lines, {"threads": threads, **found})


def compare(config: Config, precision: str, rounds: int, warm_up: int) -> Json:
    """Time all ways in turn, on full rows of one example each; return seconds, rate, ratio and losses by way."""
    batches = synthetic_rows(config, BATCH * (rounds + warm_up)).split(BATCH)
    ways = ours_and_rivals(config)
    losses_without_dropout = check_agreement(config, ways, batches[0], precision)
    losses: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    clip_norm = config.optimizer.clip_norm
    turns = {name: stepper(way, batches, precision, clip_norm, losses[name]) for name, way in ways.items()}
    seconds = alternate(turns, rounds, warm_up)
    return {
        name: {
            "seconds": seconds[name],
            "tokens_per_s": batches[0].numel() / summary(seconds[name])["median"],
            "ratio": ratio(seconds[name], seconds["ours"]),
            "losses_without_dropout": losses_without_dropout[name],
            "losses": losses[name],
        }
        for name in ways
    }


def report(found: Json, precision: str, facts: str) -> ResultLine:
    """Print the table of one precision; return its row for docs/results.md."""
    print(f"\n{precision}, {facts}, a CPU {'with' if HAS_BF16_PRODUCTS else 'without'} bf16 products")
    rows = []
    for name, way in found.items():
        first, last = (f"{mlm:.3f} / {rtd:.4f}" for mlm, rtd in (way["losses"][0], way["losses"][-1]))
        seconds = format_summary(summary(way["seconds"]), ".3f")
        rows.append([name, seconds, f"{way['tokens_per_s']:,.0f}", format_summary(way["ratio"]), f"{first} to {last}"])
    print_table(["", "s a step", "tokens/s", "time / ours", "mlm / rtd, first to last"], rows)
    published, gathered = (found[name]["ratio"]["median"] for name in ("Hugging Face", "Hugging Face, gathered"))
    against = f"{published:.2f} x Hugging Face as published, {gathered:.2f} x with its head at the masked slots only"
    value = f"{found['ours']['tokens_per_s']:,.0f} tokens/s"
    return ResultLine(f"joint step of ELECTRA-Small, {precision}, {facts}", value, against)
