"""Context AUC: its standard error against the spread over many samples, and when a run is warned of a low one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.run_records import EVAL

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.run.context_auc import (
    first_judged_step,
    is_stuck,
    stuck_warning,
    was_reported,
)
from electra_dist.run.metrics import EvalRecord
from electra_dist.train.detection_measures import auc_with_standard_error, roc_auc

BASE = Path(__file__).parents[2] / "configs" / "compare_cpu_base.yaml"  # without schedules


def sample(
    rng: np.random.Generator, num_rows: int, spread_of_rows: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, labels and rows of 10 tokens a row; the scores of a row share a random part."""
    row = np.repeat(np.arange(num_rows), 10)
    label = rng.random(len(row)) < 0.5
    score = rng.standard_normal(len(row)) + 0.3 * label + spread_of_rows * rng.standard_normal(num_rows)[row]
    return np.round(score, 1), label, row  # rounded, so that there are ties


@pytest.mark.parametrize("spread_of_rows", [0.0, 1.0])
def test_standard_error_is_the_spread_over_independent_samples(spread_of_rows: float) -> None:
    rng = np.random.default_rng(0)
    results = []
    for _ in range(600):
        score, label, row = sample(rng, 60, spread_of_rows)
        auc, standard_error = auc_with_standard_error(score, label, row)
        assert auc == roc_auc(score, label)
        results.append((auc, standard_error))
    aucs, standard_errors = np.array(results).T
    # The standard deviation of 600 values is known to 3 %.
    assert np.sqrt(np.mean(standard_errors**2)) == pytest.approx(aucs.std(ddof=1), rel=0.09)


def test_rows_that_move_together_widen_the_standard_error() -> None:
    rng = np.random.default_rng(0)
    row = np.repeat(np.arange(40), 10)
    label = row % 2 == 0  # all tokens of a row are of one class
    score = rng.standard_normal(40)[row]
    by_row = auc_with_standard_error(score, label, row)[1]
    as_if_independent = auc_with_standard_error(score, label, np.arange(len(row)))[1]
    assert by_row == pytest.approx(math.sqrt(10) * as_if_independent, rel=0.03)


def test_undefined_values_are_nan() -> None:
    nothing = np.zeros(0)
    assert all(math.isnan(value) for value in auc_with_standard_error(nothing, nothing, nothing))
    auc, standard_error = auc_with_standard_error(np.array([1.0, 2.0]), np.array([0, 1]), np.array([7, 7]))
    assert auc == 1.0 and math.isnan(standard_error)


def config(**changes: Any) -> Config:
    """A config without schedules, with other values."""
    return load_config(BASE, [f"{key}={value}" for key, value in changes.items()])


def evaluation(step: int, context_auc: float) -> EvalRecord:
    """Record of an evaluation with the values that decide about the warning."""
    return EVAL.model_copy(update={"step": step, "context_auc": context_auc, "context_auc_se": 0.004})


def test_a_run_is_judged_after_30_percent_of_its_steps_or_1_billion_tokens() -> None:
    assert first_judged_step(config(**{"train.num_steps": 1000})) == 300
    assert first_judged_step(config(**{"train.num_steps": 1001})) == 301  # 30 % of 1,001 is not yet reached at 300
    large = {"train.num_steps": 10_000_000, "train.global_batch": 64, "data.seq_len": 128}
    assert first_judged_step(config(**large)) == math.ceil(1e9 / (64 * 128))
    two_stage = {"objective.generator_only_steps": 400, "train.num_steps": 1000, "model.sharing": "none"}
    two_stage |= {"model.generator": load_config(BASE).model.discriminator.model_dump_json()}
    assert first_judged_step(config(**two_stage)) == 400 + 180


def test_only_a_low_context_auc_after_that_is_reported() -> None:
    run = config(**{"train.num_steps": 1000})
    assert not is_stuck(evaluation(299, 0.50), run)
    assert is_stuck(evaluation(300, 0.5199), run)
    assert not is_stuck(evaluation(300, 0.52), run)
    assert not is_stuck(evaluation(300, math.nan), run)
    assert not was_reported([evaluation(100, 0.5), evaluation(400, 0.6)], run)
    assert was_reported([evaluation(300, 0.5), evaluation(400, 0.6)], run)
    warning = stuck_warning(evaluation(300, 0.5031), run)
    assert warning.startswith("step 300: context AUC 0.503 (standard error 0.004) is below 0.52 after 30 % of the run")
    assert warning.endswith(
        "a falling temperature, objective.temperature={from: 4, to: 1, shape: exponential, tau: 0.15}"
    )


def test_the_advice_fits_the_config_and_can_be_followed() -> None:
    falling = "objective.temperature={from: 4, to: 1, shape: exponential, tau: 0.15}"
    low = evaluation(300, 0.5)
    followed = load_config(BASE, ["train.num_steps=1000", falling])
    assert stuck_warning(low, followed).endswith(
        "with a higher `from` or `tau` of objective.temperature, or with more steps"
    )
    fixed = config(**{"train.num_steps": 1000, "objective.generator": "unigram"})
    assert stuck_warning(low, fixed).endswith(f"with objective.generator=trained and a falling temperature, {falling}")
