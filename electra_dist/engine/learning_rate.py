"""Compute the learning rate of a step; by default warm-up and decay overlap, as in Google's reference code.

Source: google-research/electra, model/optimization.py: polynomial decay to 0 multiplied by min(1, t / warmup). The
decay begins at step 0 and not after the warm-up. With the settings of ELECTRA-Large (10,000 warm-up steps of 400,000
steps) the peak is therefore 0.975 * lr. The first update has lr 0.
"""

from __future__ import annotations

from electra_dist.config import OptimizerConfig


def learning_rate(step: int, num_steps: int, optimizer: OptimizerConfig) -> float:
    """Return the learning rate of the update that follows after `step` finished steps."""
    warmup_factor = 1.0
    if optimizer.warmup_steps:
        warmup_factor = min(1.0, step / optimizer.warmup_steps)
    remaining_fraction = max(0.0, 1.0 - step / num_steps)
    if optimizer.shape == "trapezoid":
        remaining_steps = max(0, num_steps - step)
        remaining_fraction = min(1.0, remaining_steps / optimizer.trapezoid_decay_steps(num_steps))
    return optimizer.lr * warmup_factor * remaining_fraction**optimizer.decay_power


def peak_learning_rate(num_steps: int, optimizer: OptimizerConfig) -> tuple[int, float]:
    """Return the step with the highest learning rate of a run, and that learning rate."""
    turning_point = num_steps / (1.0 + optimizer.decay_power)
    if optimizer.shape == "trapezoid":
        turning_point = num_steps - optimizer.trapezoid_decay_steps(num_steps)
    # The next smaller and the next larger whole step, if the curve turns before the warm-up ends.
    steps = {min(optimizer.warmup_steps, int(turning_point) + offset) for offset in (0, 1)}
    peak_step = max(steps, key=lambda step: learning_rate(step, num_steps, optimizer))
    return peak_step, learning_rate(peak_step, num_steps, optimizer)


def generator_learning_rate(step: int, num_steps: int, optimizer: OptimizerConfig) -> float | None:
    """Return the generator's learning rate of the update that follows after `step` finished steps."""
    if optimizer.generator is None:
        return None
    return learning_rate(step, num_steps, optimizer.for_generator)
