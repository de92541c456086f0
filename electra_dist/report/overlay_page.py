"""Write one page that compares several runs: their figures, their curves laid over each other, their configs.

Guarantee: like report.html, the page is self-contained, written atomically, and made from files of the run folders
alone.

Limits: at most eight runs, which have a color each. Curves are over optimizer steps, whatever the size of a step is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from electra_dist.config.keys import flattened
from electra_dist.errors import UserError
from electra_dist.escapes import printable
from electra_dist.report.curve_points import RunCurves
from electra_dist.report.pages import NONE, decimals, draw_diagrams, percent, render, write_page
from electra_dist.report.plot_style import MAX_RUNS
from electra_dist.report.report_page import learning_verdict
from electra_dist.report.run_record import RunRecord, read_run
from electra_dist.report.run_tiles import mean
from electra_dist.run.metrics import numbers_of
from electra_dist.run.number_formats import format_count, format_duration

OVERLAY_FILE = "runs_report.html"  # default name, in the current folder


def write_overlay(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write one HTML page that compares one to eight runs, which may still be going on, and return its path.

    Raises UserError if there are more runs, a folder is not a run, a file is damaged, or the page cannot be written.
    """
    if len(run_dirs) > MAX_RUNS:
        raise UserError(f"report: {len(run_dirs)} runs, but one page shows at most {MAX_RUNS}; name fewer runs")
    names = [printable(name) for name in unique_names(run_dirs)]
    write_page(path, overlay_page([read_run(Path(run_dir)) for run_dir in run_dirs], names))
    return path


def unique_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a name for each run: as many last parts of the folders' paths as make all names distinct.

    If a folder is given twice, the paths are returned as they were given.
    """
    names = shortest_endings([Path(run_dir).resolve().parts for run_dir in run_dirs])
    return names if len(set(names)) == len(names) else [str(run_dir) for run_dir in run_dirs]


def shortest_endings(all_parts: Sequence[Sequence[str]]) -> list[str]:
    """Return for each path, given as its parts, as few last parts as make all results distinct, joined by "/".

    All results have equally many parts. If two paths are equal, the whole paths are returned.
    """
    longest = max(len(parts) for parts in all_parts)
    names: list[str] = []
    for num_parts in range(1, longest + 1):
        names = ["/".join(parts[-num_parts:]) for parts in all_parts]
        if len(set(names)) == len(names):
            break
    return names


def overlay_page(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Return a page that compares runs, as HTML text, without writing it."""
    run_curves = [RunCurves(name=name, columns=run.metrics.columns) for run, name in zip(runs, names, strict=True)]
    return render(
        "overlay.html",
        names=list(names),
        verdicts=[(name, learning_verdict(run)) for run, name in zip(runs, names, strict=True)],
        figures=_figures(runs),
        diagrams=draw_diagrams(run_curves),
        differences=_differences(runs),
    )


def _figures(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return a table row for each figure that any run has, such as a loss: its name, then its value in each run."""
    columns = [_figures_of(run) for run in runs]
    rows = []
    for figure in columns[0]:
        values = [column[figure] for column in columns]
        if any(value != NONE for value in values):
            rows.append([figure, *values])
    return rows


def _figures_of(run: RunRecord) -> dict[str, str]:
    """Return name -> value of a run's figures, as text; the value is a dash if the run did not record it.

    Losses and accuracies in training are means over the newest 20 records; throughput is a median over all records.
    """
    metrics = run.metrics
    held_out = numbers_of(metrics.evals[-1]) if metrics.evals else {}
    recent = metrics.recent
    tokens_per_s = metrics.median("tokens_per_s")
    corpus = run.environment.get("corpus")
    commit = run.environment.get("commit")
    return {
        "state": run.state()[1],
        "context AUC, held out": decimals(held_out.get("context_auc")),
        "ROC-AUC, held out": decimals(held_out.get("auc")),
        "RTD loss, held out": decimals(held_out.get("rtd_loss")),
        "token loss, held out": decimals(held_out.get("token_loss")),
        "MLM loss, held out": decimals(held_out.get("mlm_loss")),
        "RTD loss, training": decimals(mean(recent, "rtd_loss")) if recent else NONE,
        "token loss, training": decimals(mean(recent, "token_loss")) if recent else NONE,
        "MLM loss, training": decimals(mean(recent, "mlm_loss")) if recent else NONE,
        "replaced tokens found": percent(mean(recent, "replaced_accuracy")) if recent else NONE,
        "tokens seen": format_count(metrics.newest.tokens_seen) if metrics.newest else NONE,
        "tokens per second": format_count(tokens_per_s) if tokens_per_s is not None else NONE,
        "wall clock": format_duration(run.account.wall) if run.ledger else NONE,
        "goodput": percent(run.account.fraction) if run.account.fraction is not None else NONE,
        "energy of the GPUs, estimate": f"{run.energy.kwh:,.3f} kWh" if run.energy else NONE,
        "discriminator": format_count(run.parameters.discriminator) if run.parameters else NONE,
        "generator, not shared": format_count(run.parameters.generator_only) if run.parameters else NONE,
        "corpus tokens": format_count(corpus["tokens"]) if corpus else NONE,
        "corpus fingerprint": run.corpus_fingerprint[:12] or NONE,
        "commit": commit["sha"][:12] if commit else NONE,
    }


def _differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return a row for each config key whose values differ between the runs: the key, then its value in each run."""
    trees = [flattened(run.config_tree) for run in runs]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    rows = []
    for key in keys:
        values = [str(tree.get(key, NONE)) for tree in trees]
        if key != "run_dir" and len(set(values)) > 1:
            rows.append([key, *values])
    return rows
