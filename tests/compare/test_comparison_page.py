"""compare.html shows the values of compare.json, says what an unfinished comparison lacks, and escapes every text."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from electra_dist.compare.checkpoint_scores import CheckpointScore
from electra_dist.compare.comparison import Comparison
from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_page import RunState, comparison_page
from electra_dist.compare.comparison_results import ComparisonResults, Failure
from electra_dist.compare.comparison_runs import Plan, make_plan
from electra_dist.compare.learning_rates import RateChoice
from electra_dist.compare.score_plot import RunEvaluations
from electra_dist.config.load import load_section
from electra_dist.finetune.stored_scores import Measured

MakeComparison = Callable[..., Path]
CRITERION = {"statement": "RTD is better.", "arm": "rtd", "baseline": "mlm", "metrics": ["words", "fewer"]}
# Score at the end of the run by task and objective, for seeds 1 and 2.
FINAL = {
    "words": {"mlm": (0.60, 0.62), "rtd": (0.70, 0.73), "electric": (0.55, 0.56)},
    "fewer": {"mlm": (0.50, 0.52), "rtd": (0.53, 0.49), "electric": (0.51, 0.55)},
}
RATES = [
    RateChoice(entry="rtd", measure="context AUC", rates=[0.001, 0.002], values=[0.71, None], chosen=0.001, runs="")
]


def scores_of(plan: Plan, tasks: Sequence[str], seeds: Sequence[int]) -> list[CheckpointScore]:
    """Return the scores of the anchors and of all runs with these seeds; in the middle, a run has half of its gain."""
    scores = []

    def add(entry: str, step: int, flops: float, task: str, seed: int, value: float) -> None:
        measured = Measured(
            task=task, mode="probe", seed=seed, metric="accuracy", score=value, standard_error=0.01, metrics={}
        )
        scores.append(CheckpointScore(entry=entry, step=step, flops=flops, measured=measured))

    for task in tasks:
        add("trigram", 0, 0.0, task, 1, 0.411)
        for seed in seeds:
            add("random", 0, 0.0, task, seed, 0.4)
    for run in plan.runs:
        if run.seed in seeds:
            for task, values in zip(tasks, FINAL.values(), strict=True):
                final = values[run.config.objective.name][run.seed - 1]
                add(run.entry, run.marks[0], run.flops(run.marks[0]), task, run.seed, (0.4 + final) / 2)
                add(run.entry, run.marks[1], run.flops(run.marks[1]), task, run.seed, final)
    return scores


def results_of(compare: CompareConfig, plan: Plan, scores: list[CheckpointScore], tasks: Sequence[str]) -> Any:
    common: Any = {"metric": "accuracy", "at": "all", "is_task": True, "applies_to": lambda _: True}
    measures: Any = [SimpleNamespace(name=task, **common) for task in tasks]
    return ComparisonResults(
        compare=compare,
        plan=plan,
        measures=measures,
        scores=scores,
        title="comparison",
        command="electra-dist compare comparison.yaml",
        criterion_origin="stated before the first score.",
        rates=RATES,
    )


def load(make_comparison: MakeComparison, **changes: object) -> tuple[CompareConfig, Plan]:
    file = make_comparison(seeds=[1, 2], objectives=["mlm", "rtd", "electric"], criterion=CRITERION, **changes)
    compare = load_section(file, CompareConfig)
    return compare, make_plan(compare, file)


def finished(plan: Plan) -> list[RunState]:
    return [RunState(run.entry, run.seed, run.marks[-1], run.marks[-1], 2, 2) for run in plan.runs]


def rows_of(page: str) -> list[list[str]]:
    """Return the texts of the cells of all table rows, without markup inside of cells."""
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    return [[html.unescape(re.sub("<[^>]*>", "", cell)).replace("\xa0", " ") for cell in row] for row in rows]


def diagrams_of(page: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]


def test_the_page_has_the_verdict_the_differences_the_scores_the_rates_and_the_runs_of_compare_json(
    make_comparison: MakeComparison,
) -> None:
    compare, plan = load(make_comparison)
    results = results_of(compare, plan, scores_of(plan, ["words", "fewer"], [1, 2]), ["words", "fewer"])
    failures = [Failure(entry="mlm", seed=2, what="words after 8 steps: degenerate")]
    tree = json.loads(results.json_text(failures))

    page = comparison_page(results, finished(plan), failures, [])

    rows = rows_of(page)
    assert "Verdict: not met (1 of 2 metrics passed)" in page and "Criterion: RTD is better." in page
    assert tree["verdict"] == {"answer": "not met", "passed": ["words"]}
    assert "mlm seed 2: words after 8 steps: degenerate" in page
    assert len(tree["differences"]) == 4
    for one in tree["differences"]:
        error = max(one["seed_error"], one["test_error"])
        after_heading = rows[rows.index([one["task"]]) :]
        [label, _, text, mark] = next(row for row in after_heading if row[0] == one["entry"])
        assert text.startswith(f"{100 * one['mean']:+.1f} +- {100 * error:.1f} (")
        assert f"p {one['p_value']:.2g}" in text
        is_judged = label == "rtd"
        assert mark == ({"words": "passed", "fewer": "not passed"}[one["task"]] if is_judged else "")
    names = {"random": "random initialisation", "trigram": "trigram model"}
    assert len(tree["table"]) == 2 + 3 * 2
    for row in tree["table"]:
        columns = [row["columns"][name] for name in ("words", "fewer", "average")]
        cells = [f"{100 * c['median']:.1f} ({100 * c['low']:.1f} to {100 * c['high']:.1f})" for c in columns]
        assert [names.get(row["entry"], row["entry"]), f"{row['step']:,}", f"{row['flops']:.3g}", *cells] in rows
    lines = {line["label"]: line for line in diagrams_of(page)[0]["lines"]}
    for entry in ("mlm", "rtd", "electric"):
        of_entry = [row for row in tree["table"] if row["entry"] == entry]
        assert lines[entry]["values"] == [row["columns"]["words"]["median"] for row in of_entry]
        assert lines[entry]["steps"] == [row["flops"] for row in of_entry]
        assert [entry, *["finished, 2 of 2 checkpoints scored"] * 2] in rows
    chosen = tree["learning_rates"][0]
    assert next(row for row in rows if row[:2] == ["rtd", f"{chosen['chosen']:g}"])[2].endswith(
        "(0.001 gives 0.7100, 0.002 gives a failed run)"
    )
    assert "unfinished" not in page and f"{tree['budget_flops']:.3g}" in page


def test_bars_are_drawn_to_scale_and_are_strong_if_they_do_not_reach_zero(make_comparison: MakeComparison) -> None:
    compare, plan = load(make_comparison)
    results = results_of(compare, plan, scores_of(plan, ["words", "fewer"], [1, 2]), ["words", "fewer"])

    page = comparison_page(results, finished(plan), [], [])

    table = page[page.index('<table class="forest">') :].split("</table>")[0]
    drawn = re.findall(
        r'class="zero" style="left:([\d.]+)%".*?class="bar( clear)?" style="left:([\d.]+)%;width:([\d.]+)%;'
        r'background:var\((.*?)\).*?class="point" style="left:([\d.]+)%"',
        table,
    )
    ticks = {
        float(text): float(place) for place, text in re.findall(r'<span style="left:([\d.]+)%">(.*?)</span>', table)
    }
    percent_of_point = (max(ticks.values()) - min(ticks.values())) / (max(ticks) - min(ticks))
    in_page_order = sorted(json.loads(results.json_text([]))["differences"], key=lambda one: one["task"] != "words")
    assert len(drawn) == len(in_page_order) == 4
    for (zero, clear, left, width, color, point), one in zip(drawn, in_page_order, strict=True):
        reach = 2 * 100 * max(one["seed_error"], one["test_error"])
        mean = 100 * one["mean"]
        assert float(zero) == ticks[0]
        assert float(point) == pytest.approx(ticks[0] + mean * percent_of_point, abs=0.02)
        assert float(left) == pytest.approx(ticks[0] + (mean - reach) * percent_of_point, abs=0.02)
        assert float(width) == pytest.approx(2 * reach * percent_of_point, abs=0.02)
        assert bool(clear) == (abs(mean) > reach)
        assert color == {"rtd": "--series-2", "electric": "--series-3"}[one["entry"]]
        assert float(left) >= 0 and float(left) + float(width) <= 100


def test_an_axis_on_which_nothing_differs_has_percentage_points_as_ticks(make_comparison: MakeComparison) -> None:
    compare, plan = load(make_comparison)
    scores = [
        dataclasses.replace(one, measured=dataclasses.replace(one.measured, score=0.5, standard_error=0.0))
        for one in scores_of(plan, ["words", "fewer"], [1, 2])
    ]

    page = comparison_page(results_of(compare, plan, scores, ["words", "fewer"]), finished(plan), [], [])

    ticks = re.findall(r'<span style="left:[\d.]+%">(.*?)</span>', page)
    assert "0" in ticks and all(re.fullmatch(r"-?[\d.]+", tick) for tick in ticks)


def test_the_page_of_an_unfinished_comparison_says_what_is_missing(make_comparison: MakeComparison) -> None:
    compare, plan = load(make_comparison)
    searched = compare.objectives[2].model_copy(update={"lr": (0.001, 0.002)})
    compare = compare.model_copy(update={"objectives": (*compare.objectives[:2], searched)})
    scores = [score for score in scores_of(plan, ["words", "fewer"], [1]) if score.task == "words"]
    results = results_of(compare, plan, scores, ["words", "fewer"])
    states = [
        RunState("mlm", 1, 8, 8, 2, 2),
        RunState("rtd", 1, 8, 8, 1, 2),
        RunState("electric", 1, 5, 8, 1, 2),
        *(RunState(entry, 2, 0, 8, 0, 2) for entry in ("mlm", "rtd", "electric")),
    ]

    page = comparison_page(results, states, [], [RunEvaluations(entry="rtd", seed=1, points=curve(0.5, 0.6))])

    rows = rows_of(page)
    missing = (
        "No learning rate has been chosen yet for electric. 4 of 6 runs are not finished. "
        "8 of 12 checkpoints lack scores. There is no score yet of fewer."
    )
    assert missing in page and "unfinished" in page
    assert "Verdict: open" in page
    assert next(row[-1] for row in rows if row[0] == "rtd" and len(row) == 4) == "open, 1 of 2 seeds"
    assert ["electric", "step 5 of 8, 1 of 2 checkpoints scored", "not started"] in rows
    assert ["electric", "not chosen yet", "one of 0.001, 0.002"] in rows
    [recorded] = [one["lines"] for one in diagrams_of(page) if one["lines"][0]["label"] == "rtd, seed 1"]
    assert (recorded[0]["steps"], recorded[0]["values"]) == ([1e9, 2e9], [0.5, 0.6])
    assert recorded[0]["color"] == "--series-2"  # of the objective, although it is the only one with a curve


def curve(*context_auc: float) -> dict[str, list[tuple[float, float]]]:
    points = [(1e9 * number, value) for number, value in enumerate(context_auc, start=1)]
    return {"context_auc": points, "auc": [], "mlm_loss": []}


def test_the_command_writes_the_page_even_before_the_first_run(make_comparison: MakeComparison) -> None:
    file = make_comparison()

    written = Comparison(load_section(file, CompareConfig), file, None).write()

    [page] = [path.read_text() for path in written if path.name == "compare.html"]
    assert "2 of 2 runs are not finished. 4 of 4 checkpoints lack scores." in page
    assert ["rtd", "not started"] in rows_of(page)
    assert not re.search(r'(?:src|href)="', page)  # it needs no other file


def test_names_and_texts_with_markup_are_escaped(make_comparison: MakeComparison) -> None:
    compare, plan = load(make_comparison)
    evil = "<img src=x onerror=alert(1)>\"'&$_{"
    assert compare.criterion is not None
    renamed = [entry.model_copy(update={"name": f"{entry.name}{evil}"}) for entry in compare.objectives]
    criterion = {"statement": evil, "arm": f"rtd{evil}", "baseline": f"mlm{evil}", "metrics": (f"words{evil}",)}
    compare = compare.model_copy(
        update={"objectives": tuple(renamed), "criterion": compare.criterion.model_copy(update=criterion)}
    )
    runs = tuple(dataclasses.replace(run, entry=f"{run.entry}{evil}") for run in plan.runs)
    plan = dataclasses.replace(plan, runs=runs)
    tasks = [f"words{evil}", f"fewer{evil}"]
    results = results_of(compare, plan, scores_of(plan, tasks, [1, 2]), tasks)
    curves = [RunEvaluations(entry=f"rtd{evil}", seed=1, points=curve(0.5, 0.6))]

    page = comparison_page(results, finished(plan), [Failure(entry=f"mlm{evil}", seed=1, what=evil)], curves)

    assert "<img" not in page
    assert html.escape(evil) in page
    labels = {line["label"] for diagram in diagrams_of(page) for line in diagram["lines"]}
    assert f"rtd{evil}" in labels and f"rtd{evil}, seed 1" in labels
