"""Medians, spreads and averages of scores made by hand; a failed seed is named wherever results are shown."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from electra_dist.compare.checkpoint_scores import Score
from electra_dist.compare.score_plot import panel_titles, write_picture
from electra_dist.compare.score_tables import AVERAGE, Failure, console_table, markdown, score_failures, summarize_rows


def score(entry: str, seed: int, step: int, task: str, value: float | None, *failures: str) -> Score:
    made = {"flops": 1e9 * step, "metric": "accuracy", "seconds": 1.0}
    return Score(entry=entry, seed=seed, step=step, task=task, score=value, failures=failures, **made)  # type: ignore[arg-type]


SCORES = [
    *(score("random", seed, 0, task, 0.5) for seed in (1, 2, 3) for task in ("a", "b")),
    *(score("rtd", seed, 10, "a", value) for seed, value in ((1, 0.6), (2, 0.9), (3, 0.7))),
    *(score("rtd", seed, 10, "b", value) for seed, value in ((1, 0.4), (2, 0.5), (3, 0.3))),
    *(score("mlm", seed, 12, "a", value) for seed, value in ((1, 0.55), (3, 0.65))),  # seed 2 never came so far
    score("mlm", 1, 12, "b", 0.0, "degenerate: all 60 predictions are `no`"),
    score("mlm", 3, 12, "b", None, "diverged: the loss is nan at step 0"),
]
TASKS = {"a": True, "b": True}


def test_medians_spreads_and_averages() -> None:
    random, rtd, mlm = summarize_rows(SCORES, TASKS)
    assert (random.entry, random.step, rtd.entry, rtd.flops) == ("random", 0, "rtd", 1e10)
    a = rtd.columns["a"]
    assert (a.median, a.low, a.high, a.scores) == (0.7, 0.6, 0.9, {1: 0.6, 2: 0.9, 3: 0.7})
    # The average is of each seed first: 0.5, 0.7, 0.5.
    assert [round(value, 12) for value in rtd.columns[AVERAGE].scores.values()] == [0.5, 0.7, 0.5]
    assert rtd.columns[AVERAGE].median == 0.5
    assert mlm.columns["a"].scores == {1: 0.55, 3: 0.65}
    assert mlm.columns["b"].scores == {1: 0.0}  # a degenerate result counts, a diverged one has none
    assert list(mlm.columns[AVERAGE].scores) == [1]


def test_the_failed_are_named_in_the_table_and_on_the_page() -> None:
    rows = summarize_rows(SCORES, TASKS)
    lost = Failure(
        entry="mlm", seed=2, what="the run ended with exit code 1: error: no space; read out/runs/mlm-seed2.log"
    )
    failures = [lost, *score_failures(SCORES)]
    page = markdown("comparison", rows, failures, 3, ["note"])
    assert "| mlm | 12 | 1.2e+10 | 60.0 (55.0 to 65.0, 2 of 3 seeds) | 0.0 (0.0 to 0.0, 1 of 3 seeds) |" in page
    assert "| rtd | 10 | 1e+10 | 70.0 (60.0 to 90.0) |" in page
    assert "| random initialisation | 0 | 0 | 50.0 (50.0 to 50.0) |" in page
    assert "* mlm seed 2: the run ended with exit code 1: error: no space" in page
    assert "* mlm seed 1: b after 12 steps: degenerate: all 60" in page
    assert "* mlm seed 3: b after 12 steps: diverged" in page
    assert "None." in markdown("comparison", rows, [], 3, [])
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(console_table("comparison", rows, 3))
    assert "2 of 3 seeds" in console.export_text()


def test_one_task_needs_no_average_and_a_task_without_scores_is_a_dash() -> None:
    assert AVERAGE not in summarize_rows(SCORES, {"a": True})[0].columns
    assert AVERAGE not in summarize_rows(SCORES, {"a": True, "b": False})[0].columns  # b: at the ends only
    (row,) = summarize_rows([score("rtd", 1, 5, "a", 0.5), score("rtd", 1, 5, "b", None)], TASKS)
    assert list(row.columns) == ["a"]


def test_the_picture_is_drawn_of_whatever_there_is(tmp_path: Path) -> None:
    for number, scores in enumerate((SCORES, SCORES[:6], [])):
        rows = summarize_rows(scores, TASKS)
        titles = panel_titles({"a": "accuracy", "b": "mcc"}, rows)
        assert list(titles) == ["a", "b", *([AVERAGE] if scores else [])]
        path = tmp_path / f"{number}.png"
        write_picture(rows, titles, path)
        assert path.read_bytes()[:4] == b"\x89PNG"
