"""Medians, spreads and averages of scores made by hand; every table and page reports the seeds that failed."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from electra_dist.compare.checkpoint_scores import CheckpointScore
from electra_dist.compare.comparison_config import AVERAGE
from electra_dist.compare.comparison_results import (
    Failure,
    console_table,
    markdown,
    score_failures,
    summarize_rows,
    table_texts,
)
from electra_dist.compare.score_plot import panel_titles, write_scores
from electra_dist.finetune.stored_scores import Measured


def score(entry: str, seed: int, step: int, task: str, value: float | None, *failures: str) -> CheckpointScore:
    """Return the accuracy `value` of one checkpoint on one task; a step costs 1e9 FLOPs."""
    measured = Measured(task=task, mode="probe", seed=seed, metric="accuracy", score=value, failures=failures)
    return CheckpointScore(entry=entry, step=step, flops=1e9 * step, measured=measured)


# Two tasks, a and b, and three seeds. Seed 2 of mlm has no score, because its run did not reach step 12; on task b,
# seed 1 of mlm is degenerate and seed 3 diverged.
RANDOM_SCORES = [score("random", seed, 0, task, 0.5) for seed in (1, 2, 3) for task in ("a", "b")]
SCORES = [
    *RANDOM_SCORES,
    score("rtd", 1, 10, "a", 0.6),
    score("rtd", 2, 10, "a", 0.9),
    score("rtd", 3, 10, "a", 0.7),
    score("rtd", 1, 10, "b", 0.4),
    score("rtd", 2, 10, "b", 0.5),
    score("rtd", 3, 10, "b", 0.3),
    score("mlm", 1, 12, "a", 0.55),
    score("mlm", 3, 12, "a", 0.65),
    score("mlm", 1, 12, "b", 0.0, "degenerate: all 60 predictions are `no`"),
    score("mlm", 3, 12, "b", None, "diverged: the loss is nan at step 0"),
]
TASKS = {"a": True, "b": True}  # task -> whether it counts in the average


def test_a_row_has_the_median_and_spread_over_the_seeds_of_every_task_and_of_the_average() -> None:
    random, rtd, mlm = summarize_rows(SCORES, TASKS)

    assert random.entry == "random"
    assert random.step == 0
    assert rtd.entry == "rtd"
    assert rtd.flops == 1e10
    rtd_a = rtd.columns["a"]
    assert rtd_a.median == 0.7
    assert rtd_a.low == 0.6
    assert rtd_a.high == 0.9
    assert rtd_a.scores == {1: 0.6, 2: 0.9, 3: 0.7}
    # Each seed is averaged over the tasks first: (0.6 + 0.4) / 2, (0.9 + 0.5) / 2, (0.7 + 0.3) / 2.
    rtd_average = rtd.columns[AVERAGE]
    assert [round(value, 12) for value in rtd_average.scores.values()] == [0.5, 0.7, 0.5]
    assert rtd_average.median == 0.5
    assert mlm.columns["a"].scores == {1: 0.55, 3: 0.65}
    assert mlm.columns["b"].scores == {1: 0.0}  # a degenerate result counts, a diverged one has no score
    assert list(mlm.columns[AVERAGE].scores) == [1]  # the only seed with a score on both tasks


def test_the_table_shows_missing_seeds_and_the_page_lists_every_failure() -> None:
    rows = summarize_rows(SCORES, TASKS)
    failed_run = Failure(
        entry="mlm", seed=2, what="the run ended with exit code 1: error: no space; read out/runs/mlm-seed2.log"
    )
    failures = [failed_run, *score_failures(SCORES)]

    page = markdown("comparison", rows, failures, 3, ["note"])
    page_without_failures = markdown("comparison", rows, [], 3, [])
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(console_table("comparison", table_texts(rows, 3)))

    assert "| mlm | 12 | 1.2e+10 | 60.0 (55.0 to 65.0, 2 of 3 seeds) | 0.0 (0.0 to 0.0, 1 of 3 seeds) |" in page
    assert "| rtd | 10 | 1e+10 | 70.0 (60.0 to 90.0) |" in page
    assert "| random initialisation | 0 | 0 | 50.0 (50.0 to 50.0) |" in page
    assert "* mlm seed 2: the run ended with exit code 1: error: no space" in page
    assert "* mlm seed 1: b after 12 steps: degenerate: all 60" in page
    assert "* mlm seed 3: b after 12 steps: diverged" in page
    assert "None." in page_without_failures
    assert "2 of 3 seeds" in console.export_text()


def test_a_single_task_has_no_average_and_a_task_without_scores_has_no_column() -> None:
    """A task counts in the average only if it is scored at all checkpoints."""
    only_a = summarize_rows(SCORES, {"a": True})
    b_not_at_all_checkpoints = summarize_rows(SCORES, {"a": True, "b": False})
    [row] = summarize_rows([score("rtd", 1, 5, "a", 0.5), score("rtd", 1, 5, "b", None)], TASKS)

    assert AVERAGE not in only_a[0].columns
    assert AVERAGE not in b_not_at_all_checkpoints[0].columns
    assert list(row.columns) == ["a"]


def test_a_picture_is_drawn_of_all_scores_of_the_baseline_alone_and_of_none(tmp_path: Path) -> None:
    for number, scores in enumerate((SCORES, RANDOM_SCORES, [])):
        rows = summarize_rows(scores, TASKS)
        titles = panel_titles({"a": "accuracy", "b": "mcc"}, rows)
        picture = tmp_path / f"{number}.png"

        write_scores(rows, titles, picture)

        expected_panels = ["a", "b", AVERAGE] if scores else ["a", "b"]
        assert list(titles) == expected_panels
        assert picture.read_bytes()[:4] == b"\x89PNG"
