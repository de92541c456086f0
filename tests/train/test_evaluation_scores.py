"""The best checkpoints are chosen by the score of the run's own objective, never by a loss that it does not have."""

from __future__ import annotations

from typing import Any

import pytest

from electra_dist.config.sections.objective import OBJECTIVES
from electra_dist.run.metrics import EvalRecord
from electra_dist.train.evaluator import evaluation_scores

EVALUATION = EvalRecord(
    step=10,
    rows=4,
    mlm_loss=1.0,
    mlm_accuracy=0.1,
    rtd_loss=2.0,
    token_loss=3.0,
    auc=0.7,
    accuracy=0.8,
    precision=0.9,
    recall=0.2,
    context_auc=0.6,
    context_auc_se=0.01,
    context_replaced=5000,
    generator_entropy=4.0,
    sampled_correct=0.3,
)


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("rtd", {"eval_context_auc": 0.6, "eval_loss": 2.0}),
        ("rtd_masked_only", {"eval_context_auc": 0.6, "eval_loss": 2.0}),
        ("adversarial", {"eval_context_auc": 0.6, "eval_loss": 2.0}),
        ("electric", {"eval_context_auc": 0.6, "eval_loss": 2.0}),
        ("mlm", {"eval_loss": 1.0}),
        ("replace_mlm", {"eval_loss": 3.0}),
        ("all_tokens_mlm", {"eval_loss": 3.0}),
    ],
)
def test_a_checkpoint_records_the_scores_of_its_objective(name: Any, scores: dict[str, float]) -> None:
    """`mlm` has no discriminator, whose loss is then 0: a choice by that loss would be the newest checkpoint."""
    assert evaluation_scores(EVALUATION, OBJECTIVES[name]) == scores
