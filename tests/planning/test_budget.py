"""The budget of a run: tokens, FLOPs, time and the world sizes that divide its batch, against sums by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.planning.budget import make_budget

CONFIGS = Path(__file__).parents[2] / "configs"


def large_config(*overrides: str) -> Config:
    """Return the config of ELECTRA-Large: 400,000 steps of 2048 rows of 512 tokens."""
    return load_config(CONFIGS / "large_25pct_mask.yaml", overrides)


def test_tokens_flops_and_time_of_electra_large_equal_the_sums_by_hand():
    a100_peak = 312e12  # dense bf16 FLOP/s, from the vendor's data sheet

    budget = make_budget(large_config("plan.gpu=A100", "plan.num_gpus=64", "plan.utilisation=0.5"))

    assert budget.rows == 400_000 * 2048
    assert budget.tokens == 400_000 * 2048 * 512
    assert budget.run_flops == pytest.approx(9.1e20, rel=1e-2)
    assert budget.epochs is None  # no corpus was passed
    compute = budget.compute
    assert compute is not None
    assert compute.gpu_hours == pytest.approx(budget.run_flops / (a100_peak * 0.5) / 3600)
    assert compute.days == pytest.approx(compute.gpu_hours / 64 / 24)
    assert compute.step_s == pytest.approx(compute.days * 86_400 / 400_000)


@given(num_micro_batches=st.integers(1, 96), micro_batch=st.integers(1, 5))
def test_the_world_sizes_are_exactly_those_that_divide_the_global_batch(num_micro_batches: int, micro_batch: int):
    global_batch = num_micro_batches * micro_batch
    overrides = [f"train.global_batch={global_batch}", f"train.micro_batch={micro_batch}"]
    config = load_config(CONFIGS / "demo_cpu_bert.yaml", overrides)

    accumulation = make_budget(config).accumulation

    # 200 is above the largest global batch in micro-batches, 96.
    assert list(accumulation) == [ranks for ranks in range(1, 200) if global_batch % (ranks * micro_batch) == 0]
    for ranks, accumulated_batches in accumulation.items():
        assert ranks * accumulated_batches * micro_batch == global_batch
