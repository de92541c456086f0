"""The learning rate: warmup and decay overlap, as in the reference implementation."""

from __future__ import annotations

import pytest

from electra_dist.config import OptimizerConfig


def test_learning_rate_is_the_product_of_warmup_and_decay() -> None:
    config = OptimizerConfig(lr=2e-4, warmup_steps=10_000)
    assert config.learning_rate(0, 400_000) == 0.0
    assert config.learning_rate(10_000, 400_000) == pytest.approx(2e-4 * 0.975)
    assert config.learning_rate(5_000, 400_000) == pytest.approx(2e-4 * 0.5 * (1 - 5_000 / 400_000))
    assert config.learning_rate(400_000, 400_000) == 0.0
    peak = max(range(0, 400_001, 500), key=lambda t: config.learning_rate(t, 400_000))
    assert peak == 10_000


@pytest.mark.parametrize("decay_power", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("warmup_steps", [0, 1, 10, 33, 50, 67, 99, 100])
def test_the_peak_is_the_largest_rate_of_all_steps(warmup_steps: int, decay_power: float) -> None:
    config = OptimizerConfig(lr=3e-4, warmup_steps=warmup_steps, decay_power=decay_power)
    step, rate = config.peak_learning_rate(100)
    assert rate == config.learning_rate(step, 100) == max(config.learning_rate(t, 100) for t in range(101))


def test_a_trapezoid_rises_stays_and_falls() -> None:
    config = OptimizerConfig(lr=1e-3, warmup_steps=10, shape="trapezoid", decay_steps=20)
    rates = [config.learning_rate(t, 100) for t in range(102)]
    assert rates[0] == 0.0
    assert rates[5] == pytest.approx(5e-4)
    assert set(rates[10:81]) == {1e-3}
    assert rates[90] == pytest.approx(5e-4)
    assert rates[95] == pytest.approx(2.5e-4)
    assert rates[100] == rates[101] == 0.0
    quadratic = config.model_copy(update={"decay_power": 2.0})
    assert quadratic.learning_rate(90, 100) == pytest.approx(2.5e-4)


def test_the_decay_of_a_trapezoid_is_a_tenth_of_the_run_unless_it_is_set() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=0, shape="trapezoid")
    assert config.learning_rate(900, 1000) == 1.0
    assert config.learning_rate(950, 1000) == 0.5


@pytest.mark.parametrize("warmup_steps", [0, 1, 33, 80, 99])
def test_the_peak_of_a_trapezoid_is_the_largest_rate_of_all_steps(warmup_steps: int) -> None:
    config = OptimizerConfig(lr=3e-4, warmup_steps=warmup_steps, shape="trapezoid", decay_steps=20)
    step, rate = config.peak_learning_rate(100)
    assert rate == config.learning_rate(step, 100) == max(config.learning_rate(t, 100) for t in range(101))
