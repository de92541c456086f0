"""The joint training step on the CPU: ours against Hugging Face's modules doing the same work, in turn in one process.

    python benchmarks/step.py                  # configs/small.yaml at length 128, 16 rows, 2 threads, fp32 and bf16
    python benchmarks/step.py --profile        # besides: where our time goes, by kind of operation
    python benchmarks/step.py --packed         # packed rows against one example a row, in real tokens a second
    python benchmarks/step.py --packed --corpus A --padded-corpus B     # the same on two corpora of one text

A step is masks, generator, sample, discriminator, backward of both losses, clipping and AdamW, with the dropout of the
config. Before anything is timed both sides compute their losses without dropout on the same samples; they must agree
(fp32 to 1e-4 relative). bf16 is autocast over fp32 parameters on both sides. `step_rival.py` says what the rivals do.

Where it stops: no DeepSpeed, no loader; one process.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from measure import REPOSITORY, TOY, Json, ResultLine, alternate, finish, parser, print_table, ratio, summary, told
from step_parts.packed import compare_packing, report_packing
from step_parts.ways import BATCH, SPECIAL, StepVariant, autocast, hugging_face, ours, synthetic_rows, take_step

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.model.linear import HAS_BF16_PRODUCTS
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.corruption import CorruptingObjective

AGREEMENT = {"fp32": 1e-4, "bf16": 3e-2}  # relative difference of the losses
KINDS = {  # of operations, by a word in torch's name for it; the first that fits
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
    """Losses of every way without dropout, the samples being ours; ends the program if they differ."""
    objective: CorruptingObjective = ways["ours"].module  # type: ignore[assignment]
    given = StepInput(ids_BS, torch.arange(len(ids_BS)), 0, config.seed, 1.0, 1.0)  # no loss is taken of it
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
                sys.exit(f"{precision}: {kind} loss of {name} {value}, ours {found['ours'][kind]}: not the same work")
    return found


def compare(config: Config, precision: str, rounds: int, warm_up: int) -> Json:
    """Steps of every way in turn, on full rows of one example."""
    batches = synthetic_rows(config, "none", BATCH * (rounds + warm_up), full_share=1.0).split(BATCH)
    mine = ours(config, SPECIAL)
    ways = {
        "ours": mine,
        "Hugging Face": hugging_face(config, mine.module.towers, gathered=False),
        "Hugging Face, gathered": hugging_face(config, mine.module.towers, gathered=True),
    }
    agreed = check_agreement(config, ways, batches[0], precision)
    losses: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}

    def run(name: str) -> Callable[[], None]:
        def once() -> None:
            number = len(losses[name])
            losses[name].append(take_step(ways[name], batches[number], number, precision, config.optimizer.clip_norm))

        return once

    seconds = alternate({name: run(name) for name in ways}, rounds, warm_up)
    num_tokens = batches[0].numel()
    return {
        name: {
            "seconds": seconds[name],
            "tokens_per_s": num_tokens / summary(seconds[name])["median"],
            "ratio": ratio(seconds[name], seconds["ours"]),
            "losses_without_dropout": agreed[name],
            "losses": losses[name],
        }
        for name in ways
    }


def profile(config: Config, precision: str, steps: int) -> dict[str, float]:
    """Milliseconds of a step of ours by kind of operation."""
    way = ours(config, SPECIAL)
    ids_BS = synthetic_rows(config, "none", BATCH, full_share=1.0)
    take_step(way, ids_BS, 0, precision, config.optimizer.clip_norm)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for number in range(steps):
            take_step(way, ids_BS, number, precision, config.optimizer.clip_norm)
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        name = event.key.removeprefix("aten::")
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "the rest")
        spent[kind] += event.self_cpu_time_total / 1e3 / steps
    return dict(spent.most_common())


def main(argv: Sequence[str] | None = None) -> Json:
    parse = parser(__doc__, rounds=7)
    parse.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parse.add_argument("--threads", type=int, default=2)
    parse.add_argument("--profile", action="store_true", help="also print where our time goes")
    parse.add_argument("--packed", action="store_true", help="compare packed with padded rows instead")
    parse.add_argument("--corpus", help="packed rows: a local corpus")
    parse.add_argument("--padded-corpus", help="of the same text, built with corpus.packing=none")
    parse.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config, may repeat")
    arguments = parse.parse_args(argv)
    if bool(arguments.corpus) != bool(arguments.padded_corpus):
        parse.error("--corpus and --padded-corpus go together")
    arguments.threads = 1 if arguments.smoke else arguments.threads  # a toy has nothing to share
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    toy = [*TOY, "model.vocab_size=300", "data.seq_len=32"] if arguments.smoke else []
    config = load_config(REPOSITORY / "configs/small.yaml", [*toy, *arguments.set])
    facts = f"{config.data.seq_len} tokens x {BATCH} rows, {arguments.threads} thread(s)"
    if arguments.packed:
        return report_packing(compare_packing(config, arguments), facts, arguments, argv)
    found, lines, spent = {}, [], {}
    for precision in arguments.precision:
        slow = precision == "bf16" and not HAS_BF16_PRODUCTS  # the rivals' steps take a minute each
        rounds, warm_up = (1, 0) if slow and not arguments.smoke else (arguments.rounds, 1)
        found[precision] = compare(config, precision, rounds, warm_up)
        lines.append(report(found[precision], precision, facts))
        if arguments.profile:
            spent[precision] = profile(config, precision, steps=3)
            rows = [[kind, f"{ms:.1f}"] for kind, ms in spent[precision].items()]
            print_table(["where our step goes", "ms"], rows)
    return finish("step", arguments, argv, lines, threads=arguments.threads, ways=found, profile_ms=spent)


def report(found: Json, precision: str, facts: str) -> ResultLine:
    """Print one precision's table; its line in docs/results.md."""
    print(f"\n{precision}, {facts}")
    rows = []
    for name, way in found.items():
        begin, end = way["losses"][0], way["losses"][-1]
        losses = f"{begin[0]:.3f} / {begin[1]:.4f} to {end[0]:.3f} / {end[1]:.4f}"
        seconds = told(summary(way["seconds"]), ".3f")
        rows.append([name, seconds, f"{way['tokens_per_s']:,.0f}", told(way["ratio"]), losses])
    print_table(["", "s a step", "tokens/s", "time / ours", "mlm / rtd, first to last"], rows)
    rivals = [way["ratio"]["median"] for name, way in found.items() if name != "ours"]
    value = f"{found['ours']['tokens_per_s']:,.0f} tokens/s"
    times = f"{rivals[0]:.2f} x Hugging Face as published, {rivals[1]:.2f} x with its head at the masked slots only"
    return ResultLine(f"joint step of ELECTRA-Small, {precision}, {facts}", value, times)


if __name__ == "__main__":
    main()
