"""How fast is our joint training step on the CPU: beside Hugging Face's, on packed rows, and of both architectures?

    python benchmarks/run.py step                            # all three parts, 2 threads
    python benchmarks/run.py step --parts small --ours       # our step and its matrix products alone
    python benchmarks/run.py step --parts modern --lengths 8192

The parts:

    small     configs/small.yaml at length 128, 16 rows, fp32 and bf16, beside Hugging Face's ELECTRA. The matrix
              products of our step, computed alone (electra_dist/train/step_operators.py), take turns with both sides:
              their time divided by our step's is the step's share of the ceiling.
    packed    the same model in fp32 on packed rows and on rows of one example each: real tokens, those that are not
              padding, in a second. The share `FULL_SHARE` of the examples fills a row, and the others have any length,
              as the ends of documents do.
    modern    the architecture `modern` in fp32 beside `bert` and Hugging Face's ModernBERT, by length. Discriminators
              have the shape of ELECTRA-Small, generators a third of its depth; the feed-forward widths give layers of
              both architectures the same number of parameters. A batch has 8,192 tokens, but at least one row. The
              peak memory of a step is measured in a process of its own, as the growth of the resident memory above
              that of the model and the optimizer's state.

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

import psutil
import torch
from measure import (
    REPOSITORY,
    TOY,
    Found,
    Json,
    ResultLine,
    alternate,
    format_summary,
    in_new_process,
    peak_memory,
    print_table,
    ratio,
    summary,
)
from step_ways import (
    BATCH,
    SPECIAL,
    Way,
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
from electra_dist.model.counts import parameter_counts
from electra_dist.model.matrix_products import HAS_BF16_PRODUCTS
from electra_dist.train.step_operators import products_alone_s

ROUNDS = 5
PARTS = ("small", "packed", "modern")
PRODUCTS = "our matrix products alone"
FULL_SHARE = 0.7
TOKENS = 8192  # tokens of a batch of the part `modern`
# Feed-forward widths with which a layer of both architectures has the same number of parameters, at hidden size 256.
WIDE = {"bert": 1024, "modern": 680}
Sides = dict[str, tuple[Config, Callable[[], Way]]]  # name -> (config, function that builds the side)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (all)")
    parser.add_argument(
        "--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"], help="small: precisions"
    )
    parser.add_argument("--ours", action="store_true", help="small: leave out Hugging Face's modules")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 2048], help="modern: lengths of a row in tokens"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="small, packed: change a value of the config"
    )


def measure(arguments: argparse.Namespace) -> Found:
    """Measure the chosen parts."""
    threads = 1 if arguments.smoke else arguments.threads  # The toy model is too small for two threads.
    torch.set_num_threads(threads)
    lines: list[ResultLine] = []
    found: Json = {"threads": threads}
    for part in arguments.parts:
        torch.manual_seed(0)
        part_lines, found[part] = {"small": small, "packed": packed, "modern": modern}[part](arguments, threads)
        lines += part_lines
    return Found(lines, found)


def small_config(arguments: argparse.Namespace, threads: int) -> tuple[Config, str]:
    """Return the config of ELECTRA-Small or of a toy, and its facts for the tables."""
    toy = [*TOY, "model.vocab_size=300", "data.seq_len=32"] if arguments.smoke else []
    config = load_config(REPOSITORY / "configs/small.yaml", [*toy, *arguments.set])
    return config, f"{config.data.seq_len} tokens x {BATCH} rows, {threads} thread(s)"


def small(arguments: argparse.Namespace, threads: int) -> tuple[list[ResultLine], Json]:
    """Compare our step with Hugging Face's in every precision."""
    config, facts = small_config(arguments, threads)
    found: Json = {}
    for precision in arguments.precision:
        # Without bf16 products in hardware, a Hugging Face step takes about a minute.
        is_slow = precision == "bf16" and not HAS_BF16_PRODUCTS and not arguments.smoke
        rounds, warm_up = (1, 0) if is_slow else (arguments.rounds, 1)
        found[precision] = compare_small(config, precision, rounds, warm_up, arguments.ours)
    return [report_small(ways, precision, facts) for precision, ways in found.items()], found


def compare_small(config: Config, precision: str, rounds: int, warm_up: int, only_ours: bool) -> Json:
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


def packed(arguments: argparse.Namespace, threads: int) -> tuple[list[ResultLine], Json]:
    """Time our step on packed and on padded rows in turn."""
    config, facts = small_config(arguments, threads)
    facts = f"{facts}; {FULL_SHARE:.0%} of examples full, the rest of any length"
    num_rows = BATCH * (arguments.rounds + 1)  # One batch is for the round that is not timed.
    turns = {}
    real_tokens: dict[str, list[int]] = {}  # Of each timed step.
    for name, packing in (("packed", "rows"), ("padded", "none")):
        batches = synthetic_rows(config, packing, num_rows, FULL_SHARE).split(BATCH)  # type: ignore[arg-type]
        turns[name] = stepper(ours(config), batches, "fp32", config.optimizer.clip_norm)
        real_tokens[name] = [int((batch != SPECIAL.pad).sum()) for batch in batches[1:]]
    seconds = alternate(turns, arguments.rounds)
    rates = {
        name: [tokens / elapsed for tokens, elapsed in zip(real_tokens[name], seconds[name], strict=True)]
        for name in turns
    }
    found = {
        name: {
            "seconds": seconds[name],
            "real_share": sum(real_tokens[name]) / (len(real_tokens[name]) * BATCH * config.data.seq_len),
            "real_tokens_per_s": summary(rates[name]),
            "ratio": ratio(rates["packed"], rates[name]),
        }
        for name in turns
    }
    print(f"\nfp32, {facts}")
    cells = [
        [
            name,
            f"{way['real_share']:.1%}",
            format_summary(way["real_tokens_per_s"], ",.0f"),
            format_summary(way["ratio"]),
        ]
        for name, way in found.items()
    ]
    print_table(["rows", "real tokens", "real tokens/s", "packed / this"], cells)
    line = ResultLine(
        f"packed rows, fp32, {facts}",
        f"{found['packed']['real_tokens_per_s']['median']:,.0f} real tokens/s",
        f"{found['padded']['ratio']['median']:.2f} x one example a row",
    )
    return [line], found


def modern(arguments: argparse.Namespace, threads: int) -> tuple[list[ResultLine], Json]:
    """Compare the architecture `modern` with its rivals at every length."""
    lengths = [160] if arguments.smoke else arguments.lengths  # longer than a window of 128 tokens
    found = {str(length): compare_modern(length, arguments.rounds, arguments.smoke, threads) for length in lengths}
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


def sides_of(length: int, smoke: bool) -> Sides:
    """Return the four sides of the comparison; "ours" is our step of `modern`."""
    bert = config_of("bert", length, smoke)
    modern = config_of("modern", length, smoke)

    def rival(gathered: bool) -> Way:
        return hugging_face(modern, ours(modern).module.towers, gathered=gathered)

    return {
        "ours": (modern, lambda: ours(modern)),
        "our bert": (bert, lambda: ours(bert)),
        "Hugging Face": (modern, lambda: rival(gathered=False)),
        "Hugging Face, gathered": (modern, lambda: rival(gathered=True)),
    }


def batches_of(config: Config, num_batches: int) -> list[torch.Tensor]:
    """Return batches of synthetic rows, int64 [B, S], with `TOKENS` tokens or one row each."""
    rows = max(1, TOKENS // config.data.seq_len)
    return list(synthetic_rows(config, "none", rows * num_batches, full_share=1.0).split(rows))


def peak_of_step(name: str, length: int, smoke: bool, threads: int) -> int:
    """Take two steps of one side; return the peak of resident memory above the memory between them, in bytes.

    The first step creates the optimizer's state. The kernel counts the peak since the start of the process, so this
    needs a process of its own.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config, build = sides_of(length, smoke)[name]
    side = build()
    first, second = batches_of(config, 2)
    take_step(side, first[:1, :64], 0, "fp32", config.optimizer.clip_norm)  # one short row, whose peak is lower
    before = psutil.Process().memory_info().rss
    take_step(side, second, 1, "fp32", config.optimizer.clip_norm)
    return peak_memory() - before


def compare_modern(length: int, rounds: int, smoke: bool, threads: int) -> Json:
    """Time the steps of all sides in turn at one length, and measure the memory of each."""
    sides = sides_of(length, smoke)
    built = {name: build() for name, (_, build) in sides.items()}
    config = sides["ours"][0]
    batches = batches_of(config, rounds + 1)
    same_model = {name: side for name, side in built.items() if name != "our bert"}
    losses = check_agreement(config, same_model, batches[0], "fp32")
    clip_norm = config.optimizer.clip_norm
    seconds = alternate({name: stepper(side, batches, "fp32", clip_norm) for name, side in built.items()}, rounds)
    found = {}
    for name, (side_config, _) in sides.items():
        measures_memory = not smoke or name == "ours"  # Each measurement imports torch, which takes seconds.
        peak = in_new_process("step", "peak_of_step", name, length, smoke, threads) if measures_memory else None
        found[name] = {
            "seconds": seconds[name],
            "tokens_per_s": batches[0].numel() / summary(seconds[name])["median"],
            "ratio": ratio(seconds[name], seconds["ours"]),
            "extra_peak_bytes": peak,
            "parameters": parameter_counts(side_config.model).total,
            "losses_without_dropout": losses.get(name),
        }
    return found


def report_modern(found: Json, length: int, threads: int) -> ResultLine:
    """Print the table of one length; return its row for docs/results.md."""
    print(f"\nfp32, rows of {length:,} tokens, {threads} thread(s)")
    rows = []
    for name, side in found.items():
        label = "our modern" if name == "ours" else name
        seconds = format_summary(summary(side["seconds"]), ".3f")
        memory = "-" if side["extra_peak_bytes"] is None else f"{side['extra_peak_bytes'] / 1e9:.2f}"
        parameters = f"{side['parameters'] / 1e6:.2f} M"
        rows.append(
            [label, parameters, seconds, f"{side['tokens_per_s']:,.0f}", format_summary(side["ratio"]), memory]
        )
    print_table(["", "parameters", "s a step", "tokens/s", "time / our modern", "peak GB"], rows)
    times = ", ".join(f"{found[name]['ratio']['median']:.2f} x {name}" for name in found if name != "ours")
    return ResultLine(
        f"joint step of the architecture `modern`, fp32, length {length:,}",
        f"{found['ours']['tokens_per_s']:,.0f} tokens/s",
        f"{times} (time of the other step by ours)",
    )
