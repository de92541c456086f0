"""Results summed up: the GLUE average."""

from __future__ import annotations

import pytest

from electra_dist.finetune.seed_results import Result, glue_average, summarize


def test_the_glue_average_needs_all_eight_tasks() -> None:
    def summary(task: str, score: float) -> object:
        common = {"seed": 0, "mode": "finetune", "identity": "", "metric": "accuracy", "metrics": {"accuracy": score}}
        more = {"failure": "", "train_loss": 0.0, "steps": 1, "examples": 1, "seconds": 1.0}
        return summarize([Result(task=task, score=score, **common, **more)])  # type: ignore[arg-type]

    tasks = ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]
    summaries = [summary(task, number / 10) for number, task in enumerate(tasks)]
    assert glue_average(summaries) == pytest.approx(0.35)  # type: ignore[arg-type]
    assert glue_average(summaries[1:]) is None  # type: ignore[arg-type]
