"""The budget of a run: tokens, FLOPs, time and the world sizes that divide its batch, against sums by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.planning.training_days import make_budget

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
    compute = budget.compute
    assert compute is not None
    assert compute.gpu_hours == pytest.approx(budget.run_flops / (a100_peak * 0.5) / 3600)
    assert compute.days == pytest.approx(compute.gpu_hours / 64 / 24)
    assert compute.step_s == pytest.approx(compute.days * 86_400 / 400_000)


def test_two_stages_take_the_time_of_the_flops_of_both():
    """Without launches as the limit, the time of a run is that of its FLOPs, which the first stage has fewer of."""
    towers = ["model.generator={num_layers: 24, hidden_size: 1024, num_heads: 16, intermediate_size: 4096}"]
    towers += ["model.generator_embedding_size=null", "model.sharing=none", "objective.generator_only_steps=300000"]

    budget = make_budget(large_config(*towers, "plan.gpu=A100", "plan.num_gpus=64", "plan.utilisation=0.5"))

    compute = budget.compute
    assert compute is not None
    assert compute.gpu_hours == pytest.approx(budget.run_flops / (312e12 * 0.5) / 3600)
    assert compute.days < 0.9 * 400_000 * compute.step_s / 86_400


@given(num_micro_batches=st.integers(1, 96), micro_batch=st.integers(1, 5))
def test_the_world_sizes_are_exactly_those_that_can_share_the_global_batch(num_micro_batches: int, micro_batch: int):
    global_batch = num_micro_batches * micro_batch
    overrides = [f"train.global_batch={global_batch}", f"train.micro_batch={micro_batch}", "plan.num_gpus=1"]
    config = load_config(CONFIGS / "demo_cpu_bert.yaml", overrides)

    accumulation = make_budget(config).accumulation

    assert list(accumulation) == [ranks for ranks in range(1, global_batch + 1) if global_batch % ranks == 0]
    for ranks, accumulated_batches in accumulation.items():
        rows_of_rank = global_batch // ranks
        sizes = [rows for rows in range(1, micro_batch + 1) if rows_of_rank % rows == 0]
        assert accumulated_batches == rows_of_rank // max(sizes)


def test_a_step_of_a_small_model_takes_at_least_the_time_of_its_launches():
    """24 layers of 52 operators, 380 beside them and 80 of the update take 10 us each; 2 micro-batches of 64 rows."""
    overrides = ["train.micro_batch=64", "plan.num_gpus=1"]
    compute = make_budget(load_config(CONFIGS / "small.yaml", overrides)).compute
    large = make_budget(large_config("plan.num_gpus=8")).compute

    assert compute is not None and large is not None
    assert compute.step_s == compute.launch_s == pytest.approx((2 * (24 * 52 + 380) + 80) * 10e-6)
    assert compute.tokens_per_s == pytest.approx(128 * 128 / compute.step_s)
    assert compute.days == pytest.approx(1_000_000 * compute.step_s / 86_400)
    assert compute.utilisation < 0.4 == large.utilisation
    assert large.step_s > large.launch_s
