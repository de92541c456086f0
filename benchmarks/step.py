"""Compare our joint training step on the CPU with Hugging Face's modules that do the same work.

    python benchmarks/step.py                  # configs/small.yaml at length 128, 16 rows, 2 threads, fp32 and bf16
    python benchmarks/step.py --profile        # also print the time of our step by kind of operation
    python benchmarks/step.py --ours           # our step and its matrix products alone, without Hugging Face
    python benchmarks/step.py --packed         # packed rows against one example per row, in real tokens per second
    python benchmarks/step.py --packed --corpus A --padded-corpus B     # the same on two corpora of one text

Guarantee: before anything is timed, both sides compute their losses without dropout on the same samples. The script
exits if these differ by more than 1e-4 (fp32) or 3e-2 (bf16), relative.

How: a step consists of masks, generator, sample, discriminator, backward of both losses, clipping and AdamW, with the
dropout of the config. bf16 is autocast over fp32 parameters on both sides. The two sides take turns in one process.
`step_parts/rival.py` describes the Hugging Face side. A third side computes nothing but the matrix products of our
step, one after another (`step_parts/products.py`). Its time divided by that of our step is the step's share of the
ceiling.

Limits: one process, without DeepSpeed and without a loader.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from measure import (
    REPOSITORY,
    TOY,
    Json,
    ResultLine,
    alternate,
    finish,
    format_summary,
    parser,
    print_table,
    ratio,
    summary,
)
from step_parts import products
from step_parts.packed import compare_packing, report_packing
from step_parts.variants import BATCH, SPECIAL, StepVariant, autocast, hugging_face, ours, synthetic_rows, take_step

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.model.matrix_products import HAS_BF16_PRODUCTS
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.corruption import CorruptingObjective

PRODUCTS = "our matrix products alone"
AGREEMENT = {"fp32": 1e-4, "bf16": 3e-2}  # Largest relative difference of the losses of two variants.
# Kinds of operations, each with words of torch's operator names. An operator belongs to the first kind that matches.
KINDS = {
    "attention": ("scaled_dot_product", "flash_attention"),
    "matrix products": ("mm", "linear", "bmm"),
    "optimizer": ("_foreach", "_fused"),
    "random numbers and dropout": ("dropout", "bernoulli", "random", "uniform", "philox"),
    "norms": ("layer_norm",),
    "GELU": ("gelu",),
    "embeddings and gathers": ("embedding", "gather", "scatter", "index"),
    "copies and casts": ("copy_", "to", "cat", "clone", "contiguous", "zero_", "fill_", "empty"),
}


@torch.no_grad()
def check_agreement(
    config: Config, ways: dict[str, StepVariant], ids_BS: torch.Tensor, precision: str
) -> dict[str, Json]:
    """Return both losses of every variant without dropout, or exit the program if they differ from ours.

    All variants use the tokens that our generator samples, so that the discriminators read the same text.

    Args:
        config: Config of the model, with its seed.
        ways: Variants by name, with "ours" first.
        ids_BS: [B, S] int64 token ids.
        precision: "fp32" or "bf16"; selects the tolerance from `AGREEMENT`.

    Returns:
        By name of the variant, the mean losses under the keys "mlm" and "rtd".
    """
    objective: CorruptingObjective = ways["ours"].module  # type: ignore[assignment]
    # This input is used for its masks and samples only, so its loss scales of 1.0 have no effect.
    given = StepInput(ids_BS, torch.arange(len(ids_BS)), 0, config.seed, 1.0, 1.0)
    found = {}
    for name, way in ways.items():
        way.module.eval()
        with autocast(precision):
            if name == "ours":
                _, *losses = way.forward(ids_BS, 0)
                batch = objective.batch(given)
                masking = objective.mask(batch)
                sampled_M = objective.fill(batch, masking, objective.generator_states(batch, masking)).sampled_M
            else:
                losses = list(way.module(ids_BS, given.row_B, 0, config.seed, sampled_M))
        way.module.train()
        found[name] = {"mlm": losses[0].item(), "rtd": losses[1].item()}
        for kind, value in found[name].items():
            if abs(value / found["ours"][kind] - 1) > AGREEMENT[precision]:
                sys.exit(
                    f"{precision}: the {kind} loss of {name} is {value}, ours is {found['ours'][kind]}: not the same "
                    f"work, so times cannot be compared; make both sides compute the same loss (step_parts/rival.py)"
                )
    return found


def compare(config: Config, precision: str, rounds: int, warm_up: int, only_ours: bool = False) -> Json:
    """Time training steps of ours and of both Hugging Face variants in turn, on full rows of one example each.

    The matrix products of our step, computed alone, take turns with them.

    Args:
        config: Config of the model, the objective and the optimizer.
        precision: "fp32" or "bf16".
        rounds: Timed steps of each variant.
        warm_up: Steps of each variant before the timed ones.
        only_ours: Leave out the Hugging Face variants.

    Returns:
        By name of the variant: seconds of each step, tokens per second, its time relative to ours, and its losses.
        The products alone have the seconds, their time relative to ours ("share_of_ceiling") and their number of
        floating-point operations.
    """
    batches = synthetic_rows(config, "none", BATCH * (rounds + warm_up), full_share=1.0).split(BATCH)
    our_variant = ours(config, SPECIAL)
    ways = {"ours": our_variant}
    if not only_ours:
        ways["Hugging Face"] = hugging_face(config, our_variant.module.towers, gathered=False)
        ways["Hugging Face, gathered"] = hugging_face(config, our_variant.module.towers, gathered=True)
    losses_without_dropout = check_agreement(config, ways, batches[0], precision)
    losses: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}

    def next_step(name: str) -> Callable[[], None]:
        """Return a function that takes the next step of a variant and records its losses."""

        def step() -> None:
            number = len(losses[name])
            losses[name].append(take_step(ways[name], batches[number], number, precision, config.optimizer.clip_norm))

        return step

    recorded = products.products_of(
        lambda: take_step(ours(config, SPECIAL), batches[0], 0, precision, config.optimizer.clip_norm)
    )
    turns = {name: next_step(name) for name in ways}
    turns[PRODUCTS] = products.alone(recorded)
    seconds = alternate(turns, rounds, warm_up)
    num_tokens = batches[0].numel()
    found: Json = {
        name: {
            "seconds": seconds[name],
            "tokens_per_s": num_tokens / summary(seconds[name])["median"],
            "ratio": ratio(seconds[name], seconds["ours"]),
            "losses_without_dropout": losses_without_dropout[name],
            "losses": losses[name],
        }
        for name in ways
    }
    found[PRODUCTS] = {
        "seconds": seconds[PRODUCTS],
        "share_of_ceiling": ratio(seconds[PRODUCTS], seconds["ours"]),
        "flops": products.flops_of(recorded),
        "products": len(recorded),
        "cpu_has_bf16_products": HAS_BF16_PRODUCTS,
    }
    return found


def profile(config: Config, precision: str, steps: int) -> dict[str, float]:
    """Return the milliseconds of one of our steps by kind of operation, largest first.

    The times are torch's profiler's self CPU times, averaged over `steps` steps after one that is not counted.
    Operations that match no kind of `KINDS`, our own C library among them, are summed under "the rest".
    """
    way = ours(config, SPECIAL)
    ids_BS = synthetic_rows(config, "none", BATCH, full_share=1.0)
    take_step(way, ids_BS, 0, precision, config.optimizer.clip_norm)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for number in range(steps):
            take_step(way, ids_BS, number, precision, config.optimizer.clip_norm)
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        kind = _kind_of(event.key.removeprefix("aten::"))
        spent[kind] += event.self_cpu_time_total / 1e3 / steps
    return dict(spent.most_common())


def _kind_of(operation: str) -> str:
    """Return the first kind of `KINDS` of which a word occurs in the operation's name, or "the rest"."""
    for kind, words in KINDS.items():
        if any(word in operation for word in words):
            return kind
    return "the rest"


def main(argv: Sequence[str] | None = None) -> Json:
    """Run the comparison that the command line selects, print its tables and return its record."""
    parse = parser(__doc__, rounds=7)
    parse.add_argument(
        "--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"], help="precisions to measure"
    )
    parse.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")
    parse.add_argument("--profile", action="store_true", help="also print the time of our step by kind of operation")
    parse.add_argument("--ours", action="store_true", help="leave out Hugging Face's modules")
    parse.add_argument("--packed", action="store_true", help="compare packed with padded rows instead")
    parse.add_argument("--corpus", help="with --packed: folder of a corpus of packed rows")
    parse.add_argument(
        "--padded-corpus", help="with --packed: folder of a corpus of the same text, built with corpus.packing=none"
    )
    parse.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the config; may be repeated"
    )
    arguments = parse.parse_args(argv)
    if bool(arguments.corpus) != bool(arguments.padded_corpus):
        parse.error("only one of --corpus and --padded-corpus is set; set both or neither")
    arguments.threads = 1 if arguments.smoke else arguments.threads  # The toy model is too small for two threads.
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    toy = [*TOY, "model.vocab_size=300", "data.seq_len=32"] if arguments.smoke else []
    config = load_config(REPOSITORY / "configs/small.yaml", [*toy, *arguments.set])
    facts = f"{config.data.seq_len} tokens x {BATCH} rows, {arguments.threads} thread(s)"
    if arguments.packed:
        return report_packing(compare_packing(config, arguments), facts, arguments, argv)
    found, lines, spent = {}, [], {}
    for precision in arguments.precision:
        # Without bf16 products in hardware, a Hugging Face step takes about a minute.
        is_slow = precision == "bf16" and not HAS_BF16_PRODUCTS and not arguments.smoke
        rounds, warm_up = (1, 0) if is_slow else (arguments.rounds, 1)
        found[precision] = compare(config, precision, rounds, warm_up, arguments.ours)
        lines.append(report(found[precision], precision, facts))
        if arguments.profile:
            spent[precision] = profile(config, precision, steps=3)
            rows = [[kind, f"{ms:.1f}"] for kind, ms in spent[precision].items()]
            print_table(["where our step goes", "ms"], rows)
    return finish("step", arguments, argv, lines, threads=arguments.threads, ways=found, profile_ms=spent)


def report(found: Json, precision: str, facts: str) -> ResultLine:
    """Print the table of one precision and return its row for docs/results.md.

    Args:
        found: Result of `compare`.
        precision: "fp32" or "bf16".
        facts: Size of the batch and number of threads, as text.
    """
    bf16_products = "with" if HAS_BF16_PRODUCTS else "without"
    print(f"\n{precision}, {facts}, a CPU {bf16_products} bf16 products")
    rows = []
    for name, way in found.items():
        if name == PRODUCTS:
            continue
        first_mlm, first_rtd = way["losses"][0]
        last_mlm, last_rtd = way["losses"][-1]
        losses = f"{first_mlm:.3f} / {first_rtd:.4f} to {last_mlm:.3f} / {last_rtd:.4f}"
        seconds = format_summary(summary(way["seconds"]), ".3f")
        rows.append([name, seconds, f"{way['tokens_per_s']:,.0f}", format_summary(way["ratio"]), losses])
    ceiling = found[PRODUCTS]
    share = ceiling["share_of_ceiling"]
    rows.append([PRODUCTS, format_summary(summary(ceiling["seconds"]), ".3f"), "", format_summary(share), ""])
    print_table(["", "s a step", "tokens/s", "time / ours", "mlm / rtd, first to last"], rows)
    speed = ceiling["flops"] / summary(ceiling["seconds"])["median"] / 1e9
    print(f"share of the ceiling: {share['median']:.0%} ({ceiling['products']} products at {speed:,.0f} GFLOP/s)")
    value = f"{found['ours']['tokens_per_s']:,.0f} tokens/s"
    what = f"joint step of ELECTRA-Small, {precision}, {facts}"
    of_ceiling = f"{share['median']:.0%} of the speed of its matrix products alone"
    if "Hugging Face" not in found:
        return ResultLine(what, value, of_ceiling)
    published = found["Hugging Face"]["ratio"]["median"]
    gathered = found["Hugging Face, gathered"]["ratio"]["median"]
    times = f"{published:.2f} x Hugging Face as published, {gathered:.2f} x with its head at the masked slots only"
    return ResultLine(what, value, f"{times}; {of_ceiling}")


if __name__ == "__main__":
    main()
