"""Differences paired by seed against SciPy and values by hand; the verdict of a criterion."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from electra_dist.compare.checkpoint_scores import CheckpointScore
from electra_dist.compare.comparison import Comparison
from electra_dist.compare.comparison_config import CompareConfig, Criterion
from electra_dist.compare.significance import (
    CRITERION_FILE,
    difference_rows,
    difference_text,
    differences_to,
    judge,
    paired_difference,
    record_criterion,
    verdict_lines,
)
from electra_dist.config.load import load_section
from electra_dist.errors import UserError
from electra_dist.finetune.stored_scores import Measured


def score(entry: str, seed: int, task: str, value: float | None, error: float | None = None) -> CheckpointScore:
    """Return the score of the last checkpoint of a run."""
    measured = Measured(task=task, mode="probe", seed=seed, metric="accuracy", score=value, standard_error=error)
    return CheckpointScore(entry=entry, step=10, flops=1e9, measured=measured)


RTD = {1: 0.62, 2: 0.66, 3: 0.61, 4: 0.67}
MLM = {1: 0.58, 2: 0.60, 3: 0.60, 4: 0.61}


def scores_of(error: float | None = None) -> list[CheckpointScore]:
    """Return the scores of `rtd` and `mlm` on the task `tags`."""
    return [
        score(entry, seed, "tags", value, error)
        for entry, by_seed in (("rtd", RTD), ("mlm", MLM))
        for seed, value in by_seed.items()
    ]


def criterion(**changes: Any) -> Criterion:
    tree = {"statement": "RTD is better.", "arm": "rtd", "baseline": "mlm", "metrics": ["tags"], **changes}
    return Criterion.model_validate(tree)


def test_the_difference_is_paired_by_seed_as_in_scipys_paired_t_test() -> None:
    gains = np.array([RTD[seed] - MLM[seed] for seed in RTD])
    expected = stats.ttest_rel(list(RTD.values()), list(MLM.values()))

    difference = paired_difference(scores_of(error=0.01), "rtd", "mlm", "tags")

    assert difference is not None
    assert difference.num_seeds == 4
    assert difference.mean == pytest.approx(gains.mean())
    assert difference.seed_error == pytest.approx(stats.sem(gains))
    assert difference.p_value == pytest.approx(expected.pvalue)
    assert difference.test_error == pytest.approx(0.01 * math.sqrt(2.0))
    assert difference.standard_error == max(difference.seed_error, difference.test_error)
    assert difference_text(difference) == "+4.3 +- 1.4 (p 0.037)"


def table_of(scores: list[CheckpointScore], baseline: str, baseline_of: dict[str, str]) -> list[list[str]]:
    entries = ["rtd", "mlm"]
    differences = differences_to(baseline_of, scores, entries, baseline)
    return difference_rows(differences, entries, baseline, baseline_of)


def test_only_seeds_with_both_scores_count_and_a_single_seed_has_no_seed_error() -> None:
    scores = [*scores_of()[:3], score("mlm", 2, "tags", 0.5), score("mlm", 3, "tags", None)]

    difference = paired_difference(scores, "rtd", "mlm", "tags")

    assert difference is not None
    assert difference.num_seeds == 1
    assert difference.mean == pytest.approx(0.16)
    assert difference.seed_error is None
    assert difference.test_error is None
    assert difference_text(difference) == "+16.0"
    assert paired_difference(scores, "rtd", "random", "tags") is None
    assert table_of(scores, "mlm", {"tags": "mlm", "heads": "mlm"}) == [
        ["minus mlm", "tags", "heads"],
        ["rtd", "+16.0", "-"],
    ]
    assert table_of(scores, "random", {"heads": "random", "tags": "mlm"}) == [
        ["minus random", "heads", "tags (minus mlm)"],
        ["rtd", "-", "+16.0"],
        ["mlm", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("changes", "error", "answer"),
    [
        ({}, None, "met"),  # 4.25 points with a standard error of 1.0 over the seeds
        ({"standard_errors": 5.0}, None, "not met"),
        ({}, 0.02, "not met"),  # the standard error over the test examples, 2.8 points, is larger
        ({"arm": "mlm", "baseline": "rtd"}, None, "not met"),
        ({"metrics": ["tags", "heads"]}, None, "open"),  # heads has no scores
        ({"metrics": ["tags", "same"]}, None, "not met"),
        ({"metrics": ["tags", "same"], "at_least": 1}, None, "met"),
    ],
)
def test_a_criterion_is_met_by_differences_above_the_stated_number_of_standard_errors(
    changes: dict[str, Any], error: float | None, answer: str
) -> None:
    same = [score(entry, seed, "same", 0.5) for entry in ("rtd", "mlm") for seed in RTD]
    stated = criterion(**changes)

    verdict = judge(stated, [*scores_of(error), *same], num_seeds=4)

    assert verdict.answer == answer
    lines = verdict_lines(stated, verdict)
    assert lines[0] == "Criterion: RTD is better."
    assert lines[-1].startswith(f"Verdict: {answer}")


def test_a_verdict_is_open_as_long_as_a_seed_is_missing() -> None:
    assert judge(criterion(), scores_of(), num_seeds=5).answer == "open"


def test_the_criterion_is_recorded_once_and_again_when_it_changes(tmp_path: Path) -> None:
    first = record_criterion(tmp_path, criterion(), num_scores=0)
    again = record_criterion(tmp_path, criterion(), num_scores=7)
    changed = record_criterion(tmp_path, criterion(standard_errors=1.0), num_scores=7)

    records = [json.loads(line) for line in (tmp_path / CRITERION_FILE).read_text().splitlines()]
    assert [record["scores"] for record in records] == [0, 7]
    assert first == again == f"The criterion was stated at {records[0]['time']}, before the first score."
    assert changed == f"The criterion was changed (version 2) at {records[1]['time']}, when 7 scores existed."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": "electra"}, "no objective `electra`; set one of rtd, mlm"),
        ({"metrics": ["blimp"]}, "no column `blimp`; set one of fewer, words, context-auc"),
        ({"at_least": 2}, "2 of 1 metrics cannot be passed"),
        ({"metrics": ["words", "words"], "at_least": 2}, "words, words has a metric twice, which would count twice"),
    ],
)
def test_a_criterion_that_cannot_be_judged_is_refused(
    make_comparison: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    tree = {"statement": "x", "arm": "rtd", "baseline": "mlm", "metrics": ["words"], **changes}
    with pytest.raises(UserError, match=message):
        load_section(make_comparison(seeds=[1, 2], criterion=tree), CompareConfig)


def test_a_criterion_on_the_context_auc_needs_held_out_rows(make_comparison: Callable[..., Path]) -> None:
    tree = {"statement": "x", "arm": "rtd", "baseline": "mlm", "metrics": ["context-auc"]}
    file = make_comparison(seeds=[1, 2], criterion=tree)
    base_file = file.parent / "base.yaml"
    base = yaml.safe_load(base_file.read_text())
    del base["data"]["heldout"]
    base_file.write_text(yaml.safe_dump(base))
    with pytest.raises(UserError, match=r"`context-auc` needs held-out rows; set `data\.heldout` in "):
        Comparison(load_section(file, CompareConfig), file, None)
    assert not (file.parent / "out").exists()


def test_a_criterion_needs_two_seeds_and_columns_need_different_names(make_comparison: Callable[..., Path]) -> None:
    tree = {"statement": "x", "arm": "rtd", "baseline": "mlm", "metrics": ["words"]}
    with pytest.raises(UserError, match="set at least two `seeds`"):
        load_section(make_comparison(criterion=tree), CompareConfig)
    with pytest.raises(UserError, match="two have the same name"):
        load_section(make_comparison(minimal_pairs=["pairs/words.txt"]), CompareConfig)
    with pytest.raises(UserError, match="average, of which two have the same name"):
        load_section(make_comparison(minimal_pairs=["pairs/average.txt"]), CompareConfig)
