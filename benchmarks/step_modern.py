"""How fast is the step of the architecture `modern`, beside that of `bert` and Hugging Face's ModernBERT, on the CPU?

    python benchmarks/run.py step_modern                    # lengths 512 and 2,048, 2 threads, fp32
    python benchmarks/run.py step_modern --lengths 8192     # one other length

Guarantee: before anything is timed, our step of `modern` and both steps of Hugging Face's modules compute their losses
without dropout on the same samples. The benchmark ends if these losses differ by more than 1e-4, relative.

How: the discriminators have the shape of ELECTRA-Small, and the generators have a third of its depth. The widths of
the feed-forward networks give layers of both architectures the same number of parameters. A batch has 8,192 tokens,
but at least one row. The peak memory of a step is measured in a process of its own, as the growth of the resident
memory above that of the model and the optimizer's state.

Limits: one process, without DeepSpeed and without a loader; each row holds one example.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import psutil
import torch
from measure import (
    REPOSITORY,
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
from step_ways import Way, check_agreement, hugging_face, ours, stepper, synthetic_rows, take_step

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.model.counts import parameter_counts

ROUNDS = 5
TOKENS = 8192  # tokens of a batch
# Feed-forward widths with which a layer of both architectures has the same number of parameters, at hidden size 256.
WIDE = {"bert": 1024, "modern": 680}
Sides = dict[str, tuple[Config, Callable[[], Way]]]  # name -> (config, function that builds the side)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="lengths of a row in tokens")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")


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


def compare(length: int, rounds: int, smoke: bool, threads: int) -> Json:
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
        peak = in_new_process("step_modern", "peak_of_step", name, length, smoke, threads) if measures_memory else None
        found[name] = {
            "seconds": seconds[name],
            "tokens_per_s": batches[0].numel() / summary(seconds[name])["median"],
            "ratio": ratio(seconds[name], seconds["ours"]),
            "extra_peak_bytes": peak,
            "parameters": parameter_counts(side_config.model).total,
            "losses_without_dropout": losses.get(name),
        }
    return found


def report(found: Json, length: int, threads: int) -> ResultLine:
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


def measure(arguments: argparse.Namespace) -> Found:
    """Compare the steps at every length."""
    threads = 1 if arguments.smoke else arguments.threads
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    lengths = [160] if arguments.smoke else arguments.lengths  # longer than a window of 128 tokens
    found = {str(length): compare(length, arguments.rounds, arguments.smoke, threads) for length in lengths}
    lines = [report(found[str(length)], length, threads) for length in lengths]
    return Found(lines, {"threads": threads, "lengths": found})
