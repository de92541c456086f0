"""Compare the step of the architecture `modern` with that of `bert` and with Hugging Face's ModernBERT, on the CPU.

    python benchmarks/step_modern.py                    # lengths 512 and 2,048, 2 threads, fp32
    python benchmarks/step_modern.py --lengths 8192     # one other length

Guarantee: before anything is timed, our step of `modern` and both steps of Hugging Face's modules compute their losses
without dropout on the same samples. The script exits if these losses differ by more than 1e-4, relative.

How: the discriminators have the shape of ELECTRA-Small, and the generators have a third of its depth. The widths of
the feed-forward networks give layers of both architectures the same number of parameters. A batch has 8,192 tokens,
but at least one row. The steps of all sides take turns in one process. The peak memory of a step is measured in a
process of its own, as the growth of the resident memory above that of the model and the optimizer's state.

Limits: one process, without DeepSpeed and without a loader; each row holds one example.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Sequence

import psutil
import torch
from measure import (
    REPOSITORY,
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
from step import check_agreement
from step_parts.variants import SPECIAL, StepVariant, hugging_face, ours, synthetic_rows, take_step

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.model.parameter_counts import parameter_counts

TOKENS = 8192  # tokens of a batch
OUR_MODERN = "ours"  # name of our step of `modern` among the sides; `check_agreement` expects it
# Feed-forward widths with which a layer of both architectures has the same number of parameters, at hidden size 256.
SIZES = {"bert": 1024, "modern": 680}


def config_of(architecture: str, length: int, smoke: bool) -> Config:
    """Return the config of one side of the comparison.

    Args:
        architecture: "bert" or "modern".
        length: tokens of a row.
        smoke: whether to use a toy model, whose step takes milliseconds.
    """
    width, layers, generator_layers = (32, 3, 1) if smoke else (256, 12, 4)
    intermediate = SIZES[architecture] * width // 256
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


def variants(length: int, smoke: bool) -> dict[str, tuple[Config, Callable[[], StepVariant]]]:
    """Return the four sides of the comparison: name -> (config, function that builds the side).

    Args:
        length: tokens of a row.
        smoke: whether to use toy models.
    """
    bert = config_of("bert", length, smoke)
    modern = config_of("modern", length, smoke)

    def rival(gathered: bool) -> StepVariant:
        """Build Hugging Face's side with the same initial weights as our side.

        Args:
            gathered: whether the generator's head is computed at the masked slots only.
        """
        return hugging_face(modern, ours(modern, SPECIAL).module.towers, gathered=gathered)

    return {
        OUR_MODERN: (modern, lambda: ours(modern, SPECIAL)),
        "our bert": (bert, lambda: ours(bert, SPECIAL)),
        "Hugging Face": (modern, lambda: rival(gathered=False)),
        "Hugging Face, gathered": (modern, lambda: rival(gathered=True)),
    }


def batches_of(config: Config, num_batches: int) -> list[torch.Tensor]:
    """Return `num_batches` batches of synthetic rows, int64 [B, S], with `TOKENS` tokens or one row each."""
    rows = max(1, TOKENS // config.data.seq_len)
    return list(synthetic_rows(config, "none", rows * num_batches, full_share=1.0).split(rows))


def measure_memory(name: str, length: int, smoke: bool) -> int:
    """Take two steps of one side, and return the peak of resident memory above the memory between them, in bytes.

    The first step creates the optimizer's state. The kernel counts the peak since the start of the process, so measure
    only one side in a process.

    Args:
        name: name of the side.
        length: tokens of a row.
        smoke: whether to use a toy model.
    """
    config, build = variants(length, smoke)[name]
    side = build()
    first, second = batches_of(config, 2)
    take_step(side, first[:1, :64], 0, "fp32", config.optimizer.clip_norm)  # one short row, whose peak is lower
    before = psutil.Process().memory_info().rss
    take_step(side, second, 1, "fp32", config.optimizer.clip_norm)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def memory_of_process(name: str, length: int, smoke: bool, threads: int) -> int:
    """Return the result of `measure_memory` in a new process with `threads` threads of torch."""
    command = [sys.executable, __file__, "--memory-of", name, "--lengths", str(length), "--threads", str(threads)]
    command += ["--smoke"] if smoke else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.splitlines()[-1])


def compare(length: int, rounds: int, smoke: bool, threads: int) -> Json:
    """Time the steps of all sides in turn at one length, and measure the memory of each in a process of its own.

    Args:
        length: tokens of a row.
        rounds: number of timed steps of each side.
        smoke: whether to use toy models.
        threads: threads of torch, for the processes that measure memory.

    Returns:
        Name of the side -> seconds of each step, tokens per second, time relative to our modern step, peak memory in
        bytes (None in a smoke run, except for our modern step), number of parameters, and losses without dropout.
    """
    sides = variants(length, smoke)
    built = {name: build() for name, (_, build) in sides.items()}
    modern_config = sides[OUR_MODERN][0]
    batches = batches_of(modern_config, rounds + 1)
    same_model = {name: side for name, side in built.items() if name != "our bert"}
    losses = check_agreement(modern_config, same_model, batches[0], "fp32")
    steps_taken = dict.fromkeys(built, 0)

    def next_step(name: str) -> Callable[[], None]:
        """Return a function that takes the next step of the side `name`, with the next batch."""

        def step() -> None:
            """Take the step, and count it."""
            number = steps_taken[name]
            take_step(built[name], batches[number], number, "fp32", modern_config.optimizer.clip_norm)
            steps_taken[name] += 1

        return step

    seconds = alternate({name: next_step(name) for name in built}, rounds)
    found = {}
    for name, (config, _) in sides.items():
        measures_memory = not smoke or name == OUR_MODERN  # Each measurement imports torch, which takes seconds.
        found[name] = {
            "seconds": seconds[name],
            "tokens_per_s": batches[0].numel() / summary(seconds[name])["median"],
            "ratio": ratio(seconds[name], seconds[OUR_MODERN]),
            "extra_peak_bytes": memory_of_process(name, length, smoke, threads) if measures_memory else None,
            "parameters": parameter_counts(config.model).total,
            "losses_without_dropout": losses.get(name),
        }
    return found


def report(found: Json, length: int, threads: int) -> ResultLine:
    """Print the table of one length, and return its row for docs/results.md.

    Args:
        found: result of `compare`.
        length: tokens of a row.
        threads: threads of torch.
    """
    print(f"\nfp32, rows of {length:,} tokens, {threads} thread(s)")
    rows = []
    for name, side in found.items():
        label = "our modern" if name == OUR_MODERN else name
        seconds = format_summary(summary(side["seconds"]), ".3f")
        memory = "-" if side["extra_peak_bytes"] is None else f"{side['extra_peak_bytes'] / 1e9:.2f}"
        parameters = f"{side['parameters'] / 1e6:.2f} M"
        rows.append(
            [label, parameters, seconds, f"{side['tokens_per_s']:,.0f}", format_summary(side["ratio"]), memory]
        )
    print_table(["", "parameters", "s a step", "tokens/s", "time / our modern", "peak GB"], rows)
    times = ", ".join(f"{found[name]['ratio']['median']:.2f} x {name}" for name in found if name != OUR_MODERN)
    return ResultLine(
        f"joint step of the architecture `modern`, fp32, length {length:,}",
        f"{found[OUR_MODERN]['tokens_per_s']:,.0f} tokens/s",
        f"{times} (time of the other step by ours)",
    )


def main(argv: Sequence[str] | None = None) -> Json:
    """Compare the steps at every length, print the tables, and return the record; {} with --memory-of.

    Args:
        argv: command-line arguments; None means those of this process.
    """
    parse = parser(__doc__, rounds=5)
    parse.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="lengths of a row in tokens")
    parse.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")
    parse.add_argument("--memory-of", help="print the peak memory of one side in bytes and nothing else")
    arguments = parse.parse_args(argv)
    threads = 1 if arguments.smoke else arguments.threads
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if arguments.memory_of:
        print(measure_memory(arguments.memory_of, arguments.lengths[0], arguments.smoke))
        return {}
    lengths = [160] if arguments.smoke else arguments.lengths  # longer than a window of 128 tokens
    found = {str(length): compare(length, arguments.rounds, arguments.smoke, threads) for length in lengths}
    lines = [report(found[str(length)], length, threads) for length in lengths]
    return finish("step_modern", arguments, argv, lines, threads=threads, lengths=found)


if __name__ == "__main__":
    main()
