"""How fast is our joint training step on the CPU, beside Hugging Face's modules that do the same work?

    python benchmarks/run.py step              # configs/small.yaml at length 128, 16 rows, 2 threads, fp32 and bf16
    python benchmarks/run.py step --ours       # our step and its matrix products alone, without Hugging Face

Guarantee: before anything is timed, both sides compute their losses without dropout on the same samples. The benchmark
ends if these differ by more than 1e-4 (fp32) or 3e-2 (bf16), relative.

How: a step consists of masks, generator, sample, discriminator, backward of both losses, clipping and AdamW, with the
dropout of the config. bf16 is autocast over fp32 parameters on both sides. The matrix products of our step, computed
alone (electra_dist/speed/product_ceiling.py), take turns with both sides: their time divided by our step's is the
step's share of the ceiling.

Limits: one process, without DeepSpeed and without a loader. `electra-dist speed` says where the time of a step goes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from measure import REPOSITORY, TOY, Found, Json, ResultLine, alternate, format_summary, print_table, ratio, summary
from step_ways import (
    BATCH,
    check_agreement,
    flops_of,
    hugging_face,
    matrix_products,
    ours,
    stepper,
    synthetic_rows,
    take_step,
)

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.model.matrix_products import HAS_BF16_PRODUCTS
from electra_dist.speed.product_ceiling import products_alone_s

ROUNDS = 4
PRODUCTS = "our matrix products alone"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"], help="precisions to measure"
    )
    parser.add_argument("--ours", action="store_true", help="leave out Hugging Face's modules")
    add_model_options(parser)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model that `small_config` reads."""
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the config; may be repeated"
    )


def small_config(arguments: argparse.Namespace) -> tuple[Config, str]:
    """Set torch's threads and seed; return the config of ELECTRA-Small or of a toy, and its facts for the tables."""
    threads = 1 if arguments.smoke else arguments.threads  # The toy model is too small for two threads.
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    toy = [*TOY, "model.vocab_size=300", "data.seq_len=32"] if arguments.smoke else []
    config = load_config(REPOSITORY / "configs/small.yaml", [*toy, *arguments.set])
    return config, f"{config.data.seq_len} tokens x {BATCH} rows, {threads} thread(s)"


def compare(config: Config, precision: str, rounds: int, warm_up: int, only_ours: bool) -> Json:
    """Time all ways in turn, on full rows of one example each; return seconds, rate, ratio and losses by way."""
    batches = synthetic_rows(config, "none", BATCH * (rounds + warm_up), full_share=1.0).split(BATCH)
    our_way = ours(config)
    ways = {"ours": our_way}
    if not only_ours:
        ways["Hugging Face"] = hugging_face(config, our_way.module.towers, gathered=False)
        ways["Hugging Face, gathered"] = hugging_face(config, our_way.module.towers, gathered=True)
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


def measure(arguments: argparse.Namespace) -> Found:
    """Compare the steps in every precision."""
    config, facts = small_config(arguments)
    found: Json = {}
    for precision in arguments.precision:
        # Without bf16 products in hardware, a Hugging Face step takes about a minute.
        is_slow = precision == "bf16" and not HAS_BF16_PRODUCTS and not arguments.smoke
        rounds, warm_up = (1, 0) if is_slow else (arguments.rounds, 1)
        found[precision] = compare(config, precision, rounds, warm_up, arguments.ours)
    lines = [report(ways, precision, facts) for precision, ways in found.items()]
    return Found(lines, {"threads": torch.get_num_threads(), "ways": found})


def report(found: Json, precision: str, facts: str) -> ResultLine:
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
    against = f"{share['median']:.0%} of the speed of its matrix products alone"
    if "Hugging Face" in found:
        published = found["Hugging Face"]["ratio"]["median"]
        gathered = found["Hugging Face, gathered"]["ratio"]["median"]
        against = (
            f"{published:.2f} x Hugging Face as published, {gathered:.2f} x with its head at the masked slots only; "
            f"{against}"
        )
    value = f"{found['ours']['tokens_per_s']:,.0f} tokens/s"
    return ResultLine(f"joint step of ELECTRA-Small, {precision}, {facts}", value, against)
