"""The budget of a run: tokens, FLOPs, time and the world sizes that divide its batch, against sums by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.planning.budget import make_budget

CONFIGS = Path(__file__).parents[2] / "configs"


def _large(*overrides: str) -> Config:
    return load_config(CONFIGS / "large_25pct_mask.yaml", overrides)


def test_tokens_flops_and_time_of_large():
    budget = make_budget(_large("plan.gpu=A100", "plan.num_gpus=64", "plan.utilisation=0.5"))
    assert budget.rows == 400_000 * 2048
    assert budget.tokens == 400_000 * 2048 * 512
    assert budget.run_flops == pytest.approx(9.1e20, rel=1e-2)
    assert budget.epochs is None
    assert budget.compute is not None
    assert budget.compute.gpu_hours == pytest.approx(budget.run_flops / (312e12 * 0.5) / 3600)
    assert budget.compute.days == pytest.approx(budget.compute.gpu_hours / 64 / 24)
    assert budget.compute.step_s == pytest.approx(budget.compute.days * 86_400 / 400_000)


@given(units=st.integers(1, 96), micro=st.integers(1, 5))
def test_world_sizes_are_exactly_those_that_divide(units: int, micro: int):
    config = load_config(
        CONFIGS / "demo_cpu.yaml", [f"train.global_batch={units * micro}", f"train.micro_batch={micro}"]
    )
    accumulation = make_budget(config).accumulation
    assert list(accumulation) == [w for w in range(1, 200) if (units * micro) % (w * micro) == 0]
    assert all(w * steps * micro == units * micro for w, steps in accumulation.items())
