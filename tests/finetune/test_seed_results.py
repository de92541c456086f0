"""The GLUE average of results made by hand."""

from __future__ import annotations

import pytest

from electra_dist.finetune.seed_results import Result, SeedSummary, glue_average, summarize

GLUE_TASKS = ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]


def summary_of_one_seed(task: str, score: float) -> SeedSummary:
    result = Result(
        task=task,
        seed=0,
        mode="finetune",
        identity="",
        metric="accuracy",
        score=score,
        metrics={"accuracy": score},
        failure="",
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
