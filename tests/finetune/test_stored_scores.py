"""The GLUE average, and the table for the terminal, of results made by hand."""

from __future__ import annotations

import dataclasses

import pytest

from electra_dist.finetune.stored_scores import Measured, SeedSummary, glue_average, results_table, summarize

GLUE_TASKS = ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]


def summary_of_one_seed(task: str, score: float) -> SeedSummary:
    result = Measured(
        task=task,
        seed=0,
        mode="finetune",
        identity="",
        metric="accuracy",
        score=score,
        metrics={"accuracy": score},
        failures=(),
        train_loss=0.0,
        steps=1,
        examples=1,
        seconds=1.0,
    )
    return summarize([result])


def test_the_glue_average_is_the_mean_of_eight_tasks_and_does_not_exist_for_fewer() -> None:
    summaries = [summary_of_one_seed(task, number**2 / 100) for number, task in enumerate(GLUE_TASKS)]

    assert glue_average(summaries) == pytest.approx(0.175)  # the mean of 0.00, 0.01, 0.04, ... 0.49; not their median
    assert glue_average(summaries[1:]) is None


@pytest.mark.parametrize(
    ("failed", "expected"), [([], "none"), ([0], "1 of 3 (seed 0)"), ([0, 4], "2 of 3 (seeds 0, 4)")]
)
def test_the_table_says_how_many_seeds_failed_and_which(failed: list[int], expected: str) -> None:
    """A lone "0" was the number of the failed seed, and looked like a count of none."""
    summary = summary_of_one_seed("rte", 0.5)
    summary = dataclasses.replace(summary, scores=[0.5, 0.5, 0.5], failed=dict.fromkeys(failed, "degenerate"))
    table = results_table("", [summary])

    [column] = [column for column in table.columns if column.header == "failed"]
    assert list(column.cells) == [expected]
