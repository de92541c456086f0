"""Make compare.html, which shows a comparison on one page: the verdict, the differences as bars, curves and tables.

Guarantee: like report.html, the page is self-contained and every text in it is escaped. Its figures are those of
compare.json and compare.md. A comparison that is not finished has a page, too, which says what is missing.

How: this module chooses the figures, `compare.html` among the report's templates lays them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.ticker import MaxNLocator

from electra_dist.compare.comparison_results import PAIR_REMARK, ComparisonResults, Failure, table_texts
from electra_dist.compare.score_plot import (
    RunEvaluations,
    curve_diagrams,
    panel_titles,
    placeholder_colors,
    score_diagrams,
)
from electra_dist.compare.significance import REMARK, Difference, difference_text, difference_title
from electra_dist.report.pages import Tile, render, unbroken
from electra_dist.report.plot_style import VARIABLES

_VERDICT_CLASSES = {"met": "good", "not met": "bad", "open": "open"}
_STANDARD_ERRORS = 2.0  # to both sides of a difference that a bar covers, without a criterion that states a number
_NUM_TICKS = 6  # of the axis of differences, about


class RunState(NamedTuple):
    """Progress of one run of a comparison: its steps, and how many of its checkpoints have all their scores."""

    entry: str  # name of the objective's entry
    seed: int
    step: int
    num_steps: int
    num_scored: int
    num_checkpoints: int


class _Bar(NamedTuple):
    """One difference as a bar; positions are percentages of the width of the axis."""

    label: str
    color: str  # name of a CSS variable
    left: float
    width: float
    point: float  # of the mean
    excludes_zero: bool
    text: str
    mark: str  # what the criterion says of this difference, and which seeds are missing


def comparison_page(
    results: ComparisonResults,
    runs: Sequence[RunState],
    failures: Sequence[Failure],
    curves: Sequence[RunEvaluations],
) -> str:
    """Return the text of compare.html; `runs` are in the order of the plan, `curves` are of the runs' evaluations."""
    compare = results.compare
    names = [objective.name for objective in compare.objectives]
    color_of = placeholder_colors(names)
    variables = {name: VARIABLES[color] for name, color in color_of.items()}
    head, *rows = table_texts(results.rows, len(compare.seeds))
    return render(
        "compare.html",
        results=results,
        seeds=[f"seed {seed}" for seed in compare.seeds],
        verdict_class="" if results.verdict is None else _VERDICT_CLASSES[results.verdict.answer],
        verdict_lines=results.verdict_lines(),
        missing=_missing(results, runs),
        tiles=_tiles(results, runs, failures),
        colors=variables,
        remark=REMARK,
        tables_of_differences=_difference_tables(results, variables),
        standard_errors=_standard_errors(results),
        head=head,
        rows=[[row[0], *map(unbroken, row[1:])] for row in rows],
        diagrams=[
            *score_diagrams(results.rows, panel_titles(results.metric_of, results.rows), color_of),
            *curve_diagrams(curves, color_of),
        ],
        rates=_rates(results),
        runs=[[name, *(_state_text(run) for run in runs if run.entry == name)] for name in names],
        pairs=results.pair_table(),
        pair_remark=PAIR_REMARK,
        failures=failures,
    )


def _missing(results: ComparisonResults, runs: Sequence[RunState]) -> list[str]:
    """Return a sentence for everything that the comparison still lacks."""
    sentences = []
    chosen = {choice.entry for choice in results.rates}
    searching = [entry.name for entry in results.compare.objectives if entry.lr and entry.name not in chosen]
    if searching:
        sentences.append(f"No learning rate has been chosen yet for {', '.join(searching)}.")
    num_unfinished = sum(run.step < run.num_steps for run in runs)
    if num_unfinished:
        sentences.append(f"{num_unfinished} of {len(runs)} runs are not finished.")
    num_scored, num_checkpoints = _scored(runs)
    if num_scored < num_checkpoints:
        sentences.append(f"{num_checkpoints - num_scored} of {num_checkpoints} checkpoints lack scores.")
    scored_columns = {name for row in results.rows for name in row.columns}
    unscored = [name for name in results.metric_of if name not in scored_columns]
    if unscored:
        sentences.append(f"There is no score yet of {', '.join(unscored)}.")
    return sentences


def _scored(runs: Sequence[RunState]) -> tuple[int, int]:
    return sum(run.num_scored for run in runs), sum(run.num_checkpoints for run in runs)


def _tiles(results: ComparisonResults, runs: Sequence[RunState], failures: Sequence[Failure]) -> list[Tile]:
    num_finished = sum(run.step == run.num_steps for run in runs)
    num_scored, num_checkpoints = _scored(runs)
    return [
        ("Runs finished", f"{num_finished} of {len(runs)}", f"{len(results.compare.objectives)} objectives"),
        ("Checkpoints scored", f"{num_scored} of {num_checkpoints}", f"by {len(results.metric_of)} measures"),
        ("Budget", f"{results.plan.budget_flops:.3g}", "training FLOPs a run"),
        ("Failed or degenerate", f"{len(failures)}", "listed below" if failures else "nothing"),
    ]


def _standard_errors(results: ComparisonResults) -> float:
    """Return to how many standard errors on both sides a bar of a difference reaches: those of the criterion, or 2."""
    criterion = results.compare.criterion
    return _STANDARD_ERRORS if criterion is None or not criterion.standard_errors else criterion.standard_errors


def _difference_tables(results: ComparisonResults, variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the two tables of differences, each with bars on its own axis; one without differences is left out."""
    tables = [("at the end of the runs", results.differences, True)]
    if results.num_last > 1:
        when = f"of the mean over the last {results.num_last} checkpoints"
        tables.append((when, results.mean_differences, False))
    return [
        {"title": f"Differences to {results.baseline} {when}", **_bars(results, differences, variables, is_judged)}
        for when, differences, is_judged in tables
        if differences
    ]


def _bars(
    results: ComparisonResults, differences: Sequence[Difference], variables: Mapping[str, str], is_judged: bool
) -> dict[str, Any]:
    """Return the axis of a table of differences and its bars by measure, with positions in % of the width.

    With `is_judged`, a bar also says whether the comparison's criterion is passed.
    """
    bounds = [_bounds(difference, _standard_errors(results)) for difference in differences]
    ends = [0.0, *(end for low_high in bounds for end in low_high)]
    first, last = (min(ends), max(ends)) if any(ends) else (-1.0, 1.0)
    ticks = [float(tick) for tick in MaxNLocator(_NUM_TICKS).tick_values(first, last)]

    def position(points: float) -> float:
        return round(100 * (points - ticks[0]) / (ticks[-1] - ticks[0]), 2)

    is_single = len(variables) == 2  # one objective besides the baseline, so the measures label the bars
    groups: dict[str, list[_Bar]] = {}
    for difference, (low, high) in zip(differences, bounds, strict=True):
        remarks = [_judgement(results, difference) if is_judged else "", _seeds_text(results, difference)]
        bar = _Bar(
            label=difference.task if is_single else difference.entry,
            color=variables[difference.entry],
            left=position(low),
            width=round(position(high) - position(low), 2),
            point=position(100 * difference.mean),
            excludes_zero=difference.standard_error is not None and low * high > 0,
            text=difference_text(difference),
            mark=", ".join(filter(None, remarks)),
        )
        heading = difference_title(difference.task, difference.baseline, results.baseline)
        if is_single:
            heading = f"{difference.entry} minus {difference.baseline}"
        groups.setdefault(heading, []).append(bar)
    return {
        "groups": groups,
        "ticks": [(position(tick), f"{tick:g}") for tick in ticks],
        "zero": position(0.0),
    }


def _bounds(difference: Difference, num_errors: float) -> tuple[float, float]:
    """Return the mean minus and plus `num_errors` standard errors (0 if unknown), both in percentage points."""
    half_width = 100 * num_errors * (difference.standard_error or 0.0)
    return 100 * difference.mean - half_width, 100 * difference.mean + half_width


def _judgement(results: ComparisonResults, difference: Difference) -> str:
    """Return whether a difference passes the comparison's criterion; "" if the criterion does not ask for it."""
    criterion = results.compare.criterion
    if criterion is None or results.verdict is None:
        return ""
    if difference.entry != criterion.arm or difference.task not in criterion.metrics:
        return ""
    if difference.num_seeds < len(results.compare.seeds) or difference.standard_error is None:
        return "open"
    return "passed" if difference.task in results.verdict.passed else "not passed"


def _seeds_text(results: ComparisonResults, difference: Difference) -> str:
    num_seeds = len(results.compare.seeds)
    return "" if difference.num_seeds == num_seeds else f"{difference.num_seeds} of {num_seeds} seeds"


def _rates(results: ComparisonResults) -> list[list[str]]:
    """Return a row of cells for each objective: its name, its learning rate, and how that was chosen."""
    choice_of = {choice.entry: choice for choice in results.rates}
    rows = []
    for entry in results.compare.objectives:
        rate = f"{results.plan.of(entry.name)[0].config.optimizer.lr:g}"
        choice = choice_of.get(entry.name)
        if choice is not None:
            rows.append([entry.name, rate, choice.reason()])
        elif entry.lr:
            rows.append([entry.name, "not chosen yet", f"one of {', '.join(f'{rate:g}' for rate in entry.lr)}"])
        else:
            rows.append([entry.name, rate, "as configured"])
    return rows


def _state_text(run: RunState) -> str:
    scored = f"{run.num_scored} of {run.num_checkpoints} checkpoints scored"
    if run.step == run.num_steps:
        return f"finished, {scored}"
    if run.step == 0:
        return "not started"
    return f"step {run.step:,} of {run.num_steps:,}, {scored}"
