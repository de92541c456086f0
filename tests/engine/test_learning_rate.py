"""The learning rate: warmup and decay overlap, as in the reference implementation."""

from __future__ import annotations

import pytest

from electra_dist.config import OptimizerConfig
from electra_dist.engine.learning_rate import learning_rate, peak_learning_rate


def test_learning_rate_is_the_product_of_warmup_and_decay() -> None:
    config = OptimizerConfig(lr=2e-4, warmup_steps=10_000)
    assert learning_rate(0, 400_000, config) == 0.0
    assert learning_rate(10_000, 400_000, config) == pytest.approx(2e-4 * 0.975)
    assert learning_rate(5_000, 400_000, config) == pytest.approx(2e-4 * 0.5 * (1 - 5_000 / 400_000))
    assert learning_rate(400_000, 400_000, config) == 0.0
    peak = max(range(0, 400_001, 500), key=lambda t: learning_rate(t, 400_000, config))
    assert peak == 10_000


@pytest.mark.parametrize("decay_power", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("warmup_steps", [0, 1, 10, 33, 50, 67, 99, 100])
def test_the_peak_is_the_largest_rate_of_all_steps(warmup_steps: int, decay_power: float) -> None:
    config = OptimizerConfig(lr=3e-4, warmup_steps=warmup_steps, decay_power=decay_power)
    step, rate = peak_learning_rate(100, config)
    assert rate == learning_rate(step, 100, config) == max(learning_rate(t, 100, config) for t in range(101))
