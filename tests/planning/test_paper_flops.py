"""The FLOPs of the paper's models, recomputed by the paper's method."""

from __future__ import annotations

from pathlib import Path

import pytest

from electra_dist.config.load import load_config
from electra_dist.planning.training_days import run_flops_by_paper

CONFIGS = Path(__file__).parents[2] / "configs"
BERT = "objective.name=mlm"


@pytest.mark.parametrize(
    ("config", "overrides", "script", "printed"),
    [
        ("small", [], 1.29e18, "1.3e18"),  # the paper's table has the figure of the next line
        ("small", ["model.generator.hidden_size=128", "model.generator.intermediate_size=512"], 1.42e18, "1.4e18"),
        ("base_size", [], 6.42e19, "6.4e19"),
        ("large_25pct_mask", [], 7.12e20, "7.1e20"),
        ("large_25pct_mask", ["train.num_steps=1750000"], 3.11e21, "3.1e21"),
        ("small", [BERT, "train.num_steps=1450000"], 1.42e18, "1.4e18"),
        ("base_size", [BERT, "train.num_steps=1000000"], 6.43e19, "6.4e19"),
        ("large_25pct_mask", [BERT, "train.global_batch=256", "train.num_steps=1000000"], 1.92e20, "1.9e20"),
    ],
)
def test_flops_equal_those_of_the_papers_script_and_of_its_table(
    config: str, overrides: list[str], script: float, printed: str
):
    """`script` is what google-research/electra's flops_computation.py printed for the model when it was run."""
    flops = run_flops_by_paper(load_config(CONFIGS / f"{config}.yaml", overrides))

    assert flops == pytest.approx(script, rel=0.003)
    assert f"{flops:.1e}".replace("e+", "e") == printed
