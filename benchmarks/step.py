"""How fast is our joint training step on the CPU: beside Hugging Face's, and of both architectures?

    python benchmarks/run.py step                            # both parts, 2 threads
    python benchmarks/run.py step --parts modern --lengths 8192

The parts:

    small     configs/small.yaml at length 128, 16 rows, fp32 and bf16, beside Hugging Face's ELECTRA. The matrix
              products of our step, computed alone (electra_dist/train/step_operators.py), take turns with both sides:
              their time divided by our step's is the step's share of the ceiling.
    modern    the architecture `modern` in fp32 beside `bert` and Hugging Face's ModernBERT, by length. Discriminators
              have the shape of ELECTRA-Small, generators a third of its depth; the feed-forward widths give layers of
              both architectures the same number of parameters. A batch has 8,192 tokens, but at least one row.

Guarantee: before anything is timed, our step and Hugging Face's compute their losses without dropout on the same
samples. The benchmark ends if these differ by more than 1e-4 (fp32) or 3e-2 (bf16), relative.

How: a step consists of masks, generator, sample, discriminator, backward of both losses, clipping and AdamW, with the
dropout of the config. bf16 is autocast over fp32 parameters on both sides.

Limits: one process, without DeepSpeed and without a loader; rows hold random ids. `electra-dist speed` says where the
time of a step goes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

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
    flops_of,
    matrix_products,
    ours,
    ours_and_rivals,
    stepper,
    synthetic_rows,
    take_step,
)

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.model.counts import parameter_counts
from electra_dist.model.fused_layer import HAS_BF16_PRODUCTS
from electra_dist.train.step_operators import products_alone_s

ROUNDS = 5
PARTS = ("small", "modern")
PRODUCTS = "our matrix products alone"
TOKENS = 8192  # tokens of a batch of the part `modern`
# Feed-forward widths with which a layer of both architectures has the same number of parameters, at hidden size 256.
WIDE = {"bert": 1024, "modern": 680}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (all)")
    parser.add_argument(
        "--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"], help="small: precisions"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 2048], help="modern: lengths of a row in tokens"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")


def measure(arguments: argparse.Namespace) -> Found:
    """Measure the chosen parts."""
    threads = 1 if arguments.smoke else arguments.threads  # The toy model is too small for two threads.
    torch.set_num_threads(threads)
    lines: list[ResultLine] = []
    found: Json = {"threads": threads}
    for part in arguments.parts:
        torch.manual_seed(0)
        part_lines, found[part] = {"small": small, "modern": modern}[part](arguments, threads)
        lines += part_lines
    return Found(lines, found)


def small(arguments: argparse.Namespace, threads: int) -> tuple[list[ResultLine], Json]:
    """Compare our step with Hugging Face's in every precision."""
    toy = [*TOY, "model.vocab_size=300", "data.seq_len=32"] if arguments.smoke else []
    config = load_config(REPOSITORY / "configs/small.yaml", toy)
    facts = f"{config.data.seq_len} tokens x {BATCH} rows, {threads} thread(s)"
    found: Json = {}
    for precision in arguments.precision:
        # Without bf16 products in hardware, a Hugging Face step takes about a minute.
        is_slow = precision == "bf16" and not HAS_BF16_PRODUCTS and not arguments.smoke
        rounds, warm_up = (1, 0) if is_slow else (arguments.rounds, 1)
        found[precision] = compare_small(config, precision, rounds, warm_up)
    return [report_small(ways, precision, facts) for precision, ways in found.items()], found


def compare_small(config: Config, precision: str, rounds: int, warm_up: int) -> Json:
    """Time all ways in turn, on full rows of one example each; return seconds, rate, ratio and losses by way."""
    batches = synthetic_rows(config, BATCH * (rounds + warm_up)).split(BATCH)
    ways = ours_and_rivals(config)
    losses_without_dropout = check_agreement(config, ways, batches[0], precision)
    losses: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    clip_norm = config.optimizer.clip_norm
    products = matrix_products(lambda: take_step(ours(config), batches[0], 0, precision, clip_norm))
    # Where the CPU has no bf16 products, they are computed in fp32.
    dtype = torch.bfloat16 if precision == "bf16" and HAS_BF16_PRODUCTS else torch.float32
    turns: dict[str, Callable[[], Any]] = {
        name: stepper(way, batches, precision, clip_norm, losses[name]) for name, way in ways.items()
    }
    turns[PRODUCTS] = functools.partial(products_alone_s, products, torch.device("cpu"), dtype)
    seconds = alternate(turns, rounds, warm_up)
    found: Json = {
        name: {
            "seconds": seconds[name],
            "tokens_per_s": batches[0].numel() / summary(seconds[name])["median"],
            "ratio": ratio(seconds[name], seconds["ours"]),
            "losses_without_dropout": losses_without_dropout[name],
            "losses": losses[name],
        }
        for name in ways
    }
    found[PRODUCTS] = {
        "seconds": seconds[PRODUCTS],
        "share_of_ceiling": ratio(seconds[PRODUCTS], seconds["ours"]),
        "flops": flops_of(products),
        "products": products.total(),
        "cpu_has_bf16_products": HAS_BF16_PRODUCTS,
    }
    return found


def report_small(found: Json, precision: str, facts: str) -> ResultLine:
    """Print the table of one precision; return its row for docs/results.md."""
    print(f"\n{precision}, {facts}, a CPU {'with' if HAS_BF16_PRODUCTS else 'without'} bf16 products")
    rows = []
    for name, way in found.items():
        if name == PRODUCTS:
            continue
        first, last = (f"{mlm:.3f} / {rtd:.4f}" for mlm, rtd in (way["losses"][0], way["losses"][-1]))
        seconds = format_summary(summary(way["seconds"]), ".3f")
        rows.append([name, seconds, f"{way['tokens_per_s']:,.0f}", format_summary(way["ratio"]), f"{first} to {last}"])
    ceiling = found[PRODUCTS]
    share = ceiling["share_of_ceiling"]
    rows.append([PRODUCTS, format_summary(summary(ceiling["seconds"]), ".3f"), "", format_summary(share), ""])
    print_table(["", "s a step", "tokens/s", "time / ours", "mlm / rtd, first to last"], rows)
    speed = ceiling["flops"] / summary(ceiling["seconds"])["median"] / 1e9
    print(f"share of the ceiling: {share['median']:.0%} ({ceiling['products']} products at {speed:,.0f} GFLOP/s)")
    published, gathered = (found[name]["ratio"]["median"] for name in ("Hugging Face", "Hugging Face, gathered"))
    against = (
        f"{published:.2f} x Hugging Face as published, {gathered:.2f} x with its head at the masked slots only; "
        f"{share['median']:.0%} of the speed of its matrix products alone"
    )
    value = f"{found['ours']['tokens_per_s']:,.0f} tokens/s"
    return ResultLine(f"joint step of ELECTRA-Small, {precision}, {facts}", value, against)


def modern(arguments: argparse.Namespace, threads: int) -> tuple[list[ResultLine], Json]:
    """Compare the architecture `modern` with its rivals at every length."""
    lengths = [160] if arguments.smoke else arguments.lengths  # longer than a window of 128 tokens
    found = {str(length): compare_modern(length, arguments.rounds, arguments.smoke) for length in lengths}
    return [report_modern(found[str(length)], length, threads) for length in lengths], found


def config_of(architecture: str, length: int, smoke: bool) -> Config:
    """Return the config of an architecture ("bert" or "modern") for rows of `length` tokens; a toy if `smoke`."""
    width, layers, generator_layers = (32, 3, 1) if smoke else (256, 12, 4)
    intermediate = WIDE[architecture] * width // 256
    tower = f"hidden_size: {width}, num_heads: {width // 16 if smoke else 4}, intermediate_size: {intermediate}"
    settings = [
        f"model.architecture={architecture}",
        f"model.embedding_size={width}",
        f"model.max_positions={length}",
        f"data.seq_len={length}",
        f"model.discriminator={{{tower}, num_layers: {layers}}}",
        f"model.generator={{{tower}, num_layers: {generator_layers}}}",
        "model.hidden_dropout=0",
        "model.attention_dropout=0",
    ]
    settings += ["model.vocab_size=300"] if smoke else []
    return load_config(REPOSITORY / "configs/small.yaml", settings)


def compare_modern(length: int, rounds: int, smoke: bool) -> Json:
    """Time the steps of all ways in turn at one length; "ours" is our step of `modern`."""
    bert, config = (config_of(architecture, length, smoke) for architecture in ("bert", "modern"))
    same_model = ours_and_rivals(config)
    ways = {**same_model, "our bert": ours(bert)}
    num_rows = max(1, TOKENS // length)  # of a batch
    batches = synthetic_rows(config, num_rows * (rounds + 1)).split(num_rows)
    losses = check_agreement(config, same_model, batches[0], "fp32")
    clip_norm = config.optimizer.clip_norm
    seconds = alternate({name: stepper(way, batches, "fp32", clip_norm) for name, way in ways.items()}, rounds)
    return {
        name: {
            "seconds": seconds[name],
            "tokens_per_s": batches[0].numel() / summary(seconds[name])["median"],
            "ratio": ratio(seconds[name], seconds["ours"]),
            "parameters": parameter_counts((bert if name == "our bert" else config).model).total,
            "losses_without_dropout": losses.get(name),
        }
        for name in ways
    }


def report_modern(found: Json, length: int, threads: int) -> ResultLine:
    """Print the table of one length; return its row for docs/results.md."""
    print(f"\nfp32, rows of {length:,} tokens, {threads} thread(s)")
    rows = []
    for name, side in found.items():
        label = "our modern" if name == "ours" else name
        seconds = format_summary(summary(side["seconds"]), ".3f")
        parameters = f"{side['parameters'] / 1e6:.2f} M"
        rows.append([label, parameters, seconds, f"{side['tokens_per_s']:,.0f}", format_summary(side["ratio"])])
    print_table(["", "parameters", "s a step", "tokens/s", "time / our modern"], rows)
    times = ", ".join(f"{found[name]['ratio']['median']:.2f} x {name}" for name in found if name != "ours")
    return ResultLine(
        f"joint step of the architecture `modern`, fp32, length {length:,}",
        f"{found['ours']['tokens_per_s']:,.0f} tokens/s",
        f"{times} (time of the other step by ours)",
    )
