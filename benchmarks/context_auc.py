"""Train small discriminators with several settings of the sampling temperature, and compare their context AUC.

    electra-dist corpus build --input DIR --output corpora/tiny --config configs/tiny_rtd.yaml
    python benchmarks/context_auc.py --corpus corpora/tiny --save --picture docs/context_auc.png    # two settings
    python benchmarks/context_auc.py --corpus corpora/tiny --search --seeds 11 --save               # many settings

Each run is configs/tiny_rtd.yaml with fewer steps (2,600 steps of 2,048 tokens: 13 minutes of one core with bf16
instructions) and one setting of ARMS, or of SEARCH. Settings are searched with seeds that the comparison of the first
command does not use. The context AUC is the share of pairs of a real and a foreign token of the same kind of text that
the discriminator orders rightly; the frequency of words alone gives 0.5 (`electra_dist/analysis/context_auc.py`).

Guarantee: an interrupted call continues where it stopped, as every run does; finished runs are only read. The runs of
a seed read the same rows. The table states the FLOPs of each run, because a mask rate or a generator changes them.

Limits: the schedules end with the run, so a longer run is another experiment, not a continuation of this one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from measure import REPOSITORY, TOY, Json, ResultLine, finish, parser, print_table

from electra_dist.config_file import load_config
from electra_dist.model.flops import run_flops
from electra_dist.report.curves import print_style
from electra_dist.run.writers.metrics_writer import read_metrics

CONFIG = REPOSITORY / "configs" / "tiny_rtd.yaml"
COLORS = ("#2563eb", "#ea580c", "#15803d", "#7c3aed", "#b91c1c", "#0891b2", "#a16207", "#db2777")

# Name -> settings that differ from configs/tiny_rtd.yaml, whose temperature falls from 4 to 1 with tau 0.15.
ARMS: dict[str, list[str]] = {"curriculum": [], "t1": ["objective.temperature=1.0"]}
LABELS = {"curriculum": "temperature falls from 4 to 1", "t1": "temperature 1, as in the paper"}  # in the picture
SEARCH: dict[str, list[str]] = {
    "base": [],
    "tau08": ["objective.temperature={from: 4, to: 1, shape: exponential, tau: 0.08}"],
    "tau30": ["objective.temperature={from: 4, to: 1, shape: exponential, tau: 0.3}"],
    "from8": ["objective.temperature={from: 8, to: 1, shape: exponential, tau: 0.15}"],
    "linear50": ["objective.temperature={from: 4, to: 1, shape: linear, over: 0.5}"],
    "to15": ["objective.temperature={from: 4, to: 1.5, shape: exponential, tau: 0.15}"],
    "uniform": [
        "objective.random_share={from: 1, to: 0, shape: linear, over: 0.3}",
        "objective.temperature={from: 1.5, to: 1, shape: exponential, tau: 0.3}",
    ],
    "mask30": ["objective.mask_prob=0.3"],
    "gen128": ["model.generator={hidden_size: 128, num_layers: 4, num_heads: 2, intermediate_size: 512}"],
    "genlr05": ["optimizer.generator={lr: 5.0e-4}"],
    "genlr2": ["optimizer.generator={lr: 2.0e-3}"],
    "lr2": ["optimizer.lr=2.0e-3"],
    "own_tables": ["model.sharing=none"],
}


def settings(arguments: argparse.Namespace, arm: str, seed: int) -> list[str]:
    """Return the settings of a run, in the form of `--set`, which are added to configs/tiny_rtd.yaml."""
    steps = arguments.steps
    common = {
        "run_dir": arguments.output / f"{arm}-{seed}",
        "data.corpus": arguments.corpus,
        "data.heldout": arguments.corpus / "heldout",
        "seed": seed,
        "train.num_steps": steps,
        "optimizer.warmup_steps": steps // 20,
        "train.micro_batch": 32,
        "log.eval_every_steps": max(1, steps // 13),
        "log.every_steps": max(1, steps // 130),
    }
    arms = SEARCH if arguments.search else ARMS
    toy = [*TOY, "model.vocab_size=4096"] if arguments.smoke else []  # the vocabulary of the demo's corpus
    return [f"{key}={value}" for key, value in common.items()] + toy + arms[arm]


def train(given: Sequence[str], log: Path) -> None:
    """Make a run on one core, or finish it if an earlier call began it; its output is appended to `log`.

    Raises:
        SystemExit: the run ended with an error; the message names the log.
    """
    command = [sys.executable, "launcher/pretrain.py", "--config", str(CONFIG)]
    command += [word for setting in given for word in ("--set", setting)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("a") as output:
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"error: a run ended with exit code {done.returncode}; read {log}, correct it and start again")


def read_curve(given: Sequence[str]) -> Json:
    """Return the evaluations of a finished run as lists of equal length: tokens, FLOPs, context AUC, generator's loss.

    Args:
        given: the settings of the run, in the form of `--set`.
    """
    config = load_config(CONFIG, given)
    evaluations = [record for record in read_metrics(Path(config.run_dir)) if record["kind"] == "eval"]
    return {
        "tokens": [record["step"] * config.train.global_batch * config.data.seq_len for record in evaluations],
        "flops": [run_flops(config, record["step"]) for record in evaluations],
        "context_auc": [record["context_auc"] for record in evaluations],
        "standard_error": [record["context_auc_se"] for record in evaluations],
        "mlm_loss": [record["mlm_loss"] for record in evaluations],
    }


def draw(curves: Mapping[str, Mapping[str, Json]], path: Path) -> None:
    """Draw the context AUC over the tokens read and write the picture as a PNG: a line per run, a color per setting.

    Args:
        curves: setting -> seed -> curve, as `read_curve` returns it.
        path: the PNG file, which is replaced.
    """
    with matplotlib.rc_context(print_style()):
        figure = Figure(figsize=(7.0, 3.6), layout="constrained", facecolor="white", dpi=150)
        axes = figure.add_subplot()
        for (name, by_seed), color in zip(curves.items(), COLORS * len(curves)):
            for number, curve in enumerate(by_seed.values()):
                millions = [tokens / 1e6 for tokens in curve["tokens"]]
                label = None if number else f"{LABELS.get(name, name)} ({len(by_seed)} seeds)"
                axes.plot(millions, curve["context_auc"], color=color, linewidth=1.6, label=label)
        axes.axhline(0.5, color="#6b7280", linestyle="--", linewidth=1.0, label="word frequency alone")
        axes.set_title("Context AUC on held-out rows", loc="left")
        axes.set_xlabel("million tokens")
        axes.legend(loc="upper left")
        FigureCanvasAgg(figure).print_png(str(path))


def main(argv: Sequence[str] | None = None) -> Json:
    """Make the missing runs, print the table and return the record of the comparison."""
    options = parser(__doc__)
    options.add_argument("--corpus", type=Path, required=True, help="corpus built with configs/tiny_rtd.yaml")
    options.add_argument("--output", type=Path, default=Path("runs/context_auc"), help="folder of the runs")
    options.add_argument("--seeds", default="1,2,3", help="seeds, separated by commas (default: %(default)s)")
    options.add_argument("--steps", type=int, default=2600, help="steps of each run (default: %(default)s)")
    options.add_argument("--search", action="store_true", help="compare the settings of SEARCH instead of ARMS")
    options.add_argument("--parallel", type=int, default=2, help="runs at the same time (default: %(default)s)")
    options.add_argument("--picture", type=Path, help="PNG file for the curves")
    arguments = options.parse_args(argv)
    arguments.corpus, arguments.output = arguments.corpus.resolve(), arguments.output.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    arms = SEARCH if arguments.search else ARMS
    seeds = [int(seed) for seed in arguments.seeds.split(",")]

    given = {(arm, seed): settings(arguments, arm, seed) for seed in seeds for arm in arms}
    with ThreadPoolExecutor(arguments.parallel) as pool:
        logs = [arguments.output / f"{arm}-{seed}.log" for arm, seed in given]
        list(pool.map(train, given.values(), logs))

    curves: dict[str, dict[str, Json]] = {arm: {} for arm in arms}
    for (arm, seed), run_settings in given.items():
        curves[arm][str(seed)] = read_curve(run_settings)
    rows = []
    for arm, by_seed in curves.items():
        ends = [curve["context_auc"][-1] for curve in by_seed.values()]
        losses = [curve["mlm_loss"][-1] for curve in by_seed.values()]
        petaflops = next(iter(by_seed.values()))["flops"][-1] / 1e15
        each = " ".join(f"{end:.3f}" for end in ends)
        rows.append([arm, f"{statistics.mean(ends):.3f}", each, f"{statistics.mean(losses):.3f}", f"{petaflops:.3f}"])
    print_table(["setting", "context AUC", "by seed", "MLM loss", "PFLOP"], rows)
    if arguments.picture:
        draw(curves, arguments.picture)
    what = f"context AUC after {arguments.steps:,} steps of configs/tiny_rtd.yaml"
    lines = [] if arguments.search else [_line(what, rows)]
    name = "context_auc-search" if arguments.search else "context_auc"
    return finish(name, arguments, argv, lines, settings=arms, curves=curves)


def _line(what: str, rows: Sequence[Sequence[str]]) -> ResultLine:
    """Return the row of docs/results.md: the mean with the falling temperature, and that at temperature 1."""
    (_, falling, each, *_), (_, constant, *_) = rows
    return ResultLine(what, f"{falling} (by seed {each})", f"{constant} at temperature 1")


if __name__ == "__main__":
    main()
