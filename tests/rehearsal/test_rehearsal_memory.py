"""The memory formula of the plan against the bytes that a rehearsed micro-batch allocates."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.rehearsal import build, bytes_per_row
from support.rehearsal_cases import REPOSITORY
from support.torch_versions import needs_products_on_meta

from electra_dist.config.load import load_config
from electra_dist.gpu_models import GPU_MEMORY_GB, KNOWN_GPUS
from electra_dist.planning.activation_memory import activation_bytes_per_row, micro_batch_limit

CONFIGS = REPOSITORY / "configs"
# More rows than where a row outweighs the gradients, which the backward pass makes while it frees activations.
ENOUGH_ROWS = {"small": 128, "base_size": 32, "large_25pct_mask": 32, "modern_base": 16}
RECOMPUTE = "engine.activation_checkpointing=true"


@needs_products_on_meta
@pytest.mark.parametrize(
    ("size", "precision", "overrides"),
    [
        *(("small", "bf16", overrides) for overrides in ([], [RECOMPUTE])),
        *(
            pytest.param(size, "bf16", overrides, marks=pytest.mark.sample)
            for size in ("base_size", "large_25pct_mask", "modern_base")
            for overrides in ([], [RECOMPUTE])
        ),
        ("base_size", "fp32", []),
    ],
)
def test_the_rehearsal_confirms_the_formula(size: str, precision: str, overrides: list[str]) -> None:
    config = load_config(CONFIGS / f"{size}.yaml", [*overrides, f"train.precision={precision}"])
    measured = bytes_per_row(build(config), config, ENOUGH_ROWS[size])
    computed = activation_bytes_per_row(
        config.model,
        config.objective,
        config.data.seq_len,
        precision=precision,
        recompute=config.engine.activation_checkpointing,
    )
    assert computed == pytest.approx(measured, rel=0.03)


@needs_products_on_meta
@pytest.mark.parametrize("name", ["mlm", "all_tokens_mlm", "adversarial", "electric"])
def test_the_rehearsal_confirms_the_formula_for_other_objectives(name: str) -> None:
    layers = ["model.discriminator.num_layers=6", "model.generator.num_layers=6"]
    config = load_config(CONFIGS / "base_size.yaml", [f"objective.name={name}", *layers])
    measured = bytes_per_row(build(config), config, 64)
    computed = activation_bytes_per_row(config.model, config.objective, config.data.seq_len)
    assert computed == pytest.approx(measured, rel=0.06)


def test_large_takes_half_a_gigabyte_a_row() -> None:
    config = load_config(CONFIGS / "large_25pct_mask.yaml", [])
    row_bytes = activation_bytes_per_row(config.model, config.objective, config.data.seq_len)
    assert row_bytes == pytest.approx(0.515e9, rel=0.01)


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    config = load_config(CONFIGS / "large_25pct_mask.yaml", ["plan.num_gpus=1"])
    for memory_gb in (24, 80, 141):
        limit = micro_batch_limit(config, memory_gb)
        usable_bytes = 0.9 * memory_gb * 1e9
        taken_bytes = limit.fixed_bytes + limit.fitting_rows * limit.row_bytes
        assert taken_bytes <= usable_bytes < taken_bytes + limit.row_bytes
        assert 2048 % limit.rows == 0
        assert limit.rows <= limit.fitting_rows < 2 * limit.rows  # 2,048 rows have a divisor in each doubling
    # State: 20 bytes for each of 354.66 M parameters at ZeRO-1 on one GPU.
    assert limit.fixed_bytes == pytest.approx(20 * 354.66e6 + 1e9 + 4096 * 30592 * 2 + 4 * 30592 * 1024, rel=1e-4)
    assert micro_batch_limit(config, 5).rows == 0


def test_every_known_gpu_has_a_memory_size() -> None:
    assert set(GPU_MEMORY_GB) == set(KNOWN_GPUS)


@pytest.mark.real_start
def test_the_formula_needs_no_torch() -> None:
    code = "import sys, electra_dist.planning.activation_memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
