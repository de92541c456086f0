"""Check that the config for a batch of 8,192 rows is the paper's config scaled by the square root rule."""

from __future__ import annotations

import math

import pytest
from support.real_runs import REPOSITORY

from electra_dist.config.load import load_config


def test_the_large_batch_recipe_is_the_papers_scaled_by_the_square_root_rule() -> None:
    paper = load_config(REPOSITORY / "configs" / "large_25pct_mask.yaml")
    large = load_config(REPOSITORY / "configs" / "large_batch_8192.yaml")
    factor = large.train.global_batch / paper.train.global_batch
    assert factor == 4
    assert large.train.num_steps * factor == paper.train.num_steps
    assert large.optimizer.warmup_steps * factor == paper.optimizer.warmup_steps
    assert large.optimizer.lr == pytest.approx(math.sqrt(factor) * paper.optimizer.lr)
    assert 1 - large.optimizer.beta1 == pytest.approx(factor * (1 - paper.optimizer.beta1))
    assert 1 - large.optimizer.beta2 == pytest.approx(factor * (1 - paper.optimizer.beta2))
    assert large.optimizer.eps == pytest.approx(paper.optimizer.eps / math.sqrt(factor))
    assert large.train.micro_batches(256) == 1
    scaled = {"lr": large.optimizer.lr, "warmup_steps": 2500, "beta1": 0.6, "beta2": 0.996, "eps": 5e-7}
    assert large.optimizer == paper.optimizer.model_copy(update=scaled)
