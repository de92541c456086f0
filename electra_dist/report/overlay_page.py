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
from electra_dist.report.pages import NONE, draw_diagrams, render, write_page
from electra_dist.report.plot_style import MAX_RUNS
from electra_dist.report.report_page import learning_verdict
from electra_dist.report.run_record import RunRecord, read_run
from electra_dist.report.run_tiles import run_figures
from electra_dist.run.number_formats import format_count

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
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, NONE) for column in columns)] for name in names]


def _figures_of(run: RunRecord) -> dict[str, str]:
    """Return a run's figures by name: its state, those of its own report, and what text and code it is made of."""
    figures = {"State": run.state()[1], **{name: value for name, value, _ in run_figures(run)}}
    if run.parameters is not None:
        figures["Generator, not shared"] = format_count(run.parameters.generator_only)
    if run.corpus_fingerprint:
        figures["Corpus fingerprint"] = run.corpus_fingerprint[:12]
    commit = run.environment.get("commit")
    if commit:
        figures["Commit"] = commit["sha"][:12]
    return figures


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
