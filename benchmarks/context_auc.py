"""Train small discriminators with several settings of the sampling temperature, and compare their context AUC.

    electra-dist corpus build --input DIR --output corpora/tiny --config configs/tiny_rtd.yaml
    python benchmarks/context_auc.py --corpus corpora/tiny --save --picture docs/context_auc.png    # two settings
    python benchmarks/context_auc.py --corpus corpora/tiny --search --seeds 11 --save               # many settings
    python benchmarks/context_auc.py --corpus corpora/tiny --search --only modern --save    # one, three seeds

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
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from measure import REPOSITORY, TOY, Json, ResultLine, finish, parser, print_table

from electra_dist.config_file import load_config
from electra_dist.errors import EXIT_USER_ERROR
from electra_dist.model.flops import run_flops
from electra_dist.report.curves import print_style
from electra_dist.run.metrics import iter_evaluations

CONFIG = REPOSITORY / "configs" / "tiny_rtd.yaml"
RISEN = 0.55  # a context AUC eight standard errors above 0.5, that of word frequency alone
COLORS = ("#2563eb", "#ea580c", "#15803d", "#7c3aed", "#b91c1c", "#0891b2", "#a16207", "#db2777")

# Name -> settings that differ from configs/tiny_rtd.yaml, whose temperature falls from 4 to 1 with tau 0.15.
ARMS: dict[str, list[str]] = {"curriculum": [], "t1": ["objective.temperature=1.0"]}
LABELS = {"curriculum": "temperature falls from 4 to 1", "t1": "temperature 1, as in the paper"}  # in the picture


def _settings_of_modern() -> list[str]:
    """Read the settings of ModernBERT's layers from configs/compare_tiny_modern.yaml, in the form of `--set`."""
    comparison = yaml.safe_load((REPOSITORY / "configs" / "compare_tiny_modern.yaml").read_text())
    [modern] = [entry["set"] for entry in comparison["objectives"] if entry["name"] == "modern"]
    return [f"{key}={json.dumps(value)}" for key, value in modern.items()]


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
    "lr05": ["optimizer.lr=5.0e-4"],
    "lr2": ["optimizer.lr=2.0e-3"],
    "own_tables": ["model.sharing=none"],
    "modern": _settings_of_modern(),
    "modern_t1": [*_settings_of_modern(), "objective.temperature=1.0"],
}


def settings(arguments: argparse.Namespace, arm: str, changes: Sequence[str], seed: int) -> list[str]:
    """Return the settings of a run, in the form of `--set`, which are added to configs/tiny_rtd.yaml.

    Args:
        arguments: the command line.
        arm: name of the setting that is compared; the run's folder is ARM-SEED.
        changes: what this setting changes, in the form of `--set`.
        seed: seed of the run.
    """
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
    toy = [*TOY, "model.vocab_size=4096"] if arguments.smoke else []  # the vocabulary of the demo's corpus
    return [f"{key}={value}" for key, value in common.items()] + toy + [*changes]


def train(given: Sequence[str], log: Path) -> bool:
    """Make a run on one core, or finish it if an earlier call began it; its output is appended to `log`.

    Returns:
        Whether the run reached its last step: False if its loss diverged, so that the guard ended it.

    Raises:
        SystemExit: the run ended with another error; the message names the log.
    """
    command = [sys.executable, "launcher/pretrain.py", "--config", str(CONFIG)]
    command += [word for setting in given for word in ("--set", setting)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("a") as output:
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT)
    # Other errors have the same exit code, but another message.
    last_line = log.read_text().rstrip().rpartition("\n")[2]
    diverged = done.returncode == EXIT_USER_ERROR and " diverges: " in last_line
    if done.returncode and not diverged:
        sys.exit(f"error: a run ended with exit code {done.returncode}; read {log}, correct it and start again")
    return not diverged


def read_curve(given: Sequence[str]) -> Json:
    """Return the evaluations of a finished run as lists of equal length: tokens, FLOPs, context AUC, generator's loss.

    Args:
        given: the settings of the run, in the form of `--set`.
    """
    config = load_config(CONFIG, given)
    evaluations = list(iter_evaluations(Path(config.run_dir)))
    return {
        "tokens": [record.step * config.train.global_batch * config.data.seq_len for record in evaluations],
        "flops": [run_flops(config, record.step) for record in evaluations],
        "context_auc": [record.context_auc for record in evaluations],
        "standard_error": [record.context_auc_se for record in evaluations],
        "mlm_loss": [record.mlm_loss for record in evaluations],
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
    """Train the runs that are missing, print the table, and return the record of the comparison."""
    options = parser(__doc__)
    options.add_argument("--corpus", type=Path, required=True, help="corpus built with configs/tiny_rtd.yaml")
    options.add_argument("--output", type=Path, default=Path("runs/context_auc"), help="folder of the runs")
    options.add_argument("--seeds", default="1,2,3", help="seeds, separated by commas (default: %(default)s)")
    options.add_argument("--steps", type=int, default=2600, help="steps of each run (default: %(default)s)")
    options.add_argument("--search", action="store_true", help="compare the settings of SEARCH instead of ARMS")
    options.add_argument("--only", help="some of these settings, separated by commas (default: all)")
    options.add_argument("--parallel", type=int, default=2, help="runs at the same time (default: %(default)s)")
    options.add_argument("--picture", type=Path, help="PNG file for the curves")
    arguments = options.parse_args(argv)
    arguments.corpus, arguments.output = arguments.corpus.resolve(), arguments.output.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    arms = SEARCH if arguments.search else ARMS
    if arguments.only:
        names = arguments.only.split(",")
        if unknown := [name for name in names if name not in arms]:
            sys.exit(f"error: --only names unknown settings {', '.join(unknown)}; there are {', '.join(arms)}")
        arms = {name: arms[name] for name in names}
    seeds = [int(seed) for seed in arguments.seeds.split(",")]

    given = {(arm, seed): settings(arguments, arm, arms[arm], seed) for seed in seeds for arm in arms}
    with ThreadPoolExecutor(arguments.parallel) as pool:
        logs = [arguments.output / f"{arm}-{seed}.log" for arm, seed in given]
        finished = list(pool.map(train, given.values(), logs))

    curves: dict[str, dict[str, Json]] = {arm: {} for arm in arms}
    for ((arm, seed), run_settings), reached in zip(given.items(), finished, strict=True):
        curves[arm][str(seed)] = read_curve(run_settings) | {"diverged": not reached}
    rows = [table_row(arm, list(by_seed.values())) for arm, by_seed in curves.items()]
    print_table(["setting", "context AUC", "by seed", "MLM loss", "PFLOP", "PFLOP until it rises"], rows)
    if arguments.picture:
        draw(curves, arguments.picture)
    what = f"context AUC after {arguments.steps:,} steps of configs/tiny_rtd.yaml"
    lines = [_line(what, rows)] if arms == ARMS else []
    name = "context_auc" + ("-search" if arguments.search else "") + (f"-{'-'.join(arms)}" if arguments.only else "")
    return finish(name, arguments, argv, lines, settings=arms, curves=curves)


def table_row(arm: str, curves: Sequence[Json]) -> list[str]:
    """Return the cells of a setting in the printed table.

    They are the setting's name, the mean context AUC at the end, that of each seed, and three more means over the
    seeds: the generator's loss at the end, the training FLOPs (10^15), and those at the first evaluation with a
    context AUC above RISEN. The means leave out seeds whose loss diverged, and "-" stands for a mean over no seed.

    Args:
        arm: name of the setting.
        curves: a curve for each seed, as `read_curve` returns it, with `diverged`.
    """
    finished = [curve for curve in curves if not curve["diverged"]]
    aucs = [curve["context_auc"][-1] for curve in finished]
    losses = [curve["mlm_loss"][-1] for curve in finished]
    petaflops = [curve["flops"][-1] / 1e15 for curve in finished]
    petaflops_until_risen = []
    for curve in finished:
        risen = [flops for flops, auc in zip(curve["flops"], curve["context_auc"], strict=True) if auc > RISEN]
        petaflops_until_risen += [flops / 1e15 for flops in risen[:1]]  # none if the context AUC stays below RISEN
    each = " ".join("diverged" if curve["diverged"] else f"{curve['context_auc'][-1]:.3f}" for curve in curves)
    return [arm, _mean(aucs), each, _mean(losses), _mean(petaflops), _mean(petaflops_until_risen)]


def _mean(values: Sequence[float]) -> str:
    """Return the mean as a cell of the table, "-" if there are no values."""
    return f"{statistics.mean(values):.3f}" if values else "-"


def _line(what: str, rows: Sequence[Sequence[str]]) -> ResultLine:
    """Return the row of docs/results.md: the mean with the falling temperature, and that at temperature 1."""
    (_, falling, each, *_), (_, constant, *_) = rows
    return ResultLine(what, f"{falling} (by seed {each})", f"{constant} at temperature 1")


if __name__ == "__main__":
    main()
